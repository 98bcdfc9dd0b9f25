//! A stored object: its JSON as a watch sends it, and the values that selectors read.
//!
//! The JSON is encoded once per write. Responses that need a slightly different form (a list item
//! without its kind, the last state of a deleted object at the version of its deletion) are cut
//! from those bytes.

use std::{borrow::Cow, io, ops::Range};

use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;
use serde_json::{Map, Serializer, Value, ser::Formatter};

use super::resource::{SimResource, VersionForm};
use kubefan_model::{
    ObjectKey,
    selector::{FieldSelector, LabelSelector},
};

/// The order of the metadata fields in a built-in object, as in the Go type `ObjectMeta`.
const METADATA_ORDER: [&str; 14] = [
    "name",
    "generateName",
    "namespace",
    "selfLink",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "labels",
    "annotations",
    "ownerReferences",
    "finalizers",
];

#[derive(Debug)]
pub(super) struct Object {
    pub(super) key: ObjectKey,
    pub(super) uid: Box<str>,
    pub(super) version: u64,
    labels: Box<[(Box<str>, Box<str>)]>,
    /// One value per entry of [`SimResource::selectable_fields`], in the same order.
    fields: Box<[Box<str>]>,
    bytes: Bytes,
    /// Byte range of the text of `metadata.resourceVersion`.
    version_at: Range<usize>,
    versions: VersionForm,
    /// Start of the list item in `bytes`: for a built-in type after `{"kind":…,"apiVersion":…,`,
    /// else 0.
    item_at: usize,
}

impl Object {
    /// Encodes an object at a resource version. `value` must have a name.
    pub(super) fn new(resource: &SimResource, mut value: Value, version: u64) -> Self {
        value["metadata"]["resourceVersion"] = Value::from(resource.versions.text(version));
        // Like Go's `omitempty`: empty maps are left out.
        if let Some(metadata) = value["metadata"].as_object_mut() {
            metadata.retain(|key, value| {
                !matches!(&**key, "labels" | "annotations") || *value != Value::Object(Map::new())
            });
        }
        let text = |path: &str| value["metadata"][path].as_str().unwrap_or_default();
        let key = ObjectKey::new(text("namespace"), text("name"));
        let uid = text("uid").into();
        let labels = value["metadata"]["labels"].as_object().into_iter().flatten();
        let labels = labels.filter_map(|(key, value)| Some((key.as_str().into(), value.as_str()?.into()))).collect();
        let fields = resource.selectable_fields.iter().map(|field| field.read(&value)).collect();
        let (bytes, version_at, item_at) = encode(resource, &value);
        Self { key, uid, version, labels, fields, bytes, version_at, versions: resource.versions, item_at }
    }

    /// The JSON as WATCH and GET send it.
    pub(super) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Parses the JSON.
    pub(super) fn value(&self) -> Value {
        serde_json::from_slice(&self.bytes).expect("an object's bytes are what serde_json wrote")
    }

    /// Writes the object as a list item.
    pub(super) fn put_item(&self, out: &mut BytesMut) {
        if self.item_at > 0 {
            out.put_u8(b'{');
        }
        out.put_slice(&self.bytes[self.item_at..]);
    }

    /// Writes the object as an item of a PartialObjectMetadataList.
    pub(super) fn put_metadata(&self, out: &mut BytesMut) {
        let value = self.value();
        let metadata = value["metadata"].as_object();
        let metadata = metadata.expect("an object has metadata");
        let ordered = METADATA_ORDER.iter().filter_map(|name| metadata.get_key_value(*name));
        let others = metadata.iter().filter(|(name, _)| !METADATA_ORDER.contains(&name.as_str()));
        out.put_slice(br#"{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"#);
        for (i, (name, value)) in ordered.chain(others).enumerate() {
            let comma = if i > 0 { "," } else { "" };
            out.put_slice(format!("{comma}\"{name}\":").as_bytes());
            let mut json = Vec::new();
            put_value(&mut json, value);
            out.put_slice(&json);
        }
        out.put_slice(b"}}");
    }

    /// Writes the object with another resource version: the last state of an object that was
    /// deleted or left a selector.
    pub(super) fn put_at_version(&self, version: u64, out: &mut BytesMut) {
        out.put_slice(&self.bytes[..self.version_at.start]);
        out.put_slice(self.versions.text(version).as_bytes());
        out.put_slice(&self.bytes[self.version_at.end..]);
    }

    /// Returns a copy with another resource version.
    pub(super) fn moved_to(&self, version: u64) -> Self {
        let mut bytes = BytesMut::with_capacity(self.bytes.len() + 4);
        self.put_at_version(version, &mut bytes);
        let end = self.version_at.start + self.versions.text(version).len();
        Self {
            key: self.key.clone(),
            uid: self.uid.clone(),
            version,
            labels: self.labels.clone(),
            fields: self.fields.clone(),
            bytes: bytes.freeze(),
            version_at: self.version_at.start..end,
            versions: self.versions,
            item_at: self.item_at,
        }
    }

    /// Whether both selectors match.
    pub(super) fn matches(&self, resource: &SimResource, labels: &LabelSelector, fields: &FieldSelector) -> bool {
        let label = |key: &str| self.labels.iter().find(|(k, _)| **k == *key).map(|(_, value)| &**value);
        let field = |path: &str| match path {
            "metadata.name" => Some(Cow::Borrowed(self.key.name())),
            "metadata.namespace" => Some(Cow::Borrowed(self.key.namespace())),
            path => {
                let at = resource.selectable_fields.iter().position(|field| field.path == path)?;
                self.fields.get(at).map(|value| Cow::Borrowed(&**value))
            }
        };
        labels.matches(label) && fields.matches(field)
    }
}

fn encode(resource: &SimResource, value: &Value) -> (Bytes, Range<usize>, usize) {
    let empty = Map::new();
    let object = value.as_object().unwrap_or(&empty);
    let metadata = object.get("metadata").and_then(Value::as_object).unwrap_or(&empty);
    let mut out = Vec::with_capacity(4096);
    let mut version_at = 0..0;
    let mut item_at = 0;
    let type_meta = [("kind", Value::from(&*resource.kind)), ("apiVersion", Value::from(resource.gvr.api_version()))];
    let rest = || object.iter().filter(|(key, _)| !matches!(key.as_str(), "kind" | "apiVersion" | "metadata"));
    out.push(b'{');
    if resource.custom {
        // Custom objects have sorted keys. serde_json's map is sorted, but these three fields are
        // added to it here.
        let mut fields: Vec<(&str, &Value)> = rest().map(|(key, value)| (key.as_str(), value)).collect();
        fields.extend(type_meta.iter().map(|(key, value)| (*key, value)));
        fields.push(("metadata", &Value::Null));
        fields.sort_unstable_by_key(|(key, _)| *key);
        for (key, value) in fields {
            put_key(&mut out, key);
            if key == "metadata" {
                version_at = put_metadata(&mut out, metadata.iter());
            } else {
                put_value(&mut out, value);
            }
        }
    } else {
        for (key, value) in &type_meta {
            put_key(&mut out, key);
            put_value(&mut out, value);
        }
        out.push(b',');
        item_at = out.len();
        put_key(&mut out, "metadata");
        let ordered = METADATA_ORDER.iter().filter_map(|key| metadata.get_key_value(*key));
        let others = metadata.iter().filter(|(key, _)| !METADATA_ORDER.contains(&key.as_str()));
        version_at = put_metadata(&mut out, ordered.chain(others));
        for (key, value) in rest() {
            put_key(&mut out, key);
            put_value(&mut out, value);
        }
    }
    out.push(b'}');
    (Bytes::from(out), version_at, item_at)
}

fn put_metadata<'a>(out: &mut Vec<u8>, fields: impl Iterator<Item = (&'a String, &'a Value)>) -> Range<usize> {
    let mut version_at = 0..0;
    out.push(b'{');
    for (key, value) in fields {
        put_key(out, key);
        let start = out.len();
        put_value(out, value);
        if key == "resourceVersion" {
            version_at = start + 1..out.len() - 1;
        }
    }
    out.push(b'}');
    version_at
}

