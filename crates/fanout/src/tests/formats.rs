//! Subscribers that ask for another form of the objects.

use std::collections::HashMap;

use kubefan_cache::{Backfill, Budgets, EventRing, HistoryRecord};
use kubefan_common::encoding::delta;
use kubefan_model::{
    event::WatchEvent,
    format::Encoding,
    projection::{Parts, Projection},
};

use super::*;

fn format(encoding: Encoding) -> Format {
    Format::new(Projection::default(), false, encoding).unwrap()
}

/// A subscriber that retains the objects it received, as a client of deltas does.
struct Client {
    subscription: Subscription,
    held: HashMap<String, Bytes>,
    deltas: usize,
}

impl Client {
    fn new(cache: &Cache, labels: &str, format: Format, start: Start) -> Self {
        let waker = StreamWaker::new(&ConnectionWaker::new(), 0);
        Self::of(cache.hub.subscribe(cache.select(labels), format, start, waker).unwrap())
    }

    fn of(subscription: Subscription) -> Self {
        Self { subscription, held: HashMap::new(), deltas: 0 }
    }

    /// Reads everything that is ready: one line per message, with the decoded bytes of each object.
    async fn read(&mut self) -> Vec<(String, String)> {
        let mut seen = Vec::new();
        for message in messages(&mut self.subscription).await {
            let text = line(&message);
            match message.message.unwrap() {
                watch_response::Message::Event(event) => {
                    let object = match &event.delta {
                        None => event.object,
                        Some(delta) => {
                            self.deltas += 1;
                            delta::decode(&self.held[&event.name], delta, 1 << 20).unwrap()
                        }
                    };
                    seen.push((text, String::from_utf8(object.to_vec()).unwrap()));
                    self.held.insert(event.name, object);
                }
                watch_response::Message::SnapshotChunk(chunk) => {
                    for event in chunk::decode(&chunk.zstd, 1 << 20).unwrap() {
                        seen.push((format!("+{}", event.name), String::from_utf8(event.object.to_vec()).unwrap()));
                        self.held.insert(event.name, event.object);
                    }
                }
                _ => seen.push((text, String::new())),
            }
        }
        seen
    }

    async fn lines(&mut self) -> Vec<String> {
        self.read().await.into_iter().map(|(text, _)| text).collect()
    }
}

/// An object that is long enough for a delta to pay.
fn canonical(name: &str, app: &str) -> String {
    format!(r#"{{"metadata":{{"name":"{name}","namespace":"ns","uid":"{name}","labels":{{"app":"{app}"}}}}}}"#)
}

#[tokio::test(start_paused = true)]
async fn deltas_decode_to_the_objects_and_are_sent_only_if_the_client_has_the_base() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5), ("b", "db", 6)], 10);
    let mut from_snapshot = Client::new(&cache, "app=web", format(Encoding::ZstdDelta), Start::Snapshot);
    assert_eq!(from_snapshot.read().await[1], ("+a".into(), canonical("a", "web")));
    let mut came_back = Client::new(&cache, "app=web", format(Encoding::ZstdDelta), Start::Resume(version(10)));
    let mut kept = Client::new(&cache, "app=web", format(Encoding::ZstdDelta), Start::ResumeWithObjects(version(10)));
    kept.held = from_snapshot.held.clone();

    cache.event(Modified, "a", "web", 11);
    cache.event(Modified, "a", "web", 12);
    cache.event(Modified, "b", "web", 13);
    cache.event(Modified, "a", "db", 14);
    let expected = [
        ("~a@11 (11)", canonical("a", "web")),
        ("~a@12 (12)", canonical("a", "web")),
        ("+b@13 (13)", canonical("b", "web")),
        ("<a@14 (14)", canonical("a", "web")),
    ]
    .map(|(text, object)| (text.to_owned(), object));
    assert_eq!((from_snapshot.read().await.as_slice(), from_snapshot.deltas), (expected.as_slice(), 3));
    assert_eq!((kept.read().await.as_slice(), kept.deltas), (expected.as_slice(), 3));
    assert_eq!((came_back.read().await.as_slice(), came_back.deltas), (expected.as_slice(), 2), "the first in full");
    assert_eq!(cache.hub.views(), 1);
}

