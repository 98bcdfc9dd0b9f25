//! The event ring: every record of one resource and scope after a floor, in order.
//!
//! A subscriber that returns must be sent every event after its version, or get an error because
//! this is no longer possible. So the ring is never thinned out: it is complete after its floor,
//! and a request below the floor is [`Expired`]. The ring is bounded by bytes, count and age;
//! eviction raises the floor. Evicted records go to [`super::ConflatedHistory`], which is smaller
//! and answers less.
//!
//! An event needs the object before it too, because selectors compare both. That is the cost of
//! history: one old object per event. Old objects are stored packed. The newest records are
//! *fresh*: they hold their objects unpacked, because subscribers are about to take them. Then they
//! settle. To pack at once would compress and unpack every event within a millisecond.
//!
//! A relist leaves a gap: only the state at its end is exact, because the versions inside belong to
//! changes that were never seen. No subscriber may resume from inside a gap.

use std::{
    collections::VecDeque,
    ops::{Bound, RangeBounds},
    sync::Arc,
    time::Duration,
};

use kubefan_common::planted::{self, Bug};
use kubefan_model::{
    ResourceVersion,
    event::{EventType, WatchEvent},
    object::Object,
};
use tokio::time::Instant;

use super::gap::Gap;

/// One step of history.
#[derive(Debug, Clone)]
pub enum HistoryRecord {
    /// One change at one version.
    Event(Arc<WatchEvent>),
    /// The difference between two lists: the changes between them are not known one by one.
    Gap(Arc<Gap>),
}

impl HistoryRecord {
    /// The version that history reaches with this record.
    pub fn version(&self) -> ResourceVersion {
        match self {
            Self::Event(event) => event.version(),
            Self::Gap(gap) => gap.to,
        }
    }

    /// Events of the record, in order.
    pub fn events(&self) -> &[Arc<WatchEvent>] {
        match self {
            Self::Event(event) => std::slice::from_ref(event),
            Self::Gap(gap) => &gap.events,
        }
    }

    /// Memory of the record in bytes beyond the current objects: mostly the objects that it
    /// replaced. If the current objects are in no other cache (`alone`), its own objects count too.
    fn cost_bytes(&self, alone: bool) -> usize {
        let of = |event: &Arc<WatchEvent>| {
            let object = event.object();
            let previous = event.previous();
            // A deleted object is no longer in the state: neither its last version nor the event's.
            let deleted = event.kind() == EventType::Deleted;
            let only_here =
                (deleted || alone) && previous.as_ref().is_none_or(|previous| !Arc::ptr_eq(previous, &object));
            // If the state holds it packed, a fresh event is the only owner of the unpacked bytes.
            let own_bytes = if only_here || event.holds_unpacked() { object.cost_bytes() } else { 0 };
            size_of::<WatchEvent>() + previous.map_or(0, |previous| previous.cost_bytes()) + own_bytes
        };
        size_of::<Entry>() + self.events().iter().map(of).sum::<usize>()
    }
}

/// Limits of the retained history; the first limit that is reached counts. The newest record is
/// retained whatever its size, so that a subscriber that keeps up never falls behind the floor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingLimits {
    /// Bytes of replaced objects, which are packed. `None`: a tenth of the JSON of the current
    /// objects, at least [`RingLimits::BYTES_LEAST`].
    pub ring_bytes_max: Option<usize>,
    /// Number of records.
    pub ring_events_max: usize,
    /// Age of a record.
    pub ring_age_max: Duration,
    /// Bytes of the conflated history of older changes. `None`: a twentieth of the JSON of the
    /// current objects, at least [`RingLimits::CONFLATED_BYTES_MIN`].
    pub conflated_bytes_max: Option<usize>,
}

impl RingLimits {
    /// Number of fresh records: those of one wave of wake-ups.
    pub const FRESH_RECORDS_MAX: usize = 64;
    /// Bytes that fresh records may hold beyond the current objects.
    pub const FRESH_BYTES_MAX: usize = 4 << 20;
    /// The least byte limit of a ring whose limit follows the size of the objects.
    pub const BYTES_LEAST: usize = 8 << 20;
    /// The least byte limit of a conflated history whose limit follows the size of the objects.
    pub const CONFLATED_BYTES_MIN: usize = 4 << 20;

