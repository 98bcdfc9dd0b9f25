//! Conflated history: the records that the ring evicted, reduced to the needs of a catch-up.
//!
//! A subscriber that was away for longer than the ring reaches would have to list everything again.
//! A catch-up is cheaper: it sends each object that changed, once. For that, two states are needed
//! for any selector: the state now, which the store has, and the objects that the selector matched
//! at the old version. Full old objects would cost as much as the ring. But membership depends only
//! on an object's existence, uid, labels and selectable fields. So only changes of those are
//! remembered, each with the attributes before it. The attributes before the first change after a
//! version are the attributes at that version; an object without such a change had then the
//! attributes that it has now.
//!
//! It is bounded by bytes. Eviction raises a floor of its own, below which a version is expired.

use std::{
    collections::VecDeque,
    ops::{Bound, RangeBounds},
    sync::Arc,
};

use kubefan_common::{
    planted::{self, Bug},
    when_planted,
};
use kubefan_model::{
    ObjectKey, ResourceVersion,
    event::{EventType, WatchEvent},
    object::{Object, ObjectParser},
};

use super::ring::HistoryRecord;

/// Number of gaps that are remembered. Each relist makes one, and without changes nothing else
/// would evict them.
const GAPS_MAX: usize = 1024;

/// State of one object before a change.
#[derive(Debug, Clone)]
pub struct PriorState {
    /// The version that history reached with the change.
    pub version: ResourceVersion,
    /// The object.
    pub key: ObjectKey,
    /// The object before the change, in full or only its selectable attributes; `None` if it did
    /// not exist.
    pub before: Option<Arc<Object>>,
}

impl PriorState {
    fn cost_bytes(&self) -> usize {
        size_of::<Self>() + self.before.as_ref().map_or(0, |before| before.cost_bytes())
    }
}

/// The changes after `floor` that the ring no longer retains, oldest first.
pub struct ConflatedHistory {
    floor: ResourceVersion,
    changes: VecDeque<PriorState>,
    /// The number of the first change; each has the next number.
    first: u64,
    /// The gaps: no state inside of them is exact.
    gaps: VecDeque<(ResourceVersion, ResourceVersion)>,
    bytes: usize,
}

impl ConflatedHistory {
    /// An empty history: nothing is known from before `floor`.
    pub fn new(floor: ResourceVersion) -> Self {
        Self { floor, changes: VecDeque::new(), first: 0, gaps: VecDeque::new(), bytes: 0 }
    }

    /// Appends a record that the ring evicted, and calls `filed` with each change that is retained
    /// and its number. Records must be appended in order.
    pub fn push(
        &mut self,
        record: &HistoryRecord,
        parser: &Arc<ObjectParser>,
        mut filed: impl FnMut(u64, &WatchEvent),
    ) {
        let version = record.version();
        let is_at_start =
            |object: &Object| matches!(record, HistoryRecord::Gap(gap) if object.version().is_at(gap.from));
        for event in record.events() {
            let object = event.object();
            let previous = event.previous();
            if planted::is(Bug::TombstoneForgotten) && event.kind() == EventType::Deleted {
                continue;
            }
            let before = match previous {
                Some(previous) => {
                    let same = planted::is(Bug::LeaveForgotten) || previous.has_same_attributes(&object);
                    let stays = event.kind() != EventType::Deleted && same;
                    // The object's version shows such a change, except in two cases: a new schema
                    // changes the bytes only, and later events of one version have the same number.
                    let is_later = event.version().sub() > 0 || is_at_start(&object);
                    if stays && previous.version() < object.version() && !is_later {
                        continue;
                    }
                    Some(previous.selectable_attributes(parser))
                }
                // A delete of an object that was never seen: its last state is the only one known,
                // as for a live event.
                None => (event.kind() == EventType::Deleted).then(|| object.selectable_attributes(parser)),
            };
            let change = PriorState { version, key: object.key().clone(), before };
            self.bytes += change.cost_bytes();
            filed(self.end(), event);
            self.changes.push_back(change);
        }
        if let HistoryRecord::Gap(gap) = record
            && gap.is_lossy
            && !planted::is(Bug::GapForgotten)
        {
            self.gaps.push_back((gap.from, gap.to));
        }
    }

    /// Appends a change from a peer's history. Changes must be appended in order.
    pub fn restore(&mut self, change: PriorState) {
        self.bytes += change.cost_bytes();
        self.changes.push_back(change);
    }