/// An apiserver with another schema sends the same version of an object with other bytes.
fn backfill_of(cache: &Cache, reached: u64, events: Vec<WatchEvent>) -> Backfill {
    let mut ring = EventRing::new(LIMITS, version(5));
    for event in events {
        ring.push(HistoryRecord::Event(Arc::new(event)), Instant::now());
    }
    let epoch = cache.hub.position().unwrap().epoch;
    let share = Budgets::default().backfills.share();
    Backfill { epoch, ring, reached: version(reached), has_state: true, share }
}

#[tokio::test(start_paused = true)]
async fn deltas_after_a_backfill_have_no_base_that_was_sent_in_it() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 8), ("b", "web", 9)], 10);
    let [before, other] = [4, 8].map(|at| Arc::new(cache.object("a", "other", at)));
    let backfill = backfill_of(&cache, 10, vec![WatchEvent::new(Modified, version(8), other, Some(before))]);
    let mut client = Client::of(cache.with_backfill(format(Encoding::ZstdDelta), backfill).unwrap());
    assert_eq!(client.read().await[0], ("~a@8 (8)".into(), canonical("a", "other")));
    cache.event(Modified, "a", "web", 11);
    cache.event(Modified, "a", "web", 12);
    let expected = [("~a@11 (11)", "a"), ("~a@12 (12)", "a")].map(|(text, name)| (text.into(), canonical(name, "web")));
    assert_eq!((client.read().await.as_slice(), client.deltas), (expected.as_slice(), 1), "the first in full");
}

#[tokio::test(start_paused = true)]
async fn a_backfill_uses_no_deltas_of_the_cache() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 6);
    let mut live = Client::new(&cache, "", format(Encoding::ZstdDelta), Start::Snapshot);
    cache.event(Modified, "a", "web", 8);
    assert_eq!((live.lines().await.last().unwrap().as_str(), live.deltas), ("~a@8 (8)", 1));
    let [first, second, third] = [4, 7, 8].map(|at| Arc::new(cache.object("a", "other", at)));
    let events = vec![
        WatchEvent::new(Modified, version(7), second.clone(), Some(first)),
        WatchEvent::new(Modified, version(8), third, Some(second)),
    ];
    let backfill = backfill_of(&cache, 8, events);
    let mut client = Client::of(cache.with_backfill(format(Encoding::ZstdDelta), backfill).unwrap());
    let expected = ["~a@7 (7)", "~a@8 (8)"].map(|text| (text.to_owned(), canonical("a", "other")));
    assert_eq!((&client.read().await[..2], client.deltas), (expected.as_slice(), 1));
}

#[tokio::test(start_paused = true)]
async fn a_compressed_snapshot_is_shared_while_it_is_young_and_followed_by_every_event_after_it() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5), ("b", "db", 6)], 10);
    let start = |cache: &Cache| Client::new(cache, "", format(Encoding::Zstd), Start::Snapshot);
    let mut first = start(&cache);
    let snapshot = ["snapshot@10", "+a", "+b", "end of 2 (10)"];
    assert_eq!(first.lines().await, snapshot);
    cache.event(Modified, "a", "web", 11);
    let second = start(&cache).lines().await;
    assert_eq!(second[..4], snapshot);
    assert_eq!(second[4..], ["~a@11 (11)"], "what has happened since follows");

    tokio::time::advance(Duration::from_secs(2)).await;
    let mut third = start(&cache);
    cache.event(Modified, "b", "db", 12);
    assert_eq!(third.lines().await, ["snapshot@11", "+a", "+b", "end of 2 (11)", "~b@12 (12)"]);
    let mut none = Client::new(&cache, "app=none", format(Encoding::Zstd), Start::Snapshot);
    assert_eq!(none.lines().await, ["snapshot@12", "end of 0 (12)"]);
}