    fn bytes_max(&self, store_bytes: usize) -> usize {
        self.ring_bytes_max.unwrap_or_else(|| Self::BYTES_LEAST.max(store_bytes / 10))
    }

    pub(super) fn conflated_bytes_max(&self, store_bytes: usize) -> usize {
        self.conflated_bytes_max.unwrap_or_else(|| Self::CONFLATED_BYTES_MIN.max(store_bytes / 20))
    }
}

/// The events after a version are no longer retained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("too old resource version: {} ({})", requested.whole(), oldest.whole())]
pub struct Expired {
    /// The requested version.
    pub requested: ResourceVersion,
    /// The oldest version after which all events are retained.
    pub oldest: ResourceVersion,
}

impl Expired {
    /// Lowers the oldest version if all events after `other` can be had from another source. It
    /// changes nothing unless `other` is newer than the requested version, which is refused in any
    /// case.
    pub fn or_after(self, other: Option<ResourceVersion>) -> Self {
        let helps = other.filter(|other| *other > self.requested);
        Self { oldest: helps.map_or(self.oldest, |other| self.oldest.min(other)), ..self }
    }
}

/// The records after `floor`, oldest first.
pub struct EventRing {
    limits: RingLimits,
    floor: ResourceVersion,
    records: VecDeque<Entry>,
    /// The versions of the gaps among the records.
    gaps: VecDeque<ResourceVersion>,
    /// The end of the last gap in which events may be missing.
    last_gap: Option<ResourceVersion>,
    bytes: usize,
    /// The objects of its events are in no other cache.
    alone: bool,
    /// Number of the newest records that are fresh, and their part of the bytes.
    fresh: usize,
    fresh_bytes: usize,
}

struct Entry {
    record: HistoryRecord,
    cost_bytes: usize,
    at: Instant,
}

impl EventRing {
    /// An empty ring whose history starts after `floor`.
    pub fn new(limits: RingLimits, floor: ResourceVersion) -> Self {
        let records = VecDeque::new();
        let gaps = VecDeque::new();
        let last_gap = None;
        let alone = false;
        Self { limits, floor, records, gaps, last_gap, bytes: 0, alone, fresh: 0, fresh_bytes: 0 }
    }

    /// An empty ring for events whose objects are in no cached state: their own objects count as
    /// history.
    pub fn alone(limits: RingLimits, floor: ResourceVersion) -> Self {
        Self { alone: true, ..Self::new(limits, floor) }
    }

