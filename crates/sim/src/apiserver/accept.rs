//! Reads the `Accept` header: which encodings of a list or a watch a client takes, and prefers.

use http::{header, request::Parts};

use super::{protobuf, store::Collection};

/// The media type of an object or a list in protobuf.
pub(super) const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
/// The media type of a watch in protobuf.
pub(super) const PROTOBUF_WATCH: &str = "application/vnd.kubernetes.protobuf;stream=watch";

/// Whether this clause of an `Accept` header allows plain JSON.
pub(super) fn is_json(clause: &str) -> bool {
    let media_type = clause.split(';').next().unwrap_or_default();
    matches!(media_type, "application/json" | "application/*" | "*/*") && !clause.contains("as=")
}

/// Whether this clause of an `Accept` header allows protobuf.
pub(super) fn is_protobuf(clause: &str, is_watch: bool) -> bool {
    clause == PROTOBUF || (is_watch && clause == PROTOBUF_WATCH)
}

/// Whether the client prefers protobuf to JSON, and the resource is served as such.
pub(super) fn prefers_protobuf(request: &Parts, collection: &Collection, is_watch: bool) -> bool {
    let accept = request.headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let accept = accept.replace(' ', "");
    let mut clauses = accept.split(',');
    let first = clauses.find(|clause| is_json(clause) || is_metadata_list(clause) || is_protobuf(clause, is_watch));
    protobuf::is_served(&collection.resource.gvr) && first.is_some_and(|clause| is_protobuf(clause, is_watch))
}

/// Whether this clause allows a PartialObjectMetadataList.
pub(super) fn is_metadata_list(clause: &str) -> bool {
    let mut parts = clause.split(';');
    let wanted = ["as=PartialObjectMetadataList", "g=meta.k8s.io", "v=v1"];
    parts.next() == Some("application/json")
        && wanted.iter().all(|wanted| clause.split(';').any(|part| part == *wanted))
}

/// Whether the client prefers a PartialObjectMetadataList over plain JSON.
pub(super) fn prefers_metadata(request: &Parts) -> bool {
    let accept = request.headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let accept = accept.replace(' ', "");
    accept.split(',').find(|clause| is_json(clause) || is_metadata_list(clause)).is_some_and(is_metadata_list)
}

/// Whether any clause of `Accept` passes the test. A missing header accepts everything.
pub(super) fn accepts(request: &Parts, acceptable: impl Fn(&str) -> bool) -> bool {
    let Some(accept) = request.headers.get(header::ACCEPT) else { return acceptable("*/*") };
    let accept = accept.to_str().unwrap_or_default();
    accept.split(',').any(|clause| acceptable(&clause.replace(' ', "")))
}
