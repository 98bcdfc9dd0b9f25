//! From events and objects to frames, in one format; equal formats of one cache share one encoder, and what it has just made.
//!
//! A projection or a delta is made once per event, whoever takes it. What is remembered is within a budget of the whole cache, and made
//! again where it is forgotten.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use bytes::{Buf, Bytes};

use crate::fanout::send::{
    budget::{Budget, Budgets, Share},
    control,
    entry::{EntryKind, LogEntry},
    frame::{Body, DeltaBase, EventHead, FrameBuffer, FrameWriter, Layout, Sink},
    frame_buf::FrameBuf,
};
use crate::kube_encoding::watch::columns_range;
use kubefan_common::{
    encoding::delta,
    planted::{self, Bug},
    proto::v1alpha1::{DeleteReason, ResolvedResource},
};
use kubefan_model::{
    ObjectKey, ResourceVersion,
    event::{EventType, Transition, WatchEvent},
    format::{Encoding, Format},
    object::Object,
    table::Tables,
};

/// The events whose bytes are remembered: views that see one event take it at about the same time.
const RECENT_EVENTS_MAX: usize = 128;

/// Of which objects a stream's client bases the bytes that deltas are made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaBases {
    /// Of all: it was sent a snapshot, or has kept what it was sent before.
    All,
    /// Of those that have changed since this version, at which it came back.
    ChangedSince(ResourceVersion),
    /// Of none.
    None,
}

/// What was written for an entry.
#[derive(Debug, Clone, Copy, Default)]
pub struct Written {
    /// Messages: none where a change did not touch what is projected.
    pub messages: usize,
    /// The base, where it is a delta.
    pub base: Option<ResourceVersion>,
}

/// Makes frames.
#[derive(Default)]
pub struct Encoder {
    format: Format,
    layout: Layout,
    /// Of a cache of rows.
    tables: Option<Arc<Tables>>,
    budgets: Budgets,
    recent: Mutex<Recent>,
    projected: Mutex<Projected>,
}

/// A delta and its base; nothing where it would not be shorter than the object.
type MadeDelta = Option<(Bytes, DeltaBase)>;

#[derive(Default)]
struct Recent {
    changed: VecDeque<(ResourceVersion, bool)>,
    projected: VecDeque<(ResourceVersion, Arc<Budgeted<Bytes>>)>,
    deltas: VecDeque<(ResourceVersion, Arc<Budgeted<MadeDelta>>)>,
}

#[derive(Default)]
struct Projected {
    /// Known by where they are: a version may come again with other bytes, when the schema has changed.
    objects: HashMap<ObjectKey, (Weak<Object>, Budgeted<Bytes>)>,
    /// Those that found no room since the dead were cleared away.
    refused: usize,
}

/// What is remembered, with the room that it takes.
struct Budgeted<T> {
    value: T,
    _share: Share,
}