    /// Appends a record that is in the views' logs already; older records settle. [`Self::evict`]
    /// must follow.
    pub fn push(&mut self, record: HistoryRecord, now: Instant) {
        let follows = self.records.back().is_none_or(|last| last.record.version() < record.version());
        debug_assert!(follows);
        if let HistoryRecord::Gap(gap) = &record {
            self.gaps.push_back(gap.to);
            self.last_gap = Some(gap.to).filter(|_| gap.is_lossy).or(self.last_gap);
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

    /// Packs the objects of the oldest fresh record. There must be one.
    fn settle_next(&mut self) {
        let at = self.records.len() - self.fresh;
        let Entry { record, cost_bytes: before, .. } = &self.records[at];
        for event in record.events() {
            let previous = event.previous();
            event.settle();
            // The same object, and not an object that a changed schema gave other bytes at the same
            // version: subscribers that are behind have not been sent those bytes.
            if let (Some(previous), Some(replaced)) = (previous, event.previous())
                && let Some(origin) = self.event_of(&previous)
            {
                origin.replaced(&replaced);
            }
        }
        let before = *before;
        let cost_bytes = record.cost_bytes(self.alone);
        self.records[at].cost_bytes = cost_bytes;
        self.bytes = self.bytes - before + cost_bytes;
        self.fresh -= 1;
        self.fresh_bytes -= before;
    }

    /// The event that brought this object, if it is retained.
    fn event_of(&self, object: &Arc<Object>) -> Option<&Arc<WatchEvent>> {
        let version = object.version();
        if version.end() <= self.floor {
            return None;
        }
        let at = self.records.partition_point(|entry| entry.record.version() < version);
        // The first record, and those at other places of the same version.
        let records = self.records.range(at..).map(|entry| &entry.record).enumerate();
        let mut records = records.take_while(|(at, record)| *at == 0 || record.version().is_at(version));
        records.find_map(|(_, record)| {
            let events = record.events();
            // In a gap the deletes come first, in no order of versions.
            let changes = &events[events.partition_point(|event| event.kind() == EventType::Deleted)..];
            let start = changes.partition_point(|event| event.version() < version);
            let of_version = changes[start..].iter().take_while(|event| event.version().is_at(version));
            of_version.into_iter().find(|event| Arc::ptr_eq(&event.object(), object))
        })
    }

    /// Evicts the records over the limits at `now`, and returns them, oldest first. The byte limit
    /// is multiplied by `share`, from 0 to 1.
    ///
    /// `log_share` is the share of history, from 0 to 1, that the views' logs have room for:
    /// history is shortened to it. Subscribers with many different selectors must not be able to
    /// fill the memory.
    pub fn evict(&mut self, now: Instant, store_bytes: usize, log_share: f64, share: f64) -> Vec<HistoryRecord> {
        let mut bytes_max = (self.limits.bytes_max(store_bytes) as f64 * share) as usize;
        // Packing comes before eviction.
        while self.bytes > bytes_max && self.fresh > 0 {
            self.settle_next();
        }
        if log_share < 1.0 {
            bytes_max = bytes_max.min((self.bytes as f64 * log_share) as usize);
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
            if self.gaps.front() == Some(&self.floor) {
                self.gaps.pop_front();
            }
            gone.extend(self.records.pop_front().map(|oldest| oldest.record));
        }
        gone
    }

    /// Every record after `version`, oldest first.
    pub fn since(&self, version: ResourceVersion) -> Result<impl DoubleEndedIterator<Item = &HistoryRecord>, Expired> {
        let expired = |oldest| Err(Expired { requested: version, oldest });
        if version < self.floor {
            return expired(self.floor);
        }
        let start = self.records.partition_point(|entry| entry.record.version() <= version);
        match self.records.get(start).map(|entry| &entry.record) {
            // Inside a gap there is no exact state to resume from.
            Some(HistoryRecord::Gap(gap)) if version > gap.from && !planted::is(Bug::GapEnteredInside) => {
                expired(gap.to)
            }
            _ => Ok(self.records.range(start..).map(|entry| &entry.record)),
        }
    }

    /// The number of records after a version.
    pub fn count_after(&self, version: ResourceVersion) -> usize {
        self.records.len() - self.records.partition_point(|entry| entry.record.version() <= version)
    }

    /// The versions of the gaps after a version, oldest first.
    pub fn gaps_after(&self, version: ResourceVersion) -> impl Iterator<Item = ResourceVersion> {
        self.gaps.iter().copied().filter(move |gap| *gap > version)
    }

    /// The record of a version, if it is retained.
    pub fn record_at(&self, version: ResourceVersion) -> Option<&HistoryRecord> {
        let at = self.records.partition_point(|entry| entry.record.version() < version);
        self.records.get(at).map(|entry| &entry.record).filter(|record| record.version() == version)
    }

    /// Time at which the newest record was received.
    pub fn newest_received(&self) -> Option<Instant> {
        self.records.back().map(|entry| entry.at)
    }

    /// The records after one version and up to another, with the time at which each was received,
    /// newest first.
    pub fn between(
        &self,
        after: ResourceVersion,
        up_to: Bound<ResourceVersion>,
    ) -> impl Iterator<Item = (&HistoryRecord, Instant)> {
        let start = self.records.partition_point(|entry| entry.record.version() <= after);
        let end = self.records.partition_point(|entry| (Bound::Unbounded, up_to).contains(&entry.record.version()));
        self.records.range(start..end.max(start)).rev().map(|entry| (&entry.record, entry.at))
    }

    /// The version of the newest record, or the floor.
    pub fn last(&self) -> ResourceVersion {
        self.records.back().map_or(self.floor, |last| last.record.version())
    }

    /// The oldest version after which all events are retained.
    pub fn floor(&self) -> ResourceVersion {
        self.floor
    }

    /// The oldest version after which no event is missing.
    pub fn exact_from(&self) -> ResourceVersion {
        self.last_gap.map_or(self.floor, |gap| gap.max(self.floor))
    }

    /// Memory of the ring in bytes beyond the current objects.
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

    /// The age of the oldest record; zero if there is none.
    pub fn age(&self, now: Instant) -> Duration {
        self.records.front().map_or(Duration::ZERO, |oldest| now.duration_since(oldest.at))
    }
}

#[cfg(test)]
mod tests;
