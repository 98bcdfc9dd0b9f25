//! Kubernetes protobuf: the envelope, lists, watch events, and the messages derived from an object.
//!
//! `application/vnd.kubernetes.protobuf` is a magic number and a `runtime.Unknown` (apimachinery's
//! `pkg/runtime/generated.proto`): the type, and the message as bytes. Objects are cached in the
//! form that a watch sends, with their envelope. List items have none; the envelope added to them
//! here is the one that the apiserver writes, so lists and watches give the same bytes.

use std::{borrow::Cow, fmt::Display};

use bytes::{BufMut, Bytes};

pub mod kinds;
mod status;
pub mod wire;

pub use status::{Status, StatusCause, StatusDetails, StatusMeta};
pub use wire::Malformed;

use self::wire::{Fields, Value, bytes_field, put_bytes, put_head, put_number, replaced, varint_len, without};
use super::{ResourceVersion, projection::Projection};

/// Start of every protobuf response. JSON never starts with it.
pub const MAGIC: &[u8; 4] = b"k8s\0";

/// End of an envelope, after the message: empty content encoding and content type, which the
/// apiserver writes too.
pub const TAIL: &[u8] = &[0x1a, 0, 0x22, 0];

/// The annotation of the bookmark that ends the initial events of a watch.
pub const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

// `runtime.Unknown` and its `TypeMeta`.
const UNKNOWN_TYPE: u32 = 1;
const UNKNOWN_RAW: u32 = 2;
const UNKNOWN_CONTENT_ENCODING: u32 = 3;
const UNKNOWN_CONTENT_TYPE: u32 = 4;
const TYPE_API_VERSION: u32 = 1;
const TYPE_KIND: u32 = 2;
// `metav1.WatchEvent` and `runtime.RawExtension`.
const EVENT_TYPE: u32 = 1;
const EVENT_OBJECT: u32 = 2;
const EXTENSION_RAW: u32 = 1;
/// `metadata` of every object and of every list.
pub const METADATA: u32 = 1;
const LIST_ITEMS: u32 = 2;
// `metav1.ListMeta`.
const LIST_SELF_LINK: u32 = 1;
const LIST_RESOURCE_VERSION: u32 = 2;
const LIST_CONTINUE: u32 = 3;
const LIST_REMAINING_ITEM_COUNT: u32 = 4;
const LIST_SHARD_INFO: u32 = 5;
// `metav1.ShardInfo`.
const SHARD_SELECTOR: u32 = 1;
// `metav1.ObjectMeta`.
/// `metadata.name`.
pub const META_NAME: u32 = 1;
/// `metadata.namespace`.
pub const META_NAMESPACE: u32 = 3;
/// `metadata.uid`.
pub const META_UID: u32 = 5;
/// `metadata.resourceVersion`.
pub const META_RESOURCE_VERSION: u32 = 6;
/// `metadata.labels`, one field for each label.
pub const META_LABELS: u32 = 11;
const META_ANNOTATIONS: u32 = 12;
const META_MANAGED_FIELDS: u32 = 17;
/// The key of an entry of a map.
pub const ENTRY_KEY: u32 = 1;
/// The value of an entry of a map.
pub const ENTRY_VALUE: u32 = 2;

const PARTIAL_API_VERSION: &str = "meta.k8s.io/v1";
const PARTIAL_KIND: &str = "PartialObjectMetadata";

/// An envelope envelope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Envelope<'a> {
    /// The kind; empty if the envelope has none.
    pub kind: &'a str,
    /// The message.
    pub message: &'a [u8],
}

