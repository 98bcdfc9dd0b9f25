//! What every protocol does with a request for objects: find the cache, admit the reader, and lead it on from where it was.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;

use super::request::{self, Selected};
use crate::fanout::{
    Catalog, Need, NotSubscribed, Phase, Provided, ProvidedBackfill, Refusal, Served, Start, StreamWaker,
    SubscribeOptions, Subscription,
};
use kubefan_common::{
    planted::{self, Bug},
    proto::v1alpha1,
};
use kubefan_model::{Media, ResourceVersion, format::Format, selection::Selection};

/// How long a read waits for the cache to reach the version it asks for, as the apiserver does.
pub const FRESHNESS_TIMEOUT: Duration = Duration::from_secs(3);

/// How long one who comes back waits for the first list.
const SYNC_TIMEOUT: Duration = Duration::from_secs(5);

/// The most backfills that are read for one subscription: history may move past the end of each while it is read.
const BACKFILLS_MAX: usize = 3;

/// A watch that was admitted, with what it asked for.
pub struct Opened {
    /// Where it is in the stream of changes.
    pub subscription: Subscription,
    /// The silence after which a bookmark is sent; `None`: never.
    pub bookmark_interval: Option<Duration>,
    /// When it ends by itself.
    pub timeout_at: Option<Instant>,
    /// How its beginning and its end are told.
    pub speech: Speech,
    /// Its place among all streams.
    pub permit: OwnedSemaphorePermit,
}

/// How a stream begins and ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speech {
    /// With gRPC's headers and trailers.
    Grpc,
    /// As a Kubernetes watch in this encoding: a last event where there is something to say, and no trailers.
    Http(Media),
}

impl Speech {
    /// The encoding of a Kubernetes watch; gRPC's objects are JSON.
    pub fn media(self) -> Media {
        match self {
            Self::Grpc => Media::Json,
            Self::Http(media) => media,
        }
    }
}

/// Reads a catalog for callers.
pub struct Reader<C> {
    catalog: Arc<C>,
    drain: CancellationToken,
    subscribers_max: usize,
    subscribers: Arc<Semaphore>,
    reads_max: usize,
    reads: Arc<Semaphore>,
}

impl<C: Catalog> Reader<C> {
    /// A reader of `catalog`; nobody is admitted any more when `drain` is cancelled.
    pub fn new(catalog: Arc<C>, drain: CancellationToken, subscribers_max: usize, reads_max: usize) -> Self {
        let places = |max: usize| Arc::new(Semaphore::new(max.min(Semaphore::MAX_PERMITS)));
        let (subscribers, reads) = (places(subscribers_max), places(reads_max));
        Self { catalog, drain, subscribers_max, subscribers, reads_max, reads }
    }

    /// Cancelled when every stream is to end.
    pub fn drain(&self) -> &CancellationToken {
        &self.drain
    }

    /// What is read.
    pub fn catalog(&self) -> &C {
        &self.catalog
    }

    /// Begins the cache of a target in an encoding, where that is allowed, without waiting for it.
    pub fn begin(&self, target: v1alpha1::Target, media: Media) {
        let catalog = self.catalog.clone();
        // Whoever asks meanwhile finds that it has begun, so there are few of these, and they wait for no longer than a reader would.
        tokio::spawn(async move {
            let found = request::select(&*catalog, Some(target), media).await;
            tracing::debug!(media = media.as_str(), refused = ?found.err(), "a cache was asked for");
        });
    }

    /// Finds the cache of a target in an encoding and binds its selectors.
    pub async fn select(&self, target: Option<v1alpha1::Target>, media: Media) -> Result<Selected, Refusal> {
        if self.drain.is_cancelled() {
            return Err(Refusal::Draining);
        }
        request::select(&*self.catalog, target, media).await
    }

    /// Waits until the cache is not older than `version`.
    pub async fn fresh(&self, selected: &Selected, version: Option<ResourceVersion>) -> Result<(), Refusal> {
        match version {
            Some(version) => selected.served.hub.reached(version, FRESHNESS_TIMEOUT).await,
            None => Ok(()),
        }
    }

    /// A place for one stream; a list holds state for as long as it is read, as a watch does.
    pub fn admit(&self) -> Result<OwnedSemaphorePermit, Refusal> {
        self.subscribers.clone().try_acquire_owned().map_err(|_| {
            let limit = self.subscribers_max;
            Refusal::Exhausted(format!("{limit} streams are open, the most this kubefan serves (--subscribers-max)"))
        })
    }

