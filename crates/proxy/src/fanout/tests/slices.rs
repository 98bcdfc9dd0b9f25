//! Work that grows with objects × terms is done in slices, and other tasks run in between.

use super::*;
use crate::cache::scan::SLICE_TESTS;
use kubefan_model::{format::Encoding, projection::Projection};

/// A selector of a hundred terms, which is met by objects without labels of these names.
pub(super) fn many_terms() -> String {
    (0..100).map(|number| format!("!absent-{number}")).collect::<Vec<_>>().join(",")
}

/// How often others can run until a subscription has no more, and what it was sent.
fn rounds(subscription: &mut Subscription) -> (usize, Vec<String>) {
    let (mut rounds, mut sent) = (0, Vec::new());
    loop {
        match subscription.take(1 << 20).unwrap() {
            Some(frames) => sent.extend(decode(frames).iter().map(line)),
            None if subscription.in_backlog() => rounds += 1,
            None => return (rounds, sent),
        }
    }
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
    let (cache, terms) = (listed(OBJECTS), many_terms());
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
async fn a_catch_up_with_many_terms_lets_others_run() {
    const OBJECTS: u64 = 400;
    let limits = RingLimits { ring_events_max: 1, residue_bytes_max: Some(1 << 20), ..LIMITS };
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

#[tokio::test(start_paused = true)]
async fn a_compressed_snapshot_with_many_terms_lets_others_run() {
    const OBJECTS: usize = 1000;
    let cache = listed(OBJECTS);
    let format = Format::new(Projection::default(), false, Encoding::Zstd).unwrap();
    let subscribe = || {
        let waker = StreamWaker::new(&ConnectionWaker::new(), 0);
        cache.hub.subscribe(cache.select(&many_terms()), format.clone(), Start::Snapshot, waker).unwrap()
    };
    let (mut one, mut other) = (subscribe(), subscribe());
    assert!(matches!(one.take(1 << 20), Ok(Some(_))), "the start");
    let ((of_one, sent), (of_other, again)) = (rounds(&mut one), rounds(&mut other));
    assert!(of_one >= OBJECTS * 101 / SLICE_TESTS - 1, "{of_one}");
    assert!(of_other <= 1, "the objects were found already: {of_other}");
    assert_eq!(sent.last().unwrap(), &format!("end of {OBJECTS} (10)"));
    assert_eq!(sent[..], again[again.len() - sent.len()..]);
}
