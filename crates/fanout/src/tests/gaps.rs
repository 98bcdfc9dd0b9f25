//! Gaps: one record that all views share. Each subscriber takes the part that it selects. Also
//! their effect on watches over HTTP, which cannot express them.

use kubefan_model::projection::Projection;

use super::watch_http::proved;
use super::*;
use crate::{SubscribeOptions, views::log::LogItem};

/// A ring that evicts nothing in these tests.
fn long() -> Cache {
    Cache::within(RingLimits { ring_events_max: 1000, ..LIMITS })
}

impl Cache {
    /// An object with other bytes than [`Self::object`] at the same version, as of another schema.
    fn reencoded(&self, name: &str, app: &str, version: u64) -> Object {
        let json = format!(
            r#"{{"metadata":{{"name":"{name}","namespace":"ns","uid":"{name}","resourceVersion":"{version}","labels":{{"app":"{app}"}}}},"spec":{{"new":1}}}}"#
        );
        self.parser.parse(json.as_bytes()).unwrap()
    }

    /// Lists the state at the version reached. The objects of one app have other bytes.
    fn list_again(&mut self, objects: &[(&str, &str, u64)], app: &str) {
        let at = self.writer.version().unwrap();
        self.apply(Update::ListBegin { reason: RelistReason::SchemaChanged });
        for (name, of, version) in objects {
            let object = if *of == app { self.reencoded(name, of, *version) } else { self.object(name, of, *version) };
            self.apply(Update::ListItem(object));
        }
        self.apply(Update::ListEnd(at));
    }

    fn http(&self, labels: &str, at: u64, waker: StreamWaker) -> Subscription {
        let format = Format::http(Media::Json, Projection::default());
        self.hub.subscribe(self.select(labels), format, Start::Resume(version(at)), waker).unwrap()
    }

    /// A watch over HTTP that begins with a state.
    fn http_with_state(&self, labels: &str, options: &SubscribeOptions) -> Result<Subscription, Refusal> {
        let format = Format::http(Media::Json, Projection::default());
        self.hub.subscribe(self.select(labels), format, options.clone(), waker())
    }

    /// The size of all views' logs, in items.
    fn logged(&self) -> usize {
        self.hub.budgets.logs.used() / size_of::<LogItem>()
    }
}

fn waker() -> StreamWaker {
    StreamWaker::new(&ConnectionWaker::new(), 0)
}

/// The lines that are ready; an end as its text.
async fn lines(subscription: &mut Subscription) -> Vec<String> {
    let mut lines = Vec::new();
    loop {
        match tokio::time::timeout(Duration::from_millis(1), subscription.next()).await {
            Err(_) => return lines,
            Ok(Err(end)) => {
                lines.push(end.to_string());
                return lines;
            }
            Ok(Ok(frames)) => {
                let text = String::from_utf8(to_bytes(frames).to_vec()).unwrap();
                for line in text.lines() {
                    let event: serde_json::Value = serde_json::from_str(line).unwrap();
                    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
                    let meta = &event["object"]["metadata"];
                    lines.push(format!(
                        "{} {}@{}",
                        text(&event["type"]),
                        text(&meta["name"]),
                        text(&meta["resourceVersion"])
                    ));
                }
            }
        }
    }
}

fn many(count: u64, app: &str) -> Vec<(String, String, u64)> {
    (0..count).map(|number| (format!("pod-{number:03}"), app.to_owned(), 1000 + number)).collect()
}

fn refs(objects: &[(String, String, u64)]) -> Vec<(&str, &str, u64)> {
    objects.iter().map(|(name, app, version)| (name.as_str(), app.as_str(), *version)).collect()
}

