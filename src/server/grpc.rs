//! The gRPC service of the contract, served from a [`Catalog`].

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, stream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::{
    request::{self, Selected},
    session::Session,
    status,
};
use crate::{
    fanout::{Catalog, Frame, Refusal, Start},
    model::{ObjectKey, ResourceVersion, object::Object},
    proto::{
        service::watch_service_server::WatchService,
        v1alpha1::{
            self, GetRequest, GetResponse, ListRequest, ListResourcesRequest, ListResourcesResponse, ListResponse,
            WatchRequest,
        },
    },
};

/// How long a read waits for the cache to reach the version it asks for, as the apiserver does.
const FRESHNESS_TIMEOUT: Duration = Duration::from_secs(3);

/// About how much a chunk of a list holds, in bytes.
const CHUNK_BYTES: usize = 256 << 10;

/// The service.
pub struct Service<C> {
    catalog: Arc<C>,
    drain: CancellationToken,
    subscribers_max: usize,
    subscribers: Arc<Semaphore>,
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

    async fn open(&self, request: WatchRequest) -> Result<Session, Refusal> {
        let version = request::version(&request.resource_version)?;
        let timeout = request::timeout(request.timeout_seconds)?;
        let bookmark_interval = request::bookmark_interval(request.bookmark_interval)?;
        let selected = self.select(request.target).await?;
        // Where it was in vain, the hub refuses the version, and counts that.
        let _ = self.fresh(&selected, version).await;
        let Selected { served, selection } = selected;
        let subscription = served.hub.subscribe(selection, version.map_or(Start::Snapshot, Start::After))?;
        Ok(Session::new(served.hub, subscription, bookmark_interval, timeout, self.drain.clone()))
    }
}

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl<C: Catalog> WatchService for Service<C> {
    type WatchStream = BoxStream<Frame>;
    type ListStream = BoxStream<ListResponse>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let permit = self.admit()?;
        let session = self.open(request.into_inner()).await.map_err(|refusal| status::refused(&refusal))?;
        let frames = stream::unfold(Some((session, permit)), |open| async {
            let (mut session, permit) = open?;
            match session.next().await {
                Ok(frame) => Some((Ok(frame), Some((session, permit)))),
                Err(end) => status::ended(&end).map(|status| (Err(status), None)),
            }
        });
        Ok(Response::new(Box::pin(frames)))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<Self::ListStream>, Status> {
        let permit = self.admit()?;
        let ListRequest { target, resource_version } = request.into_inner();
        let open = async {
            let version = request::version(&resource_version)?;
            let selected = self.select(target).await?;
            self.fresh(&selected, version).await?;
            let (store, version) = selected.served.hub.snapshot()?;
            Ok((selected, store, version))
        };
        let (selected, store, version) = open.await.map_err(|refusal: Refusal| status::refused(&refusal))?;
        let resource = Some(selected.served.hub.resource().clone());
        let chunks = stream::unfold(Some((resource, None::<ObjectKey>)), move |place| {
            let _held = &permit;
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
                let objects = objects.iter().map(|object| message(object)).collect();
                (Ok(ListResponse { resource_version: version.to_string(), objects, resource }), next)
            });
            std::future::ready(chunk)
        });
        Ok(Response::new(Box::pin(chunks)))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetResponse>, Status> {
        let GetRequest { target, resource_version } = request.into_inner();
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
            object: Some(message(object)),
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

fn message(object: &Object) -> v1alpha1::Object {
    v1alpha1::Object {
        namespace: object.key().namespace().to_owned(),
        name: object.key().name().to_owned(),
        uid: object.uid().to_owned(),
        resource_version: object.version().to_string(),
        object: object.bytes(),
    }
}
