//! `WatchResponse` messages as bytes with gRPC's length prefix, and events of a Kubernetes watch
//! over HTTP.
//!
//! The object is the last field of its message, so a frame is a small head of its own followed by
//! the object's bytes, which are shared with the cache: an event costs about a hundred bytes per
//! view, however large its object is. Heads are written field by field, without the message types
//! in between, because every delivery takes this path.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use kubefan_cache::kube_encoding::watch as kube_watch;
use kubefan_common::proto::v1alpha1::{DeleteReason, EventType, ResolvedResource, WatchResponse, watch_response};
use kubefan_gzip::Piece;
use kubefan_model::{
    Media, ObjectKey, ResourceVersion,
    event::EventType as Kind,
    format::{ContentCoding, Format, Wire},
    object::Object,
    table::Tables,
};
use prost::{
    Message,
    encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len},
};

use crate::send::frame_buf::FrameBuf;

/// gRPC's prefix (Length-Prefixed-Message in gRPC's `PROTOCOL-HTTP2.md`): a flag, and the message's
/// length.
const PREFIX_BYTES: usize = 5;

// Field numbers of the protobuf messages that are encoded below; a test decodes the result.
const RESPONSE_RESUME_VERSION: u32 = 1;
const RESPONSE_EVENT: u32 = 3;
const EVENT_TYPE: u32 = 1;
const EVENT_NAMESPACE: u32 = 2;
const EVENT_NAME: u32 = 3;
const EVENT_UID: u32 = 4;
const EVENT_RESOURCE_VERSION: u32 = 5;
const EVENT_DELETE_REASON: u32 = 6;
const EVENT_OBJECT: u32 = 7;
const EVENT_DELTA: u32 = 8;
const DELTA_BASE_VERSION: u32 = 1;
const DELTA_BASE_CRC32: u32 = 2;
const DELTA_ZSTD: u32 = 3;

/// An event message without its object.
#[derive(Debug, Clone, Copy)]
pub struct EventHead<'a> {
    /// The version to resume from; `None` if the stream is inside a snapshot, gap or catch-up.
    pub resume: Option<ResourceVersion>,
    /// The kind of the change.
    pub kind: Kind,
    /// The reason of a delete.
    pub reason: DeleteReason,
    /// The object's key.
    pub key: &'a ObjectKey,
    /// The object's uid.
    pub uid: &'a str,
    /// The version of the change.
    pub version: ResourceVersion,
}

impl<'a> EventHead<'a> {
    /// The head of an object in a snapshot.
    pub fn of_snapshot(object: &'a Object) -> Self {
        Self {
            resume: None,
            kind: Kind::Added,
            reason: DeleteReason::Unspecified,
            key: object.key(),
            uid: object.uid(),
            version: object.version(),
        }
    }

    /// The length of the `Event` message's fields before the object.
    fn event_len(&self, version: &Digits) -> usize {
        let text =
            |text: &str| if text.is_empty() { 0 } else { 1 + encoded_len_varint(text.len() as u64) + text.len() };
        let reason = if self.reason == DeleteReason::Unspecified { 0 } else { 2 };
        2 + text(self.key.namespace()) + text(self.key.name()) + text(self.uid) + text(version.as_str()) + reason
    }

    fn put_event(&self, version: &Digits, out: &mut BytesMut) {
        let kind = match self.kind {
            Kind::Added => EventType::Added,
            Kind::Modified => EventType::Modified,
            Kind::Deleted => EventType::Deleted,
        };
        put_number(EVENT_TYPE, kind as u64, out);
        put_text(EVENT_NAMESPACE, self.key.namespace(), out);
        put_text(EVENT_NAME, self.key.name(), out);
        put_text(EVENT_UID, self.uid, out);
        put_text(EVENT_RESOURCE_VERSION, version.as_str(), out);
        put_number(EVENT_DELETE_REASON, self.reason as u64, out);
    }
}

/// The object of an event, in full or as a delta.
#[derive(Debug, Clone)]
pub struct Body {
    bytes: Bytes,
    base: Option<DeltaBase>,
}