fn put_key(out: &mut Vec<u8>, key: &str) {
    if !matches!(out.last(), Some(b'{' | b',')) {
        out.push(b',');
    }
    put_value(out, key);
    out.push(b':');
}

/// Writes JSON as Go's encoder does: `<`, `>`, `&` and the line separators are escaped.
pub(super) fn put_value(out: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    let written = value.serialize(&mut Serializer::with_formatter(out, GoFormatter));
    written.expect("writing JSON values to memory cannot fail");
}

struct GoFormatter;

impl Formatter for GoFormatter {
    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        let special = |c: char| matches!(c, '<' | '>' | '&' | '\u{2028}' | '\u{2029}');
        let mut rest = fragment;
        while let Some(at) = rest.find(special) {
            writer.write_all(&rest.as_bytes()[..at])?;
            let mut tail = rest[at..].chars();
            let c = tail.next().unwrap_or_default();
            write!(writer, "\\u{:04x}", u32::from(c))?;
            rest = tail.as_str();
        }
        writer.write_all(rest.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::resource, *};

    fn pods() -> SimResource {
        resource::built_in().into_iter().find(|r| r.kind == "Pod").unwrap()
    }

    #[test]
    fn a_built_in_object_starts_with_its_kind_and_a_list_item_omits_it() {
        let value = json!({"spec": {"x": "<&>"}, "metadata": {"uid": "u", "labels": {"a": "b"}, "name": "p", "namespace": "n",
            "managedFields": []}});
        let object = Object::new(&pods(), value, 7);
        let rest = concat!(
            r#""metadata":{"name":"p","namespace":"n","uid":"u","resourceVersion":"7","labels":{"a":"b"},"managedFields":[]},"#,
            r#""spec":{"x":"\u003c\u0026\u003e"}}"#
        );
        assert_eq!(object.bytes(), &format!(r#"{{"kind":"Pod","apiVersion":"v1",{rest}"#));
        let mut item = BytesMut::new();
        object.put_item(&mut item);
        assert_eq!(item, format!("{{{rest}"));
    }

    #[test]
    fn a_custom_object_has_sorted_keys_and_keeps_its_kind_in_a_list() {
        let widgets = SimResource::custom("example.com", "v1", "widgets", "Widget");
        let object = Object::new(&widgets, json!({"spec": {}, "a": 1, "metadata": {"uid": "u", "name": "w"}}), 7);
        let expected = concat!(
            r#"{"a":1,"apiVersion":"example.com/v1","kind":"Widget","#,
            r#""metadata":{"name":"w","resourceVersion":"7","uid":"u"},"spec":{}}"#
        );
        let mut item = BytesMut::new();
        object.put_item(&mut item);
        assert_eq!((object.bytes(), &item[..]), (&Bytes::from(expected), expected.as_bytes()));
    }

    #[test]
    fn changing_the_resource_version_changes_no_other_byte() {
        let object = Object::new(&pods(), json!({"metadata": {"name": "p"}, "spec": {"resourceVersion": "99"}}), 99);
        let moved = object.moved_to(100).moved_to(7);
        assert_eq!(moved.bytes(), Object::new(&pods(), object.value(), 7).bytes());
    }
}
