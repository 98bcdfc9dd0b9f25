//! One Kubernetes object: immutable, shared, parsed once to what routing needs; the rest stays the bytes it came as.
//!
//! The bytes are in the watch's form, the only one that is kept. Items of a list lack `kind` and `apiVersion` where the type is
//! built in; [`ObjectParser::from_list_item`] puts them where the apiserver's encoder puts them, so that both ways give the same bytes.
//! Labels and fields are spans of those bytes: a decoded object would cost five times its JSON.
//!
//! At rest an object may be packed: a new object with its JSON compressed, whose uid, labels and fields are read as before, from a
//! small text of their own. An object never changes, so reading one takes no lock.
//!
//! The same holds for objects in protobuf: the bytes are the envelope that a watch sends, and what is looked at are spans of those. And for
//! rows of tables: the bytes are the row, and the object is in it.

use std::{borrow::Cow, fmt, sync::Arc};

use bytes::Bytes;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

mod protobuf;
mod remnant;

use self::protobuf::ProtobufFields;
use super::{
    GroupVersionResource, Media, ObjectKey, ResourceVersion,
    fields::{FieldRef, FieldTable},
    packer::Packer,
    protobuf::{Malformed, at_version, enveloped, is_enveloped},
    table::{TableError, Tables},
};

/// An object as the cache holds it.
pub struct Object {
    key: ObjectKey,
    version: ResourceVersion,
    /// Where the digits of `metadata.resourceVersion` begin in the JSON; 0 in protobuf, where they are looked for when it is needed,
    /// because the lengths around them are needed too.
    version_start: u32,
    label_count: u32,
    body: Body,
}

/// The bytes, and the texts that routing reads: the uid, the labels (key, value, key, value, …), then the fields.
enum Body {
    /// Each text is a span of the bytes: how far it begins from the end of the one before, and its length.
    Plain { bytes: Bytes, spans: Box<[u8]> },
    /// Texts, each behind its length, then the packed bytes.
    Packed { data: Box<[u8]>, packer: Arc<Packer>, texts_len: u32, json_len: u32 },
    /// Texts alone, each behind its length: see [`Object::remnant`].
    Remnant { texts: Box<[u8]>, parser: Arc<ObjectParser> },
}

/// Why bytes are no object of a resource.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// Not JSON, or not an object.
    #[error("object is not valid JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// Not protobuf in Kubernetes' envelope.
    #[error("object cannot be read: {0}")]
    Protobuf(#[from] Malformed),
    /// Not the row of a Table.
    #[error("its table cannot be kept: {0}")]
    Table(#[from] TableError),
    /// A field that every object must have.
    #[error("object has no usable metadata.{0}")]
    Metadata(&'static str),
    /// Places in it are counted in 31 bits; an apiserver's objects are below 3 MiB.
    #[error("object of {0} bytes is too large")]
    TooLarge(usize),
}

/// The texts of a body, in order.
enum Texts<'a> {
    /// The bytes, the spans that are left, and the end of the last one.
    Plain(&'a [u8], &'a [u8], usize),
    Packed(&'a [u8]),
}

impl<'a> Texts<'a> {
    /// The bytes of the text at a position, without a look at them.
    fn at(mut self, position: usize) -> Option<&'a [u8]> {
        for _ in 0..position {
            self.advance()?;
        }
        self.advance()
    }

    /// All of them as they are packed, each behind its length.
    fn write(mut self, out: &mut Vec<u8>) {
        while let Some(text) = self.advance() {
            put_number(out, text.len());
            out.extend_from_slice(text);
        }
    }

    /// The next text's bytes, without a look at them.
    fn advance(&mut self) -> Option<&'a [u8]> {
        match self {
            Self::Plain(bytes, spans, end) => {
                let (distance, rest) = split_number(spans)?;
                let (len, rest) = split_number(rest)?;
                // Distances go both ways: the lowest bit is the sign.
                let start = if distance & 1 == 0 { *end + distance / 2 } else { end.checked_sub(distance / 2)? };
                (*spans, *end) = (rest, start + len);
                bytes.get(start..*end)
            }
            Self::Packed(rest) => {
                let (len, text) = split_number(rest)?;
                let (text, after) = text.split_at_checked(len)?;
                *rest = after;
                Some(text)
            }
        }
    }
}

