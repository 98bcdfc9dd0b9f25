//! Reads an object's key, uid and version from its JSON, and takes lists and watch events apart.
//!
//! The object itself is decoded once, later, by its type. So reading the metadata has to cost
//! little: it stops as soon as it has all fields. Most servers write them at the start of the
//! object.

use std::{borrow::Cow, fmt};

use bytes::Bytes;
use serde::{
    Deserialize,
    de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor},
};
use serde_json::value::RawValue;

use crate::object::{ObjectKey, RawObject};
use kubefan_common::{
    api_json::{EventJson, ListJson, ListMeta},
    text::valid_utf8,
};

/// The metadata of an object. Fields that the object does not have are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Metadata<'a> {
    pub(super) namespace: Cow<'a, str>,
    pub(super) name: Cow<'a, str>,
    pub(super) uid: Cow<'a, str>,
    pub(super) resource_version: Cow<'a, str>,
}

/// The metadata found so far, and whether anything after it can still matter.
#[derive(Default)]
struct Found<'a> {
    metadata: Metadata<'a>,
    is_complete: bool,
}

/// Reads the metadata of an object.
///
/// The JSON after the last of the four fields is not looked at: it may even be broken.
pub(super) fn read(json: &[u8]) -> Result<Metadata<'_>, serde_json::Error> {
    let mut found = Found::default();
    let result = serde_json::Deserializer::from_slice(json).deserialize_map(ObjectVisitor(&mut found));
    match result {
        Err(error) if !found.is_complete => Err(error),
        _ if found.metadata.name.is_empty() => Err(serde_json::Error::custom("the object has no metadata.name")),
        _ => Ok(found.metadata),
    }
}

/// Returns the object with its key, uid and version.
pub(super) fn raw_object(json: Bytes) -> Result<RawObject, serde_json::Error> {
    let Metadata { namespace, name, uid, resource_version } = read(&json)?;
    let uid = uid.into();
    let resource_version = resource_version.into();
    Ok(RawObject { key: ObjectKey::new(&namespace, &name), uid, resource_version, json })
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "camelCase")]
enum ObjectField {
    Metadata,
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "camelCase")]
enum MetadataField {
    Namespace,
    Name,
    Uid,
    ResourceVersion,
    #[serde(other)]
    Other,
}

/// A text that borrows from the JSON unless it contains escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

struct ObjectVisitor<'f, 'de>(&'f mut Found<'de>);

impl<'de> Visitor<'de> for ObjectVisitor<'_, 'de> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object of Kubernetes")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(field) = map.next_key()? {
            match field {
                ObjectField::Metadata => {
                    map.next_value_seed(MetadataVisitor(self.0))?;
                    self.0.is_complete = true;
                    return Err(stop());
                }
                ObjectField::Other => map.next_value::<IgnoredAny>().map(drop)?,
            }
        }
        Ok(())
    }
}

struct MetadataVisitor<'f, 'de>(&'f mut Found<'de>);

impl<'de> DeserializeSeed<'de> for MetadataVisitor<'_, 'de> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for MetadataVisitor<'_, 'de> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object's metadata")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self(Found { metadata, is_complete }) = self;
        let mut missing = 4;
        while let Some(field) = map.next_key()? {
            let text = match field {
                MetadataField::Namespace => &mut metadata.namespace,
                MetadataField::Name => &mut metadata.name,
                MetadataField::Uid => &mut metadata.uid,
                MetadataField::ResourceVersion => &mut metadata.resource_version,
                MetadataField::Other => {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            *text = map.next_value::<Option<Text<'de>>>()?.map(|Text(text)| text).unwrap_or_default();
            missing -= 1;
            if missing == 0 {
                *is_complete = true;
                return Err(stop());
            }
        }
        Ok(())
    }
}

/// Ends the reading. serde has no other way.
fn stop<E: serde::de::Error>() -> E {
    E::custom("complete")
}

/// A page of a list, taken apart.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) resource_version: String,
    pub(super) continue_token: String,
    /// JSON of each item, with its kind.
    pub(super) items: Vec<Bytes>,
}

/// The JSON with U+FFFD for bytes that are not UTF-8, as client-go reads it.
fn valid(json: &Bytes) -> Bytes {
    match valid_utf8(json) {
        Cow::Borrowed(_) => json.clone(),
        Cow::Owned(text) => text.into(),
    }
}

/// Takes a page apart. An item is a slice of the page, unless the server left out the item's kind
/// and apiVersion, as kube-apiserver does for its own resources. They are then added from the
/// list's, as client-go does for untyped objects, so that an item equals the same object of a
/// watch.
pub(super) fn read_page(page: &Bytes) -> Result<Page, serde_json::Error> {
    let page = valid(page);
    let list: ListJson<&RawValue> = serde_json::from_slice(&page)?;
    let metadata = list.metadata.ok_or_else(|| serde_json::Error::custom("missing field `metadata`"))?;
    let kind = list.kind.strip_suffix("List").unwrap_or_default();
    let mut prefix = Vec::new();
    if !kind.is_empty() && !list.api_version.is_empty() {
        prefix.extend_from_slice(b"{\"kind\":");
        serde_json::to_writer(&mut prefix, kind)?;
        prefix.extend_from_slice(b",\"apiVersion\":");
        serde_json::to_writer(&mut prefix, &list.api_version)?;
        prefix.push(b',');
    }
    let item = |item: &RawValue| {
        let json = item.get().as_bytes();
        match json.strip_prefix(b"{") {
            Some(members) if !prefix.is_empty() && !is_typed(json)? => Ok([&prefix[..], members].concat().into()),
            _ => Ok(page.slice_ref(json)),
        }
    };
    let items = list.items.unwrap_or_default().into_iter().map(item).collect::<Result<_, serde_json::Error>>()?;
    let ListMeta { resource_version, continue_token, .. } = metadata;
    Ok(Page { resource_version, continue_token, items })
}

/// Whether an object has a kind or an apiVersion, or nothing at all.
fn is_typed(json: &[u8]) -> Result<bool, serde_json::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct TypeMeta {
        kind: Option<IgnoredAny>,
        api_version: Option<IgnoredAny>,
    }
    let TypeMeta { kind, api_version } = serde_json::from_slice(json)?;
    let is_empty = json.iter().all(|byte| b"{} \t\r\n".contains(byte));
    Ok(kind.is_some() || api_version.is_some() || is_empty)
}

/// An event of a watch, with the JSON of its object.
pub(super) struct RawEvent {
    pub(super) event_type: String,
    pub(super) object: Bytes,
}

/// Takes an event apart. The object is a slice of the line.
pub(super) fn read_event(line: &Bytes) -> Result<RawEvent, serde_json::Error> {
    let line = valid(line);
    let EventJson { kind, object } = serde_json::from_slice(&line)?;
    Ok(RawEvent { event_type: kind.into_owned(), object: line.slice_ref(object.get().as_bytes()) })
}

#[cfg(test)]
mod tests;
