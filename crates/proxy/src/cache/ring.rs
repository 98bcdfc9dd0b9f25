//! The recent history of one resource and scope: every record after the floor, in order.
//!
//! Bounded by bytes, by count and by age. What falls out raises the floor, and a reader below the floor is told so: history is
//! either complete or [`Expired`], never thinned out. The newest records are *fresh*: they hold their objects as they came, because
//! subscribers are about to take them; then they settle, and hold what was replaced packed.

use std::{
    collections::VecDeque,
    ops::{Bound, RangeBounds},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use kubefan_common::planted::{self, Bug};
use kubefan_model::{
    ResourceVersion,
    event::{EventType, WatchEvent},
};

/// One step of history.
#[derive(Debug, Clone)]
pub enum Record {
    /// One change at one version.
    Event(Arc<WatchEvent>),
    /// Upstream was listed again: what happened on the way is not known one by one.
    Gap(Arc<Gap>),
}

/// A span of history of which only the end is exact.
#[derive(Debug)]
pub struct Gap {
    /// Up to here history is exact.
    pub from: ResourceVersion,
    /// From here history is exact again.
    pub to: ResourceVersion,
    /// Why upstream was listed again; also the metric's label.
    pub reason: &'static str,
    /// What leads from the state before to the state after: deletes, then adds and changes in the order of their versions.
    pub events: Vec<Arc<WatchEvent>>,
}

impl Record {
    /// The version that history has reached with this record.
    pub fn version(&self) -> ResourceVersion {
        match self {
            Self::Event(event) => event.version(),
            Self::Gap(gap) => gap.to,
        }
    }

    /// Its events, in order.
    pub fn events(&self) -> &[Arc<WatchEvent>] {
        match self {
            Self::Event(event) => std::slice::from_ref(event),
            Self::Gap(gap) => &gap.events,
        }
    }

    /// What the record keeps in memory beyond the current objects, in bytes: the objects it replaced.
    /// What it takes beside the current objects; where nobody else holds these, `alone`, what it brings in counts too.
    fn cost_bytes(&self, alone: bool) -> usize {
        let of = |event: &Arc<WatchEvent>| {
            let (object, previous) = (event.object(), event.previous());
            // What was deleted is in the state no longer, neither as it was nor as it was told.
            let deleted = event.kind() == EventType::Deleted;
            let told = (deleted || alone) && previous.as_ref().is_none_or(|previous| !Arc::ptr_eq(previous, &object));
            // Where the state holds it packed, a fresh event is the only one to hold it plain.
            let told = if told || event.holds_plain() { object.cost_bytes() } else { 0 };
            size_of::<WatchEvent>() + previous.map_or(0, |previous| previous.cost_bytes()) + told
        };
        size_of::<Entry>() + self.events().iter().map(of).sum::<usize>()
    }
}

/// How much history is kept; whichever limit is reached first counts. The newest record is kept whatever its size, so that a
/// subscriber that keeps up never falls behind the floor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingLimits {
    /// Bytes of replaced objects, as they are held: packed. `None`: a tenth of the JSON of the current objects, at least
    /// [`RingLimits::BYTES_LEAST`].
    pub ring_bytes_max: Option<usize>,
    /// Records.
    pub ring_events_max: usize,
    /// Age of a record.
    pub ring_age_max: Duration,
    /// Bytes of what is remembered of older changes (the residue). `None`: a twentieth of the JSON of the current objects, at least
    /// [`RingLimits::RESIDUE_BYTES_LEAST`].
    pub residue_bytes_max: Option<usize>,
}

impl RingLimits {
    /// What the logs of all views of one cache may take together.
    pub const LOG_BYTES_MAX: usize = 64 << 20;
    /// Fresh records: as many as one wave of wake-ups tells of.
    pub const FRESH_RECORDS_MAX: usize = 64;
    /// What fresh records may hold beyond the current objects, in bytes.
    pub const FRESH_BYTES_MAX: usize = 4 << 20;
    /// What a ring may always hold where its bytes follow those of the objects.
    pub const BYTES_LEAST: usize = 8 << 20;
    /// What a residue may always hold where its bytes follow those of the objects.
    pub const RESIDUE_BYTES_LEAST: usize = 4 << 20;

    fn bytes_max(&self, store_bytes: usize) -> usize {
        self.ring_bytes_max.unwrap_or_else(|| Self::BYTES_LEAST.max(store_bytes / 10))
    }

    pub(super) fn residue_bytes_max(&self, store_bytes: usize) -> usize {
        self.residue_bytes_max.unwrap_or_else(|| Self::RESIDUE_BYTES_LEAST.max(store_bytes / 20))
    }
}

/// The events after a version are no longer held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("too old resource version: {requested} ({oldest})")]
pub struct Expired {
    /// What was asked for.
    pub requested: ResourceVersion,
    /// The oldest version whose later events are all held.
    pub oldest: ResourceVersion,
}

