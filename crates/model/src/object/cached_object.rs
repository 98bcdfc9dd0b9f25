//! The type of an object: its key, its version and its bytes, packed or not.

use std::{fmt, num::NonZeroU64, sync::Arc};

use bytes::Bytes;

use super::{parser::ObjectParser, texts::Texts};
use crate::{
    ObjectKey, ResourceVersion,
    packer::Packer,
    protobuf::{at_version, is_enveloped},
};

/// A cached object.
pub struct Object {
    pub(super) key: ObjectKey,
    /// Without a place inside it, to save the memory.
    pub(super) version: NonZeroU64,
    /// Offset of the digits of `metadata.resourceVersion` in the JSON. 0 in protobuf: there the
    /// field is searched when needed, because the lengths around it must change too.
    pub(super) version_start: u32,
    pub(super) label_count: u32,
    pub(super) body: Body,
}

/// The bytes, and the texts that routing reads: first the uid, then the labels (key, value, key,
/// value, …), then the selectable fields.
pub(super) enum Body {
    /// Each text is a span of the bytes: its distance from the end of the previous one, and its
    /// length.
    Plain { bytes: Bytes, spans: Box<[u8]> },
    /// The texts, each after its length, then the packed bytes.
    Packed { data: Box<[u8]>, packer: Arc<Packer>, texts_len: u32, json_len: u32 },
    /// Only the texts, each after its length: see [`Object::selectable_attributes`].
    Attributes { texts: Box<[u8]>, parser: Arc<ObjectParser> },
}

impl Object {
    /// Namespace and name.
    pub fn key(&self) -> &ObjectKey {
        &self.key
    }

    /// `metadata.resourceVersion`.
    pub fn version(&self) -> ResourceVersion {
        self.version.into()
    }

    /// `metadata.uid`; empty if the object has none.
    pub fn uid(&self) -> &str {
        self.texts().next().unwrap_or_default()
    }

    /// The value of a label.
    pub fn label(&self, key: &str) -> Option<&str> {
        self.labels().find(|(k, _)| *k == key).map(|(_, value)| value)
    }

    /// All labels, in the order of the bytes.
    pub fn labels(&self) -> impl Iterator<Item = (&str, &str)> {
        let mut texts = self.texts().skip(1).take(2 * self.label_count as usize);
        std::iter::from_fn(move || Some((texts.next()?, texts.next()?)))
    }

    /// The object's bytes as a watch sends them: shared if the object is not packed, otherwise
    /// unpacked for the caller.
    pub fn bytes(&self) -> Bytes {
        match &self.body {
            Body::Plain { bytes, .. } => bytes.clone(),
            Body::Packed { data, packer, texts_len, json_len } => {
                packer.unpack(&data[*texts_len as usize..], *json_len as usize).into()
            }
            Body::Attributes { parser, .. } => self.attributes_bytes(parser, self.version()),
        }
    }

    /// The length of [`Self::bytes`] in bytes, without unpacking.
    pub fn json_len(&self) -> usize {
        match &self.body {
            Body::Plain { bytes, .. } => bytes.len(),
            Body::Packed { json_len, .. } => *json_len as usize,
            Body::Attributes { .. } => self.bytes().len(),
        }
    }

    /// Whether the bytes are packed.
    pub fn is_packed(&self) -> bool {
        matches!(self.body, Body::Packed { .. })
    }

    /// The object's bytes with another `metadata.resourceVersion`. An object that leaves a selector
    /// is sent in its last state with the version of the event that removed it
    /// (`updateResourceVersion` in the apiserver's `cache_watcher.go`).
    pub fn bytes_at(&self, version: ResourceVersion) -> Bytes {
        let version = version.whole();
        if let Body::Attributes { parser, .. } = &self.body {
            return self.attributes_bytes(parser, version);
        }
        let json = self.bytes();
        if is_enveloped(&json) {
            // This cannot fail: the parser read the version from the same field.
            return at_version(&json, version).unwrap_or(json);
        }
        let start = self.version_start as usize;
        let own = self.version.to_string();
        let digits = version.to_string();
        let mut bytes = Vec::with_capacity(json.len() - own.len() + digits.len());
        bytes.extend_from_slice(&json[..start]);
        bytes.extend_from_slice(digits.as_bytes());
        bytes.extend_from_slice(&json[start + own.len()..]);
        bytes.into()
    }

    /// Packs the object. Returns the object itself if it is packed already or packing saves
    /// nothing.
    pub fn packed(self: &Arc<Self>, packer: &Arc<Packer>) -> Arc<Self> {
        let Body::Plain { bytes, .. } = &self.body else { return self.clone() };
        let mut head = Vec::with_capacity(512);
        self.texts().write(&mut head);
        let Some(data) = packer.pack(&head, bytes) else { return self.clone() };
        // The parser refuses lengths that do not fit into 31 bits.
        let texts_len = head.len() as u32;
        let json_len = bytes.len() as u32;
        let body = Body::Packed { data, packer: packer.clone(), texts_len, json_len };
        let Self { version, version_start, label_count, .. } = **self;
        Arc::new(Self { key: self.key.clone(), version, version_start, label_count, body })
    }

    /// Shares the key of `other` if the keys are equal, so all versions of one object share its
    /// text.
    pub fn share_key(&mut self, other: &Self) {
        if self.key == other.key {
            self.key = other.key.clone();
        }
    }

    /// The object's memory in bytes, rounded up as an allocator does. The dictionary that packed
    /// objects share is not counted.
    pub fn cost_bytes(&self) -> usize {
        let body = match &self.body {
            Body::Plain { bytes, spans } => allocated_bytes(bytes.len()) + allocated_bytes(spans.len()),
            Body::Packed { data, .. } => allocated_bytes(data.len()),
            Body::Attributes { texts, .. } => allocated_bytes(texts.len()),
        };
        allocated_bytes(size_of::<Self>() + ARC_BYTES) + allocated_bytes(self.key.as_str().len() + ARC_BYTES) + body
    }

    pub(super) fn texts(&self) -> Texts<'_> {
        match &self.body {
            Body::Plain { bytes, spans } => Texts::Plain(bytes, spans, 0),
            Body::Packed { data, texts_len, .. } => Texts::Packed(&data[..*texts_len as usize]),
            Body::Attributes { texts, .. } => Texts::Packed(texts),
        }
    }
}

/// The two counters that an `Arc` stores in front of its value.
const ARC_BYTES: usize = 2 * size_of::<usize>();

/// The size of an allocation, in bytes: jemalloc has four size classes between powers of two.
fn allocated_bytes(len: usize) -> usize {
    let class = (len.next_power_of_two() / 8).max(16);
    len.next_multiple_of(class)
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.key, self.version)
    }
}
