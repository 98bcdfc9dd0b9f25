//! The server for peers: one gRPC service behind mutual TLS.
//!
//! A transfer contains everything that a cache holds. A client without a certificate of the peers'
//! CA does not get as far as a request. Other clients that connect and send nothing must not delay
//! peers either. So addresses share the handshakes.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use futures::{Stream, StreamExt};
use kubefan_admission::{FairPool, Holder};
use kubefan_common::proto::v1alpha1::peer_service_server::PeerServiceServer;
use kubefan_telemetry::metrics::Metrics;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, timeout},
};
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Server, server::Connected};
use tracing::{error, warn};

use super::{
    error::PeerError,
    sender::{LoadSource, OfferedCaches, TransferService},
    tls::PeerTls,
    transfer_log::TransferLog,
};

/// The time limit of a TLS handshake. It is shorter than a peer waits for its connection, so that
/// silent strangers do not make peers time out.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// Handshakes at a time. The last ones are reserved for addresses with few.
const HANDSHAKES_MAX: usize = 256;
const CROWDED: &str = "too many handshakes of its address are under way";
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

/// Serves peers over `incoming`, which has connections and their addresses, from `caches` until
/// `stop` is cancelled, and records each transfer in `log`. With `load`, it also tells how loaded
/// this replica is.
pub async fn serve<IO>(
    incoming: impl Stream<Item = io::Result<(IO, Option<IpAddr>)>>,
    tls: PeerTls,
    caches: impl OfferedCaches,
    log: Arc<dyn TransferLog>,
    load: Option<LoadSource>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) where
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let service = PeerServiceServer::new(TransferService::new(caches, log).with_load(load))
        .max_decoding_message_size(REQUEST_BYTES_MAX);
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
    incoming: impl Stream<Item = io::Result<(IO, Option<IpAddr>)>>,
    tls: PeerTls,
    metrics: Arc<Metrics>,
) -> impl Stream<Item = io::Result<TlsStream<IO>>>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let shake = move |io: IO| {
        let tls = tls.clone();
        async move { tls.accept(io).await }
    };
    let mut warned: Option<Instant> = None;
    handshakes(incoming, shake).filter_map(move |shaken| {
        let refused = |error: PeerError| {
            metrics.peer_refused();
            if warned.is_none_or(|at| at.elapsed() >= WARN_INTERVAL) {
                warned = Some(Instant::now());
                warn!(%error, "a client on --peer-listen did not prove to be a peer; further ones within a minute are only counted");
            }
        };
        std::future::ready(shaken.map_err(refused).ok().map(Ok))
    })
}

/// The outcomes of the handshakes, which `shake` performs.
///
/// A connection beyond the share of its address is closed at once. If it waited, peers would wait
/// behind it. A peer that is closed tries again.
fn handshakes<IO, T, F>(
    incoming: impl Stream<Item = io::Result<(IO, Option<IpAddr>)>>,
    shake: impl Fn(IO) -> F,
) -> impl Stream<Item = Result<T, PeerError>>
where
    F: Future<Output = Result<T, PeerError>>,
{
    let places = FairPool::new(HANDSHAKES_MAX);
    let mut accepted_before = 0;
    let shaken =
        incoming.map(move |accepted| {
            let begun = accepted.ok().map(|(io, address)| {
                accepted_before += 1;
                (places.try_take(Some(Holder::new(accepted_before, address))), shake(io))
            });
            async move {
                let (place, shaking) = begun?;
                let Some(_place) = place else { return Some(Err(PeerError::Connect(CROWDED.to_owned()))) };
                let shaken = timeout(HANDSHAKE_TIMEOUT, shaking).await;
                Some(shaken.unwrap_or_else(|_| {
                    Err(PeerError::Connect(format!("no TLS handshake within {HANDSHAKE_TIMEOUT:?}")))
                }))
            }
        });
    shaken.buffer_unordered(HANDSHAKES_MAX).filter_map(std::future::ready)
}

#[cfg(test)]
mod tests {
    use std::{
        future::{pending, ready},
        pin::pin,
    };

    use futures::stream;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silent_strangers_of_one_address_do_not_delay_a_peer() {
        let of = |name: &'static str, last_byte: u8| Ok((name, Some(IpAddr::from([10, 0, 0, last_byte]))));
        let incoming = stream::iter((0..1000).map(|_| of("stranger", 1)).chain([of("peer", 2)]));
        let shake = |name: &'static str| async move {
            if name == "stranger" {
                pending::<()>().await;
            }
            Ok(name)
        };
        let began = Instant::now();
        let shaken = handshakes(incoming.chain(stream::pending()), shake);
        let mut proven = pin!(shaken.filter_map(|shaken| ready(shaken.ok())));
        assert_eq!(proven.next().await, Some("peer"));
        assert!(began.elapsed() < HANDSHAKE_TIMEOUT);
    }
}
