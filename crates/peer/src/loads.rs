//! The load of the other replicas, asked over the port for peers.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use futures::future::join_all;
use kubefan_common::proto::v1alpha1::{LoadRequest, LoadResponse, peer_service_client::PeerServiceClient};
use tokio::time::timeout;
use tonic::{Code, transport::Channel};

use super::{
    error::PeerError,
    receiver::{Dial, FoundPeers},
};

/// The time limit for one replica's answer, with a new connection if it needs one.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The number of replicas asked.
const REPLICAS_MAX: usize = 256;

/// The load of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// The watches that it serves.
    pub watches: u64,
    /// Whether it takes new ones.
    pub is_ready: bool,
    /// Whether its watches are about to move.
    pub is_draining: bool,
    /// Whether it could review its callers' rights when it last had to.
    pub authorizes: bool,
    /// A random number of the process: a replica with several addresses, such as one of each IP
    /// family, counts once.
    pub instance: u64,
    /// Connections that have watches. 0 beside watches: the replica is of an older version, which
    /// does not tell.
    pub clients: u64,
}

impl From<Load> for LoadResponse {
    fn from(Load { watches, is_ready, is_draining, authorizes, instance, clients }: Load) -> Self {
        Self { watches, ready: is_ready, draining: is_draining, authorizes, instance, clients }
    }
}

impl From<LoadResponse> for Load {
    fn from(LoadResponse { watches, ready, draining, authorizes, instance, clients }: LoadResponse) -> Self {
        Self { watches, is_ready: ready, is_draining: draining, authorizes, instance, clients }
    }
}

/// Answer of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerLoad {
    /// The load that the replica told.
    Known(Load),
    /// The replica does not tell: it runs without `--rebalance`, or its version is too old to know
    /// it.
    Unknown,
}

/// Asks the other replicas. A connection is kept for the next question.
pub struct Loads {
    dial: Arc<dyn Dial>,
    own_instance: u64,
    connected: HashMap<SocketAddr, PeerServiceClient<Channel>>,
}

impl Loads {
    /// Finds and reaches replicas with `dial`, other than the one that answers with `own_instance`.
    pub fn new(dial: Arc<dyn Dial>, own_instance: u64) -> Self {
        Self { dial, own_instance, connected: HashMap::new() }
    }

    /// The answers of the replicas that can be reached, this one excepted, each once.
    ///
    /// # Errors
    /// If it is not known which replicas exist.
    pub async fn ask(&mut self) -> Result<Vec<PeerLoad>, PeerError> {
        let FoundPeers { addresses, failed } = self.dial.find().await;
        if addresses.is_empty()
            && let Some(error) = failed
        {
            return Err(error);
        }
        let mut known = std::mem::take(&mut self.connected);
        let asked = addresses.into_iter().take(REPLICAS_MAX).map(|address| {
            let dial = self.dial.clone();
            let connected = known.remove(&address);
            async move {
                let answer = timeout(ANSWER_TIMEOUT, ask_one(&*dial, address, connected)).await;
                Some((address, answer.ok()??))
            }
        });
        // The replicas that are gone are forgotten.
        let mut loads = Vec::new();
        let mut counted = HashSet::from([self.own_instance]);
        for (address, (client, load)) in join_all(asked).await.into_iter().flatten() {
            self.connected.insert(address, client);
            let is_repeated = matches!(load, PeerLoad::Known(Load { instance, .. }) if !counted.insert(instance));
            if !is_repeated {
                loads.push(load);
            }
        }
        Ok(loads)
    }
}

/// Asks one replica; `None` if it cannot be reached, or is this one. A connection that was kept may
/// have ended since, at the latest by its age, so a failure of it says nothing about the replica.
async fn ask_one(
    dial: &dyn Dial,
    address: SocketAddr,
    connected: Option<PeerServiceClient<Channel>>,
) -> Option<(PeerServiceClient<Channel>, PeerLoad)> {
    if let Some(client) = connected
        && let Some(answered) = ask_over(client).await
    {
        return Some(answered);
    }
    ask_over(PeerServiceClient::new(dial.connect(address).await.ok()?)).await
}

