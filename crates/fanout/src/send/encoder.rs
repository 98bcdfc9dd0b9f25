//! Turns events and objects into frames of one format. Equal formats of one cache share an encoder.
//!
//! The expensive parts are projections and deltas. An event is often sent in several views of one
//! format at about the same time, so the encoder remembers the projection and the delta of the last
//! events, and the projections of objects, within a budget. Forgotten bytes are made again: a full
//! budget costs time, never memory and never a wrong byte.
//!
//! A delta is made from the object's previous bytes, so the hazard is a client that does not have
//! them, or has others. A stream records which bases its client has ([`DeltaBases`]); every other
//! event is sent in full. A delta also carries the checksum of its base.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use bytes::{Buf, Bytes};
use kubefan_cache::{
    budget::{Budget, Budgets, Share},
    kube_encoding::watch::columns_range,
};
use kubefan_common::{
    encoding::delta,
    planted::{self, Bug},
    proto::v1alpha1::{DeleteReason, ResolvedResource},
    when_planted,
};
use kubefan_gzip::{Compressors, Piece};
use kubefan_model::{
    ObjectKey, ResourceVersion,
    event::{EventType, Transition, WatchEvent},
    format::{Encoding, Format},
    object::Object,
    table::Tables,
};
use tokio::time::Instant;

use crate::send::{
    control,
    differences::Differences,
    frame::{Body, DeltaBase, EventHead, FrameBuffer, FrameWriter, Layout, Sink},
    frame_buf::FrameBuf,
    log_entry::{EntryKind, LogEntry},
};

/// The number of events whose bytes are remembered. Views send an event at about the same time.
const RECENT_EVENTS_MAX: usize = 128;

/// The number of readers from which on an event is compressed whatever the budget has left. With so
/// many, it takes about as much CPU time as it saves: see decision 54.
const COMPRESSION_READERS_MIN: usize = 24;

/// The delta bases that a client has: the objects whose bytes it still holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaBases {
    /// All objects: the client was sent a snapshot, or retained every object that it was sent
    /// before.
    All,
    /// The objects that have changed since this version, with which the client returned.
    ChangedSince(ResourceVersion),
    /// No objects.
    None,
}

/// Result of writing one entry.
#[derive(Debug, Clone, Copy, Default)]
pub struct Written {
    /// Number of messages: zero if the change did not touch the projection.
    pub messages: usize,
    /// The version of the base if it is a delta.
    pub base: Option<ResourceVersion>,
}

/// Makes the frames of one format.
#[derive(Default)]
pub struct Encoder {
    format: Format,
    layout: Layout,
    /// For a cache of table rows.
    tables: Option<Arc<Tables>>,
    budgets: Budgets,
    differences: Arc<Differences>,
    recent: Mutex<Recent>,
    projected: Mutex<Projected>,
    compressors: Compressors,
}

/// A delta and its base; `None` if it would not be shorter than the object.
type MadeDelta = Option<(Bytes, DeltaBase)>;

/// Remembered results for recent events. They are compared by address: a backfill may have an event
/// of the same version with other bytes.
#[derive(Default)]
struct Recent {
    changed: VecDeque<(Weak<WatchEvent>, bool)>,
    projected: VecDeque<(Weak<WatchEvent>, Arc<Budgeted<Bytes>>)>,
    deltas: VecDeque<(Weak<WatchEvent>, Arc<Budgeted<MadeDelta>>)>,
}

#[derive(Default)]
struct Projected {
    /// Compared by address: with a new schema an object may have other bytes at the same version.
    objects: HashMap<ObjectKey, (Weak<Object>, Budgeted<Bytes>)>,
    /// Insertions that found no room since the entries of dropped objects were removed.
    refused: usize,
}

/// A remembered value, with its share of the budget.
struct Budgeted<T> {
    value: T,
    _share: Share,
}

