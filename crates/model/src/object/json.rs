//! Finds the metadata and the selectable fields in an object's JSON, as spans of the text.
//!
//! Everything else is skipped without being decoded. The hazard is JSON of an unexpected shape,
//! such as `"spec": null`: it must read as "no such field" and not as an error.

use std::{borrow::Cow, fmt};

use bytes::Bytes;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::{
    cached_object::{Body, Object},
    json_fields::{API_VERSION, JsonFields, KIND, LABELS, NAME, NAMESPACE, Node, UID, VERSION},
    object_error::{ObjectError, check_len},
    texts::SpanWriter,
};
use crate::{ObjectKey, ResourceVersion};

/// Parses an object. The flag is true if it has a `kind` or an `apiVersion`.
pub(super) fn parse(
    JsonFields { root, fields, slots }: &JsonFields,
    bytes: Bytes,
) -> Result<(Object, bool), ObjectError> {
    check_len(&bytes)?;
    let mut slots = vec![None; *slots];
    let mut json = serde_json::Deserializer::from_slice(&bytes);
    Walk { node: root, slots: &mut slots }.deserialize(&mut json)?;
    json.end()?;

    let text = |slot: usize| slots[slot].and_then(|raw: &str| plain_string(raw)).filter(|text| !text.is_empty());
    // Some names contain characters that JSON escapes: RBAC allows any path segment, such as `a&b`.
    let unescaped = |slot: usize| slots[slot].map(field_text).filter(|text| !text.is_empty());
    let name = unescaped(NAME).ok_or(ObjectError::Metadata("name"))?;
    let version_text = text(VERSION).unwrap_or_default();
    let version: ResourceVersion = version_text.parse()?;
    let labels = slots[LABELS].map_or(Ok(Vec::new()), label_pairs)?;
    let present = |slot: &usize| slots[*slot].filter(|raw| *raw != "null" && *raw != "\"\"");
    let mut spans = SpanWriter::default();
    spans.put(&bytes, text(UID).unwrap_or_default().as_bytes());
    for text in labels.iter().flat_map(|(key, value)| [key, value]) {
        spans.put(&bytes, text.as_bytes());
    }
    let field = |of: &Vec<usize>| of.iter().find_map(present).unwrap_or_default().as_bytes();
    for of in fields {
        spans.put(&bytes, field(of));
    }
    let object = Object {
        key: ObjectKey::new(text(NAMESPACE).unwrap_or_default(), &name),
        version: version.into(),
        version_start: (version_text.as_ptr() as usize - bytes.as_ptr() as usize) as u32,
        label_count: labels.len() as u32,
        body: Body::Plain { spans: spans.written.into(), bytes: bytes.clone() },
    };
    Ok((object, slots[KIND].is_some() || slots[API_VERSION].is_some()))
}

/// The content of a JSON string without escapes. Versions, uids and labels never have escapes.
fn plain_string(raw: &str) -> Option<&str> {
    let text = raw.strip_prefix('"')?.strip_suffix('"')?;
    (!text.contains('\\')).then_some(text)
}

/// A field's JSON in the form that selectors compare: strings without quotes, numbers and booleans
/// unchanged.
pub(super) fn field_text(raw: &str) -> Cow<'_, str> {
    match plain_string(raw) {
        Some(text) => Cow::Borrowed(text),
        None if raw.starts_with('"') => serde_json::from_str(raw).map_or(Cow::Borrowed(""), Cow::Owned),
        None => Cow::Borrowed(raw),
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

/// Walks an object along the tree, stores the JSON of the leaves and skips everything else.
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

/// A value that is not a map (such as `"spec": null`) cannot have the fields, so it is skipped.
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