impl<'a> Iterator for Texts<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        // The bytes were valid JSON, and texts lie on the borders of its strings.
        self.advance().map(|text| std::str::from_utf8(text).unwrap_or_default())
    }

    fn nth(&mut self, skip: usize) -> Option<&'a str> {
        for _ in 0..skip {
            self.advance()?;
        }
        self.next()
    }
}

/// Writes the spans of texts in `bytes`.
#[derive(Default)]
struct Spans {
    written: Vec<u8>,
    end: usize,
}

impl Spans {
    /// A text that lies in `bytes`; an empty one may lie anywhere.
    fn put(&mut self, bytes: &[u8], text: &[u8]) {
        let start = if text.is_empty() { self.end } else { text.as_ptr() as usize - bytes.as_ptr() as usize };
        let distance = if start >= self.end { (start - self.end) * 2 } else { (self.end - start) * 2 + 1 };
        put_number(&mut self.written, distance);
        put_number(&mut self.written, text.len());
        self.end = start + text.len();
    }
}

/// Appends a number in groups of seven bits, the lowest first.
fn put_number(buffer: &mut Vec<u8>, mut number: usize) {
    while number >= 0x80 {
        buffer.push(number as u8 | 0x80);
        number >>= 7;
    }
    buffer.push(number as u8);
}

fn split_number(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (mut number, mut shift) = (0, 0);
    // Twice a length of 32 bits is the largest that is written.
    for (at, byte) in bytes.iter().enumerate().take(5) {
        number |= usize::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            return Some((number, &bytes[at + 1..]));
        }
    }
    None
}

/// Which parts of an object are looked at: the metadata, and the selectable fields of its resource. Made once per resource.
#[derive(Debug)]
pub struct ObjectParser {
    reads: Reads,
    defaults: Vec<&'static str>,
    /// Where each field lies first, and the type that objects are of: what the JSON of a remnant is made with.
    paths: Vec<Option<Vec<String>>>,
    kind: String,
    api_version: String,
}

/// By names or by numbers.
#[derive(Debug)]
enum Reads {
    Json(JsonFields),
    Protobuf(ProtobufFields),
    /// By names too, in the rows of tables.
    Table {
        object: JsonFields,
        tables: Arc<Tables>,
    },
}

/// Where in JSON what is looked at lies.
#[derive(Debug)]
struct JsonFields {
    root: Node,
    /// For each field, the slots that may hold it, in order of preference.
    fields: Vec<Vec<usize>>,
    slots: usize,
}

impl JsonFields {
    /// In objects that lie at a path.
    fn new(table: &FieldTable, at: &[&str]) -> Self {
        let (mut root, mut slots) = (Node::default(), 0);
        let mut insert = |path: &[&str]| root.insert(&[at, path].concat(), &mut slots);
        for name in METADATA {
            insert(&["metadata", name]);
        }
        for name in ["kind", "apiVersion"] {
            insert(&[name]);
        }
        let mut path = |path: &Vec<String>| insert(&path.iter().map(String::as_str).collect::<Vec<_>>());
        let fields = table.fields().iter().map(|field| field.paths.iter().map(&mut path).collect()).collect();
        Self { root, fields, slots }
    }
}

/// A tree of field names; a leaf's value is kept as the span of its JSON.
#[derive(Debug, Default)]
struct Node {
    children: Vec<(String, Node)>,
    slot: Option<usize>,
}

const NAME: usize = 0;
const NAMESPACE: usize = 1;
const UID: usize = 2;
const VERSION: usize = 3;
const LABELS: usize = 4;
const METADATA: [&str; 5] = ["name", "namespace", "uid", "resourceVersion", "labels"];
const KIND: usize = 5;
const API_VERSION: usize = 6;

impl Node {
    fn insert(&mut self, path: &[impl AsRef<str>], slot: &mut usize) -> usize {
        let Some((first, rest)) = path.split_first() else {
            return *self.slot.get_or_insert_with(|| {
                *slot += 1;
                *slot - 1
            });
        };
        let at = self.children.iter().position(|(name, _)| name == first.as_ref()).unwrap_or_else(|| {
            self.children.push((first.as_ref().to_owned(), Node::default()));
            self.children.len() - 1
        });
        self.children[at].1.insert(rest, slot)
    }
}

