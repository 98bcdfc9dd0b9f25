//! A catch-up: the changes for one selection since a version, each object once.
//!
//! It is made from two states: the state now, which is pinned at the start, and the selection's
//! members at the old version, which history gives. The hazard is an object that has left the
//! selection without an event that says so: it would stay with the subscriber for ever. So
//! membership is compared at both ends, and never derived from the changes in between. History is
//! read in parts, newest first, so that the lock is not held for long. Each part is compared in
//! slices, because it may have a gap with every object. Events that are committed meanwhile follow
//! the catch-up, from the log.

use std::{
    collections::{HashMap, VecDeque},
    ops::Bound,
    sync::Arc,
};

use kubefan_cache::{Gap, PriorState, PriorStep, Store, sliced_scan::SLICE_TESTS};
use kubefan_common::{
    planted::{self, Bug},
    proto::v1alpha1::DeleteReason,
    when_planted,
};
use kubefan_model::{ObjectKey, ResourceVersion, event::EventType, object::Object, selection::Selection};

use crate::send::{
    encoder::Encoder,
    frame::{Body, EventHead, FrameWriter, Sink},
};

/// Number of changes that are read at a time.
pub(super) const CHANGES_MAX: usize = 1000;

/// A catch-up in progress.
pub(super) struct CatchUp {
    /// The old version.
    pub(super) from: ResourceVersion,
    /// The version of the pinned state.
    pub(super) to: ResourceVersion,
    store: Store,
    /// The object at `from`, for each key whose membership may have changed since; `None` if it was
    /// not selected.
    before: HashMap<ObjectKey, Option<Arc<Object>>>,
    /// The end of the history that is still to be read; `None` if all was read.
    unread: Option<Bound<ResourceVersion>>,
    /// The steps that were read and not compared yet, newest first.
    steps: VecDeque<PriorStep>,
    /// A gap that is being compared. It is newer than `steps`.
    gap: Option<ComparedGap>,
    /// Whether all of history was compared.
    is_compared: bool,
    /// Objects that were selected and may be no longer, in the order of their last versions.
    gone: VecDeque<Arc<Object>>,
    /// The last object that was written.
    last: Option<ObjectKey>,
}

/// A gap that is being compared. First all of its events are tested, the oldest first; then those
/// that the selection sees are compared, the newest first.
struct ComparedGap {
    gap: Arc<Gap>,
    /// The events before this position were tested.
    tested: usize,
    /// The positions of the events that the selection sees and that were not compared yet.
    seen: Vec<usize>,
}

impl ComparedGap {
    fn is_tested(&self) -> bool {
        self.tested >= self.gap.events.len()
    }

    /// Tests events until all were tested, or no tests are left.
    fn test(&mut self, selection: &Selection, tests_left: &mut usize) {
        let mut tested = self.gap.test_each(selection, self.tested);
        while *tests_left > 0 {
            let Some((at, _, seen)) = tested.next() else {
                self.tested = self.gap.events.len();
                return;
            };
            // An event is two objects.
            *tests_left = tests_left.saturating_sub(2 * selection.tests());
            self.tested = at + 1;
            // An event that the selection does not see changes nothing for it.
            self.seen.extend(seen.map(|_| at));
        }
    }

    /// Takes the newest event that was not compared yet: the key of its object, and the object
    /// before it.
    fn pop(&mut self) -> Option<(ObjectKey, Option<Arc<Object>>)> {
        let event = self.gap.events.get(self.seen.pop()?)?;
        Some((event.object().key().clone(), event.previous()))
    }
}

impl CatchUp {
    /// A catch-up from one version to that of the state.
    pub(super) fn new(from: ResourceVersion, store: Store, to: ResourceVersion) -> Self {
        Self {
            from,
            to,
            store,
            before: HashMap::new(),
            unread: Some(Bound::Included(to)),
            steps: VecDeque::new(),
            gap: None,
            is_compared: false,
            gone: VecDeque::new(),
            last: None,
        }
    }

    /// The end of the part of history to read next; `None` if all was read, or if there is more to
    /// compare first.
    pub(super) fn unread(&self) -> Option<Bound<ResourceVersion>> {
        self.unread.filter(|_| self.steps.is_empty() && self.gap.is_none())
    }

    /// Takes a part of history, newest first, and where the next part ends.
    pub(super) fn read(&mut self, part: Vec<PriorStep>, rest: Option<ResourceVersion>) {
        self.steps = VecDeque::from(part);
        self.unread = rest.map(Bound::Excluded);
    }