    /// Appends a gap from a peer's history. Gaps must be appended in order.
    pub fn restore_gap(&mut self, from: ResourceVersion, to: ResourceVersion) {
        self.gaps.push_back((from, to));
    }

    /// Evicts changes over `bytes_max`, whole versions at a time.
    pub fn evict(&mut self, bytes_max: usize) {
        let floor = self.floor;
        while self.bytes > bytes_max
            && let Some(oldest) = self.changes.front()
        {
            self.raise(oldest.version);
        }
        while self.gaps.len() > GAPS_MAX
            && let Some((_, to)) = self.gaps.pop_front()
        {
            self.raise(to);
        }
        while self.gaps.front().is_some_and(|(_, to)| *to <= self.floor) {
            self.gaps.pop_front();
        }
        when_planted!(ConflatedFloorStays => self.floor = floor);
    }

    fn raise(&mut self, floor: ResourceVersion) {
        self.floor = self.floor.max(floor);
        while self.changes.front().is_some_and(|change| change.version <= self.floor) {
            self.bytes -= self.changes.pop_front().map_or(0, |gone| gone.cost_bytes());
            self.first += 1;
        }
    }

    /// The oldest version after which all changes are known.
    pub fn floor(&self) -> ResourceVersion {
        self.floor
    }

    /// The oldest version, at or after `version`, after which all changes are known: not below the
    /// floor, and not inside a gap.
    pub fn known_from(&self, version: ResourceVersion) -> ResourceVersion {
        let version = version.max(self.floor);
        let gap = self.gaps.iter().find(|(from, to)| *from < version && version < *to);
        gap.map_or(version, |(_, to)| *to)
    }

    /// The gaps, in order.
    pub fn gaps(&self) -> impl Iterator<Item = (ResourceVersion, ResourceVersion)> + '_ {
        self.gaps.iter().copied()
    }

    /// The changes after one version and up to another, newest first.
    pub fn between(&self, after: ResourceVersion, up_to: Bound<ResourceVersion>) -> impl Iterator<Item = &PriorState> {
        let (start, end) = self.numbers(after, up_to);
        self.changes.range((start - self.first) as usize..(end - self.first) as usize).rev()
    }

    /// The numbers of the changes after one version and up to another: the first, and the one after
    /// the last.
    pub fn numbers(&self, after: ResourceVersion, up_to: Bound<ResourceVersion>) -> (u64, u64) {
        let start = self.changes.partition_point(|change| change.version <= after);
        let end = self.changes.partition_point(|change| (Bound::Unbounded, up_to).contains(&change.version));
        (self.first + start as u64, self.first + end.max(start) as u64)
    }

    /// The change with a number, if it is retained.
    pub fn at(&self, number: u64) -> Option<&PriorState> {
        self.changes.get(usize::try_from(number.checked_sub(self.first)?).ok()?)
    }

    /// The number of the first change at or after a version.
    pub fn number_at(&self, version: ResourceVersion) -> u64 {
        self.first + self.changes.partition_point(|change| change.version < version) as u64
    }

    /// The number of the first change.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// The number of the next change.
    pub fn end(&self) -> u64 {
        self.first + self.changes.len() as u64
    }

    /// Memory of the history, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number of changes.
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use kubefan_model::fields::FieldTable;

    use super::*;
    use crate::{Gap, RelistReason};

    #[test]
    fn gaps_are_bounded_even_if_nothing_changes() {
        let version = |number: u64| ResourceVersion::new(number).unwrap();
        let mut history = ConflatedHistory::new(version(1));
        let parser = Arc::new(ObjectParser::new(&FieldTable::default()));
        for from in (0..=GAPS_MAX as u64).map(|gap| 10 * gap + 10) {
            let gap = Gap::new(version(from), version(from + 5), RelistReason::Expired, Vec::new());
            history.push(&HistoryRecord::Gap(Arc::new(gap)), &parser, |_, _| {});
        }
        assert_eq!((history.gaps.len(), history.floor()), (GAPS_MAX + 1, version(1)));
        history.evict(usize::MAX);
        assert_eq!((history.gaps.len(), history.floor()), (GAPS_MAX, version(15)));
        assert_eq!(history.known_from(version(12)), version(15), "an evicted gap cannot be entered either");
        assert_eq!(history.known_from(version(22)), version(25));
    }
}
