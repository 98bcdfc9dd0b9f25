//! Events of a Kubernetes watch over HTTP: lines of JSON, `{"type":…,"object":…}`, or protobuf with a length before each event
//! (`apimachinery/pkg/runtime/serializer/{json,protobuf}`).
//!
//! The object's bytes are shared with the cache, as in a gRPC frame; what is written here is what stands around them.

use bytes::{BufMut, BytesMut};

use crate::{
    model::{
        Media,
        event::EventType,
        format::Format,
        projection::{PARTIAL_API_VERSION, PARTIAL_KIND},
        protobuf::{self, INITIAL_EVENTS_END},
    },
    proto::v1alpha1::ResolvedResource,
};

/// The kind that a watch's bookmarks name.
#[derive(Debug)]
pub struct TypeMeta {
    /// As in `kind`.
    kind: String,
    /// As in `apiVersion`.
    api_version: String,
}

impl TypeMeta {
    /// Of the objects that a format makes of a resource's.
    pub fn of(format: &Format, resource: &ResolvedResource) -> Self {
        if !format.projection().is_identity() {
            return Self { kind: PARTIAL_KIND.to_owned(), api_version: PARTIAL_API_VERSION.to_owned() };
        }
        let api_version = match resource.group.as_str() {
            "" => resource.version.clone(),
            group => format!("{group}/{}", resource.version),
        };
        Self { kind: resource.kind.clone(), api_version }
    }
}

/// What comes before an event's object of so many bytes.
pub(super) fn put_head(media: Media, kind: EventType, object_len: usize, out: &mut BytesMut) {
    if media == Media::Protobuf {
        return protobuf::put_watch_frame_head(kind.as_str(), object_len, out);
    }
    let head: &[u8] = match kind {
        EventType::Added => br#"{"type":"ADDED","object":"#,
        EventType::Modified => br#"{"type":"MODIFIED","object":"#,
        EventType::Deleted => br#"{"type":"DELETED","object":"#,
    };
    out.put_slice(head);
}

/// What comes after it.
pub(super) fn put_tail(media: Media, out: &mut BytesMut) {
    match media {
        Media::Json => out.put_slice(b"}\n"),
        Media::Protobuf => {}
    }
}

/// A bookmark: everything at or below its version was sent. The one that ends an initial state says so (`k8s.io/initial-events-end` of
/// the API concepts page, "Streaming lists"); informers wait for it.
pub(super) fn put_bookmark(media: Media, of: &TypeMeta, version: &str, ends_initial_events: bool, out: &mut BytesMut) {
    let TypeMeta { kind, api_version } = of;
    if media == Media::Protobuf {
        let object = protobuf::bookmark(api_version, kind, version, ends_initial_events);
        out.put_slice(&protobuf::watch_frame("BOOKMARK", &object));
        return;
    }
    let annotations = match ends_initial_events {
        true => format!(r#","annotations":{{"{INITIAL_EVENTS_END}":"true"}}"#),
        false => String::new(),
    };
    // Kinds and group versions are names: nothing in them needs escaping.
    let line = format!(
        "{{\"type\":\"BOOKMARK\",\"object\":{{\"kind\":\"{kind}\",\"apiVersion\":\"{api_version}\",\
         \"metadata\":{{\"resourceVersion\":\"{version}\"{annotations}}}}}}}\n"
    );
    out.put_slice(line.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::projection::Projection;

    #[test]
    fn a_bookmark_names_the_kind_that_the_watch_is_of() {
        let resource = ResolvedResource {
            group: "apps".to_owned(),
            version: "v1".to_owned(),
            kind: "Deployment".to_owned(),
            ..ResolvedResource::default()
        };
        let line = |projection, ends| {
            let mut out = BytesMut::new();
            let format = Format::http(Media::Json, projection);
            put_bookmark(Media::Json, &TypeMeta::of(&format, &resource), "7", ends, &mut out);
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
