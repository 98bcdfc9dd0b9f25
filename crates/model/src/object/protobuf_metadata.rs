//! Finds the metadata and the selectable fields of an object in protobuf, by field number.
//!
//! Everything else is skipped by its length. Numbers and booleans stay encoded until a selector
//! reads them. A zero is treated as absent, because Kubernetes writes the zero value of every field
//! that is not a pointer.

use bytes::Bytes;
use kubefan_common::planted::{self, Bug};

use super::{
    cached_object::{Body, Object},
    object_error::{ObjectError, check_len},
    protobuf_fields::ProtobufFields,
    texts::SpanWriter,
};
use crate::{
    ObjectKey, ResourceVersion,
    protobuf::{
        ENTRY_KEY, ENTRY_VALUE, META_LABELS, META_NAME, META_NAMESPACE, META_RESOURCE_VERSION, META_UID, METADATA,
        Malformed, enveloped,
        kinds::{Location, Scalar},
        open,
        wire::{Fields, Value, put_bytes, put_varint},
    },
};

/// The parts of `metadata` that routing reads.
#[derive(Default)]
struct Metadata<'a> {
    name: &'a [u8],
    namespace: &'a [u8],
    uid: &'a [u8],
    version: &'a [u8],
    /// Key and value of each label.
    labels: Vec<(&'a [u8], &'a [u8])>,
}

