//! What changed since a version, told to one selection, each object once: from the state now, and from what was there before each later
//! change.
//!
//! The hazard is an object whose end nobody tells: it would stay with the subscriber as a ghost. So membership is taken at both ends,
//! never from what happened in between. The state is pinned at the start, and history is read in parts, newest first: what happens
//! meanwhile comes after the end of the catch-up, from the log.

use std::{
    collections::{HashMap, VecDeque},
    ops::Bound,
    sync::Arc,
};

use crate::{
    cache::{PriorState, Store},
    fanout::send::{
        encoder::Encoder,
        frame::{Body, EventHead, FrameWriter, Sink},
    },
};
use kubefan_common::{
    planted::{self, Bug},
    proto::v1alpha1::DeleteReason,
};
use kubefan_model::{ObjectKey, ResourceVersion, event::EventType, object::Object, selection::Selection};

/// How many changes are read at a time.
pub(in crate::fanout) const CHANGES_MAX: usize = 1000;

/// A catch-up under way.
pub(in crate::fanout) struct CatchUp {
    /// From here.
    pub(in crate::fanout) from: ResourceVersion,
    /// To here, where the state is pinned.
    pub(in crate::fanout) to: ResourceVersion,
    store: Store,
    /// What was there at `from`, for each key whose membership may have changed since; nothing where it was not selected.
    before: HashMap<ObjectKey, Option<Arc<Object>>>,
    /// What history is still to be read; `None` when all was.
    unread: Option<Bound<ResourceVersion>>,
    /// What is there no longer, in the order in which it was seen last.
    gone: VecDeque<Arc<Object>>,
    /// The last object that was written.
    last: Option<ObjectKey>,
}

impl CatchUp {
    /// From one version to that of the state.
    pub(in crate::fanout) fn new(from: ResourceVersion, store: Store, to: ResourceVersion) -> Self {
        let (before, gone, last) = Default::default();
        Self { from, to, store, before, unread: Some(Bound::Included(to)), gone, last }
    }

    /// The part of history that it needs to see next; `None` when it has seen all.
    pub(in crate::fanout) fn unread(&self) -> Option<Bound<ResourceVersion>> {
        self.unread
    }

    /// Takes in a part of history, newest first, and where the next one ends.
    pub(in crate::fanout) fn read(
        &mut self,
        part: Vec<PriorState>,
        rest: Option<ResourceVersion>,
        selection: &Selection,
    ) {
        for PriorState { key, before, .. } in part {
            if planted::is(Bug::NewestChangeCounts) && self.before.contains_key(&key) {
                continue;
            }
            // An older change outranks the newer ones: what counts is what was there at the very start.
            match before.filter(|before| selection.matches(before)) {
                Some(before) => drop(self.before.insert(key, Some(before))),
                // Not selected then. Worth remembering only where it is now.
                None if self.store.get(key.as_str()).is_some_and(|now| selection.matches(now)) => {
                    self.before.insert(key, None);
                }
                None => drop(self.before.remove(&key)),
            }
        }
        self.unread = rest.map(Bound::Excluded);
        if rest.is_none() {
            let mut gone: Vec<_> =
                self.before.values().flatten().filter(|was| self.is_gone(was, selection)).cloned().collect();
            gone.sort_by(|a, b| (a.version(), a.key()).cmp(&(b.version(), b.key())));
            self.gone = gone.into();
        }
    }

    fn is_gone(&self, was: &Object, selection: &Selection) -> bool {
        let now = self.store.get(was.key().as_str());
        let remade = |now: &Object| now.uid() != was.uid() && !planted::is(Bug::RemadeIsModified);
        now.is_none_or(|now| remade(now) || !selection.matches(now))
    }

    /// Writes the next events, about `bytes_max` bytes of them; tells how many, and whether that was all.
    pub(in crate::fanout) fn write(
        &mut self,
        bytes_max: usize,
        selection: &Selection,
        encoder: &Encoder,
        frames: &mut FrameWriter<'_>,
    ) -> (usize, bool) {
        let mut events = 0;
        while let Some(was) = self.gone.front() {
            if frames.len() >= bytes_max {
                return (events, false);
            }
            let exists = self.store.get(was.key().as_str()).is_some_and(|now| now.uid() == was.uid());
            let reason = if exists { DeleteReason::LeftSelector } else { DeleteReason::FinalStateUnknown };
            let head = EventHead { kind: EventType::Deleted, reason, ..EventHead::of_snapshot(was) };
            frames.event(&head, Body::object(encoder.bytes(&was.remnant(selection.parser()))));
            self.gone.pop_front();
            events += 1;
        }
        let (mut last, mut complete) = (None, true);
        for object in self.store.select(selection, self.last.as_ref()) {
            let before = self.before.get(object.key());
            // A schema may have changed an object without its version; then history says so.
            if object.version() <= self.from && before.is_none() {
                continue;
            }
            if frames.len() >= bytes_max {
                complete = false;
                break;
            }
            let kind = match before {
                Some(None) => EventType::Added,
                Some(Some(was)) if was.uid() != object.uid() && !planted::is(Bug::RemadeIsModified) => EventType::Added,
                // Whatever changed, it was selected all along.
                Some(Some(_)) | None => EventType::Modified,
            };
            let resume = planted::is(Bug::ResumeInsideCatchUp).then(|| object.version());
            frames.event(
                &EventHead { resume, kind, ..EventHead::of_snapshot(object) },
                Body::object(encoder.snapshot_bytes(object)),
            );
            last = Some(object.key().clone());
            events += 1;
        }
        self.last = last.or(self.last.take());
        (events, complete)
    }
}
