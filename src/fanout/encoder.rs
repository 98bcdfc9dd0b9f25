//! From events and objects to frames, in one format; equal formats of one cache share one encoder, and what it has just made.
//!
//! A projection or a delta is made once per event, whoever takes it. What is remembered is bounded, and made again where it is
//! forgotten.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use bytes::Bytes;

use super::{
    frame::{Base, Body, EventHead, Sink, control},
    log::{LogEntry, Seen},
};
use crate::{
    encoding::delta,
    model::{
        ObjectKey, ResourceVersion,
        event::{EventType, Transition, WatchEvent},
        format::{Encoding, Format},
        object::Object,
    },
    proto::v1alpha1::DeleteReason,
};

/// The events whose bytes are remembered: views that see one event take it at about the same time.
const RECENT_EVENTS_MAX: usize = 128;
/// The projected objects that are remembered for snapshots, in bytes.
const PROJECTED_BYTES_MAX: usize = 64 << 20;

/// Of which objects a stream's client holds the bytes that deltas are made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// Of all: it was sent a snapshot, or has kept what it was sent before.
    All,
    /// Of those that have changed since this version, at which it came back.
    Since(ResourceVersion),
    /// Of none.
    Nothing,
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
    recent: Mutex<Recent>,
    projected: Mutex<Projected>,
}

#[derive(Default)]
struct Recent {
    changed: VecDeque<(ResourceVersion, bool)>,
    deltas: VecDeque<(ResourceVersion, Option<(Bytes, Base)>)>,
}

#[derive(Default)]
struct Projected {
    /// Known by where they are: a version may come again with other bytes, when the schema has changed.
    objects: HashMap<ObjectKey, (Weak<Object>, Bytes)>,
    bytes: usize,
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
    /// An encoder of one format.
    pub fn new(format: Format) -> Self {
        Self { format, ..Self::default() }
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
        let Some(previous) = event.previous() else { return true };
        // The version of an event names it: no two of a cache share one.
        if let Some(changed) = recall(&lock(&self.recent).changed, event.version()) {
            return changed;
        }
        let changed = self.bytes(&event.object()) != self.bytes(&previous);
        remember(&mut lock(&self.recent).changed, event.version(), changed);
        changed
    }

    /// Writes an entry for a stream whose client holds `holds`.
    pub fn entry(&self, entry: &LogEntry, holds: Holds, sink: &mut impl Sink) -> Written {
        match &entry.seen {
            Seen::GapBegin(gap) => sink.message(&control::gap_begin(gap)),
            Seen::GapEnd(gap) => sink.message(&control::gap_end(gap)),
            Seen::Event(event, seen) if !self.tells(event, *seen) => return Written::default(),
            Seen::Event(event, seen) => return self.event(event, *seen, Some(event.version()), holds, sink),
            // Only its end is exact: what a client holds is not looked at inside a gap.
            Seen::GapEvent(event, seen) => return self.full_event(event, *seen, None, sink),
        }
        Written { messages: 1, base: None }
    }

    /// Whether a client that holds `holds` can read a delta with this base.
    pub fn can_read(&self, holds: Holds, base: Option<ResourceVersion>) -> bool {
        match (holds, base) {
            (Holds::All, _) | (_, None) => true,
            (Holds::Nothing, Some(_)) => false,
            // A change that it was not told of has moved the base past what it holds.
            (Holds::Since(_), Some(_)) if self.format.only_changes() => false,
            (Holds::Since(start), Some(base)) => base > start,
        }
    }

    /// Writes an object of a snapshot.
    pub fn object(&self, object: &Arc<Object>, sink: &mut impl Sink) {
        sink.event(&EventHead::of_snapshot(object), Body::object(self.snapshot_bytes(object)));
    }

    /// The bytes of an object as snapshots send them; remembered where they had to be made.
    pub fn snapshot_bytes(&self, object: &Arc<Object>) -> Bytes {
        if self.format.projection().is_identity() {
            return object.bytes();
        }
        let same = |(of, _): &&(Weak<Object>, Bytes)| of.as_ptr() == Arc::as_ptr(object);
        if let Some((_, bytes)) = lock(&self.projected).objects.get(object.key()).filter(same) {
            return bytes.clone();
        }
        let bytes = self.bytes(object);
        let Projected { objects, bytes: total } = &mut *lock(&self.projected);
        if let Some((_, before)) = objects.remove(object.key()) {
            *total -= before.len();
        }
        if *total + bytes.len() <= PROJECTED_BYTES_MAX {
            *total += bytes.len();
            objects.insert(object.key().clone(), (Arc::downgrade(object), bytes.clone()));
        }
        bytes
    }

    /// The bytes of an object in this format.
    fn bytes(&self, object: &Object) -> Bytes {
        let json = object.bytes();
        self.format.bytes_of(&json).unwrap_or(json)
    }

    fn event(
        &self,
        event: &WatchEvent,
        seen: Transition,
        resume: Option<ResourceVersion>,
        holds: Holds,
        sink: &mut impl Sink,
    ) -> Written {
        let delta = match (self.format.encoding(), event.previous()) {
            (Encoding::ZstdDelta, Some(previous))
                if seen != Transition::Enter && self.can_read(holds, Some(previous.version())) =>
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
            (Transition::Leave, _) if self.format.projection().is_identity() => event.left_bytes(),
            (Transition::Leave, Some(previous)) => self.bytes(&previous),
            _ => self.bytes(&object),
        };
        sink.event(&head(event, &object, seen, resume), Body::object(bytes));
        Written { messages: 1, base: None }
    }

    /// From the object's previous bytes to those that the event tells; `None` where that is not shorter.
    fn delta(&self, event: &WatchEvent, previous: &Object, seen: Transition) -> Option<(Bytes, Base)> {
        // Leaving tells the old state again, which is another delta than the change is.
        let shared = seen != Transition::Leave;
        if shared && let Some(known) = recall(&lock(&self.recent).deltas, event.version()) {
            return known;
        }
        let base = self.bytes(previous);
        let new = if shared { self.bytes(&event.object()) } else { base.clone() };
        let known = Base { version: previous.version(), crc32: delta::base_crc32(&base) };
        let made = delta::encode(&base, &new).map(|zstd| (zstd, known));
        if shared {
            remember(&mut lock(&self.recent).deltas, event.version(), made.clone());
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
