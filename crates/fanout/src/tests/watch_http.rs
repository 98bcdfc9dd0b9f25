//! The lines of a Kubernetes watch over HTTP.

use kubefan_model::{format::Format, projection::Projection};

use super::*;
use crate::{CachePosition, ProvedState, SubscribeOptions};

fn subscribe(
    cache: &Cache,
    labels: &str,
    projection: Projection,
    options: SubscribeOptions,
) -> Result<Subscription, Refusal> {
    cache.hub.subscribe(
        cache.select(labels),
        Format::http(Media::Json, projection),
        options,
        StreamWaker::new(&ConnectionWaker::new(), 0),
    )
}

fn after(cache: &Cache, labels: &str, at: u64) -> Result<Subscription, Refusal> {
    subscribe(cache, labels, Projection::default(), Start::Resume(version(at)).into())
}

/// Each line as its type, the object's name and its version.
pub(super) async fn lines(subscription: &mut Subscription) -> Vec<String> {
    let mut all = BytesMut::new();
    while let Ok(Ok(frames)) = tokio::time::timeout(Duration::from_millis(1), subscription.next()).await {
        all.extend_from_slice(&to_bytes(frames));
    }
    let text = String::from_utf8(all.to_vec()).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines()
        .map(|line| {
            let event: serde_json::Value = serde_json::from_str(line).unwrap();
            let meta = &event["object"]["metadata"];
            let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
            let ends = if meta["annotations"]["k8s.io/initial-events-end"] == "true" { " ends the state" } else { "" };
            format!("{} {}@{}{ends}", text(&event["type"]), text(&meta["name"]), text(&meta["resourceVersion"]))
        })
        .collect()
}

#[tokio::test(start_paused = true)]
async fn a_watch_has_the_state_its_end_and_one_line_per_event() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5), ("b", "db", 6)], 10);
    let options = SubscribeOptions { marks_end: true, ..Start::Snapshot.into() };
    let mut web = subscribe(&cache, "app=web", Projection::default(), options).unwrap();
    let mut silent = subscribe(&cache, "app=web", Projection::default(), Start::Snapshot.into()).unwrap();
    assert_eq!(lines(&mut web).await, ["ADDED a@5", "BOOKMARK @10 ends the state"]);
    assert_eq!(lines(&mut silent).await, ["ADDED a@5"], "who does not want bookmarks gets none");
    cache.event(Modified, "b", "web", 11);
    cache.event(Modified, "a", "db", 12);
    cache.event(Deleted, "b", "web", 13);
    let expected = ["ADDED b@11", "DELETED a@12", "DELETED b@13"];
    assert_eq!(lines(&mut web).await, expected);
    assert_eq!(lines(&mut silent).await, expected, "from the same block");
    assert_eq!(cache.hub.views(), 1);
    cache.apply(Update::Bookmark(version(20)));
    let bookmark = to_bytes(web.bookmark().unwrap());
    assert!(bookmark.starts_with(br#"{"type":"BOOKMARK","object":{"#) && bookmark.ends_with(b"}\n"), "{bookmark:?}");
}

#[tokio::test(start_paused = true)]
async fn a_metadata_watch_has_the_version_of_the_event_when_an_object_leaves() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let partial = Projection::partial_object_metadata();
    let mut web = subscribe(&cache, "app=web", partial, Start::Snapshot.into()).unwrap();
    cache.event(Modified, "a", "db", 11);
    assert_eq!(lines(&mut web).await, ["ADDED a@5", "DELETED a@11"]);
}

/// Options of a watch-list whose state was proved to be the one at `at`.
pub(super) fn proved(cache: &Cache, at: u64) -> SubscribeOptions {
    let CachePosition { epoch, store, version: cached_at, .. } = cache.hub.position().unwrap();
    let source = cache.hub.serve_proved(ProvedState { epoch, store, cached_at, version: version(at) });
    SubscribeOptions { marks_end: true, source, ..Start::Snapshot.into() }
}

