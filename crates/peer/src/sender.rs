//! Sends this replica's caches to replicas that start.
//!
//! A rolling update must not overload a serving replica: each cache has at most one transfer at a
//! time, the total is limited, each transfer has a time limit, and no transfer waits while holding
//! a lock. State and history are copied by reference in parts. A transfer keeps objects in memory
//! that subscribers no longer need until it ends.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::Stream;
use kubefan_admission::GatePermit;
use kubefan_cache::{HistoryCopy, Phase};
use kubefan_common::proto::v1alpha1::{
    LoadRequest, LoadResponse, TransferRequest, TransferResponse, peer_service_server::PeerService,
};
use kubefan_fanout::{CachePosition, Hub};
use kubefan_model::{GroupVersionResource, Scope};
use kubefan_telemetry::metrics::Transfer;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::yield_now,
    time::{Instant, timeout_at},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use super::{
    encode::Encoder,
    identity::CacheIdentity,
    loads::Load,
    transfer_log::{TransferLog, TransferRecord},
};

/// Time limit for one transfer, including its wait for other transfers.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(120);
/// The number of concurrent transfers, over all caches.
const TRANSFERS_MAX: usize = 4;
/// The number of chunks prepared ahead of the network.
const CHUNKS_AHEAD: usize = 2;
/// Entries of history copied at once inside the hub's critical section, which takes well under a
/// millisecond.
const COPY_ENTRIES: usize = 1024;

/// A cache that may be sent to a peer.
pub struct OfferedCache {
    /// The hub of the cache.
    pub hub: Arc<Hub>,
    /// The field selector that limits the cached objects; empty for everything.
    pub upstream_field_selector: String,
    /// The schema of every cached object. `None` if it is unknown, or during the relist after a
    /// schema change.
    pub schema: Option<String>,
}

/// The caches that may be sent.
pub trait OfferedCaches: Send + Sync + 'static {
    /// The cache of a resource and scope.
    fn offer(&self, gvr: &GroupVersionResource, scope: &Scope) -> Option<OfferedCache>;

    /// The identity of the cluster behind every cache here; `None` if it is unknown.
    fn cluster(&self) -> Option<String>;
}

type CacheId = (GroupVersionResource, Scope);

/// Tells the load of this replica.
pub type LoadSource = Arc<dyn Fn() -> Load + Send + Sync>;

/// The gRPC service for peers.
pub struct TransferService<S> {
    caches: S,
    load: Option<LoadSource>,
    log: Arc<dyn TransferLog>,
    all: Arc<Semaphore>,
    /// One semaphore per requested cache that exists here.
    each: Mutex<HashMap<CacheId, Arc<Semaphore>>>,
}

type Parts = Pin<Box<dyn Stream<Item = Result<TransferResponse, Status>> + Send>>;

impl<S: OfferedCaches> TransferService<S> {
    /// Sends those of `caches`, and records each transfer in `log`.
    pub fn new(caches: S, log: Arc<dyn TransferLog>) -> Self {
        Self { caches, load: None, log, all: Arc::new(Semaphore::new(TRANSFERS_MAX)), each: Mutex::default() }
    }

    /// Also tells the load of this replica, if there is a source of it.
    #[must_use]
    pub fn with_load(self, load: Option<LoadSource>) -> Self {
        Self { load, ..self }
    }

    fn identity_of(
        &self,
        wanted: &CacheIdentity,
        cluster: String,
        offer: &OfferedCache,
    ) -> Result<CacheIdentity, Status> {
        let schema =
            offer.schema.clone().ok_or_else(|| Status::unavailable("its schema is unknown, or is changing"))?;
        let upstream_field_selector = offer.upstream_field_selector.clone();
        let gvr = wanted.gvr.clone();
        let scope = wanted.scope.clone();
        let ours = CacheIdentity { cluster, gvr, scope, upstream_field_selector, schema };
        // From the receiver's point of view, because the receiver logs the message.
        wanted.agrees_with(&ours).map_err(|error| Status::failed_precondition(error.to_string()))?;
        Ok(ours)
    }

    async fn permits(&self, id: &CacheId) -> Result<[OwnedSemaphorePermit; 2], Status> {
        let of_cache = {
            let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
            each.entry(id.clone()).or_insert_with(|| Arc::new(Semaphore::new(1))).clone()
        };
        let closed = |_| Status::unavailable("shutting down");
        // In this order, so that waiting for one cache does not block transfers of others.
        let first = of_cache.acquire_owned().await.map_err(closed)?;
        let second = self.all.clone().acquire_owned().await.map_err(closed)?;
        Ok([first, second])
    }
}

/// Copies state and history of one moment. `None` if there is no state, or if another history has
/// started meanwhile.
pub async fn copy_cache(hub: &Hub) -> Option<(CachePosition, HistoryCopy)> {
    let ahead = hub.position()?;
    let mut history = HistoryCopy::of(ahead.version);
    while hub.copy_history(ahead.epoch, &mut history, COPY_ENTRIES)? {
        yield_now().await;
    }
    Some((ahead, history))
}