/// The records after `floor`, oldest first.
pub struct EventRing {
    limits: RingLimits,
    floor: ResourceVersion,
    records: VecDeque<Entry>,
    /// The end of the last gap.
    last_gap: Option<ResourceVersion>,
    bytes: usize,
    /// Nobody else holds what its events bring in.
    alone: bool,
    /// How many of the newest records are fresh, and their part of the bytes.
    fresh: usize,
    fresh_bytes: usize,
}

struct Entry {
    record: Record,
    cost_bytes: usize,
    at: Instant,
}

impl EventRing {
    /// An empty ring whose history starts after `floor`.
    pub fn new(limits: RingLimits, floor: ResourceVersion) -> Self {
        let (records, last_gap, alone) = (VecDeque::new(), None, false);
        Self { limits, floor, records, last_gap, bytes: 0, alone, fresh: 0, fresh_bytes: 0 }
    }

    /// The same, of events whose objects are in no state that is held: what they bring in counts as history.
    pub fn alone(limits: RingLimits, floor: ResourceVersion) -> Self {
        Self { alone: true, ..Self::new(limits, floor) }
    }

    /// Appends a record that the views have seen; older ones settle. [`Self::evict`] follows.
    pub fn push(&mut self, record: Record, now: Instant) {
        let follows = self.records.back().is_none_or(|last| last.record.version() < record.version());
        debug_assert!(follows || planted::is(Bug::OutOfOrderPassedOn));
        if let Record::Gap(gap) = &record {
            self.last_gap = Some(gap.to);
        }
        let cost_bytes = record.cost_bytes(self.alone);
        self.bytes += cost_bytes;
        self.fresh += 1;
        self.fresh_bytes += cost_bytes;
        self.records.push_back(Entry { record, cost_bytes, at: now });
        while self.fresh > RingLimits::FRESH_RECORDS_MAX || self.fresh_bytes > RingLimits::FRESH_BYTES_MAX {
            self.settle_next();
        }
    }

    /// Settles the oldest fresh record, which there must be: it is history now, and so is what it replaced.
    fn settle_next(&mut self) {
        let at = self.records.len() - self.fresh;
        let Entry { record, cost_bytes: before, .. } = &self.records[at];
        for event in record.events() {
            let previous = event.previous();
            event.settle();
            // The very object, and not one that a changed schema gave other bytes under the same version: subscribers behind have not been
            // told of those.
            if let (Some(previous), Some(replaced)) = (previous, event.previous())
                && let Some(brought) = self.event_at(replaced.version())
                && Arc::ptr_eq(&brought.object(), &previous)
            {
                brought.replaced(&replaced);
            }
        }
        let (before, cost_bytes) = (*before, record.cost_bytes(self.alone));
        self.records[at].cost_bytes = cost_bytes;
        self.bytes = self.bytes - before + cost_bytes;
        self.fresh -= 1;
        self.fresh_bytes -= before;
    }

    /// The event that brought in the object of this version, if it is held.
    fn event_at(&self, version: ResourceVersion) -> Option<&Arc<WatchEvent>> {
        if version <= self.floor {
            return None;
        }
        let at = self.records.partition_point(|entry| entry.record.version() < version);
        let events = self.records.get(at)?.record.events();
        // In a gap the deletes come first, with versions of their own.
        let changes = &events[events.partition_point(|event| event.kind() == EventType::Deleted)..];
        changes.binary_search_by_key(&version, |event| event.version()).ok().map(|at| &changes[at])
    }

    /// Lets go of what is over the limits by `now`, of which the bytes count by `share`, from 0 to 1; gives the records that are gone, oldest first.
    ///
    /// `log_bytes` is what all views' logs of these records take. Where that is over [`RingLimits::LOG_BYTES_MAX`], history is
    /// shortened in proportion: subscribers with selectors of their own must not be able to fill the memory.
    pub fn evict(&mut self, now: Instant, store_bytes: usize, log_bytes: usize, share: f64) -> Vec<Record> {
        let mut bytes_max = (self.limits.bytes_max(store_bytes) as f64 * share) as usize;
        // What is held plainly for convenience is no reason to forget.
        while self.bytes > bytes_max && self.fresh > 0 {
            self.settle_next();
        }
        if log_bytes > RingLimits::LOG_BYTES_MAX {
            let share = RingLimits::LOG_BYTES_MAX as f64 / log_bytes as f64;
            bytes_max = bytes_max.min((self.bytes as f64 * share) as usize);
        }
        let mut gone = Vec::new();
        while let Some(oldest) = self.records.front() {
            let over = self.bytes > bytes_max
                || self.records.len() > self.limits.ring_events_max
                || now.duration_since(oldest.at) > self.limits.ring_age_max;
            if !over || self.records.len() == 1 {
                break;
            }
            self.bytes -= oldest.cost_bytes;
            if self.fresh == self.records.len() {
                self.fresh -= 1;
                self.fresh_bytes -= oldest.cost_bytes;
            }
            self.floor = oldest.record.version();
            gone.extend(self.records.pop_front().map(|oldest| oldest.record));
        }
        gone
    }

