//! Settings and the body type that both HTTP clients share: `transport` for kubefan's own requests
//! and `connector` for forwarded ones.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, combinators::UnsyncBoxBody};
use tower::BoxError;

/// A streamed response body.
pub type UpstreamBody = UnsyncBoxBody<Bytes, BoxError>;

/// Wraps a body so that `held`, such as a permit or a metric's guard, is dropped together with it.
pub fn holding<B: http_body::Body>(
    body: B,
    held: impl Send + 'static,
) -> impl http_body::Body<Data = B::Data, Error = B::Error> {
    body.map_err(move |error| {
        let _held = &held;
        error
    })
}

/// The time without a frame after which a PING is sent, as in client-go.
pub(in crate::upstream) const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(30);
/// The time without an answer to the PING after which the connection counts as dead, as in
/// client-go.
pub(in crate::upstream) const HTTP2_PING_TIMEOUT: Duration = Duration::from_secs(15);
/// TCP keepalive, for HTTP/1.1.
pub(in crate::upstream) const TCP_KEEPALIVE: Duration = Duration::from_secs(30);
/// The number of concurrent streams on one connection. kube-apiserver accepts 100
/// (`--http2-max-streams-per-connection`), and so do most proxies.
pub(in crate::upstream) const STREAMS_MAX: usize = 100;
