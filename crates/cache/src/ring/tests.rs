use kubefan_model::{
    event::EventType,
    fields::FieldTable,
    object::{Object, ObjectParser},
};

use super::*;
use crate::RelistReason;

fn version(number: u64) -> ResourceVersion {
    ResourceVersion::new(number).unwrap()
}

fn object(number: u64) -> Arc<Object> {
    let json = format!(r#"{{"metadata":{{"name":"x","resourceVersion":"{number}"}}}}"#);
    Arc::new(ObjectParser::new(&FieldTable::default()).parse(json.as_bytes()).unwrap())
}

fn event(number: u64) -> HistoryRecord {
    let previous = Some(object(number - 1));
    HistoryRecord::Event(Arc::new(WatchEvent::new(EventType::Modified, version(number), object(number), previous)))
}

fn limits() -> RingLimits {
    RingLimits {
        ring_bytes_max: Some(1 << 20),
        ring_events_max: 3,
        ring_age_max: Duration::from_secs(60),
        conflated_bytes_max: Some(1 << 20),
    }
}

fn push(ring: &mut EventRing, record: HistoryRecord) {
    ring.push(record, Instant::now());
    ring.evict(Instant::now(), 0, 1.0, 1.0);
}

fn since(ring: &EventRing, number: u64) -> Result<Vec<u64>, u64> {
    ring.since(version(number))
        .map(|records| records.map(|record| record.version().get()).collect())
        .map_err(|expired| expired.oldest.get())
}

#[tokio::test(start_paused = true)]
async fn history_is_complete_or_expired() {
    let mut ring = EventRing::new(limits(), version(10));
    for number in [11, 13, 15, 17] {
        push(&mut ring, event(number));
    }
    assert_eq!(since(&ring, 10), Err(11), "the fourth record pushed the first out");
    assert_eq!(since(&ring, 11), Ok(vec![13, 15, 17]));
    assert_eq!(since(&ring, 14), Ok(vec![15, 17]), "a version of another object's event is as good");
    assert_eq!(since(&ring, 17), Ok(vec![]));
}

#[tokio::test(start_paused = true)]
async fn age_and_bytes_bound_the_ring_but_the_newest_record_stays() {
    let mut ring = EventRing::new(RingLimits { ring_bytes_max: Some(1), ..limits() }, version(10));
    push(&mut ring, event(11));
    assert_eq!(since(&ring, 10), Ok(vec![11]));
    push(&mut ring, event(12));
    assert_eq!(since(&ring, 10), Err(11));

    let mut ring = EventRing::new(limits(), version(10));
    push(&mut ring, event(11));
    tokio::time::advance(Duration::from_secs(61)).await;
    push(&mut ring, event(12));
    assert_eq!((since(&ring, 10), ring.len()), (Err(11), 1));
}

/// A change of one object, as the writer makes it.
fn change(object: &Arc<Object>, previous: Option<&Arc<Object>>) -> Arc<WatchEvent> {
    let kind = if previous.is_some() { EventType::Modified } else { EventType::Added };
    let event = WatchEvent::new(kind, object.version(), object.clone(), previous.cloned());
    Arc::new(event.packing(&Arc::default(), Some(object.clone())))
}

fn large(number: u64) -> Arc<Object> {
    sized(number, 5 << 10)
}

fn sized(number: u64, bytes: usize) -> Arc<Object> {
    let json = format!(
        r#"{{"metadata":{{"name":"x","resourceVersion":"{number}"}},"data":"{}"}}"#,
        "all the same ".repeat(bytes / 13)
    );
    Arc::new(ObjectParser::new(&FieldTable::default()).parse(json.as_bytes()).unwrap())
}

fn long() -> RingLimits {
    RingLimits { ring_events_max: 1000, ..limits() }
}

/// Adds enough records that those before are no longer fresh.
fn age(ring: &mut EventRing, from: u64) {
    for number in (from..).take(RingLimits::FRESH_RECORDS_MAX) {
        push(ring, event(number));
    }
}

#[tokio::test(start_paused = true)]
async fn a_fresh_record_has_unpacked_objects_and_a_settled_one_shares_packed_ones() {
    let mut ring = EventRing::new(long(), version(10));
    let first = large(11);
    let second = large(12);
    let events = [change(&first, None), change(&second, Some(&first))];
    push(&mut ring, HistoryRecord::Event(events[0].clone()));
    push(&mut ring, HistoryRecord::Event(events[1].clone()));
    assert!(Arc::ptr_eq(&events[1].previous().unwrap(), &first), "fresh");
    let fresh = ring.bytes();
    age(&mut ring, 100);
    let brought = events[0].object();
    let replaced = events[1].previous().unwrap();
    assert!(Arc::ptr_eq(&brought, &replaced) && replaced.is_packed());
    assert!(!events[1].object().is_packed(), "it is the current one");
    assert_eq!(Arc::strong_count(&first), 1, "nobody holds the plain bytes any more");
    assert_eq!((replaced.bytes(), replaced.key()), (first.bytes(), first.key()));
    let others: usize = ring.records.iter().skip(2).map(|entry| entry.cost_bytes).sum();
    let settled = ring.bytes() - others;
    assert!(fresh - settled > first.json_len() * 3 / 4, "{fresh} bytes, then {settled}");
}

#[tokio::test(start_paused = true)]
async fn fresh_records_are_bounded_in_bytes_and_packed_before_any_is_evicted() {
    let mut ring = EventRing::new(RingLimits { ring_bytes_max: None, ..long() }, version(10));
    let mut objects = vec![large(11)];
    for number in 12..40 {
        objects.push(sized(number, RingLimits::FRESH_BYTES_MAX / 8));
        let [.., before, now] = &*objects else { unreachable!() };
        push(&mut ring, HistoryRecord::Event(change(now, Some(before))));
        assert!(ring.fresh_bytes <= RingLimits::FRESH_BYTES_MAX);
    }
    assert_eq!(ring.bytes(), ring.records.iter().map(|entry| entry.cost_bytes).sum::<usize>());

    let tight = RingLimits { ring_bytes_max: Some(RingLimits::FRESH_BYTES_MAX / 4), ..long() };
    let mut ring = EventRing::new(tight, version(10));
    for pair in objects.windows(2) {
        push(&mut ring, HistoryRecord::Event(change(&pair[1], Some(&pair[0]))));
    }
    assert_eq!(ring.len(), 28, "all fit once they are packed");
}

#[tokio::test(start_paused = true)]
async fn an_object_from_a_relist_is_packed_when_it_is_replaced() {
    let mut ring = EventRing::new(long(), version(10));
    let gone = large(9);
    let first = large(13);
    let second = large(21);
    let deleted = WatchEvent::new(EventType::Deleted, gone.version(), gone.clone(), Some(gone.clone()));
    let deleted = Arc::new(deleted.packing(&Arc::default(), None));
    let events = vec![deleted.clone(), change(&first, None)];
    push(&mut ring, HistoryRecord::Gap(Arc::new(Gap::new(version(10), version(20), RelistReason::Expired, events))));
    push(&mut ring, HistoryRecord::Event(change(&second, Some(&first))));
    age(&mut ring, 100);
    assert!(Arc::ptr_eq(&deleted.object(), &deleted.previous().unwrap()) && deleted.object().is_packed());
    assert_eq!((Arc::strong_count(&first), Arc::strong_count(&gone)), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_ring_without_a_cache_counts_the_objects_of_its_events() {
    let mut ring = EventRing::alone(RingLimits { ring_bytes_max: Some(1 << 20), ..long() }, version(10));
    for number in 11..41 {
        let object = sized(number, 100 << 10);
        push(&mut ring, HistoryRecord::Event(change(&object, None)));
    }
    assert!((1 << 19..=1 << 20).contains(&ring.bytes()) && ring.len() < 11, "{} bytes of {}", ring.bytes(), ring.len());
}

#[tokio::test(start_paused = true)]
async fn an_object_with_other_bytes_at_the_same_version_is_not_shared() {
    let mut ring = EventRing::new(long(), version(10));
    // A changed schema gives the object other bytes, under the version that it had.
    let first = large(11);
    let other = sized(11, 4 << 10);
    let second = large(21);
    let brought = change(&first, None);
    push(&mut ring, HistoryRecord::Event(brought.clone()));
    let events = vec![change(&other, Some(&first))];
    push(&mut ring, HistoryRecord::Gap(Arc::new(Gap::new(version(11), version(20), RelistReason::Expired, events))));
    push(&mut ring, HistoryRecord::Event(change(&second, Some(&other))));
    age(&mut ring, 100);
    assert_eq!(brought.object().bytes(), first.bytes());
}

#[tokio::test(start_paused = true)]
async fn without_a_configured_limit_history_follows_the_size_of_the_cache() {
    let mut ring =
        EventRing::new(RingLimits { ring_bytes_max: None, ring_events_max: 100_000, ..limits() }, version(10));
    let mut number = 10;
    for (json_bytes, bytes_max) in [(0, RingLimits::BYTES_LEAST), (100 << 20, 10 << 20)] {
        for _ in 0..40_000 {
            number += 1;
            ring.push(event(number), Instant::now());
            ring.evict(Instant::now(), json_bytes, 1.0, 1.0);
        }
        assert!((bytes_max - 1024..=bytes_max).contains(&ring.bytes()), "{} of {bytes_max}", ring.bytes());
    }
}

#[tokio::test(start_paused = true)]
async fn a_version_inside_a_gap_cannot_be_resumed_from() {
    let mut ring = EventRing::new(limits(), version(10));
    push(&mut ring, event(12));
    let gap = Gap::new(version(12), version(20), RelistReason::Expired, vec![]);
    push(&mut ring, HistoryRecord::Gap(Arc::new(gap)));
    assert_eq!(since(&ring, 12), Ok(vec![20]));
    assert_eq!(since(&ring, 15), Err(20));
    assert_eq!(since(&ring, 20), Ok(vec![]));
}

#[tokio::test(start_paused = true)]
async fn logs_that_grow_too_large_shorten_history() {
    let mut ring = EventRing::new(RingLimits { ring_events_max: 100, ..limits() }, version(10));
    for number in 11..31 {
        push(&mut ring, event(number));
    }
    assert_eq!(ring.evict(Instant::now(), 0, 0.5, 1.0).len(), 10);
    assert_eq!(ring.len(), 10, "twice the limit leaves half of the history");
    assert!(ring.evict(Instant::now(), 0, 1.0, 1.0).is_empty());
}
