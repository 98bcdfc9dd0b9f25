//! Connects to one of the addresses that a name has, such as that of a headless Service with an
//! address for each replica.
//!
//! The system's resolver may always return addresses in the same order, to all clients. All clients
//! would then be on the first replica, and a replica that asks some to come back would get the same
//! ones again. So each connection looks the name up and takes the addresses in random order, the
//! one that was used before at the end: the replica there has failed, or asks its clients to leave.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use futures::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use hyper_util::rt::TokioIo;
use rand::seq::SliceRandom;
use tokio::{net::TcpStream, time::timeout};
use tonic::codegen::{Service, http::Uri};

use crate::random::generator;
use kubefan_common::names::{Names, Resolve};

/// The number of addresses tried for a connection.
const ADDRESSES_MAX: usize = 16;
/// Wait for a silent address before the next is tried too, as RFC 8305 recommends.
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Connects the channel of one client, again and again.
#[derive(Clone)]
pub(super) struct Connector(Arc<Shared>);

struct Shared {
    names: Arc<Names>,
    /// The address of the last connection.
    last: Mutex<Option<SocketAddr>>,
}

impl Connector {
    /// Connects to the addresses that `resolver` finds; `None`: the system's.
    pub(super) fn new(resolver: Option<Arc<dyn Resolve>>) -> Self {
        let names = resolver.map_or_else(Names::of_system, Names::new);
        Self(Arc::new(Shared { names, last: Mutex::default() }))
    }

    async fn connect(self, uri: Uri) -> io::Result<TokioIo<TcpStream>> {
        let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        // The client accepts no address without a port.
        let addresses = self.0.names.look_up(host, uri.port_u16().unwrap_or_default()).await?;
        let stream = first_of(self.in_order(addresses)).await?;
        stream.set_nodelay(true)?;
        *lock(&self.0.last) = stream.peer_addr().ok();
        Ok(TokioIo::new(stream))
    }

    /// In random order, the last one at the end.
    fn in_order(&self, mut addresses: Vec<SocketAddr>) -> VecDeque<SocketAddr> {
        addresses.shuffle(&mut generator(None));
        let last = *lock(&self.0.last);
        addresses.sort_by_key(|address| Some(*address) == last);
        addresses.truncate(ADDRESSES_MAX);
        addresses.into()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connects to the first address that answers, and does not wait long for one before it tries the
/// next. The caller limits the time.
async fn first_of(mut addresses: VecDeque<SocketAddr>) -> io::Result<TcpStream> {
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let mut attempts = FuturesUnordered::new();
    loop {
        attempts.extend(addresses.pop_front().map(TcpStream::connect));
        let ended = if addresses.is_empty() {
            attempts.next().await
        } else {
            match timeout(ATTEMPT_DELAY, attempts.next()).await {
                Ok(ended) => ended,
                Err(_) => continue,
            }
        };
        match ended {
            Some(Ok(stream)) => return Ok(stream),
            Some(Err(error)) => failed = error,
            None => return Err(failed),
        }
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    struct Fixed(Vec<SocketAddr>);

    impl Resolve for Fixed {
        fn resolve<'a>(&'a self, _: &'a str, _: u16) -> BoxFuture<'a, io::Result<Vec<SocketAddr>>> {
            Box::pin(async { Ok(self.0.clone()) })
        }
    }

    async fn used(connector: &Connector) -> SocketAddr {
        let connected = connector.clone().connect(Uri::from_static("http://kubefan.test:7443")).await;
        connected.unwrap().inner().peer_addr().unwrap()
    }

    #[tokio::test]
    async fn clients_spread_over_all_addresses_and_come_back_to_another_one() {
        let mut listeners = Vec::new();
        for _ in 0..3 {
            listeners.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
        }
        let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        let mut first = HashSet::new();
        for _ in 0..100 {
            let connector = Connector::new(Some(Arc::new(Fixed(addresses.clone()))));
            let before = used(&connector).await;
            assert_ne!(used(&connector).await, before);
            first.insert(before);
        }
        assert_eq!(first.len(), 3);
    }

    #[tokio::test]
    async fn an_address_that_refuses_is_skipped_and_the_last_one_is_used_if_there_is_no_other() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        // Bound but not listening: no other process can take the port meanwhile.
        let refusing = TcpSocket::new_v4().unwrap();
        refusing.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let up = listener.local_addr().unwrap();
        let down = refusing.local_addr().unwrap();
        let connector = Connector::new(Some(Arc::new(Fixed(vec![down, up]))));
        for _ in 0..10 {
            assert_eq!(used(&connector).await, up);
        }
        let nowhere = Connector::new(Some(Arc::new(Fixed(vec![down]))));
        let error = nowhere.connect(Uri::from_static("http://kubefan.test:7443")).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[tokio::test]
    async fn the_system_resolves_names_and_ip_addresses() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        for host in ["localhost", "127.0.0.1"] {
            let uri = format!("http://{host}:{port}").parse().unwrap();
            assert!(Connector::new(None).connect(uri).await.is_ok(), "{host}");
        }
    }
}