impl<'a> Metadata<'a> {
    /// Reads one `metadata` message. If the field is repeated, later values replace earlier ones.
    fn read(&mut self, message: &'a [u8]) -> Result<(), Malformed> {
        for field in Fields::of(message) {
            let field = field?;
            let Value::Bytes(bytes) = field.value else { continue };
            match field.number {
                META_NAME => self.name = bytes,
                META_NAMESPACE => self.namespace = bytes,
                META_UID => self.uid = bytes,
                META_RESOURCE_VERSION => self.version = bytes,
                META_LABELS => {
                    let label = entry(bytes)?;
                    if !label.1.is_empty() || !planted::is(Bug::EmptyLabelIsNone) {
                        self.labels.push(label);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Key and value of a map entry.
fn entry(message: &[u8]) -> Result<(&[u8], &[u8]), Malformed> {
    let mut key: &[u8] = &[];
    let mut value: &[u8] = &[];
    for field in Fields::of(message) {
        match field.map(|field| (field.number, field.value))? {
            (ENTRY_KEY, Value::Bytes(bytes)) => key = bytes,
            (ENTRY_VALUE, Value::Bytes(bytes)) => value = bytes,
            _ => {}
        }
    }
    Ok((key, value))
}

impl ProtobufFields {
    /// Parses an object in its envelope.
    pub(super) fn parse(&self, bytes: Bytes) -> Result<Object, ObjectError> {
        check_len(&bytes)?;
        let message = open(&bytes)?.message;
        let mut metadata = Metadata::default();
        // The top-level fields that contain selectable fields, in order.
        let mut parts: Vec<(u32, Value<'_>)> = Vec::with_capacity(4);
        for field in Fields::of(message) {
            let field = field?;
            match field.value {
                Value::Bytes(within) if field.number == METADATA => metadata.read(within)?,
                value if self.roots.contains(&field.number) => parts.push((field.number, value)),
                _ => {}
            }
        }
        let text = |bytes, what| match std::str::from_utf8(bytes) {
            Ok("") | Err(_) => Err(ObjectError::Metadata(what)),
            Ok(text) => Ok(text),
        };
        let name = text(metadata.name, "name")?;
        let version = text(metadata.version, "resourceVersion")?;
        let version: ResourceVersion = version.parse()?;
        let namespace = std::str::from_utf8(metadata.namespace).map_err(|_| ObjectError::Metadata("namespace"))?;
        let mut spans = SpanWriter::default();
        spans.put(&bytes, metadata.uid);
        for text in metadata.labels.iter().flat_map(|(key, value)| [key, value]) {
            spans.put(&bytes, text);
        }
        for locations in &self.fields {
            let mut found: &[u8] = &[];
            for location in locations {
                found = find(&parts, location)?;
                if !found.is_empty() {
                    break;
                }
            }
            spans.put(&bytes, found);
        }
        Ok(Object {
            key: ObjectKey::new(namespace, name),
            version: version.into(),
            version_start: 0,
            label_count: metadata.labels.len() as u32,
            body: Body::Plain { spans: spans.written.into(), bytes: bytes.clone() },
        })
    }

    /// An object of selectable attributes, in its envelope.
    pub(super) fn attributes(&self, of: &Object, version: ResourceVersion, api_version: &str, kind: &str) -> Bytes {
        let mut metadata = Vec::new();
        let mut texts = of.texts();
        let mut text = || texts.advance().unwrap_or_default();
        put_bytes(META_NAME, of.key.name().as_bytes(), &mut metadata);
        put_bytes(META_NAMESPACE, of.key.namespace().as_bytes(), &mut metadata);
        put_bytes(META_UID, text(), &mut metadata);
        put_bytes(META_RESOURCE_VERSION, version.to_string().as_bytes(), &mut metadata);
        for _ in 0..of.label_count {
            let mut entry = Vec::new();
            put_bytes(ENTRY_KEY, text(), &mut entry);
            put_bytes(ENTRY_VALUE, text(), &mut entry);
            put_bytes(META_LABELS, &entry, &mut metadata);
        }
        // Two selectable fields may be names for the same location.
        let mut values: Vec<(&[u32], Scalar, &[u8])> = Vec::new();
        for locations in &self.fields {
            let text = text();
            if let Some(Location { path, scalar }) = locations.first().filter(|_| !text.is_empty())
                && !values.iter().any(|(known, ..)| known == path)
            {
                values.push((path, *scalar, text));
            }
        }
        values.sort_unstable_by_key(|(path, ..)| *path);
        let mut message = Vec::new();
        put_bytes(METADATA, &metadata, &mut message);
        put_values(&values, &mut message);
        enveloped(api_version, kind, &message)
    }
}

/// The bytes at a location; empty if the field is absent or zero.
fn find<'a>(parts: &[(u32, Value<'a>)], location: &Location) -> Result<&'a [u8], Malformed> {
    let Some((first, rest)) = location.path.split_first() else { return Ok(&[]) };
    let mut found: &[u8] = &[];
    for (_, value) in parts.iter().filter(|(number, _)| number == first) {
        descend(*value, rest, location.scalar, &mut found)?;
    }
    Ok(found)
}

/// Recursion is as deep as the path is long. A value of the wrong type is treated as absent.
fn descend<'a>(value: Value<'a>, path: &[u32], scalar: Scalar, found: &mut &'a [u8]) -> Result<(), Malformed> {
    match (value, path.split_first(), scalar) {
        (Value::Bytes(message), Some((first, rest)), _) => {
            for field in Fields::of(message) {
                let field = field?;
                if field.number == *first {
                    descend(field.value, rest, scalar, found)?;
                }
            }
        }
        (Value::Bytes(text), None, Scalar::Text) => *found = text,
        (Value::Varint(0, _), None, Scalar::Bool | Scalar::Int) => *found = &[],
        (Value::Varint(_, bytes), None, Scalar::Bool | Scalar::Int) => *found = bytes,
        _ => {}
    }
    Ok(())
}

/// Writes the values at these locations, which must be sorted by path.
fn put_values(values: &[(&[u32], Scalar, &[u8])], out: &mut Vec<u8>) {
    for values in values.chunk_by(|(one, ..), (other, ..)| one.first() == other.first()) {
        match values {
            [([number], Scalar::Text, text), ..] => put_bytes(*number, text, out),
            [([number], _, varint), ..] => {
                put_varint(u64::from(*number) << 3, out);
                out.extend_from_slice(varint);
            }
            [([number, ..], ..), ..] => {
                let mut message = Vec::new();
                let within: Vec<_> = values.iter().map(|(path, scalar, text)| (&path[1..], *scalar, *text)).collect();
                put_values(&within, &mut message);
                put_bytes(*number, &message, out);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        GroupVersionResource, Media,
        fields::{FieldRef, FieldTable},
        object::ObjectParser,
        packer::Packer,
        projection::Projection,
        protobuf::{open, projected, projected_item, wire::put_number},
    };

    fn message(fields: &[(u32, &[u8])]) -> Vec<u8> {
        let mut out = Vec::new();
        for (number, bytes) in fields {
            put_bytes(*number, bytes, &mut out);
        }
        out
    }

    fn label(key: &str, value: &str) -> Vec<u8> {
        message(&[(ENTRY_KEY, key.as_bytes()), (ENTRY_VALUE, value.as_bytes())])
    }

    fn parser(resource: &str, kind: &str) -> (Arc<ObjectParser>, FieldTable, GroupVersionResource) {
        let gvr = GroupVersionResource::new("", "v1", resource);
        let table = FieldTable::new(&gvr, true, &[]);
        (Arc::new(ObjectParser::protobuf(&gvr, &table).unwrap().of(kind, "v1")), table, gvr)
    }

    /// A pod as a list item.
    fn pod(labels: &[(String, String)], version: &str, node: &str, host_network: u64, phase: &str) -> Vec<u8> {
        let mut metadata = message(&[(1, b"web-1"), (2, b""), (3, b"default"), (5, b"u-1"), (6, version.as_bytes())]);
        for (key, value) in labels {
            put_bytes(META_LABELS, &label(key, value), &mut metadata);
        }
        put_bytes(17, &[7; 500], &mut metadata);
        let mut spec = message(&[(2, &[1; 6000]), (3, b"Always"), (8, b""), (10, node.as_bytes())]);
        put_number(11, host_network, &mut spec);
        message(&[(METADATA, &metadata), (2, &spec), (3, &message(&[(1, phase.as_bytes()), (6, b"10.0.0.1")]))])
    }

    fn fields(parser: &ObjectParser, table: &FieldTable, object: &Object) -> Vec<String> {
        (0..table.fields().len()).map(|index| parser.field(object, FieldRef::Index(index)).into_owned()).collect()
    }

    #[test]
    fn a_pod_is_parsed_by_its_field_numbers() {
        let (parser, table, gvr) = parser("pods", "Pod");
        assert_eq!(parser.media(), Media::Protobuf);
        let labels = [("app".to_owned(), "web".to_owned()), ("x.io/y".to_owned(), String::new())];
        let item = pod(&labels, "41", "n1", 1, "Running");
        let object = parser.from_list_item(&item, "Pod", "v1").unwrap();
        assert_eq!((object.key().as_str(), object.uid(), object.version().get()), ("default/web-1", "u-1", 41));
        assert_eq!(object.labels().collect::<Vec<_>>(), [("app", "web"), ("x.io/y", "")]);
        let field = |name: &str| parser.field(&object, table.resolve(name, &gvr).unwrap()).into_owned();
        assert_eq!((field("spec.nodeName"), field("spec.host")), ("n1".into(), "n1".into()));
        assert_eq!((field("spec.hostNetwork"), field("status.phase")), ("true".into(), "Running".into()));
        assert_eq!((field("spec.serviceAccountName"), field("status.podIPs")), (String::new(), String::new()));
        let other = parser.from_list_item(&pod(&[], "41", "", 0, ""), "Pod", "v1").unwrap();
        assert_eq!(parser.field(&other, table.resolve("spec.hostNetwork", &gvr).unwrap()), "false");
        // A watch sends the same bytes for this object.
        assert_eq!(parser.parse(&object.bytes()).unwrap().bytes(), enveloped("v1", "Pod", &item));
    }

    #[test]
    fn numbers_compare_as_text() {
        let (parser, table, gvr) = parser("replicationcontrollers", "ReplicationController");
        let replicas = |number: u64| {
            let mut status = Vec::new();
            put_number(1, number, &mut status);
            let metadata = message(&[(1, b"rc"), (3, b"ns"), (6, b"5")]);
            let item = message(&[(METADATA, &metadata), (3, &status)]);
            let object = parser.from_list_item(&item, "ReplicationController", "v1").unwrap();
            parser.field(&object, table.resolve("status.replicas", &gvr).unwrap()).into_owned()
        };
        assert_eq!([replicas(0), replicas(3), replicas(300), replicas(-1_i64 as u64)], ["0", "3", "300", "-1"]);
    }

    #[test]
    fn partial_metadata_is_copied_from_the_object() {
        let (parser, ..) = parser("pods", "Pod");
        let item = pod(&[("app".into(), "web".into())], "41", "n1", 0, "");
        let object = parser.from_list_item(&item, "Pod", "v1").unwrap();
        let projection = Projection::partial_object_metadata();
        let partial = projected(&object.bytes(), &projection).unwrap();
        let opened = open(&partial).unwrap();
        assert_eq!(opened.kind, "PartialObjectMetadata");
        assert_eq!(opened.message, projected_item(&object.bytes(), &projection).unwrap());
        assert!(item.starts_with(opened.message) && opened.message.len() < item.len());
        let read = parser.parse(&partial).unwrap();
        assert_eq!((read.key(), read.version(), read.label("app")), (object.key(), object.version(), Some("web")));
    }

    #[test]
    fn managed_fields_are_left_out_and_all_other_bytes_stay() {
        let (parser, ..) = parser("pods", "Pod");
        let item = pod(&[("app".into(), "web".into())], "41", "n1", 0, "");
        let object = parser.from_list_item(&item, "Pod", "v1").unwrap();
        let field = message(&[(17, &[7; 500])]);
        let at = item.windows(field.len()).position(|window| window == field).unwrap();
        let expected = [&item[..at], &item[at + field.len()..]].concat();
        let dropped = projected(&object.bytes(), &Projection::default().without_managed_fields()).unwrap();
        // The length of the metadata is the only other difference: one byte instead of two.
        let opened = open(&dropped).unwrap();
        assert_eq!((opened.kind, opened.message.len()), ("Pod", expected.len() - 1));
        assert_eq!(opened.message[2..], expected[3..]);
        let read = parser.parse(&dropped).unwrap();
        assert_eq!((read.key(), read.version(), read.label("app")), (object.key(), object.version(), Some("web")));
        let partial = Projection::partial_object_metadata().without_managed_fields();
        let partial = projected_item(&object.bytes(), &partial).unwrap();
        assert!(opened.message.starts_with(&partial));
        // Nothing to leave out.
        assert_eq!(projected(&dropped, &Projection::default().without_managed_fields()).unwrap(), dropped);
    }

    #[test]
    fn invalid_objects_are_refused() {
        let (parser, ..) = parser("pods", "Pod");
        let refused = |bytes: &[u8]| parser.parse(bytes).unwrap_err().to_string();
        assert!(refused(br#"{"kind":"Pod"}"#).contains("k8s"));
        assert!(refused(b"k8s\0").contains("empty"));
        assert!(refused(&enveloped("v1", "Pod", b"")).contains("metadata.name"));
        let item = |version: &[u8]| message(&[(METADATA, &message(&[(1, b"a"), (6, version)]))]);
        assert!(refused(&enveloped("v1", "Pod", &item(b"0"))).contains("resourceVersion"));
        assert!(refused(&enveloped("v1", "Pod", &[0x0a, 100, 1])).contains("cut off"));
        let twice = [&enveloped("v1", "Pod", b"")[..], &message(&[(2, &item(b"7"))])].concat();
        assert!(refused(&twice).contains("two messages"));
        assert!(parser.parse(&enveloped("v1", "Pod", &item(b"7"))).is_ok());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn selectors_match_packed_reduced_and_reversioned_objects_alike(
            labels in prop::collection::btree_map("[a-z]{1,40}(/[a-z]{1,5})?", "[a-zA-Z0-9]{0,63}", 0..12),
            node in "\\PC{0,200}",
            host_network in 0..2_u64,
            phase in "(Running|Pending|\"quoted\"|null)?",
            version: u64,
            other in 1..u64::MAX,
        ) {
            let (parser, table, _) = parser("pods", "Pod");
            let labels: Vec<_> = labels.into_iter().collect();
            let version = version.max(1).to_string();
            let item = pod(&labels, &version, &node, host_network, &phase);
            let plain = Arc::new(parser.from_list_item(&item, "Pod", "v1").unwrap());
            prop_assert!(fields(&parser, &table, &plain)[0] == node);
            let packed = plain.packed(&Arc::<Packer>::default());
            prop_assert!(packed.is_packed());
            let reduced = packed.selectable_attributes(&parser);
            let other = ResourceVersion::new(other).unwrap();
            let moved = parser.parse(&plain.bytes_at(other)).unwrap();
            prop_assert_eq!(moved.version(), other);
            prop_assert_eq!(moved.bytes_at(plain.version()), plain.bytes());
            prop_assert_eq!(packed.bytes_at(other), moved.bytes());
            let read = parser.parse(&reduced.bytes()).unwrap();
            let read_at = parser.parse(&reduced.bytes_at(other)).unwrap();
            prop_assert_eq!(read_at.version(), other);
            for same in [&*packed, &*reduced, &moved, &read, &read_at] {
                prop_assert!(same.has_same_attributes(&plain) && plain.has_same_attributes(same));
                prop_assert_eq!((same.key(), same.uid()), (plain.key(), plain.uid()));
                prop_assert!(same.labels().eq(plain.labels()));
                prop_assert_eq!(fields(&parser, &table, same), fields(&parser, &table, &plain));
            }
        }

        #[test]
        fn any_bytes_parse_or_give_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            at in any::<prop::sample::Index>(),
            byte: u8,
        ) {
            let (parser, table, _) = parser("pods", "Pod");
            let whole = enveloped("v1", "Pod", &pod(&[("a".into(), "b".into())], "7", "n", 1, "Running"));
            let mut broken = whole.to_vec();
            let at = at.index(broken.len());
            broken[at] = byte;
            for bytes in [&enveloped("v1", "Pod", &bytes)[..], &bytes, &broken, &whole[..at]] {
                let Ok(object) = parser.parse(bytes) else { continue };
                let _ = (fields(&parser, &table, &object), object.labels().count(), object.uid().len());
                let other = ResourceVersion::new(99).unwrap();
                prop_assert_eq!(parser.parse(&object.bytes_at(other)).unwrap().version(), other);
                for projection in [Projection::default(), Projection::partial_object_metadata()] {
                    let _ = projected(&object.bytes(), &projection).unwrap();
                    let _ = projected(&object.bytes(), &projection.without_managed_fields()).unwrap();
                }
            }
        }
    }
}