    /// A place for one read over HTTP, to be held until its answer has ended: a crowd of them must not take the places of watches.
    pub fn admit_read(&self) -> Result<OwnedSemaphorePermit, Refusal> {
        self.reads.clone().try_acquire_owned().map_err(|_| {
            let limit = self.reads_max;
            Refusal::Exhausted(format!("{limit} reads are being answered, the most at a time (--reads-max)"))
        })
    }

    /// As [`Self::select`], and waits for the first list: a replica that has just been started is where everybody comes back to.
    pub async fn select_synced(&self, target: Option<v1alpha1::Target>, media: Media) -> Result<Selected, Refusal> {
        let mut changes = self.catalog.changes();
        let limit = Instant::now() + SYNC_TIMEOUT;
        loop {
            changes.mark_unchanged();
            let found = self.select(target.clone(), media).await;
            let is_synced = match &found {
                Err(Refusal::NotSynced { .. }) => false,
                Err(_) => true,
                Ok(selected) => *selected.served.hub.phase().borrow() != Phase::Syncing,
            };
            if is_synced || !matches!(timeout_at(limit, changes.changed()).await, Ok(Ok(()))) {
                return found;
            }
        }
    }

    /// Subscribes. The hub decides how; what it needs for that is fetched here, and the hub is asked again.
    ///
    /// # Errors
    /// [`Refusal::Expired`] if neither the cache nor upstream can resume from the version, and no restart was asked for.
    pub async fn subscribe(
        &self,
        served: &Served,
        selection: Selection,
        format: Format,
        options: SubscribeOptions,
        waker: StreamWaker,
    ) -> Result<Subscription, Refusal> {
        let (hub, waker) = (&served.hub, Arc::new(waker));
        let mut provided = Provided::default();
        if let Start::Resume(version) | Start::ResumeWithObjects(version) = options.start {
            provided.other_history = self.other_history(served, &options.cluster, version).await;
        }
        let mut backfills = 0;
        loop {
            match hub.try_subscribe(&selection, &format, &options, &provided, &waker) {
                Ok(subscription) => return Ok(subscription),
                Err(NotSubscribed::Refused(refusal)) => return Err(refusal),
                Err(NotSubscribed::Needs(Need::Permit)) => {
                    provided.permit = Some(Arc::new(hub.gate().acquire().await?));
                }
                Err(NotSubscribed::Needs(Need::Backfill(version))) => {
                    // A backfill takes its own permit while it is read.
                    provided.permit = None;
                    backfills += 1;
                    provided.backfill = match backfills {
                        ..=BACKFILLS_MAX => self.backfill(served, (&selection, &format), version).await?,
                        _ => ProvidedBackfill::Unavailable,
                    };
                }
            }
        }
    }

    /// The events after `version`, read again from upstream.
    async fn backfill(
        &self,
        served: &Served,
        (selection, format): (&Selection, &Format),
        version: ResourceVersion,
    ) -> Result<ProvidedBackfill, Refusal> {
        // The state before an event decides whether an object enters or leaves, and whether its projection has changed.
        let compares = selection.can_change() || format.only_changes();
        let needs_state = compares && !planted::is(Bug::BackfillWithoutMembership);
        match self.catalog.backfill(served, version, needs_state).await {
            Ok(backfill) => Ok(ProvidedBackfill::Read(backfill)),
            Err(Refusal::Expired(_)) => Ok(ProvidedBackfill::Unavailable),
            Err(other) => Err(other),
        }
    }

    /// Waits until the cache has reached `version`. Returns a refusal if the version is of another history than the cache: of another
    /// cluster, or beyond the version that this cluster reports. `None` also if the cache only lags, or if upstream cannot be asked:
    /// then the hub refuses the version, and counts that.
    async fn other_history(&self, served: &Served, cluster: &str, version: ResourceVersion) -> Option<Refusal> {
        if let Some(known) = served.hub.cluster()
            && !cluster.is_empty()
            && cluster != known
        {
            let message = format!("version {version} is of another cluster ({cluster:.64}), and this is {known}");
            return Some(Refusal::Rewritten(message));
        }
        let asked = Instant::now();
        served.hub.reached(version, FRESHNESS_TIMEOUT).await.err()?;
        let reached = self.catalog.cluster_version(served, asked).await.ok().filter(|reached| *reached < version)?;
        Some(Refusal::Rewritten(format!(
            "version {version} is of another history: the cluster has reached {reached} (etcd was restored from a backup, or this is \
             another cluster)"
        )))
    }
}