impl Projected {
    fn insert(&mut self, object: &Arc<Object>, bytes: &Bytes, budget: &Budget) {
        self.objects.remove(object.key());
        if let Some(share) = budget.take(bytes.len()) {
            let kept = Budgeted { value: bytes.clone(), _share: share };
            self.objects.insert(object.key().clone(), (Arc::downgrade(object), kept));
            return;
        }
        self.refused += 1;
        // As often as pays: a look at all of them for as many refusals.
        if self.refused > self.objects.len() {
            self.refused = 0;
            self.objects.retain(|_, (object, _)| object.strong_count() > 0);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remember<T>(recent: &mut VecDeque<(ResourceVersion, T)>, version: ResourceVersion, value: T) {
    if recent.len() == RECENT_EVENTS_MAX {
        recent.pop_front();
    }
    recent.push_back((version, value));
}

fn recall<T: Clone>(recent: &VecDeque<(ResourceVersion, T)>, version: ResourceVersion) -> Option<T> {
    recent.iter().rev().find(|(known, _)| *known == version).map(|(_, value)| value.clone())
}

impl Encoder {
    /// An encoder of one format, for objects of one resource; of `tables` where they are rows.
    pub fn new(format: Format, resource: &ResolvedResource, tables: Option<&Arc<Tables>>, budgets: Budgets) -> Self {
        let layout = Layout::of(&format, resource, tables);
        Self { format, layout, tables: tables.cloned(), budgets, ..Self::default() }
    }

    /// Where frames for one subscriber go, with room for so many bytes of heads and small bodies.
    pub fn writer(&self, capacity: usize) -> FrameWriter<'_> {
        FrameWriter::new(&self.layout, capacity)
    }

    /// Where frames that lie in one piece go, with room for so many bytes.
    pub fn buffer(&self, capacity: usize) -> FrameBuffer<'_> {
        FrameBuffer::new(&self.layout, capacity)
    }

    /// What it may keep.
    pub fn budgets(&self) -> &Budgets {
        &self.budgets
    }

    /// Lets go of everything that it keeps to save work.
    pub fn forget(&self) {
        *lock(&self.recent) = Recent::default();
        *lock(&self.projected) = Projected::default();
    }

    /// The format.
    pub fn format(&self) -> &Format {
        &self.format
    }

    /// Whether a subscriber of this format is told of a change: not where it wants only what changes what it is sent, and that stayed
    /// as it was.
    pub fn tells(&self, event: &WatchEvent, seen: Transition) -> bool {
        if !self.format.only_changes() || seen != Transition::Change {
            return true;
        }
        // Read again from upstream without the state before it, an event has itself in that place: whether it changes anything is not known.
        let Some(previous) = event.previous().filter(|previous| !Arc::ptr_eq(previous, &event.object())) else {
            return true;
        };
        // The version of an event names it: no two of a cache share one.
        if let Some(changed) = recall(&lock(&self.recent).changed, event.version()) {
            return changed;
        }
        let changed = self.event_bytes(event) != self.bytes(&previous);
        remember(&mut lock(&self.recent).changed, event.version(), changed);
        changed
    }

    /// Writes an entry for a stream whose client bases `bases`.
    pub fn entry(&self, entry: &LogEntry, bases: DeltaBases, sink: &mut impl Sink) -> Written {
        match &entry.kind {
            // Where there are no marks, nobody is led over a gap.
            EntryKind::GapBegin(_) | EntryKind::GapEnd(_) | EntryKind::GapEvent(..) if !self.format.has_marks() => {
                return Written::default();
            }
            EntryKind::GapBegin(gap) => sink.message(&control::gap_begin(gap)),
            EntryKind::GapEnd(gap) => sink.message(&control::gap_end(gap)),
            EntryKind::Event(event, seen) if !self.tells(event, *seen) => return Written::default(),
            EntryKind::Event(event, seen) => return self.event(event, *seen, Some(event.version()), bases, sink),
            // Only its end is exact: what a client bases is not looked at inside a gap.
            EntryKind::GapEvent(event, seen) => {
                let resume = planted::is(Bug::ResumeInsideGap).then(|| event.version());
                return self.full_event(event, *seen, resume, sink);
            }
        }
        Written { messages: 1, base: None }
    }

    /// Whether a client that bases `bases` can read a delta with this base.
    pub fn can_read(&self, bases: DeltaBases, base: Option<ResourceVersion>) -> bool {
        match (bases, base) {
            (DeltaBases::All, _) | (_, None) => true,
            (DeltaBases::None, Some(_)) => false,
            // A change that it was not told of has moved the base past what it bases.
            (DeltaBases::ChangedSince(_), Some(_)) if self.format.only_changes() => false,
            (DeltaBases::ChangedSince(start), Some(base)) => base > start,
        }
    }

    /// Writes an object of a snapshot.
    pub fn object(&self, object: &Arc<Object>, sink: &mut impl Sink) {
        sink.event(&EventHead::of_snapshot(object), Body::object(self.snapshot_bytes(object)));
    }

    /// The bytes of an object as snapshots send them; remembered where they had to be made.
    pub fn snapshot_bytes(&self, object: &Arc<Object>) -> Bytes {
        if !self.remembers() {
            return self.bytes(object);
        }
        let same = |(of, _): &&(Weak<Object>, Budgeted<Bytes>)| of.as_ptr() == Arc::as_ptr(object);
        if let Some((_, bytes)) = lock(&self.projected).objects.get(object.key()).filter(same) {
            return bytes.value.clone();
        }
        let bytes = self.bytes(object);
        lock(&self.projected).insert(object, &bytes, &self.budgets.projected);
        bytes
    }

    /// Whether what is made of an object is worth being remembered, and may be: the object's own bytes are there anyway, and the ages in a
    /// row pass.
    fn remembers(&self) -> bool {
        !self.format.projection().is_identity() && self.format.is_timeless()
    }

    /// The first message of a subscriber's stream says what the ones that all share do not: see [`Layout::columns`].
    pub fn begin(&self, pieces: &mut FrameBuf) {
        if let Some(columns) = self.layout.columns()
            && let Some(place) = columns_range(pieces.chunk())
        {
            pieces.replace(place, columns);
        }
    }

    /// The bytes of the object that an event brings, in this format.
    fn event_bytes(&self, event: &WatchEvent) -> Bytes {
        if !self.remembers() {
            return self.bytes(&event.object());
        }
        if let Some(known) = recall(&lock(&self.recent).projected, event.version()) {
            return known.value.clone();
        }
        let bytes = self.bytes(&event.object());
        if let Some(share) = self.budgets.projected.take(bytes.len()) {
            let kept = Arc::new(Budgeted { value: bytes.clone(), _share: share });
            remember(&mut lock(&self.recent).projected, event.version(), kept);
        }
        bytes
    }

    /// The bytes of an object in this format.
    pub fn bytes(&self, object: &Object) -> Bytes {
        let json = object.bytes();
        self.format.bytes_of(&json, self.tables.as_deref()).unwrap_or(json)
    }

    fn event(
        &self,
        event: &WatchEvent,
        seen: Transition,
        resume: Option<ResourceVersion>,
        bases: DeltaBases,
        sink: &mut impl Sink,
    ) -> Written {
        let delta = match (self.format.encoding(), event.previous()) {
            (Encoding::ZstdDelta, Some(previous))
                if seen != Transition::Enter && self.can_read(bases, Some(previous.version())) =>
            {
                self.delta(event, &previous, seen)
            }
            _ => None,
        };
        let Some((zstd, base)) = delta else { return self.full_event(event, seen, resume, sink) };
        sink.event(&head(event, &event.object(), seen, resume), Body::delta(zstd, base));
        Written { messages: 1, base: Some(base.version) }
    }

    fn full_event(
        &self,
        event: &WatchEvent,
        seen: Transition,
        resume: Option<ResourceVersion>,
        sink: &mut impl Sink,
    ) -> Written {
        let object = event.object();
        let bytes = match (seen, event.previous()) {
            // As the apiserver sends it: what it was, at the version of the event.
            (Transition::Leave, _) if self.format.projection().keeps_version() => {
                let bytes = event.left_bytes();
                self.format.bytes_of(&bytes, self.tables.as_deref()).unwrap_or(bytes)
            }
            (Transition::Leave, Some(previous)) => self.bytes(&previous),
            // Inside a gap a delete has the version of the object that is gone, which another event may have.
            _ if resume.is_none() => self.bytes(&object),
            _ => self.event_bytes(event),
        };
        sink.event(&head(event, &object, seen, resume), Body::object(bytes));
        Written { messages: 1, base: None }
    }

    /// From the object's previous bytes to those that the event tells; `None` where that is not shorter.
    fn delta(&self, event: &WatchEvent, previous: &Object, seen: Transition) -> MadeDelta {
        // Leaving tells the old state again, which is another delta than the change is.
        let leaves = seen == Transition::Leave;
        let shared = !leaves || planted::is(Bug::LeaveDeltaShared);
        if shared && let Some(known) = recall(&lock(&self.recent).deltas, event.version()) {
            return known.value.clone();
        }
        let base = self.bytes(previous);
        let new = if leaves { base.clone() } else { self.event_bytes(event) };
        let known = DeltaBase { version: previous.version(), crc32: delta::base_crc32(&base) };
        let made = delta::encode(&base, &new).map(|zstd| (zstd, known));
        if shared {
            let share = self.budgets.projected.take(made.as_ref().map_or(0, |(zstd, _)| zstd.len()));
            if let Some(share) = share {
                let kept = Arc::new(Budgeted { value: made.clone(), _share: share });
                remember(&mut lock(&self.recent).deltas, event.version(), kept);
            }
        }
        made
    }
}

/// Without a version to come back with, the event is part of a gap: of a delete the final state is not known.
fn head<'a>(
    event: &WatchEvent,
    object: &'a Object,
    seen: Transition,
    resume: Option<ResourceVersion>,
) -> EventHead<'a> {
    let gone = if resume.is_some() { DeleteReason::ObjectDeleted } else { DeleteReason::FinalStateUnknown };
    let (kind, reason) = match seen {
        Transition::Enter => (EventType::Added, DeleteReason::Unspecified),
        Transition::Change => (EventType::Modified, DeleteReason::Unspecified),
        Transition::Leave => (EventType::Deleted, DeleteReason::LeftSelector),
        Transition::Delete => (EventType::Deleted, gone),
    };
    EventHead { resume, kind, reason, key: object.key(), uid: object.uid(), version: event.version() }
}

#[cfg(test)]
mod tests;
