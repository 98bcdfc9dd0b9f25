//! Several events at one version: objects that expire with one lease of etcd are deleted in one
//! transaction. No subscriber over gRPC may lose one of them, or get one twice, at whichever point
//! its stream breaks.

use std::task::Poll;

use futures::FutureExt;
use kubefan_cache::{OnExpired, SAME_VERSION_WAIT};

use super::*;
use crate::ReadSource;

fn place(text: &str) -> ResourceVersion {
    ResourceVersion::parse_place(text).unwrap()
}

/// Three deletes at version 12, and a change after them.
const BURST: [&str; 4] = ["-a@12 (12)", "-b@12 (12.1)", "-c@12 (12.2)", "+d@13 (13)"];

fn burst(limits: RingLimits) -> Cache {
    let mut cache = Cache::within(limits);
    cache.list(&[("a", "web", 5), ("b", "db", 6), ("c", "web", 7)], 10);
    for (name, app) in [("a", "web"), ("b", "db"), ("c", "web")] {
        cache.event(Deleted, name, app, 12);
    }
    cache.event(Added, "d", "web", 13);
    cache
}

/// The first of two deletes at version 12.
fn one_of_two_deletes() -> Cache {
    let mut cache = Cache::new();
    cache.list_at(&[("a", "web", 5), ("b", "db", 6)], place("10.end"));
    cache.event(Deleted, "a", "web", 12);
    cache
}

async fn from(cache: &Cache, labels: &str, at: &str) -> Vec<String> {
    ready(&mut cache.subscribe(labels, Start::Resume(place(at))).unwrap()).await
}

#[tokio::test(start_paused = true)]
async fn a_resume_between_two_events_of_one_version_continues_with_the_next() {
    let cache = burst(LIMITS);
    for (sent, at) in ["10", "12", "12.1", "12.2", "13"].into_iter().enumerate() {
        assert_eq!(from(&cache, "", at).await, BURST[sent..], "{at}");
    }
    // A place counts all events of a version, also those that a selection does not see.
    assert_eq!(from(&cache, "app=web", "10").await, ["-a@12 (12)", "-c@12 (12.2)", "+d@13 (13)"]);
    assert_eq!(from(&cache, "app=web", "12").await, ["-c@12 (12.2)", "+d@13 (13)"]);
    assert_eq!(from(&cache, "app=web", "12.1").await, ["-c@12 (12.2)", "+d@13 (13)"]);
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_and_a_bookmark_have_their_places_between_the_events_of_one_version() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5), ("b", "db", 6), ("c", "web", 7)], 10);
    cache.event(Deleted, "a", "web", 12);
    cache.event(Deleted, "b", "db", 12);
    let mut web = cache.subscribe("app=web", Start::Snapshot).unwrap();
    assert_eq!(ready(&mut web).await, ["snapshot@12.1", "+c@7", "end of 1 (12.1)"]);
    let mut none = cache.subscribe("app=none", Start::Resume(place("12"))).unwrap();
    assert_eq!(line(&decode(none.bookmark().unwrap())[0]), "bookmark (12.1)");
    cache.event(Deleted, "c", "web", 12);
    assert_eq!(ready(&mut web).await, ["-c@12 (12.2)"]);
    assert_eq!(line(&decode(none.bookmark().unwrap())[0]), "bookmark (12.2)");
    assert_eq!(from(&cache, "app=web", "12.1").await, ["-c@12 (12.2)"]);
}

#[tokio::test(start_paused = true)]
async fn a_list_of_whole_versions_waits_for_the_other_events_of_its_version() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5), ("b", "db", 6), ("c", "web", 7)], 10);
    let hub = cache.hub.clone();
    let source = ReadSource::Cache;
    let list = async || hub.whole_snapshot_of(&source).await.map(|(store, version)| (store.len(), version)).unwrap();
    cache.event(Deleted, "a", "web", 12);
    assert_eq!(list().now_or_never(), Some((2, place("12"))), "most versions have one event");
    cache.event(Deleted, "b", "db", 12);
    let mut early = std::pin::pin!(list());
    assert!(futures::poll!(&mut early).is_pending());
    tokio::time::advance(SAME_VERSION_WAIT / 2).await;
    cache.event(Deleted, "c", "web", 12);
    assert!(futures::poll!(&mut early).is_pending());
    tokio::time::advance(SAME_VERSION_WAIT).await;
    assert_eq!(early.await, (0, place("12.2")), "a quiet cluster has no later version");
    assert_eq!(list().now_or_never(), Some((0, place("12.2"))), "and no list waits any more");
    cache.event(Added, "d", "web", 13);
    cache.event(Added, "e", "web", 14);
    cache.event(Deleted, "d", "web", 15);
    cache.event(Deleted, "e", "web", 15);
    let mut late = std::pin::pin!(list());
    assert!(futures::poll!(&mut late).is_pending());
    cache.event(Added, "f", "web", 16);
    assert_eq!(futures::poll!(&mut late), Poll::Ready((1, place("16"))));
}

#[tokio::test(start_paused = true)]
async fn history_that_ends_between_two_events_of_one_version_is_caught_up_from_there() {
    // The ring has the last two records, and the conflated history those before.
    let cache = burst(RingLimits { ring_events_max: 2, conflated_bytes_max: Some(1 << 20), ..LIMITS });
    assert_eq!(from(&cache, "", "12.1").await, BURST[2..]);
    assert_eq!(from(&cache, "", "12").await, ["catch-up from 12", "?b@6", "?c@7", "+d@13", "end of catch-up (13)"]);
}