/// Whether bytes start like an envelope. JSON never does.
pub fn is_enveloped(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// Opens an envelope.
pub fn open(bytes: &[u8]) -> Result<Envelope<'_>, Malformed> {
    let unknown = unknown_of(bytes)?;
    let mut envelope = Envelope { kind: "", message: &[] };
    let mut found = false;
    for field in Fields::of(unknown) {
        let field = field?;
        match (field.number, field.value) {
            (UNKNOWN_TYPE, Value::Bytes(of)) => {
                envelope.kind =
                    std::str::from_utf8(bytes_field(of, TYPE_KIND)?.unwrap_or_default()).unwrap_or_default();
            }
            // Two messages are ambiguous: readers could disagree on which one counts.
            (UNKNOWN_RAW, Value::Bytes(_)) if found => return Err(Malformed("the envelope contains two messages")),
            (UNKNOWN_RAW, Value::Bytes(message)) => {
                envelope.message = message;
                found = true;
            }
            (UNKNOWN_CONTENT_ENCODING | UNKNOWN_CONTENT_TYPE, Value::Bytes(text)) if !text.is_empty() => {
                return Err(Malformed("the envelope has a content encoding or a content type"));
            }
            _ => {}
        }
    }
    // An empty message is valid: it is an object without any fields.
    if found { Ok(envelope) } else { Err(Malformed("the envelope is empty")) }
}

/// Writes an envelope up to its message of `message_len` bytes. The message and [`TAIL`] follow.
pub fn put_envelope_head(api_version: &str, kind: &str, message_len: usize, out: &mut impl BufMut) {
    let text_len = |text: &str| 1 + varint_len(text.len()) + text.len();
    out.put_slice(MAGIC);
    put_head(UNKNOWN_TYPE, text_len(api_version) + text_len(kind), out);
    put_bytes(TYPE_API_VERSION, api_version.as_bytes(), out);
    put_bytes(TYPE_KIND, kind.as_bytes(), out);
    put_head(UNKNOWN_RAW, message_len, out);
}

/// A message in its envelope, as the apiserver writes it.
pub fn enveloped(api_version: &str, kind: &str, message: &[u8]) -> Bytes {
    let mut out = Vec::with_capacity(64 + api_version.len() + kind.len() + message.len());
    put_envelope_head(api_version, kind, message.len(), &mut out);
    out.put_slice(message);
    out.put_slice(TAIL);
    // Without spare capacity, because objects are cached for long.
    out.into_boxed_slice().into()
}

/// The `runtime.Unknown` of an envelope.
fn unknown_of(bytes: &[u8]) -> Result<&[u8], Malformed> {
    bytes.strip_prefix(MAGIC).ok_or(Malformed("it does not start with k8s\\0"))
}

/// The object with `bytes` as the value of the field at a path of its `runtime.Unknown`.
fn with_field(object: &[u8], path: &[u32], bytes: &[u8]) -> Result<Bytes, Malformed> {
    Ok([MAGIC, &*replaced(unknown_of(object)?, path, bytes)?].concat().into())
}

/// The object with another `metadata.resourceVersion`.
pub fn at_version(object: &[u8], version: ResourceVersion) -> Result<Bytes, Malformed> {
    const PATH: [u32; 3] = [UNKNOWN_RAW, METADATA, META_RESOURCE_VERSION];
    with_field(object, &PATH, version.to_string().as_bytes())
}

/// The projected object as a message without an envelope, as in a list. For a projection to the
/// metadata it is a `metav1.PartialObjectMetadata`. Only those parts of a projection are applied
/// that [`super::format::Format::http`] allows.
pub fn projected_item(object: &[u8], projection: &Projection) -> Result<Vec<u8>, Malformed> {
    let message = open(object)?.message;
    let message = if projection.is_partial() {
        let metadata = bytes_field(message, METADATA)?.unwrap_or_default();
        let mut partial = Vec::with_capacity(1 + varint_len(metadata.len()) + metadata.len());
        put_bytes(METADATA, metadata, &mut partial);
        Cow::Owned(partial)
    } else {
        Cow::Borrowed(message)
    };
    if projection.keeps_managed_fields() {
        Ok(message.into_owned())
    } else {
        without(&message, &[METADATA, META_MANAGED_FIELDS])
    }
}

