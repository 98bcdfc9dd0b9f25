//! The server for peers: one gRPC service behind mutual TLS.
//!
//! A transfer contains everything that a cache holds. A client without a certificate of the peers'
//! CA does not get as far as a request, and cannot delay those that have one.

use std::{io, sync::Arc, time::Duration};

use futures::{Stream, StreamExt};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, timeout},
};
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Server, server::Connected};
use tracing::{error, warn};

use super::{LoadSource, OfferedCaches, PeerError, Sender, TransferLog, tls::PeerTls};
use crate::telemetry::metrics::Metrics;
use kubefan_common::proto::v1alpha1::peer_service_server::PeerServiceServer;

/// The time limit of a TLS handshake. It is shorter than a peer waits for its connection, so that
/// silent strangers do not make peers time out.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// Handshakes at a time. Others wait.
const HANDSHAKES_MAX: usize = 256;
/// The shortest time between two warnings about failed handshakes.
const WARN_INTERVAL: Duration = Duration::from_secs(60);
/// Requests of one peer at a time. A peer requests each of its resources.
const REQUESTS_MAX: u32 = 64;
/// The longest request, in bytes.
const REQUEST_BYTES_MAX: usize = 64 << 10;
/// A silent peer gets an HTTP/2 ping after this time, and has as long to answer.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// A connection takes no further requests after this time, and ends with the last one. Only
/// handshakes verify certificates, so an older one could outlive the CA that it was proved by.
const CONNECTION_AGE_MAX: Duration = Duration::from_secs(60);

/// Serves peers over `incoming` from `caches` until `stop` is cancelled, and records each transfer
/// in `log`. With `load`, it also tells how loaded this replica is.
pub async fn serve<IO>(
    incoming: impl Stream<Item = io::Result<IO>>,
    tls: PeerTls,
    (caches, log, load): (impl OfferedCaches, Arc<dyn TransferLog>, Option<LoadSource>),
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) where
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let service =
        PeerServiceServer::new(Sender::new(caches, log).with_load(load)).max_decoding_message_size(REQUEST_BYTES_MAX);
    let server = Server::builder()
        .max_concurrent_streams(REQUESTS_MAX)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .max_connection_age(CONNECTION_AGE_MAX)
        .add_service(service);
    let proven = proven(incoming, tls, metrics);
    let served = tokio::select! {
        served = server.serve_with_incoming(proven) => served,
        // A peer does not use an incomplete transfer, so there is no drain.
        () = stop.cancelled() => return,
    };
    if let Err(error) = served {
        error!(%error, "the server for peers has failed");
    }
}

/// The connections whose handshake proved that the client is a peer.
fn proven<IO>(
    incoming: impl Stream<Item = io::Result<IO>>,
    tls: PeerTls,
    metrics: Arc<Metrics>,
) -> impl Stream<Item = io::Result<TlsStream<IO>>>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let shaken =
        incoming.map(move |accepted| {
            let tls = tls.clone();
            async move {
                let accepting = timeout(HANDSHAKE_TIMEOUT, tls.accept(accepted.ok()?));
                Some(accepting.await.unwrap_or_else(|_| {
                    Err(PeerError::Connect(format!("no TLS handshake within {HANDSHAKE_TIMEOUT:?}")))
                }))
            }
        });
    let mut warned: Option<Instant> = None;
    shaken.buffer_unordered(HANDSHAKES_MAX).filter_map(move |shaken| {
        let proven = shaken.and_then(|shaken| {
            let refused = |error: PeerError| {
                metrics.peer_refused();
                if warned.is_none_or(|at| at.elapsed() >= WARN_INTERVAL) {
                    warned = Some(Instant::now());
                    warn!(%error, "a client on --peer-listen did not prove to be a peer; further ones within a minute are only counted");
                }
            };
            shaken.map_err(refused).ok()
        });
        std::future::ready(proven.map(Ok))
    })
}
