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

/// Times after which a connection counts as dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Time limit for a TCP connection with its TLS handshake.
    pub connect_timeout: Duration,
    /// The time without a frame after which a PING is sent (HTTP/2).
    pub ping_interval: Duration,
    /// The time without an answer to the PING after which the connection is closed.
    pub ping_timeout: Duration,
}

impl ConnectionLimits {
    /// For an apiserver: PINGs as in client-go. An overloaded apiserver may answer late, and many
    /// new connections would not help it.
    pub const APISERVER: Self = Self {
        connect_timeout: Duration::from_secs(10),
        ping_interval: Duration::from_secs(30),
        ping_timeout: Duration::from_secs(15),
    };
    /// For another kubefan. A machine that loses power answers nothing, also no new connection that
    /// a Service still leads to it, and a replica on another machine can take over at once. There
    /// are few such connections, so the checks cost nothing. Readers wait for the sum of the three.
    pub const KUBEFAN: Self = Self {
        connect_timeout: Duration::from_secs(1),
        ping_interval: Duration::from_secs(1),
        ping_timeout: Duration::from_millis(1500),
    };
}

/// TCP keepalive, for HTTP/1.1: a peer that answers nothing is dead after a minute. By default the
/// kernel gives it 11 minutes more.
pub(crate) const TCP_KEEPALIVE: Duration = Duration::from_secs(30);
/// The time between two probes.
pub(crate) const TCP_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Probes without an answer.
pub(crate) const TCP_KEEPALIVE_RETRIES: u32 = 3;
/// The number of concurrent streams on one connection. kube-apiserver accepts 100
/// (`--http2-max-streams-per-connection`), and so do most proxies.
pub(crate) const STREAMS_MAX: usize = 100;
/// The number of concurrent requests on one connection. The remaining streams are a reserve for
/// requests that this side has ended and the server has not. A request without a stream would wait,
/// and fail if the server closes the connection then.
pub(crate) const REQUESTS_MAX: usize = STREAMS_MAX - 10;
