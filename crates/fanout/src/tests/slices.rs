//! Work that grows with objects × terms is done in slices, and other tasks run in between.

use futures::FutureExt;
use kubefan_admission::{Holder, gate::REPLAYS_MAX};
use kubefan_cache::sliced_scan::SLICE_TESTS;
use kubefan_model::{
    format::Encoding,
    projection::{Parts, Projection},
};

use super::*;

/// A selector of a hundred terms, which is met by objects without labels of these names.
pub(super) fn many_terms() -> String {
    (0..100).map(|number| format!("!absent-{number}")).collect::<Vec<_>>().join(",")
}

/// Number of times that others can run until a subscription has no more, and its messages.
fn rounds(subscription: &mut Subscription) -> (usize, Vec<String>) {
    let mut rounds = 0;
    let mut sent = Vec::new();
    loop {
        match subscription.take(1 << 20).unwrap() {
            Some(frames) => sent.extend(decode(frames).iter().map(line)),
            None if subscription.in_backlog() => rounds += 1,
            None => return (rounds, sent),
        }
    }
}

/// Everything that a subscription is sent until nothing else runs.
async fn lines(subscription: &mut Subscription) -> Vec<String> {
    messages(subscription).await.iter().map(line).collect()
}

fn listed(objects: usize) -> Cache {
    let mut cache = Cache::new();
    let names: Vec<_> = (0..objects).map(|number| format!("o{number:05}")).collect();
    let objects: Vec<_> = names.iter().map(|name| (name.as_str(), "web", 5)).collect();
    cache.list(&objects, 10);
    cache
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_with_many_terms_lets_others_run() {
    const OBJECTS: usize = 1000;
    let cache = listed(OBJECTS);
    let terms = many_terms();
    let slices = OBJECTS * 101 / SLICE_TESTS;
    for (selector, found) in [(format!("{terms},app=db"), 0), (terms, OBJECTS)] {
        let mut subscription = cache.subscribe(&selector, Start::Snapshot).unwrap();
        let (rounds, sent) = rounds(&mut subscription);
        assert!((slices - 1..=slices + 1).contains(&rounds), "{rounds} rounds for {slices} slices");
        assert_eq!(sent.len(), found + 2, "{:?}", sent.first());
        assert_eq!(sent.last().unwrap(), &format!("end of {found} (10)"));
    }
    let mut subscription = cache.subscribe("", Start::Snapshot).unwrap();
    assert_eq!(rounds(&mut subscription).0, 0, "what is cheap is sent at once");
}

#[tokio::test(start_paused = true)]
async fn replayed_changes_that_are_compared_and_hidden_let_others_run() {
    const EVENTS: u64 = 300;
    /// The objects of a few events.
    const BATCH_BYTES: usize = 1 << 10;
    let mut cache = Cache::within(RingLimits { ring_events_max: 1000, ..LIMITS });
    cache.list(&[("a", "web", 5)], 10);
    for at in 11..=10 + EVENTS {
        cache.event(Modified, "a", "web", at);
    }
    cache.event(Modified, "a", "db", 11 + EVENTS);
    let labels = Projection::new(Parts::Fields(&["metadata.labels".to_owned()]), false, false).unwrap();
    let format = Format::new(labels, true, Encoding::Json).unwrap();
    let start = Start::Resume(version(10));
    let waker = StreamWaker::new(&ConnectionWaker::new(), 0);
    let mut subscription = cache.hub.subscribe(cache.select(""), format, start, waker).unwrap();
    let mut yields = 0;
    let mut sent = Vec::new();
    loop {
        match subscription.take(BATCH_BYTES).unwrap() {
            Some(frames) => sent.extend(decode(frames).iter().map(line)),
            None if subscription.has_yielded() => yields += 1,
            None => break,
        }
    }
    assert!(yields > 5, "{yields} yields for {EVENTS} comparisons");
    assert_eq!(sent, [format!("~a@{0} ({0})", 11 + EVENTS)]);
}

#[tokio::test(start_paused = true)]
async fn a_catch_up_with_many_terms_lets_others_run() {
    const OBJECTS: u64 = 400;
    let limits = RingLimits { ring_events_max: 1, conflated_bytes_max: Some(1 << 20), ..LIMITS };
    let mut cache = Cache::within(limits);
    let name = |number: u64| format!("o{number:05}");
    let names: Vec<_> = (0..OBJECTS).map(name).collect();
    cache.list(&names.iter().map(|name| (name.as_str(), "web", 5)).collect::<Vec<_>>(), 10);
    for number in 0..OBJECTS {
        cache.event(Modified, &name(number), "db", 11 + number);
    }
    let selector = format!("{},app=web", many_terms());
    let mut subscription = cache.after(&selector, 10).unwrap();
    let (rounds, sent) = rounds(&mut subscription);
    let slices = OBJECTS as usize * 102 / SLICE_TESTS;
    assert!(rounds >= slices, "{rounds} rounds for {slices} slices");
    assert_eq!(sent.len(), OBJECTS as usize + 2, "each object has left the selector");
    assert!(sent[1].starts_with("<o00000@") && sent.last().unwrap().starts_with("end of catch-up"), "{sent:?}");
}

/// Lists the objects of [`listed`] again, at version 30: all have changed, and are of this app.
fn relisted(cache: &mut Cache, objects: usize, app: &str) {
    let names: Vec<_> = (0..objects).map(|number| format!("o{number:05}")).collect();
    cache.list(&names.iter().map(|name| (name.as_str(), app, 20)).collect::<Vec<_>>(), 30);
}

#[tokio::test(start_paused = true)]
async fn a_catch_up_over_a_gap_lets_others_run() {
    const OBJECTS: usize = 400;
    let mut cache = Cache::within(RingLimits { ring_events_max: 1, conflated_bytes_max: Some(1 << 20), ..LIMITS });
    let names: Vec<_> = (0..OBJECTS).map(|number| format!("o{number:05}")).collect();
    cache.list(&names.iter().map(|name| (name.as_str(), "web", 5)).collect::<Vec<_>>(), 10);
    cache.event(Modified, &names[0], "web", 11);
    relisted(&mut cache, OBJECTS, "db");
    // Without a value, so that no index finds the events.
    let mut subscription = cache.after(&format!("{},app!=db", many_terms()), 10).unwrap();
    let (rounds, sent) = rounds(&mut subscription);
    let slices = OBJECTS * 102 / SLICE_TESTS;
    // Two to test the gap, one to compare, and two to write.
    assert!(rounds >= 4 * slices, "{rounds} rounds for {slices} slices of one test per object");
    assert_eq!(sent.len(), OBJECTS + 2);
    assert!(sent[1..=OBJECTS].iter().all(|line| line.starts_with("<o")), "each object has left the selector");
}

#[tokio::test(start_paused = true)]
async fn a_gap_lets_others_run_and_is_tested_once_for_all_subscribers_of_a_view() {
    const OBJECTS: usize = 400;
    let slices = 2 * OBJECTS * 102 / SLICE_TESTS;
    for (app, seen) in [("web", 0), ("db", OBJECTS)] {
        let mut cache = listed(OBJECTS);
        let selector = format!("{},app!=web", many_terms());
        let mut both = [(); 2].map(|()| cache.subscribe(&selector, Start::Snapshot).unwrap());
        for subscription in &mut both {
            rounds(subscription);
        }
        relisted(&mut cache, OBJECTS, app);
        let [(yields, sent), (again, same)] = both.each_mut().map(|subscription| {
            let mut yields = 0;
            let mut sent = Vec::new();
            loop {
                match subscription.take(1 << 20).unwrap() {
                    Some(frames) => sent.extend(decode(frames).iter().map(line)),
                    None if subscription.has_yielded() => yields += 1,
                    None => return (yields, sent),
                }
            }
        });
        assert!((slices - 1..=slices + 1).contains(&yields), "{yields} yields for {slices} slices");
        assert_eq!((again, &same), (0, &sent), "what the first one found is shared");
        assert_eq!((sent.len(), &*sent[0], &*sent[seen + 1]), (seen + 2, "gap from 10 expired", "end of gap (30)"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_compressed_snapshot_with_many_terms_lets_others_run() {
    const OBJECTS: usize = 1000;
    let cache = listed(OBJECTS);
    let format = Format::new(Projection::default(), false, Encoding::Zstd).unwrap();
    let subscribe = || {
        let waker = StreamWaker::new(&ConnectionWaker::new(), 0);
        cache.hub.subscribe(cache.select(&many_terms()), format.clone(), Start::Snapshot, waker).unwrap()
    };
    let mut one = subscribe();
    let mut other = subscribe();
    assert!(matches!(one.take(1 << 20), Ok(Some(_))), "the start");
    let (of_one, sent) = rounds(&mut one);
    let (of_other, again) = rounds(&mut other);
    assert!(of_one >= OBJECTS * 101 / SLICE_TESTS - 1, "{of_one}");
    assert!(of_other <= 1, "the objects were found already: {of_other}");
    assert_eq!(sent.last().unwrap(), &format!("end of {OBJECTS} (10)"));
    assert_eq!(sent[..], again[again.len() - sent.len()..]);
}

#[tokio::test(start_paused = true)]
async fn a_commit_does_not_test_many_terms() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let selector = format!("{},app=web", many_terms());
    let mut slow = cache.subscribe(&selector, Start::Snapshot).unwrap();
    let mut fast = cache.subscribe("app=web", Start::Snapshot).unwrap();
    rounds(&mut slow);
    rounds(&mut fast);
    cache.event(Modified, "a", "web", 11);
    assert_eq!(rounds(&mut fast).1, ["~a@11 (11)"]);
    assert!(slow.take(1 << 20).unwrap().is_none() && slow.bookmark().is_none(), "it is not tested yet");
    // A snapshot of the same view starts after the event, which it has.
    let mut late = cache.subscribe(&selector, Start::Snapshot).unwrap();
    cache.event(Modified, "a", "db", 12);
    assert_eq!(lines(&mut late).await, ["snapshot@11", "+a@11", "end of 1 (11)", "<a@12 (12)"]);
    assert_eq!(lines(&mut slow).await, ["~a@11 (11)", "<a@12 (12)"]);
    assert!(slow.bookmark().is_none(), "nothing is new");
}

#[tokio::test(start_paused = true)]
async fn unseen_events_are_passed_and_the_end_of_a_view_follows_its_events() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let selector = format!("{},app=web", many_terms());
    let mut web = cache.subscribe(&selector, Start::Snapshot).unwrap();
    rounds(&mut web);
    // More than the ring retains.
    for at in 11..31 {
        cache.event(if at == 11 { Added } else { Modified }, "b", "db", at);
        tokio::task::yield_now().await;
    }
    assert!(lines(&mut web).await.is_empty());
    assert_eq!(decode(web.bookmark().unwrap()).iter().map(line).collect::<Vec<_>>(), ["bookmark (30)"]);
    cache.event(Modified, "a", "web", 31);
    cache.list(&[("a", "web", 31), ("b", "web", 33)], 40);
    cache.event(Modified, "a", "web", 41);
    let expected = ["~a@31 (31)", "gap from 31 expired", "+b@33", "end of gap (40)", "~a@41 (41)"];
    assert_eq!(lines(&mut web).await, expected);
    cache.event(Deleted, "a", "web", 42);
    cache.hub.close(Phase::NotFound, StreamEnd::Stopped("gone".to_owned()));
    assert_eq!(decode(web.next().await.unwrap()).iter().map(line).collect::<Vec<_>>(), ["-a@42 (42)"]);
    assert!(matches!(web.next().await, Err(StreamEnd::Stopped(_))));
}

#[tokio::test(start_paused = true)]
async fn untested_events_that_the_ring_evicts_are_not_missed_in_silence() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let mut web = cache.subscribe(&format!("{},app=web", many_terms()), Start::Snapshot).unwrap();
    rounds(&mut web);
    cache.event(Modified, "a", "web", 11);
    assert!(web.take(1 << 20).unwrap().is_none(), "it is not tested yet");
    // More than the ring retains, before any test.
    for at in 12..32 {
        cache.event(if at == 12 { Added } else { Modified }, "b", "db", at);
    }
    let next = tokio::time::timeout(Duration::from_secs(60), web.next()).await.expect("the subscriber is woken");
    assert!(matches!(next, Err(StreamEnd::Expired(_))), "{next:?}");
}

#[tokio::test(start_paused = true)]
async fn a_replay_of_an_indexed_value_is_sliced_if_many_have_it() {
    let mut cache = Cache::within(RingLimits { ring_events_max: 1000, ..LIMITS });
    cache.list(&[("a", "web", 5), ("b", "db", 6)], 10);
    let many = cache.select("app=web");
    let few = cache.select("app=db");
    for selection in [&many, &few] {
        cache.hub.index_for(selection, None).await;
    }
    for at in 11..=50 {
        cache.event(Modified, "a", "web", at);
    }
    cache.event(Modified, "b", "db", 51);
    let format = Format::default();
    assert!(cache.hub.replay(&many, &format, version(10), None).await.unwrap().is_some());
    assert!(cache.hub.replay(&few, &format, version(10), None).await.unwrap().is_none(), "little to test");
}

#[tokio::test(start_paused = true)]
async fn clients_of_one_view_replay_in_turns_and_not_once_it_has_the_history() {
    let mut cache = Cache::within(RingLimits { ring_events_max: 1000, ..LIMITS });
    cache.list(&[("a", "web", 5)], 10);
    for at in 11..111 {
        cache.event(Modified, "a", "web", at);
    }
    let selection = cache.select("app!=x");
    let format = Format::default();
    let replay = || cache.hub.replay(&selection, &format, version(10), None).boxed_local();
    let mut replays: Vec<_> = std::iter::repeat_with(replay).take(10).collect();
    for replay in &mut replays {
        assert!(futures::poll!(replay).is_pending());
    }
    for _ in 0..1000 {
        assert!(futures::poll!(replays.last_mut().unwrap()).is_pending(), "it is the turn of the first");
    }
    let other = cache.select("app!=y");
    assert!(cache.hub.replay(&other, &format, version(10), None).await.unwrap().is_some(), "of another view");
    let _client = cache.subscribe("app!=x", Start::Resume(version(10))).unwrap();
    assert!(futures::future::join_all(replays).await.into_iter().all(|replay| replay.unwrap().is_none()));
}

#[tokio::test(start_paused = true)]
async fn a_few_views_are_replayed_at_a_time() {
    let mut cache = Cache::within(RingLimits { ring_events_max: 1000, ..LIMITS });
    cache.list(&[("a", "web", 5)], 10);
    for at in 11..111 {
        cache.event(Modified, "a", "web", at);
    }
    let format = Format::default();
    let selections: Vec<_> = (0..=REPLAYS_MAX).map(|view| cache.select(&format!("app!=x{view}"))).collect();
    let holder = |number: usize| Some(Holder::new(number as u64, None));
    let replay = |(number, selection)| cache.hub.replay(selection, &format, version(10), holder(number)).boxed_local();
    let mut replays: Vec<_> = selections.iter().enumerate().map(replay).collect();
    for replay in &mut replays {
        assert!(futures::poll!(replay).is_pending());
    }
    for _ in 0..1000 {
        assert!(futures::poll!(replays.last_mut().unwrap()).is_pending(), "it waits, and has no memory");
    }
    assert!(futures::future::join_all(replays).await.into_iter().all(|replay| replay.unwrap().is_some()));
}

#[tokio::test(start_paused = true)]
async fn views_with_many_terms_take_turns() {
    const EVENTS: u64 = 200;
    let limits = RingLimits { ring_events_max: 1000, ..LIMITS };
    let mut cache = Cache::within(limits);
    cache.list(&[("a", "web", 5)], 10);
    let selectors = (0..3).map(|view| format!("{},!of-{view}", many_terms()));
    let mut views: Vec<_> = selectors.map(|selector| cache.subscribe(&selector, Start::Snapshot).unwrap()).collect();
    for view in &mut views {
        rounds(view);
    }
    for at in 11..11 + EVENTS {
        cache.event(Modified, "a", "web", at);
    }
    let slice = SLICE_TESTS / (2 * 102);
    // One task tests a slice of one view, and the task of this test runs again.
    let mut tested = [0; 3];
    for turn in 0..6 {
        tokio::task::yield_now().await;
        for (view, tested) in views.iter_mut().zip(&mut tested) {
            *tested += rounds(view).1.len();
        }
        let turns = |view: usize| (turn + 3 - view) / 3;
        assert_eq!(tested, [0, 1, 2].map(|view| slice * turns(view)), "after turn {turn}");
    }
    for (view, tested) in views.iter_mut().zip(tested) {
        assert_eq!(tested + lines(view).await.len(), EVENTS as usize);
    }
}

#[tokio::test(start_paused = true)]
async fn an_index_of_a_cache_that_is_gone_is_not_waited_for() {
    let cache = listed(1000);
    let selection = cache.select("app=web");
    let mut built = (0..10).find_map(|_| cache.hub.start_index(&selection, None)).expect("it is used often enough");
    tokio::task::yield_now().await;
    assert!(!*built.borrow(), "it is built in parts");
    drop(cache);
    let ended = tokio::time::timeout(Duration::from_secs(1), built.wait_for(|has_ended| *has_ended)).await;
    assert!(ended.expect("no reader waits").is_ok());
}