/// The projected object in its envelope, as a watch and a GET send it.
pub fn projected(object: &[u8], projection: &Projection) -> Result<Bytes, Malformed> {
    let message = projected_item(object, projection)?;
    if projection.is_partial() {
        return Ok(enveloped(PARTIAL_API_VERSION, PARTIAL_KIND, &message));
    }
    with_field(object, &[UNKNOWN_RAW], &message)
}

/// The object of a bookmark. It contains only the version and, at the end of the initial events,
/// the annotation for that.
pub fn bookmark(api_version: &str, kind: &str, version: impl Display, ends_initial_state: bool) -> Bytes {
    let mut metadata = Vec::new();
    let mut message = Vec::new();
    put_bytes(META_RESOURCE_VERSION, version.to_string().as_bytes(), &mut metadata);
    if ends_initial_state {
        let mut entry = Vec::new();
        put_bytes(ENTRY_KEY, INITIAL_EVENTS_END.as_bytes(), &mut entry);
        put_bytes(ENTRY_VALUE, b"true", &mut entry);
        put_bytes(META_ANNOTATIONS, &entry, &mut metadata);
    }
    put_bytes(METADATA, &metadata, &mut message);
    enveloped(api_version, kind, &message)
}

/// A list's metadata.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListMeta {
    /// The version of the list.
    pub resource_version: String,
    /// The continue token of the next page; empty on the last page.
    pub next: String,
    /// Number of objects after this page, if known.
    pub remaining_item_count: Option<u64>,
    /// The shard selector of the request; empty if it had none. Lists from upstream have none.
    pub shard_selector: String,
}

/// Writes a list up to its first item. `items_len` is the sum of [`item_len`] over all items. The
/// items follow, each with [`put_item_head`] and its message, then [`TAIL`].
pub fn put_list_head(api_version: &str, kind: &str, meta: &ListMeta, items_len: usize, out: &mut impl BufMut) {
    let mut metadata = Vec::with_capacity(64 + meta.next.len());
    put_bytes(LIST_SELF_LINK, b"", &mut metadata);
    put_bytes(LIST_RESOURCE_VERSION, meta.resource_version.as_bytes(), &mut metadata);
    put_bytes(LIST_CONTINUE, meta.next.as_bytes(), &mut metadata);
    if let Some(count) = meta.remaining_item_count {
        put_number(LIST_REMAINING_ITEM_COUNT, count, &mut metadata);
    }
    if !meta.shard_selector.is_empty() {
        let mut info = Vec::with_capacity(3 + meta.shard_selector.len());
        put_bytes(SHARD_SELECTOR, meta.shard_selector.as_bytes(), &mut info);
        put_bytes(LIST_SHARD_INFO, &info, &mut metadata);
    }
    let message_len = 1 + varint_len(metadata.len()) + metadata.len() + items_len;
    put_envelope_head(api_version, kind, message_len, out);
    put_bytes(METADATA, &metadata, out);
}

/// The number of bytes of a list item whose message has `message_len` bytes.
pub fn item_len(message_len: usize) -> usize {
    1 + varint_len(message_len) + message_len
}

/// Writes the start of a list item, up to its message.
pub fn put_item_head(message_len: usize, out: &mut impl BufMut) {
    put_head(LIST_ITEMS, message_len, out);
}

/// A parsed page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List<'a> {
    /// Metadata of the list.
    pub meta: ListMeta,
    /// The messages of its items.
    pub items: Vec<&'a [u8]>,
}

