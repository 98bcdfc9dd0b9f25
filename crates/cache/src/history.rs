//! The history of one resource and scope: recent events in full in the ring, older changes
//! conflated.
//!
//! Records that the ring evicts go into the conflated history in the same call, so the two join
//! without a hole.

use std::{
    ops::{Bound, RangeBounds},
    sync::Arc,
};

use kubefan_common::planted::{self, Bug};
use kubefan_model::{ResourceVersion, object::ObjectParser, selection::Selection};
use tokio::time::Instant;

use super::{
    conflated::{ConflatedHistory, PriorState},
    gap::Gap,
    history_index::HistoryIndex,
    resume::Coverage,
    ring::{EventRing, Expired, HistoryRecord, RingLimits},
};

/// A copy of a history at one version, by reference. It is made in parts, so that the lock is never
/// held for long: see [`History::copy`].
#[derive(Debug)]
pub struct HistoryCopy {
    /// The version that the history reaches.
    pub version: ResourceVersion,
    /// Every record after this version is among the `records`.
    pub ring_floor: ResourceVersion,
    /// Every change after this version and up to `ring_floor` is among the `changes`.
    pub conflated_floor: ResourceVersion,
    /// Conflated changes, oldest first.
    pub changes: Vec<PriorState>,
    /// The gaps up to `ring_floor`, in order.
    pub inexact: Vec<(ResourceVersion, ResourceVersion)>,
    /// Events and gaps, with the time at which each was received, oldest first.
    pub records: Vec<(HistoryRecord, Instant)>,
    in_ring: bool,
}

impl HistoryCopy {
    /// An empty copy of the history that reaches `version`.
    pub fn of(version: ResourceVersion) -> Self {
        Self {
            version,
            ring_floor: version,
            conflated_floor: version,
            changes: Vec::new(),
            inexact: Vec::new(),
            records: Vec::new(),
            in_ring: true,
        }
    }
}

/// State before a step of history.
#[derive(Debug)]
pub enum PriorStep {
    /// Before a change of one object.
    Object(PriorState),
    /// Before each event of a gap.
    Gap(Arc<Gap>),
}

impl PriorStep {
    fn version(&self) -> ResourceVersion {
        match self {
            Self::Object(change) => change.version,
            Self::Gap(gap) => gap.to,
        }
    }
}

/// The event ring and the conflated history before it.
pub struct History {
    limits: RingLimits,
    parser: Arc<ObjectParser>,
    ring: EventRing,
    conflated: ConflatedHistory,
    /// Index of ring and conflated history by the labels and fields that selections use.
    steps: HistoryIndex,
    /// The share of its usual size that it may have.
    share: f64,
}

impl History {
    /// A history that starts after `floor`. `parser` reads the objects.
    pub fn new(limits: RingLimits, floor: ResourceVersion, parser: Arc<ObjectParser>) -> Self {
        Self::to_restore(limits, floor, floor, parser)
    }

    /// A history to be filled from a peer's: changes after `conflated_floor` are conflated, and
    /// events after `ring_floor` complete.
    pub fn to_restore(
        limits: RingLimits,
        conflated_floor: ResourceVersion,
        ring_floor: ResourceVersion,
        parser: Arc<ObjectParser>,
    ) -> Self {
        let ring = EventRing::new(limits, ring_floor);
        let conflated = ConflatedHistory::new(conflated_floor);
        Self { limits, parser, ring, conflated, steps: HistoryIndex::default(), share: 1.0 }
    }

    /// The conflated history, to be filled before the first record is pushed.
    pub fn conflated_mut(&mut self) -> &mut ConflatedHistory {
        &mut self.conflated
    }

    /// Everything was filled in: evicts the records over the limits.
    pub fn restored(&mut self, now: Instant, store_bytes: usize) {
        self.evict(now, store_bytes, 1.0);
    }

    /// The recent events.
    pub fn ring(&self) -> &EventRing {
        &self.ring
    }

