//! Takes connections, up to a limit, and gives each the task that speaks its protocol.

use std::{io, pin::pin, sync::Arc, time::Duration};

use axum::{
    Router,
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use http::{Request, StatusCode};
use tokio::{sync::Semaphore, task::JoinSet, time::timeout};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;
use tonic::{service::Routes, transport::server::Connected};
use tower::util::MapResponseLayer;

use super::{
    call,
    connection::{Connection, Io},
    grpc::Service,
    http::{Front, FrontOptions, proxy::Proxy},
    http1,
    limits::{HANDSHAKE_TIMEOUT, TLS_BYTES_MAX},
    listen::{Listener, Peer},
    plaintext,
    preface::{self, Rewound},
    reader::Reader,
    status,
};
use crate::{
    config::ServeConfig,
    fanout::Catalog,
    telemetry::metrics::{ConnectionEnd, Metrics},
};
use kubefan_common::proto::v1alpha1::watch_service_server::WatchServiceServer;
use kubefan_model::selector::FieldSelector;

/// What an operator may change of the data port.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Connections at a time.
    pub connections_max: usize,
    /// Streams at a time, over all connections.
    pub subscribers_max: usize,
    /// Lists and single objects over HTTP at a time.
    pub reads_max: usize,
    /// Streams at a time, per connection.
    pub max_concurrent_streams: u32,
    /// The longest request.
    pub message_bytes_max: usize,
    /// HTTP/2 PING after this silence.
    pub keepalive_interval: Duration,
    /// The connection is closed when nothing follows the PING for so long.
    pub keepalive_timeout: Duration,
    /// A snapshot that makes too little progress in so long ends.
    pub snapshot_stall_timeout: Duration,
    /// From so many bytes of JSON on, a consistent list waits for a proof that takes a second or two.
    pub consistent_list_bytes_min: usize,
    /// The caches hold only what this selects.
    pub narrowed_by: FieldSelector,
    /// Whether a browser of this machine could be led here: over loopback, and without TLS.
    pub is_guarded: bool,
}

impl From<&ServeConfig> for ServerOptions {
    fn from(config: &ServeConfig) -> Self {
        Self {
            connections_max: config.connections_max,
            subscribers_max: config.subscribers_max,
            reads_max: config.reads_max,
            max_concurrent_streams: config.max_concurrent_streams,
            message_bytes_max: config.message_bytes_max,
            keepalive_interval: config.keepalive_interval,
            keepalive_timeout: config.keepalive_timeout,
            snapshot_stall_timeout: config.snapshot_stall_timeout,
            consistent_list_bytes_min: config.consistent_list_bytes_min,
            narrowed_by: config.upstream.field_selector.clone().unwrap_or_default(),
            is_guarded: config.tls.is_none() && config.listen.is_local(),
        }
    }
}

/// What all connections share.
pub struct Server<C> {
    pub(super) service: Service<C>,
    pub(super) front: Front<C>,
    pub(super) router: Router,
    pub(super) options: ServerOptions,
    pub(super) drain: CancellationToken,
    metrics: Arc<Metrics>,
}

impl<C: Catalog> Server<C> {
    /// A server of `catalog`, and of `others` on the same port, which passes all else on by `proxy`; every stream ends when `drain` is
    /// cancelled.
    pub fn new(
        catalog: Arc<C>,
        others: Routes,
        options: ServerOptions,
        proxy: Option<Arc<Proxy>>,
        metrics: Arc<Metrics>,
        drain: CancellationToken,
    ) -> Arc<Self> {
        let reader = Arc::new(Reader::new(catalog, drain.clone(), options.subscribers_max, options.reads_max));
        let front = FrontOptions {
            stall_timeout: options.snapshot_stall_timeout,
            consistent_list_bytes_min: options.consistent_list_bytes_min,
            narrowed_by: options.narrowed_by.clone(),
            is_guarded: options.is_guarded,
        };
        let service = Service::new(reader.clone(), metrics.clone());
        let front = Front::new(reader, proxy, front, metrics.clone());
        let routed = WatchServiceServer::new(service.clone()).max_decoding_message_size(options.message_bytes_max);
        let router = others.add_service(routed).into_axum_router();
        let router = router.fallback(not_found).layer(MapResponseLayer::new(status::explain)).with_state(());
        Arc::new(Self { service, front, router, options, drain, metrics })
    }