    /// Compares a slice of the history read so far. Returns whether all of history was compared.
    pub(super) fn compare(&mut self, selection: &Selection) -> bool {
        if self.is_compared {
            return true;
        }
        let mut tests_left = SLICE_TESTS;
        while tests_left > 0 {
            let change = match &mut self.gap {
                Some(gap) if !gap.is_tested() => {
                    gap.test(selection, &mut tests_left);
                    continue;
                }
                Some(gap) => gap.pop(),
                None => match self.steps.pop_front() {
                    Some(PriorStep::Object(PriorState { key, before, .. })) => Some((key, before)),
                    Some(PriorStep::Gap(gap)) => {
                        self.gap = Some(ComparedGap { gap, tested: 0, seen: Vec::new() });
                        continue;
                    }
                    None => break,
                },
            };
            match change {
                Some((key, before)) => self.read_change(key, before, selection),
                // All events of the gap were compared.
                None => self.gap = None,
            }
            tests_left = tests_left.saturating_sub(selection.tests());
        }
        self.is_compared = self.unread.is_none() && self.steps.is_empty() && self.gap.is_none();
        if self.is_compared {
            let mut gone: Vec<_> = self.before.values().flatten().cloned().collect();
            gone.sort_by(|a, b| (a.version(), a.key()).cmp(&(b.version(), b.key())));
            self.gone = gone.into();
        }
        self.is_compared
    }

    fn read_change(&mut self, key: ObjectKey, before: Option<Arc<Object>>, selection: &Selection) {
        when_planted!(NewestChangeCounts => if self.before.contains_key(&key) { return });
        // An older change replaces newer ones: only the object at `from` counts.
        match before.filter(|before| selection.matches(before)) {
            Some(before) => drop(self.before.insert(key, Some(before))),
            // It was not selected at `from`. That matters only if it is selected now.
            None if self.store.get(key.as_str()).is_some_and(|now| selection.matches(now)) => {
                self.before.insert(key, None);
            }
            None => drop(self.before.remove(&key)),
        }
    }

    fn is_gone(&self, was: &Object, selection: &Selection) -> bool {
        let now = self.store.get(was.key().as_str());
        let recreated = |now: &Object| now.uid() != was.uid() && !planted::is(Bug::RemadeWithoutDelete);
        now.is_none_or(|now| recreated(now) || !selection.matches(now))
    }

    /// Writes the next events, about `bytes_max` bytes of them. Returns how many, and whether those
    /// were all.
    pub(super) fn write(
        &mut self,
        bytes_max: usize,
        selection: &Selection,
        encoder: &Encoder,
        frames: &mut FrameWriter<'_>,
    ) -> (usize, bool) {
        let mut events = 0;
        let mut tests_left = SLICE_TESTS;
        while let Some(was) = self.gone.front() {
            if frames.len() >= bytes_max || tests_left == 0 {
                return (events, false);
            }
            tests_left = tests_left.saturating_sub(selection.tests());
            if !self.is_gone(was, selection) {
                self.gone.pop_front();
                continue;
            }
            let exists = self.store.get(was.key().as_str()).is_some_and(|now| now.uid() == was.uid());
            let reason = if exists { DeleteReason::LeftSelector } else { DeleteReason::FinalStateUnknown };
            let head = EventHead { kind: EventType::Deleted, reason, ..EventHead::of_snapshot(was) };
            frames.event(&head, Body::object(encoder.bytes(&was.selectable_attributes(selection.parser()))));
            self.gone.pop_front();
            events += 1;
        }
        let mut scan = self.store.scan(selection, self.last.as_ref(), tests_left);
        while frames.len() < bytes_max
            && let Some(object) = scan.next()
        {
            let before = self.before.get(object.key());
            // A new schema may change an object without its version; history has that change.
            if object.version() <= self.from && before.is_none() {
                continue;
            }
            let kind = match before {
                Some(None) => EventType::Added,
                Some(Some(was)) if was.uid() != object.uid() => EventType::Added,
                // It was selected at both ends.
                Some(Some(_)) | None => EventType::Modified,
            };
            let resume = planted::is(Bug::ResumeInsideCatchUp).then(|| object.version());
            frames.event(
                &EventHead { resume, kind, ..EventHead::of_snapshot(object) },
                Body::object(encoder.snapshot_bytes(object)),
            );
            events += 1;
        }
        let complete = scan.is_complete();
        let tested = scan.tested().cloned();
        self.last = tested.or(self.last.take());
        (events, complete)
    }
}
