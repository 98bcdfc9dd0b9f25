//! One `WatchResponse` as bytes, made once and shared by every subscriber it goes to.
//!
//! The object is the last field of the message, so that a frame is a small head of its own and the object's bytes, shared with the
//! cache: an event costs a hundred bytes per view, whatever its object weighs.

use bytes::{BufMut, Bytes, BytesMut};
use prost::{Message, encoding};

use crate::{
    cache::Gap,
    model::{ResourceVersion, event::Transition, event::WatchEvent, object::Object},
    proto::v1alpha1::{
        Bookmark, DeleteReason, Event, EventType, GapBegin, GapEnd, ResolvedResource, SnapshotBegin, SnapshotEnd,
        WatchResponse, watch_response,
    },
};

/// An encoded `WatchResponse`, without gRPC's prefix.
#[derive(Clone, Debug)]
pub struct Frame {
    head: Bytes,
    body: Bytes,
}

// Field numbers of the contract that the hand-made encoding below relies on; the test decodes what it makes.
const RESPONSE_EVENT: u32 = 3;
const EVENT_OBJECT: u32 = 7;

impl Frame {
    /// The frame of a live or replayed event, as a selection sees it.
    pub fn event(event: &WatchEvent, transition: Transition) -> Self {
        Self::transition(event, transition, Some(event.version()), DeleteReason::ObjectDeleted)
    }

    /// The frame of an event inside a gap: no version to resume from, and a delete's final state is not known.
    pub fn gap_event(event: &WatchEvent, transition: Transition) -> Self {
        Self::transition(event, transition, None, DeleteReason::FinalStateUnknown)
    }

    /// The frame of an object of a snapshot.
    pub fn snapshot_object(object: &Object) -> Self {
        let head = head_of(object, object.version(), EventType::Added, DeleteReason::Unspecified);
        encode(None, head, object.bytes())
    }

    fn transition(
        event: &WatchEvent,
        transition: Transition,
        resume: Option<ResourceVersion>,
        delete: DeleteReason,
    ) -> Self {
        let (kind, reason, bytes) = match transition {
            Transition::Enter => (EventType::Added, DeleteReason::Unspecified, event.object().bytes()),
            Transition::Change => (EventType::Modified, DeleteReason::Unspecified, event.object().bytes()),
            Transition::Leave => (EventType::Deleted, DeleteReason::LeftSelector, event.left_bytes()),
            Transition::Delete => (EventType::Deleted, delete, event.object().bytes()),
        };
        encode(resume, head_of(&event.object(), event.version(), kind, reason), bytes)
    }

    /// Opens a snapshot.
    pub fn snapshot_begin(version: ResourceVersion, resource: ResolvedResource) -> Self {
        let begin = SnapshotBegin { resource_version: version.to_string(), resource: Some(resource) };
        Self::plain(None, watch_response::Message::SnapshotBegin(begin))
    }

    /// Closes a snapshot.
    pub fn snapshot_end(version: ResourceVersion, object_count: u64) -> Self {
        let end = SnapshotEnd { object_count: i64::try_from(object_count).unwrap_or(i64::MAX) };
        Self::plain(Some(version), watch_response::Message::SnapshotEnd(end))
    }

    /// Opens a gap.
    pub fn gap_begin(gap: &Gap) -> Self {
        let begin = GapBegin { resource_version: gap.from.to_string(), reason: gap.reason.to_owned() };
        Self::plain(None, watch_response::Message::GapBegin(begin))
    }

    /// Closes a gap.
    pub fn gap_end(gap: &Gap) -> Self {
        Self::plain(Some(gap.to), watch_response::Message::GapEnd(GapEnd {}))
    }

    /// A bookmark.
    pub fn bookmark(version: ResourceVersion) -> Self {
        Self::plain(Some(version), watch_response::Message::Bookmark(Bookmark {}))
    }

    fn plain(resume: Option<ResourceVersion>, message: watch_response::Message) -> Self {
        let resume_version = resume.map_or_else(String::new, |version| version.to_string());
        WatchResponse { resume_version, message: Some(message) }.into()
    }

    /// The message's length in bytes.
    pub fn len(&self) -> usize {
        self.head.len() + self.body.len()
    }

    /// The bytes that are this frame's own; the object's are shared with the cache.
    pub fn head_len(&self) -> usize {
        self.head.len()
    }

    /// Never: every message has a field.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the message.
    pub fn write(&self, buffer: &mut impl BufMut) {
        buffer.put_slice(&self.head);
        buffer.put_slice(&self.body);
    }
}

impl From<WatchResponse> for Frame {
    fn from(response: WatchResponse) -> Self {
        Self { head: response.encode_to_vec().into(), body: Bytes::new() }
    }
}

fn head_of(object: &Object, version: ResourceVersion, kind: EventType, reason: DeleteReason) -> Event {
    Event {
        r#type: kind.into(),
        namespace: object.key().namespace().to_owned(),
        name: object.key().name().to_owned(),
        uid: object.uid().to_owned(),
        resource_version: version.to_string(),
        delete_reason: reason.into(),
        object: Bytes::new(),
    }
}

/// The message of `event` with `object` as its last field, which is left out of the head and appended as it is.
fn encode(resume: Option<ResourceVersion>, event: Event, object: Bytes) -> Frame {
    let resume = resume.map_or_else(String::new, |version| version.to_string());
    let object_key_len = encoding::key_len(EVENT_OBJECT) + encoding::encoded_len_varint(object.len() as u64);
    let event_len = event.encoded_len() + object_key_len + object.len();
    let mut head = BytesMut::with_capacity(event.encoded_len() + resume.len() + 32);
    if !resume.is_empty() {
        encoding::string::encode(1, &resume, &mut head);
    }
    encoding::encode_key(RESPONSE_EVENT, encoding::WireType::LengthDelimited, &mut head);
    encoding::encode_varint(event_len as u64, &mut head);
    event.encode_raw(&mut head);
    encoding::encode_key(EVENT_OBJECT, encoding::WireType::LengthDelimited, &mut head);
    encoding::encode_varint(object.len() as u64, &mut head);
    Frame { head: head.freeze(), body: object }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{fields::FieldTable, object::ObjectParser};

    #[test]
    fn a_frame_is_the_message_of_the_contract() {
        let json = br#"{"metadata":{"name":"web","namespace":"default","uid":"u","resourceVersion":"7"}}"#;
        let object = ObjectParser::new(&FieldTable::default()).parse(json).unwrap();
        let version = ResourceVersion::new(300).unwrap();
        let event = Event {
            object: object.bytes(),
            ..head_of(&object, version, EventType::Deleted, DeleteReason::LeftSelector)
        };
        let frame = encode(Some(version), Event { object: Bytes::new(), ..event.clone() }, object.bytes());
        let mut bytes = Vec::new();
        frame.write(&mut bytes);
        let decoded = WatchResponse::decode(bytes.as_slice()).unwrap();
        assert_eq!(decoded.resume_version, "300");
        assert_eq!(decoded.message, Some(watch_response::Message::Event(event)));
        assert_eq!(decoded.encode_to_vec(), bytes, "as prost itself would encode it");
        assert_eq!(frame.len(), bytes.len());
    }
}
