//! The history of one resource and scope: recent events in full, and what is left of older ones.
//!
//! What the ring lets go of goes into the residue, so the two join without a hole. Together they say which way leads on from a version.

use std::{ops::Bound, sync::Arc};

use tokio::time::Instant;

use super::{
    conflated::{ConflatedHistory, PriorState},
    resume::Coverage,
    ring::{EventRing, Expired, Record, RingLimits},
};
use kubefan_model::{ResourceVersion, object::ObjectParser};

/// A history as it is at one version, copied by reference, in parts, so that nobody waits for it long: see [`History::copy`].
#[derive(Debug)]
pub struct HistoryCopy {
    /// What it leads up to.
    pub version: ResourceVersion,
    /// Every record after this version is among the `records`.
    pub ring_floor: ResourceVersion,
    /// Every change after this version and up to `ring_floor` is among the `changes`.
    pub conflated_floor: ResourceVersion,
    /// What is left of old changes, oldest first.
    pub changes: Vec<PriorState>,
    /// The spans up to `ring_floor` inside of which nothing is exact, in order.
    pub inexact: Vec<(ResourceVersion, ResourceVersion)>,
    /// Events and gaps, and when they came, oldest first.
    pub records: Vec<(Record, Instant)>,
    in_ring: bool,
}

impl HistoryCopy {
    /// A copy of which nothing is made yet, of the history that leads up to `version`.
    pub fn of(version: ResourceVersion) -> Self {
        let (changes, inexact, records) = Default::default();
        Self { version, ring_floor: version, conflated_floor: version, changes, inexact, records, in_ring: true }
    }
}

/// Ring and residue.
pub struct History {
    limits: RingLimits,
    parser: Arc<ObjectParser>,
    ring: EventRing,
    conflated: ConflatedHistory,
    /// What it may take of its usual size.
    share: f64,
}

impl History {
    /// A history that starts after `floor`, of objects that `parser` reads.
    pub fn new(limits: RingLimits, floor: ResourceVersion, parser: Arc<ObjectParser>) -> Self {
        Self::to_restore(limits, (floor, floor), parser)
    }

    /// A history to be restored: what is older than `ring_floor` was reduced elsewhere, and nothing is known from before
    /// `residue_floor`.
    pub fn to_restore(
        limits: RingLimits,
        (residue_floor, ring_floor): (ResourceVersion, ResourceVersion),
        parser: Arc<ObjectParser>,
    ) -> Self {
        let (ring, conflated) = (EventRing::new(limits, ring_floor), ConflatedHistory::new(residue_floor));
        Self { limits, parser, ring, conflated, share: 1.0 }
    }

    /// Where changes are restored to, before the first record is pushed.
    pub fn conflated_mut(&mut self) -> &mut ConflatedHistory {
        &mut self.conflated
    }

    /// Everything was restored: lets go of what is over the limits here.
    pub fn restored(&mut self, now: Instant, store_bytes: usize) {
        self.evict(now, store_bytes, 0);
    }

    /// The recent events.
    pub fn ring(&self) -> &EventRing {
        &self.ring
    }

    /// What is left of older ones.
    pub fn conflated(&self) -> &ConflatedHistory {
        &self.conflated
    }

    /// Appends a record that the views have seen. [`Self::evict`] follows.
    pub fn push(&mut self, record: Record, now: Instant) {
        self.ring.push(record, now);
    }

    /// Lets go of what is over the limits, as [`EventRing::evict`]; gives the records that the ring no longer holds.
    pub fn evict(&mut self, now: Instant, store_bytes: usize, log_bytes: usize) -> Vec<Record> {
        let gone = self.ring.evict(now, store_bytes, log_bytes, self.share);
        gone.iter().for_each(|record| self.conflated.push(record, &self.parser));
        self.conflated.evict((self.limits.residue_bytes_max(store_bytes) as f64 * self.share) as usize);
        gone
    }

    /// Limits it to a share, from 0 to 1, of its usual size, from the next eviction on.
    pub fn limit_to(&mut self, share: f64) {
        self.share = share;
    }

    /// The oldest version that something leads on from.
    pub fn oldest(&self) -> ResourceVersion {
        self.conflated.floor()
    }