/// Parses the message of a list.
pub fn read_list(message: &[u8]) -> Result<List<'_>, Malformed> {
    let mut meta = ListMeta::default();
    let mut items = Vec::new();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    for field in Fields::of(message) {
        match field.map(|field| (field.number, field.value))? {
            (METADATA, Value::Bytes(metadata)) => {
                for field in Fields::of(metadata) {
                    match field.map(|field| (field.number, field.value))? {
                        (LIST_RESOURCE_VERSION, Value::Bytes(version)) => meta.resource_version = text(version),
                        (LIST_CONTINUE, Value::Bytes(next)) => meta.next = text(next),
                        (LIST_REMAINING_ITEM_COUNT, Value::Varint(count, _)) => meta.remaining_item_count = Some(count),
                        _ => {}
                    }
                }
            }
            (LIST_ITEMS, Value::Bytes(item)) => items.push(item),
            _ => {}
        }
    }
    Ok(List { meta, items })
}

/// A parsed `metav1.WatchEvent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WatchEvent<'a> {
    /// `ADDED`, `MODIFIED`, `DELETED`, `BOOKMARK` or `ERROR`.
    pub kind: &'a str,
    /// The object, in its envelope.
    pub object: &'a [u8],
}

/// Parses an event of a watch. The frame length is not part of `event`.
pub fn read_watch_event(event: &[u8]) -> Result<WatchEvent<'_>, Malformed> {
    let kind = bytes_field(event, EVENT_TYPE)?.unwrap_or_default();
    let kind = std::str::from_utf8(kind).map_err(|_| Malformed("the type of an event is not UTF-8"))?;
    let extension = bytes_field(event, EVENT_OBJECT)?.ok_or(Malformed("an event without an object"))?;
    Ok(WatchEvent { kind, object: bytes_field(extension, EXTENSION_RAW)?.unwrap_or_default() })
}

/// Writes a watch event up to its object, for a websocket, whose messages have their own length.
pub fn put_watch_event_head(kind: &str, object_len: usize, out: &mut impl BufMut) {
    put_bytes(EVENT_TYPE, kind.as_bytes(), out);
    put_head(EVENT_OBJECT, 1 + varint_len(object_len) + object_len, out);
    put_head(EXTENSION_RAW, object_len, out);
}

/// Writes a watch event up to its object, for an HTTP body: its length in four bytes (big-endian),
/// then the event. Nothing follows the object.
pub fn put_watch_frame_head(kind: &str, object_len: usize, out: &mut impl BufMut) {
    let extension_len = 1 + varint_len(object_len) + object_len;
    let event_len = 1 + varint_len(kind.len()) + kind.len() + 1 + varint_len(extension_len) + extension_len;
    // The parser refuses objects of 2 GiB or more.
    out.put_u32(u32::try_from(event_len).unwrap_or(u32::MAX));
    put_watch_event_head(kind, object_len, out);
}

/// A whole frame of a watch's HTTP body, for a small object.
pub fn watch_frame(kind: &str, object: &[u8]) -> Bytes {
    let mut out = Vec::with_capacity(32 + object.len());
    put_watch_frame_head(kind, object.len(), &mut out);
    out.put_slice(object);
    out.into()
}

/// The content of a bookmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bookmark<'a> {
    /// The resource version as written.
    pub version: &'a str,
    /// Whether it ends the initial events.
    pub ends_initial_state: bool,
}

/// Parses the object of a bookmark.
pub fn read_bookmark(object: &[u8]) -> Result<Bookmark<'_>, Malformed> {
    let metadata = bytes_field(open(object)?.message, METADATA)?.unwrap_or_default();
    let version = bytes_field(metadata, META_RESOURCE_VERSION)?.unwrap_or_default();
    let version = std::str::from_utf8(version).map_err(|_| Malformed("a version is not UTF-8"))?;
    let mut ends_initial_state = false;
    for field in Fields::of(metadata) {
        if let (META_ANNOTATIONS, Value::Bytes(entry)) = field.map(|field| (field.number, field.value))?
            && bytes_field(entry, ENTRY_KEY)? == Some(INITIAL_EVENTS_END.as_bytes())
        {
            ends_initial_state = bytes_field(entry, ENTRY_VALUE)? == Some(b"true");
        }
    }
    Ok(Bookmark { version, ends_initial_state })
}
