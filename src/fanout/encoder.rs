//! From log entries and objects to frames, in one format. Equal formats share one encoder.

use super::{
    frame::{Body, EventHead, FrameWriter, control, put_event, put_message},
    log::{LogEntry, Seen},
};
use crate::{
    model::{
        ResourceVersion,
        event::{EventType, Transition, WatchEvent},
        object::Object,
    },
    proto::v1alpha1::{DeleteReason, WatchResponse},
};
use bytes::BytesMut;

/// Makes frames.
#[derive(Default)]
pub struct Encoder {}

/// Where frames go.
pub trait Sink {
    /// An event.
    fn event(&mut self, head: &EventHead<'_>, body: Body);
    /// Any other message.
    fn message(&mut self, message: &WatchResponse);
}

impl Sink for FrameWriter {
    fn event(&mut self, head: &EventHead<'_>, body: Body) {
        self.event(head, body);
    }

    fn message(&mut self, message: &WatchResponse) {
        self.message(message);
    }
}

impl Sink for BytesMut {
    fn event(&mut self, head: &EventHead<'_>, body: Body) {
        put_event(head, &body, self);
    }

    fn message(&mut self, message: &WatchResponse) {
        put_message(message, self);
    }
}

impl Encoder {
    /// Writes an entry; tells how many messages that were.
    pub fn entry(&self, entry: &LogEntry, sink: &mut impl Sink) -> usize {
        match &entry.seen {
            Seen::GapBegin(gap) => sink.message(&control::gap_begin(gap)),
            Seen::GapEnd(gap) => sink.message(&control::gap_end(gap)),
            Seen::Event(event, seen) => self.event(event, *seen, Some(event.version()), sink),
            Seen::GapEvent(event, seen) => self.event(event, *seen, None, sink),
        }
        1
    }

    /// Writes an object of a snapshot.
    pub fn object(&self, object: &Object, sink: &mut impl Sink) {
        sink.event(&EventHead::of_snapshot(object), Body::object(object.bytes().clone()));
    }

    /// Without a version to come back with, the event is part of a gap: of a delete the final state is not known.
    fn event(&self, event: &WatchEvent, seen: Transition, resume: Option<ResourceVersion>, sink: &mut impl Sink) {
        let object = event.object();
        let gone = if resume.is_some() { DeleteReason::ObjectDeleted } else { DeleteReason::FinalStateUnknown };
        let (kind, reason, bytes) = match seen {
            Transition::Enter => (EventType::Added, DeleteReason::Unspecified, object.bytes().clone()),
            Transition::Change => (EventType::Modified, DeleteReason::Unspecified, object.bytes().clone()),
            Transition::Leave => (EventType::Deleted, DeleteReason::LeftSelector, event.left_bytes()),
            Transition::Delete => (EventType::Deleted, gone, object.bytes().clone()),
        };
        let head = EventHead { resume, kind, reason, key: object.key(), uid: object.uid(), version: event.version() };
        sink.event(&head, Body::object(bytes));
    }
}