async fn ask_over(mut client: PeerServiceClient<Channel>) -> Option<(PeerServiceClient<Channel>, PeerLoad)> {
    match client.load(LoadRequest {}).await {
        Ok(answer) => Some((client, PeerLoad::Known(answer.into_inner().into()))),
        Err(status) if status.code() == Code::Unimplemented => Some((client, PeerLoad::Unknown)),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use futures::{future::BoxFuture, stream};
    use hyper_util::rt::TokioIo;
    use kubefan_common::proto::v1alpha1::peer_service_server::PeerServiceServer;
    use kubefan_model::{GroupVersionResource, Scope};
    use tonic::transport::{Endpoint, Server};
    use tower::service_fn;

    use super::*;
    use crate::{NoTransferLog, OfferedCache, OfferedCaches, TransferService};

    const CONNECTION_AGE: Duration = Duration::from_secs(60);

    struct Nothing;

    impl OfferedCaches for Nothing {
        fn offer(&self, _: &GroupVersionResource, _: &Scope) -> Option<OfferedCache> {
            None
        }

        fn cluster(&self) -> Option<String> {
            None
        }
    }

    /// Replicas by port: their load, or that they do not take part.
    struct Replicas(Vec<(u16, Option<Load>)>);

    impl Dial for Replicas {
        fn find(&self) -> BoxFuture<'_, FoundPeers> {
            let addresses = (0..=9).map(|port| SocketAddr::from(([192, 0, 2, 1], port))).collect();
            Box::pin(std::future::ready(FoundPeers { addresses, failed: None }))
        }

        fn connect(&self, address: SocketAddr) -> BoxFuture<'_, Result<Channel, PeerError>> {
            let found = self.0.iter().find(|(port, _)| *port == address.port()).cloned();
            Box::pin(async move {
                let refused = || PeerError::Connect("connection refused".to_owned());
                let (_, load) = found.ok_or_else(refused)?;
                let load = load.map(|load| Arc::new(move || load) as crate::LoadSource);
                let service =
                    PeerServiceServer::new(TransferService::new(Nothing, Arc::new(NoTransferLog)).with_load(load));
                let (ours, theirs) = tokio::io::duplex(16 << 10);
                let incoming = futures::StreamExt::chain(stream::iter([Ok::<_, io::Error>(theirs)]), stream::pending());
                let server = Server::builder().max_connection_age(CONNECTION_AGE).add_service(service);
                tokio::spawn(server.serve_with_incoming(incoming));
                let mut io = Some(TokioIo::new(ours));
                let once = service_fn(move |_| {
                    std::future::ready(io.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)))
                });
                let connected = Endpoint::from_static("http://peer").connect_with_connector(once).await;
                connected.map_err(|_| refused())
            })
        }
    }

    #[tokio::test]
    async fn a_replica_with_two_addresses_counts_once_and_this_one_does_not() {
        let load = |instance, watches| Load {
            watches,
            is_ready: true,
            is_draining: false,
            authorizes: true,
            instance,
            clients: watches / 2,
        };
        let own = load(1, 10);
        let second = load(2, 20);
        let third = load(3, 30);
        let all =
            vec![(1, Some(own)), (2, Some(second)), (3, Some(third)), (4, Some(own)), (5, Some(second)), (6, None)];
        let mut loads = Loads::new(Arc::new(Replicas(all)), own.instance);
        for _ in 0..2 {
            let found = loads.ask().await.unwrap();
            assert_eq!(found, [PeerLoad::Known(second), PeerLoad::Known(third), PeerLoad::Unknown]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_replica_whose_kept_connection_has_ended_is_asked_over_a_new_one() {
        let load = Load { watches: 1, is_ready: true, is_draining: false, authorizes: true, instance: 2, clients: 1 };
        let mut loads = Loads::new(Arc::new(Replicas(vec![(1, Some(load))])), 1);
        for _ in 0..3 {
            assert_eq!(loads.ask().await.unwrap(), [PeerLoad::Known(load)]);
            // Simulated time.
            tokio::time::sleep(2 * CONNECTION_AGE).await;
        }
    }
}