impl ObjectParser {
    /// A parser for the objects of a resource with these selectable fields, as JSON.
    pub fn new(table: &FieldTable) -> Self {
        Self::reading(Reads::Json(JsonFields::new(table, &[])), table)
    }

    /// The same for objects in protobuf; `None` for a resource of which it is not known where its fields lie.
    pub fn protobuf(gvr: &GroupVersionResource, table: &FieldTable) -> Option<Self> {
        Some(Self::reading(Reads::Protobuf(ProtobufFields::new(gvr, table)?), table))
    }

    /// The same for objects in the rows of tables.
    pub fn table(tables: Tables, table: &FieldTable) -> Self {
        let (object, tables) = (JsonFields::new(table, &["object"]), Arc::new(tables));
        Self::reading(Reads::Table { object, tables }, table)
    }

    fn reading(reads: Reads, table: &FieldTable) -> Self {
        let defaults = table.fields().iter().map(|field| field.default).collect();
        let paths = table.fields().iter().map(|field| field.paths.first().cloned()).collect();
        Self { reads, defaults, paths, kind: String::new(), api_version: String::new() }
    }

    /// In which encoding objects are read.
    pub fn media(&self) -> Media {
        match self.reads {
            Reads::Json(_) => Media::Json,
            Reads::Protobuf(_) => Media::Protobuf,
            Reads::Table { .. } => Media::Table,
        }
    }

    /// What is known of the tables whose rows are read.
    pub fn tables(&self) -> Option<&Arc<Tables>> {
        match &self.reads {
            Reads::Table { tables, .. } => Some(tables),
            Reads::Json(_) | Reads::Protobuf(_) => None,
        }
    }

    /// The kind and the group version of the objects.
    pub fn type_meta(&self) -> (&str, &str) {
        (&self.kind, &self.api_version)
    }

    /// The same for objects of this type.
    pub fn of(self, kind: &str, api_version: &str) -> Self {
        Self { kind: kind.to_owned(), api_version: api_version.to_owned(), ..self }
    }

    /// An object from the bytes of a watch event or a GET. They are copied, so that a network buffer is not kept alive.
    pub fn parse(&self, bytes: &[u8]) -> Result<Object, ObjectError> {
        match &self.reads {
            Reads::Json(fields) => Ok(parse_json(fields, Bytes::copy_from_slice(bytes))?.0),
            Reads::Protobuf(fields) => fields.parse(Bytes::copy_from_slice(bytes)),
            Reads::Table { object, tables } => {
                let row = tables.keep(bytes)?.into_boxed_slice();
                Ok(parse_json(object, Bytes::from(row))?.0)
            }
        }
    }

    /// An object from an item of a list: JSON gets `kind` and `api_version` in front where the item has none, protobuf its envelope;
    /// a row is the same everywhere.
    pub fn from_list_item(&self, item: &[u8], kind: &str, api_version: &str) -> Result<Object, ObjectError> {
        let fields = match &self.reads {
            Reads::Json(fields) => fields,
            Reads::Protobuf(fields) => return fields.parse(enveloped(api_version, kind, item)),
            Reads::Table { .. } => return self.parse(item),
        };
        let (object, has_type) = parse_json(fields, Bytes::copy_from_slice(item))?;
        // Wherever they stand: the keys of a custom resource are sorted, and some sort before these.
        if has_type {
            return Ok(object);
        }
        let body = item.trim_ascii_start();
        let body = body.strip_prefix(b"{").unwrap_or(body).trim_ascii_start();
        let comma = if body.starts_with(b"}") { "" } else { "," };
        let head = format!("{{\"kind\":\"{kind}\",\"apiVersion\":\"{api_version}\"{comma}");
        let canonical = [head.as_bytes(), body].concat().into_boxed_slice();
        Ok(parse_json(fields, Bytes::from(canonical))?.0)
    }

    /// The value that a field selector compares with.
    pub fn field<'a>(&self, object: &'a Object, field: FieldRef) -> Cow<'a, str> {
        match field {
            FieldRef::Name => Cow::Borrowed(object.key.name()),
            FieldRef::Namespace => Cow::Borrowed(object.key.namespace()),
            FieldRef::Index(index) => {
                let raw = object.texts().at(1 + 2 * object.label_count as usize + index).unwrap_or_default();
                match &self.reads {
                    _ if raw.is_empty() => Cow::Borrowed(self.defaults.get(index).copied().unwrap_or_default()),
                    Reads::Json(_) | Reads::Table { .. } => field_text(std::str::from_utf8(raw).unwrap_or_default()),
                    Reads::Protobuf(fields) => fields.text(index, raw),
                }
            }
        }
    }
}