/// The base of a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaBase {
    /// The version of the object's state.
    pub version: ResourceVersion,
    /// The CRC-32 of its bytes.
    pub crc32: u32,
}

impl Body {
    /// The object itself, in the encoding of its cache.
    pub fn object(bytes: Bytes) -> Self {
        Self { bytes, base: None }
    }

    /// A zstd frame that is decoded with the base as its dictionary.
    pub fn delta(zstd: Bytes, base: DeltaBase) -> Self {
        Self { bytes: zstd, base: Some(base) }
    }

    /// The length of everything between the event's head and the bytes.
    fn head_len(&self) -> usize {
        let field = 1 + encoded_len_varint(self.bytes.len() as u64);
        match self.base {
            None => field,
            Some(base) => {
                let delta = Self::base_len(&Digits::of(base.version)) + field;
                1 + encoded_len_varint((delta + self.bytes.len()) as u64) + delta
            }
        }
    }

    /// The length of a delta's fields before its bytes.
    fn base_len(version: &Digits) -> usize {
        2 + version.as_str().len() + 5
    }

    fn put_head(&self, out: &mut BytesMut) {
        let mut field = EVENT_OBJECT;
        if let Some(base) = self.base {
            let version = Digits::of(base.version);
            let delta = Self::base_len(&version) + 1 + encoded_len_varint(self.bytes.len() as u64) + self.bytes.len();
            encode_key(EVENT_DELTA, WireType::LengthDelimited, out);
            encode_varint(delta as u64, out);
            put_text(DELTA_BASE_VERSION, version.as_str(), out);
            encode_key(DELTA_BASE_CRC32, WireType::ThirtyTwoBit, out);
            out.put_u32_le(base.crc32);
            field = DELTA_ZSTD;
        }
        encode_key(field, WireType::LengthDelimited, out);
        encode_varint(self.bytes.len() as u64, out);
    }
}

/// Writes the head of a whole gRPC message, after which the body's bytes follow.
fn put_head(head: &EventHead<'_>, body: &Body, out: &mut BytesMut) {
    let version = Digits::of(head.version);
    let event_len = head.event_len(&version) + body.head_len() + body.bytes.len();
    let event_head_len = key_len(RESPONSE_EVENT) + encoded_len_varint(event_len as u64);
    // Most events are resumed from at the version of their change.
    let is_same = |resume: ResourceVersion| resume == head.version.whole();
    let resume = head.resume.map(|resume| if is_same(resume) { version } else { Digits::of_place(resume) });
    let resume_len = resume.map_or(0, |resume| 2 + resume.as_str().len());
    out.reserve(PREFIX_BYTES + resume_len + event_head_len + event_len - body.bytes.len());
    put_prefix(out, resume_len + event_head_len + event_len);
    if let Some(resume) = resume {
        put_text(RESPONSE_RESUME_VERSION, resume.as_str(), out);
    }
    encode_key(RESPONSE_EVENT, WireType::LengthDelimited, out);
    encode_varint(event_len as u64, out);
    head.put_event(&version, out);
    body.put_head(out);
}

/// A destination of frames.
pub trait Sink {
    /// Adds an event.
    fn event(&mut self, head: &EventHead<'_>, body: Body);
    /// Adds any other message.
    fn message(&mut self, message: &WatchResponse);
}

/// Framing of a message: as a gRPC frame, or as an event of a Kubernetes watch over HTTP.
#[derive(Debug, Default)]
pub enum Layout {
    /// `WatchResponse` messages with gRPC's prefix.
    #[default]
    Grpc,
    /// An event in this encoding.
    Http {
        /// The encoding.
        media: Media,
        /// The type that bookmarks name.
        type_meta: kube_watch::TypeMeta,
        /// The content coding of the response.
        coding: ContentCoding,
    },
}

impl Layout {
    /// The layout of a format, for objects of one resource.
    pub fn of(format: &Format, resource: &ResolvedResource, tables: Option<&Arc<Tables>>) -> Self {
        match format.wire() {
            Wire::Grpc => Self::Grpc,
            Wire::Http(media) => Self::Http {
                media,
                type_meta: kube_watch::TypeMeta::of(format, resource, tables),
                coding: format.coding(),
            },
        }
    }

