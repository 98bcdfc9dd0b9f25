//! What the ring has forgotten, reduced to what selectors need: for every change of an object's being, uid, labels or selectable fields,
//! what was there before it.
//!
//! The state now and what was there before each later change tell whether an object was selected at an older version: its remnant before
//! the first change after that version, or its present self where there was none. So what changed since can be told to any selector,
//! each object once. Bounded by bytes; what falls out raises a floor of its own, below which nothing is known.

use std::{
    collections::VecDeque,
    ops::{Bound, RangeBounds},
    sync::Arc,
};

use super::ring::Record;
use kubefan_common::planted::{self, Bug};
use kubefan_model::{
    ObjectKey, ResourceVersion,
    event::EventType,
    object::{Object, ObjectParser},
};

/// How many gaps are remembered; each relist makes one, also where no change follows that would take its place.
const GAPS_MAX: usize = 1024;

/// What was there before a change.
#[derive(Debug, Clone)]
pub struct PriorState {
    /// The version that history had reached with the change.
    pub version: ResourceVersion,
    /// Whose change it was.
    pub key: ObjectKey,
    /// What was there, in full or as a remnant; `None` where there was nothing.
    pub before: Option<Arc<Object>>,
}

impl PriorState {
    fn cost_bytes(&self) -> usize {
        size_of::<Self>() + self.before.as_ref().map_or(0, |before| before.cost_bytes())
    }
}

/// The changes after `floor` that the ring holds no longer, oldest first.
pub struct ConflatedHistory {
    floor: ResourceVersion,
    changes: VecDeque<PriorState>,
    /// The spans inside of which nothing is exact.
    gaps: VecDeque<(ResourceVersion, ResourceVersion)>,
    bytes: usize,
}

impl ConflatedHistory {
    /// An empty residue: nothing is known from before `floor`.
    pub fn new(floor: ResourceVersion) -> Self {
        Self { floor, changes: VecDeque::new(), gaps: VecDeque::new(), bytes: 0 }
    }

    /// Takes in what the ring lets go of, which follows what it took in before.
    pub fn push(&mut self, record: &Record, parser: &Arc<ObjectParser>) {
        let version = record.version();
        for event in record.events() {
            let (object, previous) = (event.object(), event.previous());
            if planted::is(Bug::TombstoneForgotten) && event.kind() == EventType::Deleted {
                continue;
            }
            let before = match previous {
                Some(previous) => {
                    let same = planted::is(Bug::LeaveForgotten) || previous.is_seen_as(&object);
                    let stays = event.kind() != EventType::Deleted && same;
                    // With a new schema an object may have changed without its version, which nothing else would tell.
                    if stays && previous.version() < object.version() {
                        continue;
                    }
                    Some(previous.remnant(parser))
                }
                // A delete of what was never seen: its last state is all there is to go by, as for a live event.
                None => (event.kind() == EventType::Deleted).then(|| object.remnant(parser)),
            };
            let change = PriorState { version, key: object.key().clone(), before };
            self.bytes += change.cost_bytes();
            self.changes.push_back(change);
        }
        if let Record::Gap(gap) = record
            && !planted::is(Bug::GapForgotten)
        {
            self.gaps.push_back((gap.from, gap.to));
        }
    }

    /// Takes in a change that was remembered elsewhere, and follows those taken in before.
    pub fn restore(&mut self, change: PriorState) {
        self.bytes += change.cost_bytes();
        self.changes.push_back(change);
    }

    /// Takes in a span of which only the ends are exact, and which follows those taken in before.
    pub fn restore_gap(&mut self, from: ResourceVersion, to: ResourceVersion) {
        self.gaps.push_back((from, to));
    }

    /// Lets go of what is over `bytes_max`, whole versions at a time.
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
        if planted::is(Bug::ResidueFloorStays) {
            self.floor = floor;
        }
    }

    fn raise(&mut self, floor: ResourceVersion) {
        self.floor = self.floor.max(floor);
        while self.changes.front().is_some_and(|change| change.version <= self.floor) {
            self.bytes -= self.changes.pop_front().map_or(0, |gone| gone.cost_bytes());
        }
    }

    /// The oldest version whose later changes are all known.
    pub fn floor(&self) -> ResourceVersion {
        self.floor
    }

    /// The oldest version, not before this one, whose later changes are all known: at or above the floor, and not inside a gap.
    pub fn known_from(&self, version: ResourceVersion) -> ResourceVersion {
        let version = version.max(self.floor);
        let gap = self.gaps.iter().find(|(from, to)| *from < version && version < *to);
        gap.map_or(version, |(_, to)| *to)
    }

    /// The spans inside of which nothing is exact, in order.
    pub fn gaps(&self) -> impl Iterator<Item = (ResourceVersion, ResourceVersion)> + '_ {
        self.gaps.iter().copied()
    }

    /// The changes from after one version up to another, newest first.
    pub fn between(&self, after: ResourceVersion, up_to: Bound<ResourceVersion>) -> impl Iterator<Item = &PriorState> {
        let start = self.changes.partition_point(|change| change.version <= after);
        let end = self.changes.partition_point(|change| (Bound::Unbounded, up_to).contains(&change.version));
        self.changes.range(start..end.max(start)).rev()
    }

    /// What it takes, in bytes.
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
    use super::*;
    use crate::cache::Gap;
    use kubefan_model::fields::FieldTable;

    #[test]
    fn gaps_are_bounded_also_where_nothing_changes() {
        let version = |number: u64| ResourceVersion::new(number).unwrap();
        let mut residue = ConflatedHistory::new(version(1));
        let parser = Arc::new(ObjectParser::new(&FieldTable::default()));
        for from in (0..=GAPS_MAX as u64).map(|gap| 10 * gap + 10) {
            let gap = Gap { from: version(from), to: version(from + 5), reason: "test", events: Vec::new() };
            residue.push(&Record::Gap(Arc::new(gap)), &parser);
        }
        assert_eq!((residue.gaps.len(), residue.floor()), (GAPS_MAX + 1, version(1)));
        residue.evict(usize::MAX);
        assert_eq!((residue.gaps.len(), residue.floor()), (GAPS_MAX, version(15)));
        assert_eq!(
            residue.known_from(version(12)),
            version(15),
            "the forgotten one is entered as little as the others"
        );
        assert_eq!(residue.known_from(version(22)), version(25));
    }
}