/// Places are counted in 31 bits.
fn check_len(bytes: &[u8]) -> Result<(), ObjectError> {
    i32::try_from(bytes.len()).map(|_| ()).map_err(|_| ObjectError::TooLarge(bytes.len()))
}

/// The object, and whether it says its kind.
fn parse_json(JsonFields { root, fields, slots }: &JsonFields, bytes: Bytes) -> Result<(Object, bool), ObjectError> {
    check_len(&bytes)?;
    let mut slots = vec![None; *slots];
    let mut json = serde_json::Deserializer::from_slice(&bytes);
    Walk { node: root, slots: &mut slots }.deserialize(&mut json)?;
    json.end()?;

    let text = |slot: usize| slots[slot].and_then(|raw: &str| plain_string(raw)).filter(|text| !text.is_empty());
    // Names of some types may hold what JSON escapes (RBAC takes any path segment, such as `a&b`).
    let unescaped = |slot: usize| slots[slot].map(field_text).filter(|text| !text.is_empty());
    let name = unescaped(NAME).ok_or(ObjectError::Metadata("name"))?;
    let version_text = text(VERSION).ok_or(ObjectError::Metadata("resourceVersion"))?;
    let version = version_text.parse().map_err(|_| ObjectError::Metadata("resourceVersion"))?;
    let labels = slots[LABELS].map_or(Ok(Vec::new()), label_pairs)?;
    let present = |slot: &usize| slots[*slot].filter(|raw| *raw != "null" && *raw != "\"\"");
    let mut spans = Spans::default();
    spans.put(&bytes, text(UID).unwrap_or_default().as_bytes());
    labels.iter().flat_map(|(key, value)| [key, value]).for_each(|text| spans.put(&bytes, text.as_bytes()));
    let field = |of: &Vec<usize>| of.iter().find_map(present).unwrap_or_default().as_bytes();
    fields.iter().for_each(|of| spans.put(&bytes, field(of)));
    let object = Object {
        key: ObjectKey::new(text(NAMESPACE).unwrap_or_default(), &name),
        version,
        version_start: (version_text.as_ptr() as usize - bytes.as_ptr() as usize) as u32,
        label_count: labels.len() as u32,
        body: Body::Plain { spans: spans.written.into(), bytes: bytes.clone() },
    };
    Ok((object, slots[KIND].is_some() || slots[API_VERSION].is_some()))
}

impl Object {
    /// Namespace and name.
    pub fn key(&self) -> &ObjectKey {
        &self.key
    }

    /// `metadata.resourceVersion`.
    pub fn version(&self) -> ResourceVersion {
        self.version
    }

    /// `metadata.uid`; empty where there is none.
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

    /// The object's bytes, in the form a watch sends: shared where it is held plain, else unpacked for the caller.
    pub fn bytes(&self) -> Bytes {
        match &self.body {
            Body::Plain { bytes, .. } => bytes.clone(),
            Body::Packed { data, packer, texts_len, json_len } => {
                packer.unpack(&data[*texts_len as usize..], *json_len as usize).into()
            }
            Body::Remnant { parser, .. } => self.remnant_bytes(parser, self.version),
        }
    }

    /// The length of [`Self::bytes`], without unpacking.
    pub fn json_len(&self) -> usize {
        match &self.body {
            Body::Plain { bytes, .. } => bytes.len(),
            Body::Packed { json_len, .. } => *json_len as usize,
            Body::Remnant { .. } => self.bytes().len(),
        }
    }

    /// Whether the bytes are held packed.
    pub fn is_packed(&self) -> bool {
        matches!(self.body, Body::Packed { .. })
    }

