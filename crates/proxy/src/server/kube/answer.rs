//! The answer to a request, and the headers of answers from the cache.

use axum::body::Body;
use http::{HeaderMap, HeaderName, HeaderValue, Response, header};

use crate::{cache::warnings::Warnings, server::watch::OpenedWatch};
use kubefan_model::Media;

/// The answer to a request.
pub enum Answer {
    /// A watch that was opened. The transport sends it.
    Watch(OpenedWatch),
    /// A whole response. The client must read it without long pauses, because it pins a snapshot or
    /// a place among forwarded requests.
    Response(Response<Body>),
    /// A forwarded response that the client may read at any pace: a watch, a log, a session.
    Forwarded(Response<Body>),
}

/// In the extensions of a response: it comes from upstream.
#[derive(Debug, Clone, Copy)]
pub struct FromUpstream;

/// Marks answers from the cache (RFC 9211).
pub const CACHE_STATUS: HeaderName = HeaderName::from_static("cache-status");
/// The value of [`CACHE_STATUS`] for an answer from the cache.
pub const HIT: HeaderValue = HeaderValue::from_static("kubefan; hit");

/// Puts the headers of a watch, including upstream's warnings.
pub fn put_watch_headers(media: Media, warnings: &Warnings, headers: &mut HeaderMap) {
    put_headers(media.watch_content_type(), headers);
    warnings.put(headers);
}

fn put_headers(content_type: &'static str, headers: &mut HeaderMap) {
    headers.insert(CACHE_STATUS, HIT);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
}

/// A response from the cache.
pub fn from_cache(content_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    put_headers(content_type, response.headers_mut());
    response
}
