//! Selectable attributes: an object reduced to its key, version, uid, labels and selectable fields.
//!
//! History that is too old to keep in full is reduced to this form, a few hundred bytes per object.
//! The question whether an object was selected at an old version then still has an exact answer for
//! every selector. The result is an `Object` like any other; its bytes are made only when they are
//! read.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value};

use super::{
    cached_object::{Body, Object},
    parser::{ObjectParser, Reads},
    texts::Texts,
};
use crate::ResourceVersion;

impl Object {
    /// Reduces the object to its selectable attributes: key, version, uid, labels and selectable
    /// fields. Returns the object itself if it is reduced already.
    pub fn selectable_attributes(self: &Arc<Self>, parser: &Arc<ObjectParser>) -> Arc<Self> {
        if let Body::Attributes { .. } = self.body {
            return self.clone();
        }
        let mut texts = Vec::with_capacity(256);
        self.texts().write(&mut texts);
        let body = Body::Attributes { texts: texts.into(), parser: parser.clone() };
        let Self { version, label_count, .. } = **self;
        Arc::new(Self { key: self.key.clone(), version, version_start: 0, label_count, body })
    }

    /// Whether uid, labels and selectable fields are equal, so that every selector gives both
    /// objects the same answer.
    pub fn has_same_attributes(&self, other: &Self) -> bool {
        if self.label_count != other.label_count {
            return false;
        }
        match (self.texts(), other.texts()) {
            // The usual case in history. The encoding is deterministic, so equal bytes mean equal
            // texts.
            (Texts::Packed(one), Texts::Packed(other)) => one == other,
            (mut one, mut other) => loop {
                match (one.advance(), other.advance()) {
                    (None, None) => return true,
                    (one, other) if one != other => return false,
                    _ => {}
                }
            },
        }
    }

    /// The bytes of an object of selectable attributes, with `version` as its resource version.
    pub(super) fn attributes_bytes(&self, parser: &ObjectParser, version: ResourceVersion) -> Bytes {
        match &parser.reads {
            Reads::Json(_) => self.attributes_json(parser, version).into(),
            Reads::Table { tables, .. } => tables.attributes_row(&self.attributes_json(parser, version)).into(),
            Reads::Protobuf(fields) => fields.attributes(self, version, &parser.api_version, &parser.kind),
        }
    }

    fn attributes_json(&self, parser: &ObjectParser, version: ResourceVersion) -> Vec<u8> {
        let text = |text: &str| Value::String(text.to_owned());
        let mut metadata = Map::new();
        metadata.insert("name".to_owned(), text(self.key.name()));
        if !self.key.namespace().is_empty() {
            metadata.insert("namespace".to_owned(), text(self.key.namespace()));
        }
        metadata.insert("uid".to_owned(), text(self.uid()));
        metadata.insert("resourceVersion".to_owned(), text(&version.to_string()));
        if self.label_count > 0 {
            let labels = self.labels().map(|(key, value)| (key.to_owned(), text(value)));
            metadata.insert("labels".to_owned(), Value::Object(labels.collect()));
        }
        let mut object = Map::new();
        for (name, value) in [("kind", &parser.kind), ("apiVersion", &parser.api_version)] {
            if !value.is_empty() {
                object.insert(name.to_owned(), text(value));
            }
        }
        object.insert("metadata".to_owned(), Value::Object(metadata));
        let fields = self.texts().skip(1 + 2 * self.label_count as usize);
        for (path, json) in parser.paths.iter().zip(fields).filter(|(_, json)| !json.is_empty()) {
            // The text is the JSON of a value, copied from a parsed object.
            if let (Some(path), Ok(value)) = (path, serde_json::from_str(json)) {
                put_at(&mut object, path, value);
            }
        }
        Value::Object(object).to_string().into_bytes()
    }
}

/// Puts a value at a path. Paths may share a prefix, and two fields may have the same path.
fn put_at(object: &mut Map<String, Value>, path: &[String], value: Value) {
    match path {
        [] => {}
        [last] => {
            object.insert(last.clone(), value);
        }
        [first, rest @ ..] => {
            let within = object.entry(first.clone()).or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(within) = within {
                put_at(within, rest, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        GroupVersionResource,
        fields::{FieldRef, FieldTable},
        packer::Packer,
    };

    #[test]
    fn selectable_attributes_match_the_object_and_their_json_parses_back() {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let table = FieldTable::new(&gvr, true, &[]);
        let parser = Arc::new(ObjectParser::new(&table).of("Pod", "v1"));
        let json = br#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a","namespace":"ns","uid":"u1","resourceVersion":"7",
            "labels":{"app":"web","x.io/y":""},"annotations":{"long":"text"}},
            "spec":{"nodeName":"n1","hostNetwork":true,"containers":[]},"status":{"phase":"Running","podIP":""}}"#;
        let object = Arc::new(parser.parse(json).unwrap());
        for original in [object.clone(), object.packed(&Arc::<Packer>::default())] {
            let reduced = original.selectable_attributes(&parser);
            let read = parser.parse(&reduced.bytes()).unwrap();
            for same in [&*reduced, &read] {
                assert!(same.has_same_attributes(&object) && object.has_same_attributes(same), "{:?}", same.bytes());
                assert_eq!((same.key(), same.version(), same.uid()), (object.key(), object.version(), "u1"));
                assert!(same.labels().eq(object.labels()));
                for index in 0..table.fields().len() {
                    let field = FieldRef::Index(index);
                    assert_eq!(parser.field(same, field), parser.field(&object, field));
                }
            }
            let json: Value = serde_json::from_slice(&reduced.bytes_at(ResourceVersion::new(9).unwrap())).unwrap();
            assert_eq!(json["metadata"]["resourceVersion"], "9");
            assert_eq!((json["kind"].as_str(), json["spec"]["nodeName"].as_str()), (Some("Pod"), Some("n1")));
            assert_eq!(json["metadata"]["annotations"], Value::Null);
            assert!(Arc::ptr_eq(&reduced.selectable_attributes(&parser), &reduced));
        }
        let other = Arc::new(parser.parse(&String::from_utf8_lossy(json).replace("web", "db").into_bytes()).unwrap());
        assert!(!other.has_same_attributes(&object));
    }
}