    /// Serves what `listener` accepts until the drain; then until the last connection has ended. When it is dropped, all end.
    pub async fn run(self: Arc<Self>, listener: Listener, tls: Option<TlsAcceptor>) {
        let places = Arc::new(Semaphore::new(self.options.connections_max.min(Semaphore::MAX_PERMITS)));
        let mut connections = JoinSet::new();
        let mut refusing = false;
        {
            let mut incoming = pin!(listener.incoming());
            loop {
                let accepted = tokio::select! {
                    biased;
                    () = self.drain.cancelled() => break,
                    Some(_) = connections.join_next() => continue,
                    accepted = incoming.next() => accepted,
                };
                // Failures are waited out below.
                let Some(Ok(io)) = accepted else { continue };
                let metrics = self.metrics.connection();
                let Ok(place) = places.clone().try_acquire_owned() else {
                    metrics.finished(ConnectionEnd::Refused);
                    if !std::mem::replace(&mut refusing, true) {
                        let limit = self.options.connections_max;
                        tracing::warn!(limit, "too many connections; more are closed at once (--connections-max)");
                    }
                    continue;
                };
                refusing = false;
                let (server, tls) = (self.clone(), tls.clone());
                connections.spawn(async move {
                    let peer = io.connect_info();
                    let end = match tls {
                        None => server.serve(io, peer).await,
                        // In boxes: what a handshake needs is not kept after it, and TLS is large.
                        Some(tls) => match Box::pin(server.secure(io, tls, peer)).await.map(Box::new) {
                            Ok(io) => {
                                let has_certificate = io.get_ref().1.peer_certificates().is_some();
                                server.serve(io, Peer { has_certificate, ..peer }).await
                            }
                            Err(end) => end,
                        },
                    };
                    metrics.finished(end);
                    drop(place);
                });
            }
        }
        while connections.join_next().await.is_some() {}
    }

    /// Begins TLS. Whoever speaks without it is told so.
    async fn secure<T: Io>(&self, io: T, tls: TlsAcceptor, peer: Peer) -> Result<TlsStream<Rewound<T>>, ConnectionEnd> {
        let handshake = async {
            let (is_http2, io) = preface::detect(io).await?;
            if plaintext::is_spoken(io.first()) {
                plaintext::refuse(io, is_http2).await?;
                return Err(io::Error::other(plaintext::REFUSAL));
            }
            tls.accept_with(io, |session| session.set_buffer_limit(Some(TLS_BYTES_MAX))).await
        };
        tokio::select! {
            biased;
            secured = in_time(handshake) => secured.map_err(|error| no_handshake(&error, peer)),
            () = self.drain.cancelled() => Err(ConnectionEnd::Draining),
        }
    }

    /// Serves one connection, whichever protocol it speaks.
    pub async fn serve<T: Io>(self: Arc<Self>, io: T, peer: Peer) -> ConnectionEnd {
        let (front, router, drain) = (self.front.clone(), self.router.clone(), self.drain.clone());
        let stall_timeout = self.options.snapshot_stall_timeout;
        // In boxes, so that a connection at rest has the memory of its own protocol, and no more.
        match Box::pin(self.greet(io, peer)).await {
            Ok(Spoken::Http2(connection)) => connection.await,
            Ok(Spoken::Http1(io)) => Box::pin(http1::serve(io, peer, front, router, stall_timeout, drain)).await,
            Err(end) => end,
        }
    }

    /// Finds out what the peer speaks.
    async fn greet<T: Io>(self: Arc<Self>, io: T, peer: Peer) -> Result<Spoken<C, T>, ConnectionEnd> {
        let detected = tokio::select! {
            biased;
            detected = in_time(preface::detect(io)) => detected,
            () = self.drain.cancelled() => return Err(ConnectionEnd::Draining),
        };
        match detected {
            Ok((true, io)) => match in_time(Connection::begin(self, io, peer)).await {
                Ok(connection) => Ok(Spoken::Http2(Box::new(connection))),
                Err(error) => Err(no_handshake(&error, peer)),
            },
            Ok((false, io)) => Ok(Spoken::Http1(io)),
            Err(error) => Err(no_handshake(&error, peer)),
        }
    }
}

/// A connection whose protocol is known.
enum Spoken<C, T> {
    Http2(Box<Connection<C, Rewound<T>>>),
    Http1(Rewound<T>),
}

fn no_handshake(error: &io::Error, peer: Peer) -> ConnectionEnd {
    tracing::debug!(%error, peer = ?peer.address, "a connection did not come about");
    ConnectionEnd::Handshake
}

async fn in_time<T, E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    handshake: impl Future<Output = Result<T, E>>,
) -> io::Result<T> {
    match timeout(HANDSHAKE_TIMEOUT, handshake).await {
        Ok(result) => result.map_err(io::Error::other),
        Err(elapsed) => Err(elapsed.into()),
    }
}

/// What is asked for and not there.
async fn not_found(request: Request<axum::body::Body>) -> Response {
    if call::is_any_grpc(request.headers()) {
        return status::no_such_method(request.uri().path()).into_http::<axum::body::Body>().into_response();
    }
    (StatusCode::NOT_FOUND, "nothing is served here; kubefan speaks gRPC and the Kubernetes API on this port\n")
        .into_response()
}