#[tokio::test(start_paused = true)]
async fn a_proved_state_is_followed_by_the_events_after_its_version() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let options = proved(&cache, 20);
    let watch = |cache: &Cache| subscribe(cache, "app=web", Projection::default(), options.clone());
    let mut early = watch(&cache).unwrap();
    let expected = ["ADDED a@5", "BOOKMARK @20 ends the state"];
    assert_eq!(lines(&mut early).await, expected);
    // An object that was created and deleted before 20 is in neither state. A watch that starts in
    // between must not show it either.
    cache.event(Added, "b", "web", 12);
    let mut between = watch(&cache).unwrap();
    assert_eq!(cache.hub.snapshot_of(&options.source).unwrap().0.len(), 1, "the same in a list");
    cache.event(Deleted, "b", "web", 13);
    assert_eq!(lines(&mut between).await, expected);
    assert!(lines(&mut early).await.is_empty() && early.bookmark().is_none());
    cache.event(Added, "c", "web", 21);
    // The cache itself is as fresh now.
    let mut late = watch(&cache).unwrap();
    assert_eq!(lines(&mut late).await, ["ADDED a@5", "ADDED c@21", "BOOKMARK @21 ends the state"]);
    assert_eq!(cache.hub.snapshot_of(&options.source).unwrap().1, version(21));
    cache.event(Modified, "a", "db", 22);
    for watch in [&mut early, &mut between] {
        assert_eq!(lines(watch).await, ["ADDED c@21", "DELETED a@22"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_below_a_proved_state_ends_every_watch() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let mut early = subscribe(&cache, "app=web", Projection::default(), proved(&cache, 20)).unwrap();
    assert_eq!(lines(&mut early).await, ["ADDED a@5", "BOOKMARK @20 ends the state"]);
    cache.hub.listing(RelistReason::Expired);
    cache.list(&[("a", "web", 5), ("b", "web", 12)], 15);
    let end = early.next().await;
    assert!(matches!(end, Err(StreamEnd::Rewritten(_))), "{end:?}");
    let mut late = subscribe(&cache, "app=web", Projection::default(), proved(&cache, 20)).unwrap();
    assert_eq!(lines(&mut late).await.len(), 3);
    cache.hub.listing(RelistReason::Expired);
    cache.list(&[("a", "web", 5)], 25);
    assert!(!matches!(late.next().await, Err(StreamEnd::Rewritten(_))), "an ordinary gap");
    cache.hub.listing(RelistReason::SchemaChanged);
    let mut during = subscribe(&cache, "app=web", Projection::default(), proved(&cache, 40)).unwrap();
    assert_eq!(lines(&mut during).await, ["ADDED a@5", "BOOKMARK @40 ends the state"]);
    cache.list(&[("a", "web", 5), ("b", "web", 28)], 30);
    assert!(lines(&mut during).await.is_empty(), "the list is older than the proof");
    cache.event(Added, "c", "web", 41);
    assert_eq!(lines(&mut during).await, ["ADDED c@41"]);
}

#[tokio::test(start_paused = true)]
async fn a_state_of_another_history_is_refused() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let options = proved(&cache, 20);
    cache.list(&[("b", "web", 3)], 4);
    let refused = subscribe(&cache, "", Projection::default(), options).err();
    assert!(matches!(refused, Some(Refusal::Unavailable(_))), "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn a_watch_from_a_version_ahead_of_the_cache_skips_events_up_to_it() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let ahead =
        |cache: &Cache| subscribe(cache, "app=web", Projection::default(), Start::Await(version(20)).into()).unwrap();
    // One waits before anything comes; one is only read when some of it is there; and one
    // subscribes in the middle.
    let mut web = ahead(&cache);
    assert!(lines(&mut web).await.is_empty());
    let mut late = ahead(&cache);
    cache.event(Modified, "a", "web", 11);
    let mut between = ahead(&cache);
    assert!(lines(&mut web).await.is_empty() && lines(&mut between).await.is_empty());
    assert!(web.bookmark().is_none(), "a bookmark below what it has would take it back");
    cache.event(Modified, "a", "web", 20);
    cache.event(Modified, "a", "web", 21);
    cache.event(Modified, "b", "web", 22);
    for watch in [&mut web, &mut late, &mut between] {
        assert_eq!(lines(watch).await, ["MODIFIED a@21", "ADDED b@22"]);
    }
    cache.event(Deleted, "b", "web", 23);
    assert_eq!(lines(&mut web).await, ["DELETED b@23"]);
    // Reached meanwhile: as any other.
    assert_eq!(lines(&mut ahead(&cache)).await.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_watch_from_a_version_ahead_of_the_cache_gets_bookmarks_and_events_after_it() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let mut web = subscribe(&cache, "app=web", Projection::default(), Start::Await(version(20)).into()).unwrap();
    assert!(lines(&mut web).await.is_empty());
    cache.apply(Update::Bookmark(version(20)));
    assert!(web.bookmark().is_none());
    cache.apply(Update::Bookmark(version(30)));
    assert!(web.bookmark().is_some());
    cache.event(Modified, "a", "web", 31);
    assert_eq!(lines(&mut web).await, ["MODIFIED a@31"]);
}

#[tokio::test(start_paused = true)]
async fn a_gap_ends_an_http_watch_and_none_starts_before_it() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5), ("b", "web", 6)], 10);
    let mut web = after(&cache, "app=web", 10).unwrap();
    cache.event(Modified, "a", "web", 11);
    cache.list(&[("a", "db", 18)], 20);
    cache.event(Modified, "a", "web", 21);
    assert_eq!(lines(&mut web).await, ["MODIFIED a@11"], "what came before is exact");
    assert_eq!(web.next().await.unwrap_err().to_string(), "too old resource version: 11 (20)");
    assert_eq!(after(&cache, "app=web", 11).err().unwrap().to_string(), "too old resource version: 11 (20)");
    let mut next = after(&cache, "app=web", 20).unwrap();
    assert_eq!(lines(&mut next).await, ["ADDED a@21"]);
    drop(web);
    assert_eq!(cache.hub.views(), 1, "the old view's end is not its successor's");
    cache.event(Modified, "a", "web", 22);
    assert_eq!(lines(&mut next).await, ["MODIFIED a@22"]);
}

#[tokio::test(start_paused = true)]
async fn a_version_that_needs_a_catch_up_is_expired_over_http() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    for at in 11..=16 {
        cache.event(Modified, "a", if at % 2 == 0 { "web" } else { "db" }, at);
    }
    assert!(cache.after("app=web", 11).is_ok(), "over gRPC it is caught up");
    assert!(after(&cache, "app=web", 11).is_err());
    assert_eq!(lines(&mut after(&cache, "app=web", 12).unwrap()).await.len(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_awaits_a_version_continues_after_the_ring_has_evicted_it() {
    let mut cache = Cache::within(RingLimits { conflated_bytes_max: Some(0), ..LIMITS });
    cache.list(&[("a", "web", 5)], 10);
    let mut web = cache.subscribe("app=web", Start::Await(version(12))).unwrap();
    cache.event(Modified, "a", "web", 11);
    assert!(ready(&mut web).await.is_empty(), "the client has the events up to 12 from elsewhere");
    // More than the ring holds, and nothing that the view sees.
    for at in 12..=20 {
        cache.event(Modified, "b", "db", at);
    }
    cache.event(Modified, "a", "web", 21);
    assert_eq!(ready(&mut web).await, ["~a@21 (21)"]);
}