    /// The older changes.
    pub fn conflated(&self) -> &ConflatedHistory {
        &self.conflated
    }

    /// Appends a record that is in the views' logs already. [`Self::evict`] must follow.
    pub fn push(&mut self, record: HistoryRecord, now: Instant) {
        self.steps.push(&record);
        self.ring.push(record, now);
    }

    /// Evicts the records over the limits, as [`EventRing::evict`]. Returns the records that the
    /// ring no longer holds.
    pub fn evict(&mut self, now: Instant, store_bytes: usize, log_share: f64) -> Vec<HistoryRecord> {
        let evicted = self.ring.evict(now, store_bytes, log_share, self.share);
        for record in &evicted {
            self.steps.evicted(record);
        }
        if self.share == 1.0 || !planted::is(Bug::ShedForgetsHistory) {
            let Self { conflated, steps, parser, .. } = self;
            for record in &evicted {
                conflated.push(record, parser, |number, event| steps.conflated(number, event));
            }
        }
        self.conflated.evict((self.limits.conflated_bytes_max(store_bytes) as f64 * self.share) as usize);
        let steps_left = self.ring.len() + self.conflated.len();
        self.steps.sweep(self.ring.floor(), self.conflated.first(), steps_left);
        evicted
    }

    /// The steps by label and field.
    pub fn steps(&self) -> &HistoryIndex {
        &self.steps
    }

    /// The steps by label and field, to add or remove columns.
    pub fn steps_mut(&mut self) -> &mut HistoryIndex {
        &mut self.steps
    }