/// Copies state and history of a cache that follows upstream.
async fn copy(hub: &Hub) -> Result<(CachePosition, HistoryCopy), Status> {
    let unsynced = || Status::unavailable("it is not synced here");
    if *hub.phase().borrow() != Phase::Synced {
        return Err(unsynced());
    }
    copy_cache(hub).await.ok_or_else(unsynced)
}

#[tonic::async_trait]
impl<S: OfferedCaches> PeerService for TransferService<S> {
    type TransferStream = Parts;

    async fn transfer(&self, request: Request<TransferRequest>) -> Result<Response<Parts>, Status> {
        let (_, extensions, message) = request.into_parts();
        let wanted = CacheIdentity::of_request(message);
        let mut record = self.log.begin(&extensions, &wanted);
        match self.begin(&wanted).await {
            Ok(transfer) => {
                record.started().await?;
                Ok(Response::new(transfer.send(record)))
            }
            Err(status) => {
                record.refused(&status);
                Err(status)
            }
        }
    }

    async fn load(&self, _: Request<LoadRequest>) -> Result<Response<LoadResponse>, Status> {
        let load = self.load.as_ref().ok_or_else(|| Status::unimplemented("this replica does not rebalance"))?;
        Ok(Response::new(load().into()))
    }
}

/// A transfer that is about to be sent.
struct Prepared {
    hub: Arc<Hub>,
    identity: CacheIdentity,
    encoder: Encoder,
    until: Instant,
    permits: [OwnedSemaphorePermit; 2],
    gate_permit: GatePermit,
}

impl<S: OfferedCaches> TransferService<S> {
    async fn begin(&self, wanted: &CacheIdentity) -> Result<Prepared, Status> {
        let until = Instant::now() + TRANSFER_TIMEOUT;
        let CacheIdentity { gvr, scope, .. } = wanted;
        let find = || {
            let offer = self.caches.offer(gvr, scope);
            offer.ok_or_else(|| Status::not_found(format!("{gvr} in {:?} is not cached here", scope.namespace())))
        };
        let cluster =
            self.caches.cluster().ok_or_else(|| Status::failed_precondition("the cluster is not identified here"))?;
        self.identity_of(wanted, cluster.clone(), &find()?)?;
        let id = (gvr.clone(), scope.clone());
        let permits = timeout_at(until, self.permits(&id));
        let permits = permits.await.map_err(|_| Status::unavailable("other replicas are being served"))??;
        // A transfer retains state as a snapshot does, so it needs the same permit. If memory
        // pressure refuses the permit, the peer starts with a list.
        let gate_permit = find()?
            .hub
            .gate()
            .acquire(None)
            .await
            .map_err(|refusal| Status::resource_exhausted(refusal.to_string()))?;
        // The cache may have changed during the wait.
        let offer = find()?;
        let identity = self.identity_of(wanted, cluster, &offer)?;
        let (ahead, history) = copy(&offer.hub).await?;
        let encoder = Encoder::new(&identity, ahead.store, history, Instant::now());
        Ok(Prepared { hub: offer.hub, identity, encoder, until, permits, gate_permit })
    }
}

impl Prepared {
    /// Sends it in a task, which ends with the record.
    fn send(self, record: Box<dyn TransferRecord>) -> Parts {
        let Self { hub, identity, encoder, until, permits, gate_permit } = self;
        let (parts, receiver) = mpsc::channel(CHUNKS_AHEAD);
        tokio::spawn(async move {
            let _until_the_end = (permits, gate_permit, record);
            let result = send(encoder, parts, until, &identity).await;
            hub.metrics().transfer(result);
        });
        Box::pin(ReceiverStream::new(receiver))
    }
}

/// Sends all parts, until the peer disconnects or the time limit passes. The missing trailer then
/// tells the receiver that the transfer is incomplete.
async fn send(
    mut encoder: Encoder,
    parts: mpsc::Sender<Result<TransferResponse, Status>>,
    until: Instant,
    identity: &CacheIdentity,
) -> Transfer {
    let resource = &identity.gvr;
    let scope = identity.scope.namespace();
    for part in encoder.by_ref() {
        let part = part.map_err(|error| Status::internal(error.to_string()));
        let cut_off = match timeout_at(until, parts.send(part)).await {
            Ok(Ok(())) => continue,
            Ok(Err(_)) => "the peer disconnected",
            Err(_) => "it took too long",
        };
        warn!(%resource, scope, "a transfer to a peer was cut off: {cut_off}");
        return Transfer::CutOff;
    }
    info!(%resource, scope, sent = ?encoder.sent(), "sent to a peer");
    Transfer::Given
}