    /// The object's bytes with another `metadata.resourceVersion`: the last state of an object that left a selector carries the
    /// version of the event that took it away (`updateResourceVersion` in the apiserver's `cache_watcher.go`).
    pub fn bytes_at(&self, version: ResourceVersion) -> Bytes {
        if let Body::Remnant { parser, .. } = &self.body {
            return self.remnant_bytes(parser, version);
        }
        let json = self.bytes();
        if is_enveloped(&json) {
            // The parser has found the version where it is now looked for.
            return at_version(&json, version).unwrap_or(json);
        }
        let start = self.version_start as usize;
        let (own, digits) = (self.version.to_string(), version.to_string());
        let mut bytes = Vec::with_capacity(json.len() - own.len() + digits.len());
        bytes.extend_from_slice(&json[..start]);
        bytes.extend_from_slice(digits.as_bytes());
        bytes.extend_from_slice(&json[start + own.len()..]);
        bytes.into()
    }

    /// The same object packed; itself where it is already, or where packing saves nothing.
    pub fn packed(self: &Arc<Self>, packer: &Arc<Packer>) -> Arc<Self> {
        let Body::Plain { bytes, .. } = &self.body else { return self.clone() };
        let mut head = Vec::with_capacity(512);
        self.texts().write(&mut head);
        let Some(data) = packer.pack(&head, bytes) else { return self.clone() };
        // The parser has refused what 31 bits cannot count.
        let (texts_len, json_len) = (head.len() as u32, bytes.len() as u32);
        let body = Body::Packed { data, packer: packer.clone(), texts_len, json_len };
        let Self { version, version_start, label_count, .. } = **self;
        Arc::new(Self { key: self.key.clone(), version, version_start, label_count, body })
    }

    /// Takes over the key of an equal object, so that the versions of one object share its text.
    pub fn share_key(&mut self, other: &Self) {
        if self.key == other.key {
            self.key = other.key.clone();
        }
    }

    /// What the object costs in memory, in bytes, as an allocator rounds it; what packed objects share is not counted.
    pub fn cost_bytes(&self) -> usize {
        let body = match &self.body {
            Body::Plain { bytes, spans } => allocated_bytes(bytes.len()) + allocated_bytes(spans.len()),
            Body::Packed { data, .. } => allocated_bytes(data.len()),
            Body::Remnant { texts, .. } => allocated_bytes(texts.len()),
        };
        allocated_bytes(size_of::<Self>() + ARC_BYTES) + allocated_bytes(self.key.as_str().len() + ARC_BYTES) + body
    }

    fn texts(&self) -> Texts<'_> {
        match &self.body {
            Body::Plain { bytes, spans } => Texts::Plain(bytes, spans, 0),
            Body::Packed { data, texts_len, .. } => Texts::Packed(&data[..*texts_len as usize]),
            Body::Remnant { texts, .. } => Texts::Packed(texts),
        }
    }
}

/// The two counters in front of what an `Arc` holds.
const ARC_BYTES: usize = 2 * size_of::<usize>();

/// What an allocation takes: four size classes between a power of two and the next, as jemalloc has them.
fn allocated_bytes(len: usize) -> usize {
    let class = (len.next_power_of_two() / 8).max(16);
    len.next_multiple_of(class)
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.key, self.version)
    }
}

/// The text of a JSON string without escapes, which versions, uids and labels never have.
fn plain_string(raw: &str) -> Option<&str> {
    let text = raw.strip_prefix('"')?.strip_suffix('"')?;
    (!text.contains('\\')).then_some(text)
}

/// A field's JSON as selectors compare it: strings without quotes, numbers and booleans as they stand.
fn field_text(raw: &str) -> Cow<'_, str> {
    match (plain_string(raw), raw.starts_with('"')) {
        (Some(text), _) => Cow::Borrowed(text),
        (None, true) => serde_json::from_str(raw).map_or(Cow::Borrowed(""), Cow::Owned),
        (None, false) => Cow::Borrowed(raw),
    }
}

fn label_pairs(raw: &str) -> Result<Vec<(&str, &str)>, ObjectError> {
    struct Pairs;
    impl<'de> Visitor<'de> for Pairs {
        type Value = Vec<(&'de str, &'de str)>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map of labels")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut pairs = Vec::new();
            while let Some(pair) = map.next_entry()? {
                pairs.push(pair);
            }
            Ok(pairs)
        }
        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(Vec::new())
        }
    }
    Ok(serde_json::Deserializer::from_str(raw).deserialize_any(Pairs)?)
}

