//! The port for other replicas, and the way to theirs.
//!
//! It has one service and one way to speak, mutual TLS; who shows no certificate of the peers' CA does not get as far as a request.

use std::{io, sync::Arc, time::Duration};

use futures::{Stream, StreamExt};
use tokio::time::{Instant, timeout};
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tracing::{error, warn};

use super::registry::Registry;
use crate::{
    config::ServeConfig,
    peer::{DnsDial, PeerError, Peers, Sender, tls::PeerTls},
    server::transport::listen::{Connection, Listener},
    telemetry::metrics::Metrics,
};
use kubefan_common::proto::v1alpha1::peer_service_server::PeerServiceServer;

/// How long a peer has to prove who it is: less than a peer waits for its connection, so that strangers who say nothing make nobody late.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// Peers that prove it at a time; others wait.
const HANDSHAKES_MAX: usize = 256;
/// How often it is said that somebody was refused, at most.
const WARN_INTERVAL: Duration = Duration::from_secs(60);
/// Requests of one peer at a time: it has so many resources, and each takes its turn here.
const REQUESTS_MAX: u32 = 64;
/// The longest request, in bytes.
const REQUEST_BYTES_MAX: usize = 64 << 10;
/// A peer that is silent for so long is asked whether it is there, and has as long to answer.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// What peers prove themselves by, where there are any.
pub(super) fn tls(config: &ServeConfig) -> Option<PeerTls> {
    let files = config.peer.files.clone()?;
    Some(PeerTls { cert_file: files.cert_file, key_file: files.key_file, ca_file: files.ca_file })
}

/// Content of one transfer where neither it nor memory has a limit, in bytes.
const TRANSFER_BYTES_MAX: u64 = 4 << 30;

/// Whom caches are taken over from; `own_port` is where this replica serves peers, `memory_max` what it may take in memory, in bytes.
pub(super) fn whom(config: &ServeConfig, own_port: Option<u16>, memory_max: Option<usize>) -> Option<Peers> {
    let (name, tls) = (config.peer.peers.clone()?, tls(config)?);
    let dial = DnsDial::new(name.host, name.port, tls, own_port);
    // Before a cache is there, nothing can be let go of when memory is short.
    let share = memory_max.map_or(TRANSFER_BYTES_MAX, |bytes| bytes as u64 / 2);
    Some(Peers::new(Arc::new(dial), config.peer.timeout, config.peer.transfer_bytes_max.unwrap_or(share)))
}

/// Serves peers until `stop`.
pub(super) async fn serve(
    listener: Listener,
    tls: PeerTls,
    registry: Arc<Registry>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) {
    let service = PeerServiceServer::new(Sender::new(registry)).max_decoding_message_size(REQUEST_BYTES_MAX);
    let server = Server::builder()
        .max_concurrent_streams(REQUESTS_MAX)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .add_service(service);
    let proven = proven(listener, tls, metrics);
    let served = tokio::select! {
        served = server.serve_with_incoming(proven) => served,
        // What a peer has not received whole it does not use: nothing is waited for.
        () = stop.cancelled() => return,
    };
    if let Err(error) = served {
        error!(%error, "peers are no longer served");
    }
}

/// The connections of those who have proved to be peers.
fn proven(
    listener: Listener,
    tls: PeerTls,
    metrics: Arc<Metrics>,
) -> impl Stream<Item = io::Result<TlsStream<Connection>>> {
    let shaken = listener.incoming().map(move |accepted| {
        let tls = tls.clone();
        async move {
            let accepting = timeout(HANDSHAKE_TIMEOUT, tls.accept(accepted.ok()?));
            Some(
                accepting
                    .await
                    .unwrap_or_else(|_| Err(PeerError::Connect(format!("none within {HANDSHAKE_TIMEOUT:?}")))),
            )
        }
    });
    let mut warned: Option<Instant> = None;
    shaken.buffer_unordered(HANDSHAKES_MAX).filter_map(move |shaken| {
        let proven = shaken.and_then(|shaken| {
            let refused = |error: PeerError| {
                metrics.peer_refused();
                if warned.is_none_or(|at| at.elapsed() >= WARN_INTERVAL) {
                    warned = Some(Instant::now());
                    warn!(%error, "somebody on --peer-listen has not proved to be a peer; others within a minute are only counted");
                }
            };
            shaken.map_err(refused).ok()
        });
        std::future::ready(proven.map(Ok))
    })
}