    /// What it covers at `version`, for a subscriber whose format has `gap_markers` or not. The cache has reached `current`.
    pub fn coverage(&self, version: ResourceVersion, current: ResourceVersion, gap_markers: bool) -> Coverage {
        let log_floor = self.ring.floor();
        let (gap_end, conflated_from) = match version >= log_floor {
            true => (self.ring.since(version).err().map(|expired| expired.oldest), version),
            false => (None, self.conflated.known_from(version)),
        };
        let exact_from = self.ring.exact_from();
        Coverage { version, current, log_floor, gap_end, conflated_from, exact_from, gap_markers }
    }

    /// Whether a subscriber whose format has gap markers can resume from `version`.
    pub fn can_resume_from(&self, version: ResourceVersion) -> bool {
        self.coverage(version, version, true).source().is_ok()
    }

    /// Goes on with a copy by about `entries_max` entries, the newest first, because the oldest are let go of meanwhile: what the ring
    /// has forgotten by then is found in the residue. Tells whether there is more.
    pub fn copy(&self, copy: &mut HistoryCopy, entries_max: usize) -> bool {
        if copy.in_ring {
            let oldest = copy.records.last().map(|(record, _)| record.version());
            let older =
                self.ring.between(self.ring.floor(), oldest.map_or(Bound::Included(copy.version), Bound::Excluded));
            let before = copy.records.len();
            copy.records.extend(older.take(entries_max).map(|(record, at)| (record.clone(), at)));
            if copy.records.len() - before == entries_max {
                return true;
            }
            copy.in_ring = false;
            let start = copy.records.last().map_or(Some(copy.version), |(record, _)| match record {
                Record::Event(event) => ResourceVersion::new(event.version().get() - 1),
                Record::Gap(gap) => Some(gap.from),
            });
            copy.ring_floor = start.map_or(self.ring.floor(), |start| start.min(self.ring.floor()));
            copy.records.reverse();
            return true;
        }
        let oldest = copy.changes.last().map(|change| change.version);
        let up_to = oldest.map_or(Bound::Included(copy.ring_floor), Bound::Excluded);
        let before = copy.changes.len();
        for change in self.conflated.between(self.conflated.floor(), up_to) {
            // Whole versions: a gap's changes share one.
            let another = copy.changes.last().is_some_and(|last| last.version != change.version);
            if another && copy.changes.len() - before >= entries_max {
                return true;
            }
            copy.changes.push(change.clone());
        }
        copy.conflated_floor = self.conflated.floor().min(copy.ring_floor);
        let known = |version: &ResourceVersion| *version > copy.conflated_floor;
        copy.changes.retain(|change| known(&change.version));
        copy.changes.reverse();
        let within = |(_, to): &(ResourceVersion, ResourceVersion)| known(to) && *to <= copy.ring_floor;
        copy.inexact = self.conflated.gaps().filter(within).collect();
        false
    }

    /// What was there before each change after one version and up to another, newest first. Only a part of about `changes_max` changes
    /// each time, so that a reader who has much to catch up with keeps nobody from the history: where there is more, the version that
    /// it lies below is given too.
    pub fn prior_states(
        &self,
        after: ResourceVersion,
        up_to: Bound<ResourceVersion>,
        changes_max: usize,
    ) -> Result<(Vec<PriorState>, Option<ResourceVersion>), Expired> {
        if after < self.conflated.floor() {
            return Err(Expired { requested: after, oldest: self.oldest() });
        }
        let mut part = Vec::new();
        for (record, _) in self.ring.between(after, up_to) {
            let version = record.version();
            let replaced = record.events().iter().rev().map(|event| {
                let (object, before) = (event.object(), event.previous());
                PriorState { version, key: object.key().clone(), before }
            });
            part.extend(replaced);
            if part.len() >= changes_max {
                return Ok((part, Some(version)));
            }
        }
        for change in self.conflated.between(after, up_to) {
            // Whole versions: a gap's changes share one.
            if let Some(last) = part.last().map(|last: &PriorState| last.version)
                && last != change.version
                && part.len() >= changes_max
            {
                return Ok((part, Some(last)));
            }
            part.push(change.clone());
        }
        Ok((part, None))
    }
}
