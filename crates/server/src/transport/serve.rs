//! Accepts connections, up to a limit, detects the protocol of each, and runs its task.

use std::{
    io,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use futures::StreamExt;
use kubefan_access::AccessControl;
use kubefan_admission::{FairPool, Holder};
use kubefan_fanout::Catalog;
use kubefan_telemetry::metrics::{ConnectionEnd, Metrics};
use tokio::{task::JoinSet, time::timeout};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tonic::{service::Routes, transport::server::Connected};

use super::{
    http1,
    http2::connection::{Connection, Io},
    limits::HANDSHAKE_TIMEOUT,
    listen::Listener,
    mismatch,
    open_connections::OpenConnections,
    preface::{self, Rewound},
    services::{ServerHandles, ServerOptions, Services},
    tls_handshake,
    unread::Readers,
};
use crate::{client_info::ClientInfo, fallback_budget::FallbackBudget, reader::Reader, subscribers::Subscribers};

/// The server of the data port.
pub struct Server {
    services: Arc<Services>,
    access: Arc<AccessControl>,
    metrics: Arc<Metrics>,
    /// The number of the last connection.
    connections: AtomicU64,
}

impl Server {
    /// A server for `catalog` and the gRPC services `others` on the same port.
    pub fn new(catalog: Arc<dyn Catalog>, others: Routes, options: ServerOptions, handles: ServerHandles) -> Arc<Self> {
        let access = handles.access.clone();
        let metrics = handles.metrics.clone();
        let services = Arc::new(Services::new(catalog, others, options, handles));
        Arc::new(Self { services, access, metrics, connections: AtomicU64::new(0) })
    }

    /// The readers of all connections. Some of them may read nothing.
    pub fn readers(&self) -> &Arc<Readers> {
        &self.services.readers
    }

    /// Admission, and the reads of both APIs.
    pub fn reader(&self) -> &Arc<Reader> {
        &self.services.reader
    }

    /// The open connections.
    pub fn connections(&self) -> &Arc<OpenConnections> {
        &self.services.connections
    }

    /// The budget that answers tell their clients.
    pub fn fallback_budget(&self) -> &Arc<FallbackBudget> {
        &self.services.budget
    }

    /// The watches that are being sent.
    pub fn subscribers(&self) -> &Arc<Subscribers> {
        self.services.reader.subscribers()
    }

    /// Serves the connections of `listener` until the drain, then waits until the last one has
    /// ended. Dropping the future ends all.
    pub async fn run(self: Arc<Self>, listener: Listener, tls: Option<TlsAcceptor>) {
        let limit = self.services.options.connections_max;
        let places = FairPool::new(limit);
        let mut connections = JoinSet::new();
        let mut accepted_before = 0;
        let mut refusing = false;
        {
            let mut incoming = pin!(listener.incoming(0));
            loop {
                let accepted = tokio::select! {
                    biased;
                    () = self.services.drain.cancelled() => break,
                    Some(_) = connections.join_next() => continue,
                    accepted = incoming.next() => accepted,
                };
                // The listener has logged the failure and waited.
                let Some(Ok(io)) = accepted else { continue };
                let metrics = self.metrics.connection();
                let client = self.client(&io);
                accepted_before += 1;
                let holder = Holder::new(accepted_before, client.address.map(|address| address.ip()));
                let Some(place) = places.try_take(Some(holder)) else {
                    metrics.finished(ConnectionEnd::Refused);
                    if !std::mem::replace(&mut refusing, true) {
                        tracing::warn!(
                            limit,
                            "too many connections; new ones are closed at once (limits.connectionsMax)"
                        );
                    }
                    continue;
                };
                refusing = false;
                let server = self.clone();
                let tls = tls.clone();
                let io = self.services.readers.observe_socket(io);
                connections.spawn(async move {
                    let end = match tls {
                        None => server.serve(io, client).await,
                        // Boxed, so that the memory of the handshake is freed after it. A TLS
                        // session is large.
                        Some(tls) => match Box::pin(server.accept_tls(io, tls, &client)).await.map(Box::new) {
                            Ok(io) => {
                                let client = tls_handshake::client(&io, client, &server.access);
                                server.serve(io, client).await
                            }
                            Err(end) => end,
                        },
                    };
                    metrics.finished(end);
                    drop(place);
                });
            }
        }
        self.services.connections.drain();
        while connections.join_next().await.is_some() {}
    }

    /// The client of a connection.
    fn client(&self, io: &impl Connected<ConnectInfo = ClientInfo>) -> ClientInfo {
        let client = io.connect_info();
        let networks = &self.services.options.trusted_proxies;
        let is_of = |address: SocketAddr| networks.iter().any(|one| one.contains(&address.ip().to_canonical()));
        ClientInfo { is_trusted_proxy: client.address.is_some_and(is_of), ..client }
    }

    /// Performs the TLS handshake.
    async fn accept_tls<T: Io>(
        &self,
        io: T,
        tls: TlsAcceptor,
        client: &ClientInfo,
    ) -> Result<TlsStream<Rewound<T>>, ConnectionEnd> {
        tokio::select! {
            biased;
            accepted = in_time(tls_handshake::accept(io, tls)) => accepted.map_err(|error| handshake_failed(&error, client)),
            () = self.services.drain.cancelled() => Err(ConnectionEnd::Draining),
        }
    }

    /// Serves one connection, in the protocol that its client speaks.
    pub async fn serve<T: Io>(self: Arc<Self>, io: T, client: ClientInfo) -> ConnectionEnd {
        let services = self.services.clone();
        let client = ClientInfo { connection: self.connections.fetch_add(1, Ordering::Relaxed) + 1, ..client };
        // Boxed, so that an idle connection has the memory of its own protocol only.
        match Box::pin(self.detect_protocol(io, client.clone())).await {
            Ok(Detected::Http2(connection)) => connection.await,
            Ok(Detected::Http1(io)) => Box::pin(http1::connection::serve(io, client, services)).await,
            Err(end) => end,
        }
    }

    /// Detects the protocol of a connection; performs the HTTP/2 handshake.
    async fn detect_protocol<T: Io>(self: Arc<Self>, io: T, client: ClientInfo) -> Result<Detected<T>, ConnectionEnd> {
        let detected = tokio::select! {
            biased;
            detected = in_time(preface::detect(io)) => detected,
            () = self.services.drain.cancelled() => return Err(ConnectionEnd::Draining),
        };
        match detected {
            Ok((true, io)) => match in_time(Connection::handshake(self.services.clone(), io, client.clone())).await {
                Ok(connection) => Ok(Detected::Http2(Box::new(connection))),
                Err(error) => Err(handshake_failed(&error, &client)),
            },
            Ok((false, io)) if mismatch::is_tls(io.first()) => {
                let refused = in_time(mismatch::refuse(io, mismatch::HAS_NO_TLS)).await;
                let error = refused.err().unwrap_or_else(|| io::Error::other(mismatch::HAS_NO_TLS));
                Err(handshake_failed(&error, &client))
            }
            Ok((false, io)) => Ok(Detected::Http1(io)),
            Err(error) => Err(handshake_failed(&error, &client)),
        }
    }
}

/// A connection whose protocol is known.
enum Detected<T> {
    Http2(Box<Connection<Rewound<T>>>),
    Http1(Rewound<T>),
}

fn handshake_failed(error: &io::Error, client: &ClientInfo) -> ConnectionEnd {
    tracing::debug!(%error, peer = ?client.address, "a handshake failed");
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