#[tokio::test(start_paused = true)]
async fn a_gap_costs_each_view_one_item_and_sends_its_selection() {
    let mut cache = long();
    cache.list(&[("a", "web", 5), ("b", "db", 6)], 10);
    let selectors = ["", "app=web", "app=db", "app in (db,web)", "app!=web", "app=none"];
    let mut views = selectors.map(|labels| cache.after(labels, 10).unwrap());
    let objects = many(200, "web");
    cache.list(&[refs(&objects), vec![("a", "db", 2000)]].concat(), 3000);
    assert_eq!(cache.logged(), views.len(), "not one item per object");
    let mut seen = Vec::new();
    for view in &mut views {
        seen.push(ready(view).await);
    }
    let web: Vec<_> = objects.iter().map(|(name, _, version)| format!("+{name}@{version}")).collect();
    let gap = |inside: &[&[String]]| {
        [&["gap from 10 expired".to_owned()][..], &inside.concat(), &["end of gap (3000)".to_owned()]].concat()
    };
    let line = |text: &str| vec![text.to_owned()];
    assert_eq!(seen[0], gap(&[&line("?b@6"), &web, &line("~a@2000")]));
    assert_eq!(seen[1], gap(&[&web, &line("<a@2000")]));
    assert_eq!(seen[2], gap(&[&line("?b@6"), &line("+a@2000")]));
    assert_eq!(seen[3], seen[0]);
    assert_eq!(seen[4], seen[2]);
    assert_eq!(seen[5], gap(&[]));
    let mut late = cache.after("app=db", 10).unwrap();
    assert_eq!(ready(&mut late).await, seen[2], "a view that is made from the ring");
}

#[tokio::test(start_paused = true)]
async fn subscribers_of_one_view_share_the_bytes_of_a_gap_however_much_they_take_at_a_time() {
    let mut cache = long();
    cache.list(&[("a", "web", 5)], 10);
    let mut alone = cache.after("app=web", 10).unwrap();
    let sizes = [1, 150, 4000, 1 << 20, 1 << 20];
    let mut shared = sizes.map(|_| cache.after("app", 10).unwrap());
    cache.list(&refs(&many(500, "web")), 3000);
    cache.event(Modified, "pod-007", "web", 3001);
    let mut expected = BytesMut::new();
    while let Some(frames) = alone.take(1000).unwrap() {
        expected.extend(to_bytes(frames));
    }
    let mut first = Vec::new();
    for (subscription, size) in shared.iter_mut().zip(sizes) {
        let mut bytes = BytesMut::new();
        while let Some(frames) = subscription.take(size).unwrap() {
            if bytes.is_empty() {
                first.push(frames.chunk().as_ptr());
            }
            bytes.extend(to_bytes(frames));
        }
        assert_eq!(bytes, expected, "{size} bytes at a time");
    }
    assert!(first.iter().all(|start| *start == first[0]), "one piece of memory");
    assert_eq!(cache.hub.budgets().segments.used(), 0, "what all have taken is freed");
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_a_gap_and_a_close_end_in_one_wave_is_woken() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let line = ConnectionWaker::new();
    let mut watch = cache.http("", 10, StreamWaker::new(&line, 7));
    assert!(watch.take(1 << 20).unwrap().is_none());
    // No wave starts between the two.
    let mut batch = cache.hub.batch();
    for update in [Update::ListBegin { reason: RelistReason::Expired }, Update::ListEnd(version(20))] {
        if let Some(commit) = cache.writer.apply(update).unwrap() {
            batch.commit(commit, Instant::now());
        }
    }
    cache.hub.close(Phase::NotFound, StreamEnd::NotFound("pods are gone".into()));
    drop(batch);
    let mut woken = ReadyStreams::new();
    line.take_ready(&mut woken);
    assert_eq!(*woken, [7]);
    assert!(watch.take(1 << 20).is_err());
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_a_gap_ends_pins_no_more_history_than_any_other() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let mut slow = cache.http("", 10, waker());
    cache.event(Modified, "a", "web", 11);
    cache.list(&[("a", "web", 18)], 20);
    for at in 21..=30 {
        cache.event(Modified, "a", "web", at);
    }
    assert_eq!(cache.logged(), 4, "what the ring has");
    assert_eq!(lines(&mut slow).await, ["too old resource version: 10 (26)"]);
}

#[tokio::test(start_paused = true)]
async fn a_new_encoding_ends_only_the_http_watches_that_select_changed_bytes() {
    let mut cache = Cache::new();
    let objects = [("a", "web", 5), ("b", "db", 6)];
    cache.list(&objects, 10);
    let mut web = cache.http("app=web", 10, waker());
    let mut db = cache.http("app=db", 10, waker());
    let mut marked = cache.after("app=web", 10).unwrap();
    cache.list_again(&objects, "web");
    assert_eq!((lines(&mut web).await, ready(&mut marked).await), (vec![], vec![]), "it waits for a version");
    cache.apply(Update::Bookmark(version(20)));
    assert_eq!(lines(&mut web).await, ["too old resource version: 19 (20)"]);
    assert_eq!(ready(&mut marked).await, ["gap from 19 schema_changed", "~a@5", "end of gap (20)"]);
    assert_eq!(lines(&mut db).await, Vec::<String>::new());
    cache.event(Modified, "b", "db", 21);
    assert_eq!(lines(&mut db).await, ["MODIFIED b@21"]);
    // Watches that return with a version from before it.
    assert_eq!(lines(&mut cache.http("app=web", 15, waker())).await, ["too old resource version: 19 (20)"]);
    assert_eq!(lines(&mut cache.http("app=db", 15, waker())).await, ["MODIFIED b@21"]);
    assert_eq!(ready(&mut cache.after("app=web", 15).unwrap()).await[1], "~a@5");
}

