//! The load of the other replicas, asked over the port for peers.

use std::{collections::HashMap, net::SocketAddr, sync::Arc, time::Duration};

use futures::future::join_all;
use tokio::time::timeout;
use tonic::{Code, transport::Channel};

use super::{Dial, PeerError};
use kubefan_common::proto::v1alpha1::{LoadRequest, LoadResponse, peer_service_client::PeerServiceClient};

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
    /// Whether it could ask who may read what, when it last had to.
    pub authorizes: bool,
}

impl From<Load> for LoadResponse {
    fn from(Load { watches, is_ready, is_draining, authorizes }: Load) -> Self {
        Self { watches, ready: is_ready, draining: is_draining, authorizes }
    }
}

impl From<LoadResponse> for Load {
    fn from(LoadResponse { watches, ready, draining, authorizes }: LoadResponse) -> Self {
        Self { watches, is_ready: ready, is_draining: draining, authorizes }
    }
}

/// What a replica answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerLoad {
    /// Its load.
    Known(Load),
    /// It does not take part in rebalancing; a replica of an older version does not.
    Unknown,
}

/// Asks the other replicas. A connection is kept for the next question.
pub struct Loads {
    dial: Arc<dyn Dial>,
    connected: HashMap<SocketAddr, PeerServiceClient<Channel>>,
}

impl Loads {
    /// Replicas found and reached by `dial`.
    pub fn new(dial: Arc<dyn Dial>) -> Self {
        Self { dial, connected: HashMap::new() }
    }

    /// The answers of the replicas that can be reached, this one excepted.
    ///
    /// # Errors
    /// It is not known which replicas there are.
    pub async fn ask(&mut self) -> Result<Vec<PeerLoad>, PeerError> {
        let addresses = match self.dial.addresses().await {
            Err(PeerError::Alone) => Vec::new(),
            found => found?,
        };
        let asked = addresses.into_iter().take(REPLICAS_MAX).map(|address| {
            let (dial, known) = (self.dial.clone(), self.connected.remove(&address));
            async move {
                let answer = timeout(ANSWER_TIMEOUT, ask_one(&*dial, address, known)).await;
                Some((address, answer.ok()??))
            }
        });
        let mut loads = Vec::new();
        for (address, (client, load)) in join_all(asked).await.into_iter().flatten() {
            self.connected.insert(address, client);
            loads.push(load);
        }
        Ok(loads)
    }
}

/// Asks one replica; `None` if it cannot be reached, or is this one. A connection that broke is
/// opened again at the next question.
async fn ask_one(
    dial: &dyn Dial,
    address: SocketAddr,
    connected: Option<PeerServiceClient<Channel>>,
) -> Option<(PeerServiceClient<Channel>, PeerLoad)> {
    let mut client = match connected {
        Some(client) => client,
        None => PeerServiceClient::new(dial.connect(address).await.ok()?),
    };
    match client.load(LoadRequest {}).await {
        Ok(answer) => Some((client, PeerLoad::Known(answer.into_inner().into()))),
        Err(status) if status.code() == Code::Unimplemented => Some((client, PeerLoad::Unknown)),
        Err(_) => None,
    }
}
