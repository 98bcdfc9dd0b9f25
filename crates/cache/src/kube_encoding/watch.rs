//! Events of a Kubernetes watch over HTTP: lines of JSON (`{"type":…,"object":…}`, where the object
//! may be a Table of one row), or protobuf messages with a length prefix
//! (`apimachinery/pkg/runtime/serializer/{json,protobuf}`).
//!
//! An event is written as a head, the object's bytes and a tail, so that the object's bytes can be
//! shared with the cache, as in a gRPC frame.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};

use kubefan_common::proto::v1alpha1::ResolvedResource;
use kubefan_model::{
    Media,
    event::EventType,
    format::{Format, IncludeObject},
    projection::{PARTIAL_API_VERSION, PARTIAL_KIND},
    protobuf::{self, INITIAL_EVENTS_END},
    table::{self, Tables},
};

/// The object type that a watch's bookmarks name.
#[derive(Debug)]
pub struct TypeMeta {
    /// The value of `kind`.
    kind: String,
    /// The value of `apiVersion`.
    api_version: String,
    /// Set for a watch of Tables, with how much of its object each row includes.
    tables: Option<(Arc<Tables>, IncludeObject)>,
}

impl TypeMeta {
    /// The type of the objects that `format` makes from objects of `resource`.
    pub fn of(format: &Format, resource: &ResolvedResource, tables: Option<&Arc<Tables>>) -> Self {
        if format.projection().is_partial() {
            return Self { kind: PARTIAL_KIND.to_owned(), api_version: PARTIAL_API_VERSION.to_owned(), tables: None };
        }
        let api_version = match resource.group.as_str() {
            "" => resource.version.clone(),
            group => format!("{group}/{}", resource.version),
        };
        let tables = tables.map(|tables| (tables.clone(), format.include()));
        Self { kind: resource.kind.clone(), api_version, tables }
    }

    /// The column definitions of a watch of Tables, as a JSON array.
    pub fn column_definitions(&self) -> Option<Bytes> {
        self.tables.as_ref().map(|(tables, _)| tables.definitions())
    }
}

/// Writes the head of an event whose object has `object_len` bytes; `version` is the version of the
/// change.
pub fn put_head(media: Media, kind: EventType, version: &str, object_len: usize, out: &mut BytesMut) {
    if media == Media::Protobuf {
        return protobuf::put_watch_frame_head(kind.as_str(), object_len, out);
    }
    let head: &[u8] = match kind {
        EventType::Added => br#"{"type":"ADDED","object":"#,
        EventType::Modified => br#"{"type":"MODIFIED","object":"#,
        EventType::Deleted => br#"{"type":"DELETED","object":"#,
    };
    out.put_slice(head);
    if media == Media::Table {
        put_table_head(version, out);
    }
}

/// Writes a Table up to its only row. Each subscriber gets the columns once: see [`columns_range`].
fn put_table_head(version: &str, out: &mut BytesMut) {
    for part in [table::HEAD, version, "\"", table::COLUMNS, table::NO_COLUMNS, table::ROWS, "["] {
        out.put_slice(part.as_bytes());
    }
}

/// The byte range that the column definitions replace in the first event that a subscriber is sent.
pub fn columns_range(events: &[u8]) -> Option<std::ops::Range<usize>> {
    // Only a version and names come before it, so the first match is the right one.
    let at = memchr::memmem::find(events, table::COLUMNS.as_bytes())? + table::COLUMNS.len();
    Some(at..at + table::NO_COLUMNS.len())
}

/// Writes the tail of an event, after its object.
pub fn put_tail(media: Media, out: &mut BytesMut) {
    match media {
        Media::Json => out.put_slice(b"}\n"),
        Media::Table => out.put_slice(b"]}}\n"),
        Media::Protobuf => {}
    }
}

/// Writes a bookmark: every change up to its version was sent. The bookmark that ends the initial
/// events carries the annotation `k8s.io/initial-events-end` (API concepts page, "Streaming
/// lists"); informers wait for it.
pub fn put_bookmark(media: Media, of: &TypeMeta, version: &str, ends_initial_events: bool, out: &mut BytesMut) {
    let TypeMeta { kind, api_version, tables } = of;
    if let Some((tables, include)) = tables {
        out.put_slice(br#"{"type":"BOOKMARK","object":"#);
        put_table_head(version, out);
        out.put_slice(tables.bookmark_row(kind, api_version, *include, version, ends_initial_events).as_bytes());
        return put_tail(Media::Table, out);
    }
    if media == Media::Protobuf {
        let object = protobuf::bookmark(api_version, kind, version, ends_initial_events);
        out.put_slice(&protobuf::watch_frame("BOOKMARK", &object));
        return;
    }
    let annotations = if ends_initial_events {
        format!(r#","annotations":{{"{INITIAL_EVENTS_END}":"true"}}"#)
    } else {
        String::new()
    };
    // Kinds and group versions are names, which need no escaping.
    let line = format!(
        "{{\"type\":\"BOOKMARK\",\"object\":{{\"kind\":\"{kind}\",\"apiVersion\":\"{api_version}\",\
         \"metadata\":{{\"resourceVersion\":\"{version}\"{annotations}}}}}}}\n"
    );
    out.put_slice(line.as_bytes());
}

/// An ERROR event; `status` is a `Status` in the same encoding, without a line feed.
pub fn error_event(media: Media, status: &[u8]) -> Bytes {
    match media {
        Media::Json | Media::Table => [br#"{"type":"ERROR","object":"#, status, b"}\n"].concat().into(),
        Media::Protobuf => protobuf::watch_frame("ERROR", status),
    }
}

#[cfg(test)]
mod tests {
    use kubefan_model::projection::Projection;

    use super::*;

    #[test]
    fn a_bookmark_names_the_type_of_the_watched_objects() {
        let resource = ResolvedResource {
            group: "apps".to_owned(),
            version: "v1".to_owned(),
            kind: "Deployment".to_owned(),
            ..ResolvedResource::default()
        };
        let line = |projection, ends| {
            let mut out = BytesMut::new();
            let format = Format::http(Media::Json, projection);
            put_bookmark(Media::Json, &TypeMeta::of(&format, &resource, None), "7", ends, &mut out);
            let line: serde_json::Value = serde_json::from_slice(&out).expect("JSON");
            line
        };
        let plain = line(Projection::default(), false);
        assert_eq!(plain["object"]["apiVersion"], "apps/v1");
        assert_eq!(plain["object"]["metadata"], serde_json::json!({"resourceVersion": "7"}));
        let last = line(Projection::partial_object_metadata(), true);
        assert_eq!(last["object"]["kind"], "PartialObjectMetadata");
        assert_eq!(last["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"], "true");
    }
}