#[tokio::test(start_paused = true)]
async fn a_change_behind_another_of_its_version_is_in_every_catch_up() {
    let mut cache = Cache::within(RingLimits { conflated_bytes_max: Some(1 << 20), ..LIMITS });
    cache.list(&[("a", "web", 5), ("b", "web", 6)], 10);
    cache.event(Modified, "a", "web", 12);
    cache.event(Modified, "b", "web", 12);
    for at in 13..=18 {
        cache.event(Modified, "z", "other", at);
    }
    assert_eq!(from(&cache, "app=web", "12").await, ["catch-up from 12", "~b@12", "end of catch-up (18)"]);
    assert_eq!(from(&cache, "app=web", "12.1").await, ["catch-up from 12.1", "end of catch-up (18)"]);
}

#[tokio::test(start_paused = true)]
async fn an_http_resume_starts_behind_the_cached_events_of_its_version() {
    let mut cache = burst(LIMITS);
    let http = |cache: &Cache, start| {
        let format = Format::http(Media::Json, Default::default());
        let waker = StreamWaker::new(&ConnectionWaker::new(), 0);
        cache.hub.subscribe(cache.select(""), format, start, waker).unwrap()
    };
    let all = watch_http::lines(&mut http(&cache, Start::Resume(version(10).end()))).await;
    assert_eq!(all, ["DELETED a@12", "DELETED b@12", "DELETED c@12", "ADDED d@13"]);
    assert_eq!(watch_http::lines(&mut http(&cache, Start::Resume(version(12).end()))).await, ["ADDED d@13"]);
    let mut current = http(&cache, Start::Resume(version(13)));
    assert!(watch_http::lines(&mut current).await.is_empty());
    cache.event(Added, "e", "web", 13);
    assert_eq!(watch_http::lines(&mut current).await, ["ADDED e@13"]);
    let mut ahead = http(&cache, Start::Await(version(15).end()));
    cache.event(Deleted, "d", "web", 15);
    cache.event(Deleted, "e", "web", 15);
    assert!(watch_http::lines(&mut ahead).await.is_empty());
    cache.event(Added, "f", "web", 16);
    assert_eq!(watch_http::lines(&mut ahead).await, ["ADDED f@16"]);
}

#[tokio::test(start_paused = true)]
async fn a_listed_version_is_known_as_such_when_the_ring_has_gone_on() {
    let mut cache = Cache::within(RingLimits { ring_events_max: 2, conflated_bytes_max: Some(1 << 20), ..LIMITS });
    cache.list_at(&[("a", "web", 5)], place("12.end"));
    for at in 13..=18 {
        cache.event(Modified, "a", "web", at);
    }
    let epoch = cache.hub.position().unwrap().epoch;
    let resumable = |at| {
        let continuation = cache.hub.continues_from(epoch, version(at)).unwrap();
        (continuation.can_resume, continuation.can_resume_after)
    };
    assert_eq!([12, 14].map(resumable), [(false, true), (true, true)]);
}

#[tokio::test(start_paused = true)]
async fn a_place_that_this_cache_only_listed_is_expired() {
    // Another replica has sent events of version 12, at which this one has listed.
    let mut cache = Cache::new();
    cache.list_at(&[("c", "web", 7)], place("12.end"));
    let mut listed = cache.subscribe("", Start::Snapshot).unwrap();
    assert_eq!(ready(&mut listed).await, ["snapshot@12", "+c@7", "end of 1 (12.end)"]);
    for at in ["12", "12.1"] {
        let refused = cache.subscribe("", Start::Resume(place(at))).err().unwrap();
        assert_eq!(refused.to_string(), "too old resource version: 12 (12)", "{at}");
    }
    assert!(from(&cache, "", "12.end").await.is_empty());
    cache.event(Added, "d", "web", 13);
    for at in ["12", "12.1"] {
        cache.subscribe("", Start::Resume(place(at))).err().unwrap();
    }
    assert_eq!(from(&cache, "", "12.end").await, ["+d@13 (13)"]);
}

#[tokio::test(start_paused = true)]
async fn a_client_with_a_whole_version_from_another_replica_gets_no_event_of_it_again() {
    // Another replica has listed at version 12. This one has a part of its events, then all.
    let mut cache = one_of_two_deletes();
    let mut whole = cache.subscribe("", Start::Resume(place("12.end"))).unwrap();
    assert!(ready(&mut whole).await.is_empty());
    cache.event(Deleted, "b", "db", 12);
    assert!(ready(&mut whole).await.is_empty());
    assert!(from(&cache, "", "12.end").await.is_empty());
    cache.event(Added, "d", "web", 13);
    assert_eq!(ready(&mut whole).await, ["+d@13 (13)"]);
    assert_eq!(from(&cache, "", "12.end").await, ["+d@13 (13)"]);
}

#[tokio::test(start_paused = true)]
async fn a_client_with_a_whole_version_gets_no_gap_from_inside_it() {
    let mut cache = one_of_two_deletes();
    let start = |on_expired| SubscribeOptions { on_expired, ..Start::Resume(place("12.end")).into() };
    let mut restarts = cache.subscribe("", start(OnExpired::Restart)).unwrap();
    let mut fails = cache.subscribe("", start(OnExpired::Fail)).unwrap();
    assert!(ready(&mut restarts).await.is_empty() && ready(&mut fails).await.is_empty());
    // The delete of b at version 12 is inside the gap, and the clients have it.
    cache.list_at(&[], place("14.end"));
    assert_eq!(ready(&mut restarts).await, ["snapshot@14 for 12", "end of 0 (14.end)"]);
    assert_eq!(fails.next().await.unwrap_err().to_string(), "too old resource version: 12 (14)");
    assert_eq!(
        cache.subscribe("", start(OnExpired::Fail)).err().unwrap().to_string(),
        "too old resource version: 12 (14)"
    );
}