    /// Every record after `version`, oldest first.
    pub fn since(&self, version: ResourceVersion) -> Result<impl DoubleEndedIterator<Item = &Record>, Expired> {
        let expired = |oldest| Err(Expired { requested: version, oldest });
        if version < self.floor {
            return expired(self.floor);
        }
        let start = self.records.partition_point(|entry| entry.record.version() <= version);
        match self.records.get(start).map(|entry| &entry.record) {
            // Inside a gap there is no exact state to go on from.
            Some(Record::Gap(gap)) if version > gap.from && !planted::is(Bug::GapEnteredInside) => expired(gap.to),
            _ => Ok(self.records.range(start..).map(|entry| &entry.record)),
        }
    }

    /// The records from after one version up to another and when they came, newest first.
    pub fn between(
        &self,
        after: ResourceVersion,
        up_to: Bound<ResourceVersion>,
    ) -> impl Iterator<Item = (&Record, Instant)> {
        let start = self.records.partition_point(|entry| entry.record.version() <= after);
        let end = self.records.partition_point(|entry| (Bound::Unbounded, up_to).contains(&entry.record.version()));
        self.records.range(start..end.max(start)).rev().map(|entry| (&entry.record, entry.at))
    }

    /// The version of the newest record, or the floor.
    pub fn last(&self) -> ResourceVersion {
        self.records.back().map_or(self.floor, |last| last.record.version())
    }

    /// The oldest version whose later events are all held.
    pub fn floor(&self) -> ResourceVersion {
        self.floor
    }

    /// The oldest version after which there are events and no gap.
    pub fn exact_from(&self) -> ResourceVersion {
        self.last_gap.map_or(self.floor, |gap| gap.max(self.floor))
    }