#[tokio::test(start_paused = true)]
async fn a_format_of_changes_has_only_changes_of_its_projection_live_and_replayed() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let labels = Projection::new(Parts::Fields(&["metadata.labels".to_owned()]), false, false).unwrap();
    for encoding in [Encoding::Json, Encoding::ZstdDelta] {
        let format = Format::new(labels.clone(), true, encoding).unwrap();
        let from = cache.hub.head().unwrap();
        let mut live = Client::new(&cache, "", format.clone(), Start::Resume(from));
        assert!(live.lines().await.is_empty());
        let at = from.get();
        cache.event(Modified, "a", "web", at + 1);
        cache.event(Modified, "a", "db", at + 2);
        cache.event(Modified, "a", "web", at + 3);
        let mut replayed = Client::new(&cache, "", format, Start::Resume(from));
        let mut more = cache.after("", at + 1).unwrap();
        assert_eq!(ready(&mut more).await.len(), 2);
        for client in [&mut live, &mut replayed] {
            let seen = client.read().await;
            let expected = [
                (format!("~a@{0} ({0})", at + 2), r#"{"metadata":{"labels":{"app":"db"}}}"#.to_owned()),
                (format!("~a@{0} ({0})", at + 3), r#"{"metadata":{"labels":{"app":"web"}}}"#.to_owned()),
            ];
            assert_eq!(seen, expected);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn bytes_that_changed_without_a_version_are_sent_as_they_are_now() {
    let mut cache = Cache::new();
    let labels = Projection::new(Parts::Fields(&["metadata.labels".to_owned()]), false, false).unwrap();
    for encoding in [Encoding::Json, Encoding::Zstd] {
        let at = cache.hub.head().map_or(10, |head| head.get() + 1);
        cache.list(&[("a", "web", 5)], at);
        let format = Format::new(labels.clone(), false, encoding).unwrap();
        let mut stays = Client::new(&cache, "", format.clone(), Start::Snapshot);
        assert_eq!(stays.read().await[1].1, r#"{"metadata":{"labels":{"app":"web"}}}"#);
        cache.list(&[("a", "db", 5)], at + 1);
        let mut comes = Client::new(&cache, "", format, Start::Snapshot);
        assert_eq!(comes.read().await[1].1, r#"{"metadata":{"labels":{"app":"db"}}}"#, "{encoding:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_is_compared_only_for_the_views_that_see_it() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5), ("b", "db", 6)], 10);
    let labels = Projection::new(Parts::Fields(&["metadata.labels".to_owned()]), false, false).unwrap();
    let format = Format::new(labels, true, Encoding::Json).unwrap();
    let mut web = Client::new(&cache, "app=web", format, Start::Resume(version(10)));
    let projected = cache.hub.budgets.projected.clone();
    cache.event(Modified, "b", "db", 11);
    assert!(web.lines().await.is_empty());
    assert_eq!(projected.used(), 0, "no view sees it");
    cache.event(Modified, "a", "web", 12);
    assert!(web.lines().await.is_empty(), "its labels are the same");
    assert!(projected.used() > 0, "the difference of the objects is remembered");
}

#[tokio::test(start_paused = true)]
async fn the_projection_of_a_deleted_object_is_not_retained() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5), ("b", "db", 6)], 10);
    let labels = Projection::new(Parts::Fields(&["metadata.labels".to_owned()]), false, false).unwrap();
    let format = Format::new(labels, false, Encoding::Json).unwrap();
    let mut all = Client::new(&cache, "", format, Start::Snapshot);
    assert_eq!(all.read().await.len(), 4);
    let projected = cache.hub.budgets.projected.clone();
    let both = projected.used();
    cache.event(Deleted, "b", "db", 11);
    assert!(projected.used() < both);
    cache.list(&[], 20);
    assert_eq!(projected.used(), 0, "a relist deletes too");
}