impl Projected {
    fn insert(&mut self, object: &Arc<Object>, bytes: &Bytes, budget: &Budget) {
        self.objects.remove(object.key());
        if let Some(share) = budget.take(bytes.len()) {
            let value = Budgeted { value: bytes.clone(), _share: share };
            self.objects.insert(object.key().clone(), (Arc::downgrade(object), value));
            return;
        }
        self.refused += 1;
        // Amortized: one pass over all of them for as many refusals.
        if self.refused > self.objects.len() {
            self.refused = 0;
            self.objects.retain(|_, (object, _)| object.strong_count() > 0);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remember<T>(recent: &mut VecDeque<(Weak<WatchEvent>, T)>, event: &Arc<WatchEvent>, value: T) {
    if recent.len() == RECENT_EVENTS_MAX {
        recent.pop_front();
    }
    recent.push_back((Arc::downgrade(event), value));
}

fn recall<T: Clone>(recent: &VecDeque<(Weak<WatchEvent>, T)>, event: &Arc<WatchEvent>) -> Option<T> {
    recent.iter().rev().find(|(known, _)| known.as_ptr() == Arc::as_ptr(event)).map(|(_, value)| value.clone())
}

impl Encoder {
    /// An encoder of one format, for objects of one resource; `tables` if they are rows.
    pub fn new(format: Format, resource: &ResolvedResource, tables: Option<&Arc<Tables>>, budgets: Budgets) -> Self {
        let layout = Layout::of(&format, resource, tables);
        // Not from the default, which has budgets of its own.
        Self {
            format,
            layout,
            tables: tables.cloned(),
            budgets,
            differences: Arc::default(),
            recent: Mutex::default(),
            projected: Mutex::default(),
            compressors: Compressors::default(),
        }
    }

    /// Shares this set of differences with the other encoders of its cache.
    pub fn sharing(self, differences: Arc<Differences>) -> Self {
        Self { differences, ..self }
    }

    /// Returns a writer of frames for one subscriber, with room for this many bytes of heads and
    /// small bodies.
    pub fn writer(&self, capacity: usize) -> FrameWriter<'_> {
        FrameWriter::new(&self.layout, capacity)
    }

    /// Returns a writer of frames into one buffer, with room for this many bytes.
    pub fn buffer(&self, capacity: usize) -> FrameBuffer<'_> {
        FrameBuffer::new(&self.layout, capacity)
    }

    /// Whether its frames are parts of gzip bodies.
    pub fn is_gzip(&self) -> bool {
        self.layout.is_gzip()
    }

    /// Makes a piece of bytes that the subscribers of a view share: compressed, or stored.
    pub fn piece(&self, plain: Bytes, may_compress: bool) -> Piece {
        self.compressors.piece(plain, may_compress)
    }

    /// Takes the CPU time to compress the events of a segment of about this many bytes. Returns
    /// false if so few readers do not pay for it and the budget is spent.
    pub fn takes_compression(&self, bytes: usize, readers: usize) -> bool {
        readers >= COMPRESSION_READERS_MIN || self.budgets.compression.take(bytes, Instant::now())
    }

    /// The budgets of the bytes that it retains.
    pub fn budgets(&self) -> &Budgets {
        &self.budgets
    }

    /// Drops everything that it retains for reuse, except the parts that it shares.
    pub fn forget(&self) {
        *lock(&self.recent) = Recent::default();
        *lock(&self.projected) = Projected::default();
        self.compressors.forget();
    }

    /// Drops the bytes that it retains of an object that no longer exists.
    pub fn deleted(&self, key: &ObjectKey) {
        if self.remembers() {
            lock(&self.projected).objects.remove(key);
        }
    }

    /// The format.
    pub fn format(&self) -> &Format {
        &self.format
    }

    /// Whether a change is sent in this format. If the format has only changes of the projection, a
    /// change that leaves the projection as it was is not sent.
    pub fn tells(&self, event: &Arc<WatchEvent>, seen: Transition) -> bool {
        let may_hide = seen == Transition::Change || (seen == Transition::Enter && planted::is(Bug::EnterIsNoChange));
        if !self.format.only_changes() || !may_hide {
            return true;
        }
        // An event of a backfill without state has itself as the previous object: whether the
        // projection changed is not known.
        let Some(previous) = event.previous().filter(|previous| !Arc::ptr_eq(previous, &event.object())) else {
            return true;
        };
        if let Some(changed) = recall(&lock(&self.recent).changed, event) {
            return changed;
        }
        let changed =
            self.differences.of(event, &previous, &self.budgets.projected).may_change(self.format.projection())
                && self.event_bytes(event) != self.bytes(&previous);
        remember(&mut lock(&self.recent).changed, event, changed);
        changed
    }

    /// Writes an entry for a client that has these bases.
    pub fn entry(&self, entry: &LogEntry, bases: DeltaBases, sink: &mut impl Sink) -> Written {
        match &entry.kind {
            EntryKind::GapBegin(gap) => sink.message(&control::gap_begin(gap)),
            EntryKind::GapEnd(gap) => sink.message(&control::gap_end(gap)),
            EntryKind::Event(event, seen) if !self.tells(event, *seen) => return Written::default(),
            EntryKind::Event(event, seen) => return self.event(event, *seen, Some(event.version()), bases, sink),
            // Inside a gap the bytes that a client has are not exact, so there are no deltas.
            EntryKind::GapEvent(event, seen, _) => {
                let resume = planted::is(Bug::ResumeInsideGap).then(|| event.version());
                return self.full_event(event, *seen, resume, sink);
            }
        }
        Written { messages: 1, base: None }
    }

    /// Whether a client that has these bases can read a delta from the base with this version.
    pub fn can_read(&self, bases: DeltaBases, base: Option<ResourceVersion>) -> bool {
        match (bases, base) {
            (DeltaBases::All, _) | (_, None) => true,
            (DeltaBases::None, Some(_)) => false,
            // A change that was not sent may have moved the base past the client's state.
            (DeltaBases::ChangedSince(_), Some(_))
                if self.format.only_changes() && !planted::is(Bug::DeltaOnUnsentBase) =>
            {
                false
            }
            (DeltaBases::ChangedSince(start), Some(base)) => base > start,
        }
    }

    /// Writes an object of a snapshot.
    pub fn object(&self, object: &Arc<Object>, sink: &mut impl Sink) {
        sink.event(&EventHead::of_snapshot(object), Body::object(self.snapshot_bytes(object)));
    }

    /// The bytes of an object in a snapshot; remembered if they had to be made.
    pub fn snapshot_bytes(&self, object: &Arc<Object>) -> Bytes {
        if !self.remembers() {
            return self.bytes(object);
        }
        let same = |(of, _): &&(Weak<Object>, Budgeted<Bytes>)| {
            of.as_ptr() == Arc::as_ptr(object) || planted::is(Bug::ProjectedByKey)
        };
        if let Some((_, bytes)) = lock(&self.projected).objects.get(object.key()).filter(same) {
            return bytes.value.clone();
        }
        let bytes = self.bytes(object);
        lock(&self.projected).insert(object, &bytes, &self.budgets.projected);
        bytes
    }

    /// Whether projected bytes are remembered: not if they are the object's own bytes, and not if
    /// they show ages, which change.
    fn remembers(&self) -> bool {
        !self.format.projection().is_identity() && self.format.is_time_independent()
    }

    /// Adds the parts that shared messages leave out to the first message of a stream: see
    /// [`Layout::columns`], and the header of a gzip body.
    pub fn begin(&self, frames: &mut FrameBuf) {
        // A watch of Tables is never gzip: its first event has columns, which shared pieces lack.
        if self.is_gzip() {
            return frames.push_front(Bytes::from_static(&kubefan_gzip::HEADER));
        }
        if let Some(columns) = self.layout.columns()
            && let Some(place) = columns_range(frames.chunk())
        {
            frames.replace(place, columns);
        }
    }

    /// The bytes of an event's object in this format; remembered if they had to be made.
    fn event_bytes(&self, event: &Arc<WatchEvent>) -> Bytes {
        if !self.remembers() {
            return self.bytes(&event.object());
        }
        if let Some(known) = recall(&lock(&self.recent).projected, event) {
            return known.value.clone();
        }
        let bytes = self.bytes(&event.object());
        if let Some(share) = self.budgets.projected.take(bytes.len()) {
            let value = Arc::new(Budgeted { value: bytes.clone(), _share: share });
            remember(&mut lock(&self.recent).projected, event, value);
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
        event: &Arc<WatchEvent>,
        seen: Transition,
        resume: Option<ResourceVersion>,
        bases: DeltaBases,
        sink: &mut impl Sink,
    ) -> Written {
        // A client that has listed at this version may have a later one of its states.
        let is_only = event.version().sub() == 0;
        let delta = match (self.format.encoding(), event.previous()) {
            (Encoding::ZstdDelta, Some(previous))
                if is_only && seen != Transition::Enter && self.can_read(bases, Some(previous.version())) =>
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
        event: &Arc<WatchEvent>,
        seen: Transition,
        resume: Option<ResourceVersion>,
        sink: &mut impl Sink,
    ) -> Written {
        let object = event.object();
        let bytes = match (seen, event.previous()) {
            // As the apiserver sends it: the old object at the version of the event.
            (Transition::Leave, _) if self.format.projection().keeps_version() => {
                let mut bytes = event.leave_bytes();
                when_planted!(LeaveAtOwnVersion => if let Some(previous) = event.previous() { bytes = previous.bytes() });
                self.format.bytes_of(&bytes, self.tables.as_deref()).unwrap_or(bytes)
            }
            (Transition::Leave, Some(previous)) => self.bytes(&previous),
            // A gap has more events than are remembered, so each is encoded when it is sent.
            _ if resume.is_none() => self.bytes(&object),
            _ => self.event_bytes(event),
        };
        sink.event(&head(event, &object, seen, resume), Body::object(bytes));
        Written { messages: 1, base: None }
    }

    /// The delta from the object's previous bytes to those that the event sends; `None` if it is
    /// not shorter.
    fn delta(&self, event: &Arc<WatchEvent>, previous: &Object, seen: Transition) -> MadeDelta {
        // An object that leaves is sent in its old state, which is another delta than that of the
        // change.
        let leaves = seen == Transition::Leave;
        let shared = !leaves || planted::is(Bug::LeaveDeltaShared);
        if shared && let Some(known) = recall(&lock(&self.recent).deltas, event) {
            return known.value.clone();
        }
        let base = self.bytes(previous);
        let new = if leaves { base.clone() } else { self.event_bytes(event) };
        let known = DeltaBase { version: previous.version(), crc32: delta::base_crc32(&base) };
        let made = delta::encode(&base, &new).map(|zstd| (zstd, known));
        if shared {
            let share = self.budgets.projected.take(made.as_ref().map_or(0, |(zstd, _)| zstd.len()));
            if let Some(share) = share {
                let value = Arc::new(Budgeted { value: made.clone(), _share: share });
                remember(&mut lock(&self.recent).deltas, event, value);
            }
        }
        made
    }
}

/// An event without a version to resume from is inside a gap, where the final state of a deleted
/// object is not known.
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