#[tokio::test(start_paused = true)]
async fn an_event_that_brings_a_new_encoding_is_exact_for_http_watches_without_changed_bytes() {
    let mut cache = Cache::new();
    let objects = [("a", "web", 5), ("b", "db", 6)];
    cache.list(&objects, 10);
    let mut web = cache.http("app=web", 10, waker());
    let mut db = cache.http("app=db", 10, waker());
    let mut marked = cache.after("", 10).unwrap();
    cache.list_again(&objects, "web");
    cache.event(Deleted, "b", "db", 11);
    assert_eq!(lines(&mut web).await, ["too old resource version: 10 (11)"]);
    assert_eq!(lines(&mut db).await, ["DELETED b@11"]);
    assert_eq!(ready(&mut marked).await, ["gap from 10 schema_changed", "?b@11", "~a@5", "end of gap (11)"]);
    cache.event(Added, "b", "db", 12);
    assert_eq!(lines(&mut db).await, ["ADDED b@12"]);
}

#[tokio::test(start_paused = true)]
async fn a_list_with_the_same_bytes_at_the_version_reached_is_not_seen() {
    let mut cache = Cache::new();
    let objects = [("a", "web", 5)];
    cache.list(&objects, 10);
    let mut web = cache.http("", 10, waker());
    let mut marked = cache.after("", 10).unwrap();
    cache.list_again(&objects, "none");
    cache.event(Modified, "a", "web", 11);
    assert_eq!(lines(&mut web).await, ["MODIFIED a@11"]);
    assert_eq!(ready(&mut marked).await, ["~a@11 (11)"]);
}

#[tokio::test(start_paused = true)]
async fn a_watch_from_a_version_ahead_of_the_cache_continues_after_a_gap_below_it() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let ahead = |cache: &Cache, at| {
        let format = Format::http(Media::Json, Projection::default());
        cache.hub.subscribe(cache.select(""), format, Start::Await(version(at)), waker()).unwrap()
    };
    let mut inside = ahead(&cache, 15);
    let mut after = ahead(&cache, 25);
    assert!(lines(&mut inside).await.is_empty() && lines(&mut after).await.is_empty());
    cache.list(&[("a", "web", 18)], 20);
    cache.event(Modified, "a", "web", 22);
    cache.event(Modified, "a", "web", 26);
    assert_eq!(lines(&mut inside).await, ["too old resource version: 15 (20)"]);
    assert_eq!(lines(&mut after).await, ["MODIFIED a@26"]);
}

/// The cache was at 10 when its state was proved to be that of 20.
#[tokio::test(start_paused = true)]
async fn other_bytes_before_the_version_of_a_proved_state_end_the_watches_that_select_them() {
    for with_event in [false, true] {
        let mut cache = long();
        let objects = [("a", "web", 5), ("b", "db", 6)];
        cache.list(&objects, 10);
        let options = proved(&cache, 20);
        let mut web = cache.http_with_state("app=web", &options).unwrap();
        let mut db = cache.http_with_state("app=db", &options).unwrap();
        assert_eq!(lines(&mut web).await, ["ADDED a@5", "BOOKMARK @20"]);
        cache.list_again(&objects, "web");
        if with_event {
            cache.event(Added, "c", "db", 15)
        } else {
            cache.apply(Update::Bookmark(version(15)))
        }
        let refused = cache.http_with_state("app=web", &options).err();
        assert!(matches!(refused, Some(Refusal::Unavailable(_))), "the state has the old bytes: {refused:?}");
        if with_event {
            cache.event(Deleted, "c", "db", 16);
            cache.event(Modified, "b", "db", 21);
        }
        let end = lines(&mut web).await;
        assert!(end.len() == 1 && end[0].contains("too old resource version"), "{end:?}");
        let expected: &[&str] = if with_event { &["MODIFIED b@21"] } else { &[] };
        assert_eq!(lines(&mut db).await.split_off(2), expected);
    }
}
