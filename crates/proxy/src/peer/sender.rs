//! Gives what this replica holds to one that starts.
//!
//! A rolling update must not be able to overload a replica that serves: one transfer at a time of each cache, few in all, each within a
//! time, and none of them ever holds a lock while it waits. State and history are copied by reference in parts; they pin what
//! subscribers no longer need for as long as the transfer lasts.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::Stream;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::yield_now,
    time::{Instant, timeout_at},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use super::{CacheIdentity, Encoder};
use crate::{
    cache::HistoryCopy,
    fanout::{CachePosition, Hub, Phase},
    telemetry::metrics::Transfer,
};
use kubefan_common::proto::v1alpha1::{TransferRequest, TransferResponse, peer_service_server::PeerService};
use kubefan_model::{GroupVersionResource, Scope};

/// How long one transfer may take, its wait for others included.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(120);
/// Transfers at a time, over all caches.
const TRANSFERS_MAX: usize = 4;
/// Chunks made ahead of the network.
const CHUNKS_AHEAD: usize = 2;
/// Entries of history copied at a time, inside the hub's critical section: well below a millisecond.
const COPY_ENTRIES: usize = 1024;

/// A cache that may be given away.
pub struct Offer {
    /// What it holds.
    pub hub: Arc<Hub>,
    /// What everything cached is narrowed by.
    pub upstream_field_selector: String,
    /// The schema that everything held was read by; `None` where it is not known, and while all is listed again because of another one.
    pub schema: Option<String>,
}

/// Where caches are found.
pub trait Source: Send + Sync + 'static {
    /// The cache of a resource and scope.
    fn offer(&self, gvr: &GroupVersionResource, scope: &Scope) -> Option<Offer>;

    /// The identity of the cluster that everything here is of; `None` where it is not known.
    fn cluster(&self) -> Option<String>;
}

type CacheId = (GroupVersionResource, Scope);

/// The service that peers ask.
pub struct Sender<S> {
    source: S,
    all: Arc<Semaphore>,
    /// For each cache that was asked for, and is here.
    each: Mutex<HashMap<CacheId, Arc<Semaphore>>>,
}

type Parts = Pin<Box<dyn Stream<Item = Result<TransferResponse, Status>> + Send>>;

impl<S: Source> Sender<S> {
    /// Gives away what is found in `source`.
    pub fn new(source: S) -> Self {
        Self { source, all: Arc::new(Semaphore::new(TRANSFERS_MAX)), each: Mutex::default() }
    }

    fn identity_of(&self, wanted: &CacheIdentity, cluster: String, offer: &Offer) -> Result<CacheIdentity, Status> {
        let schema =
            offer.schema.clone().ok_or_else(|| Status::unavailable("its schema is not known, or is changing"))?;
        let upstream_field_selector = offer.upstream_field_selector.clone();
        let (gvr, scope) = (wanted.gvr.clone(), wanted.scope.clone());
        let ours = CacheIdentity { cluster, gvr, scope, upstream_field_selector, schema };
        // Told as the one who asks sees it.
        wanted.agrees_with(&ours).map_err(|error| Status::failed_precondition(error.to_string()))?;
        Ok(ours)
    }

    async fn permits(&self, id: &CacheId) -> Result<[OwnedSemaphorePermit; 2], Status> {
        let of_cache = {
            let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
            each.entry(id.clone()).or_insert_with(|| Arc::new(Semaphore::new(1))).clone()
        };
        let closed = |_| Status::unavailable("shutting down");
        // In this order, so that those who wait for one cache keep nobody from another.
        let first = of_cache.acquire_owned().await.map_err(closed)?;
        let second = self.all.clone().acquire_owned().await.map_err(closed)?;
        Ok([first, second])
    }
}

/// State and history of one moment.
async fn copy(hub: &Hub) -> Result<(CachePosition, HistoryCopy), Status> {
    let unsynced = || Status::unavailable("it is not synced here");
    if *hub.phase().borrow() != Phase::Synced {
        return Err(unsynced());
    }
    let ahead = hub.position().ok_or_else(unsynced)?;
    let mut history = HistoryCopy::of(ahead.version);
    while hub.copy_history(ahead.epoch, &mut history, COPY_ENTRIES).ok_or_else(unsynced)? {
        yield_now().await;
    }
    Ok((ahead, history))
}

#[tonic::async_trait]
impl<S: Source> PeerService for Sender<S> {
    type TransferStream = Parts;

    async fn transfer(&self, request: Request<TransferRequest>) -> Result<Response<Parts>, Status> {
        let until = Instant::now() + TRANSFER_TIMEOUT;
        let wanted = CacheIdentity::of_request(request.into_inner());
        let CacheIdentity { gvr, scope, .. } = &wanted;
        let find = || {
            let offer = self.source.offer(gvr, scope);
            offer.ok_or_else(|| Status::not_found(format!("{gvr} in {:?} is not cached here", scope.namespace())))
        };
        let cluster = self
            .source
            .cluster()
            .ok_or_else(|| Status::failed_precondition("which cluster this is of is not known here"))?;
        self.identity_of(&wanted, cluster.clone(), &find()?)?;
        let id = (gvr.clone(), scope.clone());
        let permits = timeout_at(until, self.permits(&id));
        let permits = permits.await.map_err(|_| Status::unavailable("other replicas are being served"))??;
        // It pins state as a snapshot does. Refused by memory pressure, a peer begins with a list.
        let pass =
            find()?.hub.gate().acquire().await.map_err(|refusal| Status::resource_exhausted(refusal.to_string()))?;
        // It may have waited: what it is now counts.
        let offer = find()?;
        let identity = self.identity_of(&wanted, cluster, &offer)?;
        let (ahead, history) = copy(&offer.hub).await?;
        let encoder = Encoder::new(&identity, ahead.store, history, Instant::now());
        let (parts, receiver) = mpsc::channel(CHUNKS_AHEAD);
        tokio::spawn(async move {
            let _until_the_end = (permits, pass);
            let result = send(encoder, parts, until, &identity).await;
            offer.hub.metrics().transfer(result);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// Sends all parts, unless the other side goes away or the time is over; then what is missing tells it.
async fn send(
    mut encoder: Encoder,
    parts: mpsc::Sender<Result<TransferResponse, Status>>,
    until: Instant,
    identity: &CacheIdentity,
) -> Transfer {
    let (resource, scope) = (&identity.gvr, identity.scope.namespace());
    for part in encoder.by_ref() {
        let part = part.map_err(|error| Status::internal(error.to_string()));
        let cut_off = match timeout_at(until, parts.send(part)).await {
            Ok(Ok(())) => continue,
            Ok(Err(_)) => "the peer has gone away",
            Err(_) => "it took too long",
        };
        warn!(%resource, scope, "a transfer to a peer was cut off: {cut_off}");
        return Transfer::CutOff;
    }
    info!(%resource, scope, sent = ?encoder.sent(), "given to a peer");
    Transfer::Given
}
