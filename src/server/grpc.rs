//! The gRPC service of the contract, served from a [`Catalog`].

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, stream};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::{
    request::{self, Selected},
    status,
};
use crate::{
    cache::Way,
    fanout::{Bell, Catalog, OnExpired, Phase, Refusal, Served, Start, Subscription, Terms},
    model::{ObjectKey, ResourceVersion, format::Format, object::Object, selection::Selection},
    planted::{self, Bug},
    proto::v1alpha1::{
        self, GetRequest, GetResponse, ListRequest, ListResourcesRequest, ListResourcesResponse, ListResponse,
        WatchRequest, WatchResponse, watch_service_server::WatchService,
    },
    telemetry::metrics::Resume,
};

/// How long a read waits for the cache to reach the version it asks for, as the apiserver does.
const FRESHNESS_TIMEOUT: Duration = Duration::from_secs(3);

/// How long one who comes back waits for the first list.
const SYNC_TIMEOUT: Duration = Duration::from_secs(5);

/// How often one who comes back may find that history has moved on since it was looked at.
const TRIES_MAX: usize = 3;

/// About how much a chunk of a list holds, in bytes.
const CHUNK_BYTES: usize = 256 << 10;

/// A watch that was admitted, with what it asked for.
pub struct Opened {
    /// Where it is in the stream of changes.
    pub subscription: Subscription,
    /// The silence after which a bookmark is sent.
    pub bookmark_interval: Duration,
    /// When it ends by itself.
    pub timeout_at: Option<Instant>,
    /// Its place among all streams.
    pub permit: OwnedSemaphorePermit,
}

/// The service.
pub struct Service<C> {
    catalog: Arc<C>,
    drain: CancellationToken,
    subscribers_max: usize,
    subscribers: Arc<Semaphore>,
}

impl<C> Clone for Service<C> {
    fn clone(&self) -> Self {
        let Self { catalog, drain, subscribers_max, subscribers } = self;
        let (catalog, drain, subscribers) = (catalog.clone(), drain.clone(), subscribers.clone());
        Self { catalog, drain, subscribers_max: *subscribers_max, subscribers }
    }
}

impl<C: Catalog> Service<C> {
    /// A service of `catalog`; every stream ends when `drain` is cancelled.
    pub fn new(catalog: Arc<C>, drain: CancellationToken, subscribers_max: usize) -> Self {
        let subscribers = Arc::new(Semaphore::new(subscribers_max.min(Semaphore::MAX_PERMITS)));
        Self { catalog, drain, subscribers_max, subscribers }
    }

    async fn select(&self, target: Option<v1alpha1::Target>) -> Result<Selected, Refusal> {
        if self.drain.is_cancelled() {
            return Err(Refusal::Draining);
        }
        request::select(&*self.catalog, target).await
    }

    /// Waits until the cache is not older than `version`.
    async fn fresh(&self, selected: &Selected, version: Option<ResourceVersion>) -> Result<(), Refusal> {
        match version {
            Some(version) => selected.served.hub.reached(version, FRESHNESS_TIMEOUT).await,
            None => Ok(()),
        }
    }

    /// A place for one stream; a list holds state for as long as it is read, as a watch does.
    fn admit(&self) -> Result<OwnedSemaphorePermit, Status> {
        self.subscribers.clone().try_acquire_owned().map_err(|_| {
            let limit = self.subscribers_max;
            let message = format!("{limit} streams are open, the most this kubefan serves (--subscribers-max)");
            status::refused(&Refusal::Exhausted(message))
        })
    }