    /// Whether the response is a gzip body.
    pub fn is_gzip(&self) -> bool {
        matches!(self, Self::Http { coding: ContentCoding::Gzip, .. })
    }

    /// Returns the part that only the first event of a stream has: the column definitions of
    /// tables.
    pub fn columns(&self) -> Option<Bytes> {
        match self {
            Self::Http { type_meta, .. } => type_meta.column_definitions(),
            Self::Grpc => None,
        }
    }

    fn put_head(&self, head: &EventHead<'_>, body: &Body, out: &mut BytesMut) {
        match self {
            Self::Grpc => put_head(head, body, out),
            Self::Http { media, .. } => {
                kube_watch::put_head(*media, head.kind, Digits::of(head.version).as_str(), body.bytes.len(), out);
            }
        }
    }

    fn put_tail(&self, out: &mut BytesMut) {
        match self {
            Self::Grpc => {}
            Self::Http { media, .. } => kube_watch::put_tail(*media, out),
        }
    }

    /// Writes a message that is not an event. Returns the number of messages written.
    fn put_message(&self, message: &WatchResponse, out: &mut BytesMut) -> usize {
        match self {
            Self::Grpc => {
                let len = message.encoded_len();
                out.reserve(PREFIX_BYTES + len);
                put_prefix(out, len);
                message.encode_raw(out);
                1
            }
            Self::Http { media, type_meta, .. } => match &message.message {
                Some(watch_response::Message::Bookmark(_)) => {
                    kube_watch::put_bookmark(*media, type_meta, whole(&message.resume_version), false, out);
                    1
                }
                // A watch over HTTP has no other such messages.
                _ => 0,
            },
        }
    }
}

/// Writes frames into one buffer, for segments that many subscribers share.
pub struct FrameBuffer<'a> {
    layout: &'a Layout,
    bytes: BytesMut,
}

impl<'a> FrameBuffer<'a> {
    /// Returns a buffer with room for this many bytes.
    pub fn new(layout: &'a Layout, capacity: usize) -> Self {
        Self { layout, bytes: BytesMut::with_capacity(capacity) }
    }

    /// The bytes so far.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether nothing was added.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Ready to send.
    pub fn freeze(self) -> Bytes {
        self.bytes.freeze()
    }
}

impl Sink for FrameBuffer<'_> {
    fn event(&mut self, head: &EventHead<'_>, body: Body) {
        self.layout.put_head(head, &body, &mut self.bytes);
        self.bytes.put_slice(&body.bytes);
        self.layout.put_tail(&mut self.bytes);
    }

    fn message(&mut self, message: &WatchResponse) {
        self.layout.put_message(message, &mut self.bytes);
    }
}

/// The largest body that is copied behind its head, in bytes: to reference a small body costs more
/// than to copy it. With copies a snapshot of objects of 1.5 KiB takes 0.6 of the time; one of
/// objects of 5.8 KB would take 1.2 of it.
const COPIED_BODY_BYTES_MAX: usize = 4 << 10;

/// Writes frames for one subscriber: the heads share a buffer, and large bodies are referenced, not
/// copied.
pub struct FrameWriter<'a> {
    layout: &'a Layout,
    heads: BytesMut,
    /// Bodies that are referenced, with their offsets in the heads.
    bodies: Vec<(usize, Bytes)>,
    /// Bytes of these bodies.
    body_bytes: usize,
    messages: usize,
}

impl Sink for FrameWriter<'_> {
    fn event(&mut self, head: &EventHead<'_>, body: Body) {
        self.layout.put_head(head, &body, &mut self.heads);
        if body.bytes.len() <= COPIED_BODY_BYTES_MAX {
            self.heads.put_slice(&body.bytes);
        } else {
            self.body_bytes += body.bytes.len();
            self.bodies.push((self.heads.len(), body.bytes));
        }
        self.layout.put_tail(&mut self.heads);
        self.messages += 1;
    }

    fn message(&mut self, message: &WatchResponse) {
        self.messages += self.layout.put_message(message, &mut self.heads);
    }
}