    /// The bytes that history keeps beyond the current objects.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number of records.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// How old the oldest record is; zero if there is none.
    pub fn age(&self, now: Instant) -> Duration {
        self.records.front().map_or(Duration::ZERO, |oldest| now.duration_since(oldest.at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kubefan_model::{
        event::EventType,
        fields::FieldTable,
        object::{Object, ObjectParser},
    };

    fn version(number: u64) -> ResourceVersion {
        ResourceVersion::new(number).unwrap()
    }

    fn object(number: u64) -> Arc<Object> {
        let json = format!(r#"{{"metadata":{{"name":"x","resourceVersion":"{number}"}}}}"#);
        Arc::new(ObjectParser::new(&FieldTable::default()).parse(json.as_bytes()).unwrap())
    }

    fn event(number: u64) -> Record {
        let previous = Some(object(number - 1));
        Record::Event(Arc::new(WatchEvent::new(EventType::Modified, version(number), object(number), previous)))
    }

    fn limits() -> RingLimits {
        RingLimits {
            ring_bytes_max: Some(1 << 20),
            ring_events_max: 3,
            ring_age_max: Duration::from_secs(60),
            residue_bytes_max: Some(1 << 20),
        }
    }

    fn push(ring: &mut EventRing, record: Record) {
        ring.push(record, Instant::now());
        ring.evict(Instant::now(), 0, 0, 1.0);
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

    /// So many more that all records before are fresh no longer.
    fn age(ring: &mut EventRing, from: u64) {
        (from..).take(RingLimits::FRESH_RECORDS_MAX).for_each(|number| push(ring, event(number)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_fresh_record_holds_what_is_about_to_be_taken_and_a_settled_one_holds_it_once_and_packed() {
        let mut ring = EventRing::new(long(), version(10));
        let (first, second) = (large(11), large(12));
        let events = [change(&first, None), change(&second, Some(&first))];
        push(&mut ring, Record::Event(events[0].clone()));
        push(&mut ring, Record::Event(events[1].clone()));
        assert!(Arc::ptr_eq(&events[1].previous().unwrap(), &first), "fresh");
        let fresh = ring.bytes();
        age(&mut ring, 100);
        let (brought, replaced) = (events[0].object(), events[1].previous().unwrap());
        assert!(Arc::ptr_eq(&brought, &replaced) && replaced.is_packed());
        assert!(!events[1].object().is_packed(), "it is the current one");
        assert_eq!(Arc::strong_count(&first), 1, "nobody holds the plain bytes any more");
        assert_eq!((replaced.bytes(), replaced.key()), (first.bytes(), first.key()));
        let others: usize = ring.records.iter().skip(2).map(|entry| entry.cost_bytes).sum();
        let settled = ring.bytes() - others;
        assert!(fresh - settled > first.json_len() * 3 / 4, "{fresh} bytes, then {settled}");
    }

    #[tokio::test(start_paused = true)]
    async fn fresh_records_are_bounded_in_bytes_too_and_make_no_room_by_forgetting() {
        let mut ring = EventRing::new(RingLimits { ring_bytes_max: None, ..long() }, version(10));
        let mut objects = vec![large(11)];
        for number in 12..40 {
            objects.push(sized(number, RingLimits::FRESH_BYTES_MAX / 8));
            let [.., before, now] = &*objects else { unreachable!() };
            push(&mut ring, Record::Event(change(now, Some(before))));
            assert!(ring.fresh_bytes <= RingLimits::FRESH_BYTES_MAX);
        }
        assert_eq!(ring.bytes(), ring.records.iter().map(|entry| entry.cost_bytes).sum::<usize>());

        let tight = RingLimits { ring_bytes_max: Some(RingLimits::FRESH_BYTES_MAX / 4), ..long() };
        let mut ring = EventRing::new(tight, version(10));
        for pair in objects.windows(2) {
            push(&mut ring, Record::Event(change(&pair[1], Some(&pair[0]))));
        }
        assert_eq!(ring.len(), 28, "all fit once they are packed");
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_relist_brought_in_is_packed_when_it_is_replaced() {
        let mut ring = EventRing::new(long(), version(10));
        let (gone, first, second) = (large(9), large(13), large(21));
        let deleted = WatchEvent::new(EventType::Deleted, gone.version(), gone.clone(), Some(gone.clone()));
        let deleted = Arc::new(deleted.packing(&Arc::default(), None));
        let events = vec![deleted.clone(), change(&first, None)];
        push(&mut ring, Record::Gap(Arc::new(Gap { from: version(10), to: version(20), reason: "test", events })));
        push(&mut ring, Record::Event(change(&second, Some(&first))));
        age(&mut ring, 100);
        assert!(Arc::ptr_eq(&deleted.object(), &deleted.previous().unwrap()) && deleted.object().is_packed());
        assert_eq!((Arc::strong_count(&first), Arc::strong_count(&gone)), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn alone_a_ring_counts_what_its_events_bring_in() {
        let mut ring = EventRing::alone(RingLimits { ring_bytes_max: Some(1 << 20), ..long() }, version(10));
        for number in 11..41 {
            let object = sized(number, 100 << 10);
            push(&mut ring, Record::Event(change(&object, None)));
        }
        assert!(
            (1 << 19..=1 << 20).contains(&ring.bytes()) && ring.len() < 11,
            "{} bytes of {}",
            ring.bytes(),
            ring.len()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn other_bytes_of_a_version_are_not_those_that_an_older_event_brought_in() {
        let mut ring = EventRing::new(long(), version(10));
        // A changed schema gives the object other bytes, under the version that it had.
        let (first, other, second) = (large(11), sized(11, 4 << 10), large(21));
        let brought = change(&first, None);
        push(&mut ring, Record::Event(brought.clone()));
        let events = vec![change(&other, Some(&first))];
        push(&mut ring, Record::Gap(Arc::new(Gap { from: version(11), to: version(20), reason: "test", events })));
        push(&mut ring, Record::Event(change(&second, Some(&other))));
        age(&mut ring, 100);
        assert_eq!(brought.object().bytes(), first.bytes());
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_limit_of_its_own_history_follows_the_cache() {
        let mut ring =
            EventRing::new(RingLimits { ring_bytes_max: None, ring_events_max: 100_000, ..limits() }, version(10));
        let mut number = 10;
        for (json_bytes, bytes_max) in [(0, RingLimits::BYTES_LEAST), (100 << 20, 10 << 20)] {
            for _ in 0..40_000 {
                number += 1;
                ring.push(event(number), Instant::now());
                ring.evict(Instant::now(), json_bytes, 0, 1.0);
            }
            assert!((bytes_max - 1024..=bytes_max).contains(&ring.bytes()), "{} of {bytes_max}", ring.bytes());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_resumes_inside_a_gap() {
        let mut ring = EventRing::new(limits(), version(10));
        push(&mut ring, event(12));
        let gap = Gap { from: version(12), to: version(20), reason: "expired", events: vec![] };
        push(&mut ring, Record::Gap(Arc::new(gap)));
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
        assert_eq!(ring.evict(Instant::now(), 0, RingLimits::LOG_BYTES_MAX * 2, 1.0).len(), 10);
        assert_eq!(ring.len(), 10, "twice the limit leaves half of the history");
        assert!(ring.evict(Instant::now(), 0, RingLimits::LOG_BYTES_MAX, 1.0).is_empty());
    }
}
