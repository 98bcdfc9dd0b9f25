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
mod tests;