    /// The records after `version` that a selection may see, oldest first: all of them, unless its
    /// equality term is indexed. Gaps are always among them.
    pub fn since(&self, version: ResourceVersion, selection: &Selection) -> Result<Records<'_>, Expired> {
        let all = self.ring.since(version)?;
        Ok(match self.indexed_after(version, selection) {
            None => Box::new(all),
            Some(versions) => Box::new(versions.into_iter().filter_map(|version| self.ring.record_at(version))),
        })
    }

    /// The versions of the ring's records after `version` that a selection may see, oldest first.
    /// `None` if none of its equality terms is indexed.
    pub fn indexed_after(&self, version: ResourceVersion, selection: &Selection) -> Option<Vec<ResourceVersion>> {
        let mut versions = self.steps.of(selection)?.recent_after(version);
        versions.extend(self.ring.gaps_after(version));
        versions.sort_unstable();
        Some(versions)
    }

    /// Limits it to a share, from 0 to 1, of its usual size, from the next eviction on.
    pub fn limit_to(&mut self, share: f64) {
        self.share = share;
    }

    /// The oldest version that a subscriber with gap markers may resume from, unless it is inside a
    /// gap.
    pub fn oldest(&self) -> ResourceVersion {
        self.conflated.floor()
    }

    /// Returns the coverage at `version`, for a subscriber whose format has `gap_markers` or not.
    /// The cache has reached `current`.
    pub fn coverage(&self, version: ResourceVersion, current: ResourceVersion, gap_markers: bool) -> Coverage {
        let log_floor = self.ring.floor();
        let mut gap_end = None;
        let mut conflated_from = version;
        if version >= log_floor {
            gap_end = self.ring.since(version).err().map(|expired| expired.oldest);
        } else {
            conflated_from = self.conflated.known_from(version);
        }
        // Another replica has counted the events up to a place that this one has not seen. It may
        // not lead to the same state.
        if version != current && !self.has_place(version) {
            gap_end = Some(current);
        }
        let exact_from = self.ring.exact_from();
        Coverage { version, current, log_floor, gap_end, conflated_from, exact_from, gap_markers }
    }

    /// Whether a place is of a version as a whole, or the history has the event that reached it.
    fn has_place(&self, place: ResourceVersion) -> bool {
        place.sub() == 0
            || place.is_end()
            || [self.ring.floor(), self.conflated.floor()].contains(&place)
            || matches!(self.ring.record_at(place), Some(HistoryRecord::Event(_)))
            || place
                .before()
                .is_some_and(|before| self.conflated.between(before, Bound::Included(place)).next().is_some())
    }

    /// Whether a subscriber whose format has gap markers can resume from `version`. The cache has
    /// reached `current`.
    pub fn can_resume_from(&self, version: ResourceVersion, current: ResourceVersion) -> bool {
        self.coverage(version, current, true).source().is_ok()
    }

    /// Continues a copy by about `entries_max` entries. Returns whether there is more. The newest
    /// are copied first, because the oldest are evicted meanwhile: a record that the ring evicts
    /// before it is copied is found in the conflated history.
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
                // Earlier events of that version may have been evicted since.
                HistoryRecord::Event(event) => event.version().before(),
                HistoryRecord::Gap(gap) => Some(gap.from),
            });
            copy.ring_floor = start.map_or(self.ring.floor(), |start| start.min(self.ring.floor()));
            copy.records.reverse();
            return true;
        }
        let oldest = copy.changes.last().map(|change| change.version);
        let up_to = oldest.map_or(Bound::Included(copy.ring_floor), Bound::Excluded);
        let before = copy.changes.len();
        for change in self.conflated.between(self.conflated.floor(), up_to) {
            // Never a part of a version: the changes of a gap share one.
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

    /// Returns the state before each step after one version and up to another that may concern a
    /// selection, newest first. Each call returns about `steps_max` steps, so that a long catch-up
    /// does not hold the lock for long. If there are more, it also returns the version below which
    /// they are.
    pub fn prior_steps(
        &self,
        after: ResourceVersion,
        up_to: Bound<ResourceVersion>,
        steps_max: usize,
        selection: &Selection,
    ) -> Result<(Vec<PriorStep>, Option<ResourceVersion>), Expired> {
        if after < self.conflated.floor() {
            return Err(Expired { requested: after, oldest: self.oldest() });
        }
        let indexed = self.steps.of(selection);
        let recent: Box<dyn Iterator<Item = &HistoryRecord>> = match &indexed {
            None => Box::new(self.ring.between(after, up_to).map(|(record, _)| record)),
            Some(steps) => {
                let mut versions = steps.recent_after(after.max(self.ring.floor()));
                versions.extend(self.ring.gaps_after(after));
                versions.retain(|version| (Bound::Unbounded, up_to).contains(version));
                versions.sort_unstable();
                Box::new(versions.into_iter().rev().filter_map(|version| self.ring.record_at(version)))
            }
        };
        let mut part = Vec::new();
        for record in recent {
            part.push(match record {
                HistoryRecord::Gap(gap) => PriorStep::Gap(gap.clone()),
                HistoryRecord::Event(event) => {
                    let version = event.version();
                    let key = event.object().key().clone();
                    PriorStep::Object(PriorState { version, key, before: event.previous() })
                }
            });
            if part.len() >= steps_max {
                return Ok((part, Some(record.version())));
            }
        }
        let older: Box<dyn Iterator<Item = &PriorState>> = match &indexed {
            None => Box::new(self.conflated.between(after, up_to)),
            Some(steps) => {
                let (first, end) = self.conflated.numbers(after, up_to);
                let numbers = steps.older_within(first, end).into_iter().rev();
                Box::new(numbers.filter_map(|number| self.conflated.at(number)))
            }
        };
        for change in older {
            // Never a part of a version: the changes of a gap share one.
            if let Some(last) = part.last().map(PriorStep::version)
                && last != change.version
                && part.len() >= steps_max
            {
                return Ok((part, Some(last)));
            }
            part.push(PriorStep::Object(change.clone()));
        }
        Ok((part, None))
    }
}

/// Records of the ring.
pub type Records<'a> = Box<dyn Iterator<Item = &'a HistoryRecord> + 'a>;
