//! The front of the replicas: a TCP balancer that picks a ready replica at random for each
//! connection, as kube-proxy does for a Service, or a name that has the addresses of the ready
//! replicas, like the name of a headless Service.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use futures::future::BoxFuture;
use kubefan_client::Resolve;
use rand::{
    SeedableRng,
    seq::{IndexedRandom, SliceRandom},
};
use rand_pcg::Pcg64Mcg;
use reqwest::dns;
use tokio::{
    net::{TcpListener, TcpStream},
    task::{JoinHandle, JoinSet},
};

/// The ready replicas. Clones share the list.
#[derive(Clone)]
pub(super) struct Endpoints(Arc<Shared>);

struct Shared {
    ready: Mutex<Vec<SocketAddr>>,
    asked: AtomicUsize,
    random: Mutex<Pcg64Mcg>,
}

impl Endpoints {
    pub(super) fn none() -> Endpoints {
        let random = Mutex::new(Pcg64Mcg::seed_from_u64(7));
        Endpoints(Arc::new(Shared { ready: Mutex::default(), asked: AtomicUsize::new(0), random }))
    }

    pub(super) fn add(&self, address: SocketAddr) {
        self.0.ready.lock().unwrap().push(address);
    }

    pub(super) fn remove(&self, address: SocketAddr) {
        self.0.ready.lock().unwrap().retain(|ready| *ready != address);
    }

    /// Number of times that a client wanted to connect.
    pub(super) fn asked(&self) -> usize {
        self.0.asked.load(Ordering::Relaxed)
    }

    fn all(&self) -> Vec<SocketAddr> {
        self.0.asked.fetch_add(1, Ordering::Relaxed);
        self.0.ready.lock().unwrap().clone()
    }

    fn any(&self) -> Option<SocketAddr> {
        self.all().choose(&mut *self.0.random.lock().unwrap()).copied()
    }
}

/// Returns the name's addresses, in the same order for every client.
impl Resolve for Endpoints {
    fn resolve<'a>(&'a self, _: &'a str, _: u16) -> BoxFuture<'a, io::Result<Vec<SocketAddr>>> {
        Box::pin(async { Ok(self.all()) })
    }
}

/// The name's addresses in random order, as CoreDNS answers: other HTTP clients take the first.
impl dns::Resolve for Endpoints {
    fn resolve(&self, _: dns::Name) -> dns::Resolving {
        let mut addresses = self.all();
        addresses.shuffle(&mut *self.0.random.lock().unwrap());
        Box::pin(async { Ok(Box::new(addresses.into_iter()) as dns::Addrs) })
    }
}

/// A forwarder of connections to the endpoints. It stops when dropped.
pub(super) struct Balancer {
    pub(super) addr: SocketAddr,
    accepts: JoinHandle<()>,
}

impl Balancer {
    pub(super) async fn to(endpoints: Endpoints) -> Balancer {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let addr = listener.local_addr().expect("a listener has an address");
        let accepts = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                connections.spawn(forward(client, endpoints.any()));
                while connections.try_join_next().is_some() {}
            }
        });
        Balancer { addr, accepts }
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.accepts.abort();
    }
}

async fn forward(mut client: TcpStream, server: Option<SocketAddr>) {
    let Some(server) = server else { return };
    let Ok(mut server) = TcpStream::connect(server).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
}