impl<'a> FrameWriter<'a> {
    /// Returns a writer with room for this many bytes of heads and small bodies.
    pub fn new(layout: &'a Layout, capacity: usize) -> Self {
        let heads = BytesMut::with_capacity(capacity);
        Self { layout, heads, bodies: Vec::new(), body_bytes: 0, messages: 0 }
    }

    /// Ends the initial state of a watch over HTTP that asked for a bookmark there.
    pub fn initial_events_end(&mut self, version: ResourceVersion) {
        if let Layout::Http { media, type_meta, .. } = self.layout {
            kube_watch::put_bookmark(*media, type_meta, &version.whole().to_string(), true, &mut self.heads);
            self.messages += 1;
        }
    }

    /// The bytes so far.
    pub fn len(&self) -> usize {
        self.heads.len() + self.body_bytes
    }

    /// Whether nothing was added.
    pub fn is_empty(&self) -> bool {
        self.messages == 0
    }

    /// Ready to send. In a gzip body the bytes are stored: they are for one subscriber, so to
    /// compress them would cost as much as for all.
    pub fn finish(self) -> FrameBuf {
        let mut frames = FrameBuf::default();
        let is_gzip = self.layout.is_gzip();
        let mut add = |bytes: Bytes| {
            if is_gzip { frames.push_piece(&Piece::stored(bytes)) } else { frames.push(bytes) }
        };
        let heads = self.heads.freeze();
        let mut start = 0;
        for (end, body) in self.bodies {
            add(heads.slice(start..end));
            add(body);
            start = end;
        }
        add(heads.slice(start..));
        frames.count(self.messages);
        frames
    }
}

/// Writes an `Event` after its length, as in the content of a snapshot chunk.
pub fn put_delimited(head: &EventHead<'_>, body: &Body, out: &mut BytesMut) {
    let version = Digits::of(head.version);
    encode_varint((head.event_len(&version) + body.head_len() + body.bytes.len()) as u64, out);
    head.put_event(&version, out);
    body.put_head(out);
    out.put_slice(&body.bytes);
}

fn put_prefix(out: &mut BytesMut, message_len: usize) {
    out.put_u8(0);
    // An object is below 4 GiB: its spans are 32 bits wide.
    out.put_u32(u32::try_from(message_len).unwrap_or(u32::MAX));
}

fn put_text(field: u32, text: &str, out: &mut BytesMut) {
    if !text.is_empty() {
        encode_key(field, WireType::LengthDelimited, out);
        encode_varint(text.len() as u64, out);
        out.put_slice(text.as_bytes());
    }
}

fn put_number(field: u32, number: u64, out: &mut BytesMut) {
    if number != 0 {
        encode_key(field, WireType::Varint, out);
        encode_varint(number, out);
    }
}

/// A version without the place inside it, which HTTP does not have.
fn whole(version: &str) -> &str {
    version.split_once('.').map_or(version, |(whole, _)| whole)
}

/// The longest version: 20 digits, a point and 10 digits.
const DIGITS_MAX: usize = 31;

/// The decimal digits of a version, without an allocation.
#[derive(Clone, Copy)]
struct Digits {
    digits: [u8; DIGITS_MAX],
    start: usize,
}

impl Digits {
    /// Without the place inside it.
    fn of(version: ResourceVersion) -> Self {
        let mut digits = Self { digits: [0; DIGITS_MAX], start: DIGITS_MAX };
        digits.prepend(version.get());
        digits
    }

    /// Keeps the place inside the version, as a stream over gRPC resumes from it.
    fn of_place(version: ResourceVersion) -> Self {
        if version.sub() == 0 {
            return Self::of(version);
        }
        debug_assert!(!version.is_end(), "no event is at the end of its version");
        let mut digits = Self { digits: [0; DIGITS_MAX], start: DIGITS_MAX };
        digits.prepend(version.sub().into());
        digits.start -= 1;
        digits.digits[digits.start] = b'.';
        digits.prepend(version.get());
        digits
    }

    fn prepend(&mut self, mut rest: u64) {
        while rest > 0 {
            self.start -= 1;
            self.digits[self.start] = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
    }

    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.digits[self.start..]).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
