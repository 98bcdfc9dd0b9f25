//! The replicas as each other's peers, over connections in memory: a replica that starts may copy
//! state and history from one that runs. Some transfers break off.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture, stream};
use hyper_util::rt::TokioIo;
use kubefan_common::proto::v1alpha1::peer_service_server::PeerServiceServer;
use kubefan_informers::{CacheCatalog, Registry};
use kubefan_peer::{Dial, FoundPeers, NoTransferLog, PeerError, Peers, TransferService};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use tonic::transport::{Channel, Endpoint, Server, server::Connected};
use tower::service_fn;

use super::link::{End, Route};

/// The most bytes of a transfer that breaks off.
const BROKEN_BYTES_MAX: usize = 40_000;

/// The time limit of a warm start, and of one transfer in bytes.
const TIMEOUT: Duration = Duration::from_secs(10);
const TRANSFER_BYTES_MAX: u64 = 64 << 20;

/// The ports for peers of all replicas that run.
pub(crate) struct Peering {
    ports: Mutex<BTreeMap<usize, Port>>,
    random: Mutex<Pcg64Mcg>,
}

struct Port {
    registry: Arc<Registry>,
    route: Route,
}

impl Peering {
    pub(crate) fn new(seed: u64) -> Arc<Peering> {
        Arc::new(Peering { ports: Mutex::default(), random: Mutex::new(Pcg64Mcg::seed_from_u64(seed)) })
    }

    /// The peers of a replica.
    pub(crate) fn peers_of(self: &Arc<Peering>, own: usize) -> Peers {
        Peers::new(Arc::new(Others { peering: self.clone(), own }), TIMEOUT, TRANSFER_BYTES_MAX)
    }

    pub(crate) fn open(&self, number: usize, registry: Arc<Registry>) {
        self.ports.lock().unwrap().insert(number, Port { registry, route: Route::default() });
    }

    /// Closes a replica's port and cuts its transfers.
    pub(crate) fn close(&self, number: usize) {
        if let Some(port) = self.ports.lock().unwrap().remove(&number) {
            port.route.each(|link| link.cut());
        }
    }

    fn connect(&self, number: usize) -> io::Result<End> {
        let ports = self.ports.lock().unwrap();
        let port = ports.get(&number).ok_or(io::ErrorKind::ConnectionRefused)?;
        let (ours, theirs) = port.route.connect()?;
        let mut random = self.random.lock().unwrap();
        if random.random_bool(0.2) {
            let bytes = random.random_range(1..BROKEN_BYTES_MAX);
            port.route.each(|link| link.cut_after(bytes));
        }
        let service =
            PeerServiceServer::new(TransferService::new(CacheCatalog(port.registry.clone()), Arc::new(NoTransferLog)));
        let incoming = stream::once(std::future::ready(Ok::<_, io::Error>(theirs)));
        // It ends with the connection.
        tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
        Ok(ours)
    }
}

impl Connected for End {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

/// The other replicas, from the point of view of one.
struct Others {
    peering: Arc<Peering>,
    own: usize,
}

impl Dial for Others {
    fn find(&self) -> BoxFuture<'_, FoundPeers> {
        let others = self.peering.ports.lock().unwrap();
        let others = others.keys().filter(|number| **number != self.own);
        let addresses = others.map(|number| SocketAddr::from(([10, 0, 0, *number as u8], 1))).collect();
        std::future::ready(FoundPeers { addresses, failed: None }).boxed()
    }

    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, Result<Channel, PeerError>> {
        let SocketAddr::V4(address) = address else { unreachable!("all addresses are of version 4") };
        let connected = self.peering.connect(usize::from(address.ip().octets()[3]));
        async move {
            let mut io = Some(TokioIo::new(connected.map_err(|error| PeerError::Connect(error.to_string()))?));
            let once = service_fn(move |_| {
                let io = io.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected));
                std::future::ready(io)
            });
            let connected = Endpoint::from_static("http://peer").connect_with_connector(once).await;
            connected.map_err(|error| PeerError::Connect(error.to_string()))
        }
        .boxed()
    }
}