/// Walks an object along the tree, keeping the JSON of its leaves and skipping the rest.
struct Walk<'t, 'de, 's> {
    node: &'t Node,
    slots: &'s mut [Option<&'de str>],
}

impl<'de> DeserializeSeed<'de> for Walk<'_, 'de, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self.node.slot {
            Some(slot) => {
                let raw: &RawValue = serde::Deserialize::deserialize(deserializer)?;
                self.slots[slot] = Some(raw.get());
                Ok(())
            }
            None => deserializer.deserialize_any(self),
        }
    }
}

/// A value of another type than a map (say `"spec": null`) holds none of the fields: it is skipped.
impl<'de> Visitor<'de> for Walk<'_, 'de, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            match self.node.children.iter().find(|(name, _)| *name == key) {
                Some((_, node)) => map.next_value_seed(Walk { node, slots: self.slots })?,
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;
    use crate::GroupVersionResource;

    fn pods() -> (GroupVersionResource, FieldTable) {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let table = FieldTable::new(&gvr, true, &[]);
        (gvr, table)
    }

    const POD: &str = r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"web-1","namespace":"default","uid":"u-1","resourceVersion":"99","labels":{"app":"web","tier":"front"}},"spec":{"nodeName":"n1","hostNetwork":true},"status":{"phase":"Run\u006eing"}}"#;

    #[test]
    fn what_routing_needs_is_read_and_the_bytes_stay() {
        let (gvr, table) = pods();
        let parser = ObjectParser::new(&table);
        let pod = parser.parse(POD.as_bytes()).unwrap();
        assert_eq!((pod.key().as_str(), pod.uid(), pod.version().get()), ("default/web-1", "u-1", 99));
        assert_eq!((pod.label("tier"), pod.label("none")), (Some("front"), None));
        let field = |name| parser.field(&pod, table.resolve(name, &gvr).unwrap()).into_owned();
        assert_eq!(field("spec.nodeName"), "n1");
        assert_eq!(field("spec.host"), "n1");
        assert_eq!(field("spec.hostNetwork"), "true");
        assert_eq!(field("status.phase"), "Running", "escapes are resolved");
        assert_eq!(field("status.podIP"), "");
        assert_eq!(field("metadata.name"), "web-1");
        assert_eq!(pod.bytes(), POD.as_bytes());
    }

    #[test]
    fn a_missing_field_has_the_zero_value_of_its_type() {
        let (gvr, table) = pods();
        let parser = ObjectParser::new(&table);
        let pod = parser.parse(br#"{"metadata":{"name":"x","resourceVersion":"1"},"spec":null,"status":7}"#).unwrap();
        assert_eq!(parser.field(&pod, table.resolve("spec.hostNetwork", &gvr).unwrap()), "false");
        assert_eq!(pod.key().as_str(), "x");
    }

    #[test]
    fn a_list_item_becomes_what_a_watch_would_have_sent() {
        let parser = ObjectParser::new(&pods().1);
        let item = POD.replace(r#""kind":"Pod","apiVersion":"v1","#, "");
        assert_eq!(parser.from_list_item(item.as_bytes(), "Pod", "v1").unwrap().bytes(), POD.as_bytes());
        assert_eq!(parser.from_list_item(POD.as_bytes(), "Pod", "v1").unwrap().bytes(), POD.as_bytes());
    }

    #[test]
    fn a_custom_object_whose_keys_sort_before_its_kind_stays_as_it_is() {
        let parser = ObjectParser::new(&pods().1);
        let item = r#"{"allowAll":true,"apiVersion":"v1","kind":"X","metadata":{"name":"x","resourceVersion":"1"}}"#;
        assert_eq!(parser.from_list_item(item.as_bytes(), "X", "v1").unwrap().bytes(), item.as_bytes());
    }

    #[test]
    fn a_name_may_hold_what_json_escapes() {
        let parser = ObjectParser::new(&pods().1);
        let role = parser.parse(br#"{"metadata":{"name":"a\u0026b","resourceVersion":"1"}}"#).unwrap();
        assert_eq!(role.key().name(), "a&b");
    }

    #[test]
    fn an_object_that_leaves_carries_the_version_of_the_event() {
        let parser = ObjectParser::new(&pods().1);
        let pod = parser.parse(POD.as_bytes()).unwrap();
        let moved = pod.bytes_at(ResourceVersion::new(1000).unwrap());
        assert_eq!(moved, POD.replace("\"99\"", "\"1000\"").as_bytes());
    }

    #[test]
    fn what_is_no_object_is_refused() {
        let parser = ObjectParser::new(&pods().1);
        for json in ["", "{", "[]", "7", r#"{"metadata":{"name":"x"}}"#, r#"{"metadata":{"resourceVersion":"1"}}"#] {
            assert!(parser.parse(json.as_bytes()).is_err(), "{json}");
        }
        let trailing = format!("{POD} x");
        assert!(parser.parse(trailing.as_bytes()).is_err());
    }

    /// Without a dictionary, and with one.
    static PACKERS: LazyLock<[Arc<Packer>; 2]> = LazyLock::new(|| {
        let parser = ObjectParser::new(&pods().1);
        let samples: Vec<_> = (0..50)
            .map(|n| Arc::new(parser.parse(POD.replace("web-1", &format!("web-{n}")).as_bytes()).unwrap()))
            .collect();
        let trained = Packer::new(&samples);
        assert!(trained.has_dictionary());
        [Arc::default(), Arc::new(trained)]
    });

    #[test]
    fn a_packed_object_gives_the_same_bytes_at_any_version() {
        let parser = ObjectParser::new(&pods().1);
        let json = POD.replace("\"status\"", &format!("\"data\":\"{}\",\"status\"", "abc ".repeat(500)));
        let plain = Arc::new(parser.parse(json.as_bytes()).unwrap());
        for packer in &*PACKERS {
            let packed = plain.packed(packer);
            assert!(packed.is_packed() && packed.cost_bytes() < plain.cost_bytes() / 2);
            assert_eq!((packed.bytes(), packed.json_len()), (plain.bytes(), json.len()));
            let version = ResourceVersion::new(1000).unwrap();
            assert_eq!(packed.bytes_at(version), plain.bytes_at(version));
            assert!(Arc::ptr_eq(&packed.packed(packer), &packed));
        }
    }

    #[test]
    fn an_object_that_packing_makes_no_smaller_stays_plain() {
        let parser = ObjectParser::new(&pods().1);
        let plain = Arc::new(parser.parse(br#"{"metadata":{"name":"x","resourceVersion":"1"}}"#).unwrap());
        assert!(Arc::ptr_eq(&plain.packed(&Arc::default()), &plain));
    }

    proptest::proptest! {
        #[test]
        fn a_packed_object_answers_selectors_like_the_plain_one(
            labels in proptest::collection::btree_map("[a-z]{1,40}(/[a-z]{1,5})?", "[a-zA-Z0-9]{0,63}", 0..12),
            uid in "[0-9a-f]{0,36}",
            node in "\\PC{0,200}",
            phase in "(Running|Pend\"ing)?",
            version in 1..u64::MAX,
        ) {
            let (gvr, table) = pods();
            let parser = ObjectParser::new(&table);
            let json = serde_json::json!({
                "metadata": {"name": "x", "namespace": "ns", "uid": uid, "resourceVersion": version.to_string(), "labels": labels},
                "spec": {"nodeName": node, "hostNetwork": true, "filler": "filler ".repeat(1000)},
                "status": {"phase": phase},
            });
            let plain = Arc::new(parser.parse(json.to_string().as_bytes()).unwrap());
            for packer in &*PACKERS {
                let packed = plain.packed(packer);
                proptest::prop_assert!(packed.is_packed());
                proptest::prop_assert_eq!((packed.key(), packed.uid(), packed.version()), (plain.key(), plain.uid(), plain.version()));
                proptest::prop_assert!(packed.labels().eq(plain.labels()) && plain.labels().count() == labels.len());
                for label in labels.keys().map(String::as_str).chain(["none"]) {
                    proptest::prop_assert_eq!(packed.label(label), plain.label(label));
                }
                for field in ["metadata.name", "spec.nodeName", "spec.host", "spec.hostNetwork", "status.phase", "status.podIPs", "status.podIP"] {
                    let field = table.resolve(field, &gvr).unwrap();
                    proptest::prop_assert_eq!(parser.field(&packed, field), parser.field(&plain, field));
                }
                proptest::prop_assert_eq!(packed.bytes(), plain.bytes());
            }
        }
    }
}