    /// As [`Self::select`], and waits for the first list: a replica that has just been started is where everybody comes back to.
    async fn select_synced(&self, target: Option<v1alpha1::Target>) -> Result<Selected, Refusal> {
        let mut changes = self.catalog.changes();
        let limit = Instant::now() + SYNC_TIMEOUT;
        loop {
            changes.mark_unchanged();
            let found = self.select(target.clone()).await;
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

    /// Goes on from a version by the first way that there is: what the cache holds, what upstream tells again, or from the start.
    async fn resume(
        &self,
        served: &Served,
        selection: Selection,
        format: Format,
        (terms, version): (Terms, ResourceVersion),
        bell: Bell,
    ) -> Result<Subscription, Refusal> {
        let (hub, bell) = (&served.hub, Arc::new(bell));
        // Where it was in vain, the hub refuses the version, and counts that.
        let _ = hub.reached(version, FRESHNESS_TIMEOUT).await;
        // What was there before tells whether an object enters or leaves, and whether what is sent of it has changed.
        let compares = selection.can_change() || format.only_changes();
        let needs_state = compares && !planted::is(Bug::BackfillWithoutMembership);
        let mut tries = 0;
        let expired = loop {
            let (backfill, way) = match hub.way_from(version) {
                Ok(way) => (None, Some(way)),
                // Where upstream has nothing either, what is held here is named.
                Err(Refusal::Expired(expired)) => match self.catalog.backfill(served, version, needs_state).await {
                    Ok(backfill) => (Some(backfill), None),
                    Err(Refusal::Expired(_)) => break expired,
                    Err(other) => return Err(other),
                },
                Err(other) => return Err(other),
            };
            // Not before the backfill: whoever waits here has been heard there.
            let pass = match way {
                Some(Way::Ring) => None,
                _ => Some(Arc::new(hub.gate().enter().await?)),
            };
            let terms = Terms { backfill, pass, ..terms.clone() };
            tries += 1;
            match hub.subscribe(selection.clone(), format.clone(), terms, bell.clone()) {
                // History has moved on meanwhile.
                Err(Refusal::Expired(_)) if tries < TRIES_MAX => {}
                Err(Refusal::Expired(expired)) => break expired,
                other => return other,
            }
        };
        if terms.on_expired == OnExpired::Restart {
            let pass = Some(Arc::new(hub.gate().enter().await?));
            return hub.subscribe(selection, format, Terms { start: Start::Over(version), pass, ..terms }, bell);
        }
        hub.metrics().resume(Resume::Expired);
        Err(expired.into())
    }

    /// Starts a watch; its bell rings when there is something to send.
    pub async fn open(&self, request: WatchRequest, bell: Bell) -> Result<Opened, Status> {
        let permit = self.admit()?;
        let open = async {
            let version = request::version(&request.resource_version)?;
            let ends_after = request::timeout(request.timeout_seconds)?;
            let bookmark_interval = request::bookmark_interval(request.bookmark_interval)?;
            let format = request::watch_format(&request)?;
            let kept = request::state_kept(&request)?;
            let (on_lag, on_expired) = request::policy(&request)?;
            let Selected { served, selection } = match version {
                None => self.select(request.target).await?,
                Some(_) => self.select_synced(request.target).await?,
            };
            let start = match (version, kept) {
                (None, _) => Start::Snapshot,
                (Some(version), false) => Start::After(version),
                (Some(version), true) => Start::Kept(version),
            };
            let terms = Terms { on_lag, on_expired, ..start.into() };
            let subscription = match version {
                None => {
                    let pass = Some(Arc::new(served.hub.gate().enter().await?));
                    served.hub.subscribe(selection, format, Terms { pass, ..terms }, bell)?
                }
                Some(version) => self.resume(&served, selection, format, (terms, version), bell).await?,
            };
            let timeout_at = ends_after.map(|ends_after| Instant::now() + ends_after);
            Ok(Opened { subscription, bookmark_interval, timeout_at, permit })
        };
        open.await.map_err(|refusal: Refusal| status::refused(&refusal))
    }
}

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl<C: Catalog> WatchService for Service<C> {
    type WatchStream = stream::Empty<Result<WatchResponse, Status>>;
    type ListStream = BoxStream<ListResponse>;

    /// Watches are served by [`super::connection`]. What arrives here came by another way than gRPC's own.
    async fn watch(&self, _request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(status::not_by_this_way())
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<Self::ListStream>, Status> {
        let permit = self.admit()?;
        let request = request.into_inner();
        let format = request::list_format(&request).map_err(|refusal| status::refused(&refusal))?;
        let ListRequest { target, resource_version, .. } = request;
        let open = async {
            let version = request::version(&resource_version)?;
            let selected = self.select(target).await?;
            self.fresh(&selected, version).await?;
            let pass = selected.served.hub.gate().enter().await?;
            let (store, version) = selected.served.hub.snapshot()?;
            Ok((selected, store, version, pass))
        };
        let (selected, store, version, pass) = open.await.map_err(|refusal: Refusal| status::refused(&refusal))?;
        let resource = Some(selected.served.hub.resource().clone());
        let chunks = stream::unfold(Some((resource, None::<ObjectKey>)), move |place| {
            let _held = (&permit, &pass);
            let chunk = place.map(|(resource, last)| {
                let (mut objects, mut bytes, mut next) = (Vec::new(), 0, None);
                for object in store.select(&selected.selection, last.as_ref()) {
                    if bytes >= CHUNK_BYTES {
                        next = objects.last().map(|last: &Arc<Object>| (None, Some(last.key().clone())));
                        break;
                    }
                    bytes += object.json_len();
                    objects.push(object.clone());
                }
                selected.served.hub.metrics().snapshot_sent(objects.len(), bytes);
                let objects = objects.iter().map(|object| message(object, &format)).collect();
                (Ok(ListResponse { resource_version: version.to_string(), objects, resource }), next)
            });
            std::future::ready(chunk)
        });
        Ok(Response::new(Box::pin(chunks)))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetResponse>, Status> {
        let request = request.into_inner();
        let format = request::get_format(&request).map_err(|refusal| status::refused(&refusal))?;
        let GetRequest { target, resource_version, .. } = request;
        let (namespace, name) = target.as_ref().map_or(("", ""), |target| (&*target.namespace, &*target.name));
        let key = ObjectKey::new(namespace, name);
        let open = async {
            let version = request::version(&resource_version)?;
            let selectors =
                |target: &v1alpha1::Target| !(target.label_selector.is_empty() && target.field_selector.is_empty());
            let invalid = |field, message: &str| Err(Refusal::Invalid { field, message: message.to_owned() });
            if target.as_ref().is_some_and(selectors) {
                return invalid("target", "selectors are not allowed: a get is by name");
            }
            if key.name().is_empty() {
                return invalid("target.name", "required");
            }
            let selected = self.select(target).await?;
            if selected.served.namespaced && key.namespace().is_empty() {
                return invalid("target.namespace", "required: the resource is namespaced");
            }
            self.fresh(&selected, version).await?;
            let (store, version) = selected.served.hub.snapshot()?;
            Ok((selected.served, store, version))
        };
        let (served, store, version) = open.await.map_err(|refusal: Refusal| status::refused(&refusal))?;
        let object = store.get(key.as_str());
        let object = object.ok_or_else(|| status::object_not_found(&served.gvr.to_string(), key.name()))?;
        Ok(Response::new(GetResponse {
            object: Some(message(object, &format)),
            resource_version: version.to_string(),
            resource: Some(served.hub.resource().clone()),
        }))
    }

    async fn list_resources(
        &self,
        _request: Request<ListResourcesRequest>,
    ) -> Result<Response<ListResourcesResponse>, Status> {
        Ok(Response::new(ListResourcesResponse { resources: self.catalog.list() }))
    }
}

fn message(object: &Object, format: &Format) -> v1alpha1::Object {
    let json = object.bytes();
    v1alpha1::Object {
        namespace: object.key().namespace().to_owned(),
        name: object.key().name().to_owned(),
        uid: object.uid().to_owned(),
        resource_version: object.version().to_string(),
        object: format.bytes_of(&json).unwrap_or(json),
    }
}
