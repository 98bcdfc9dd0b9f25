//! `kubefan.v1alpha1.WatchService`, served from a catalog.
//!
//! Lists and gets are answered here. A watch is only opened here; the transport sends it, because a
//! gRPC library in between costs more per message than the socket does.

use std::{ops::ControlFlow, pin::Pin, sync::Arc};

use futures::{Stream, StreamExt, stream};
use kubefan_access::{Presented, Read, ReadVerb};
use kubefan_admission::{FairPermit, Holder};
use kubefan_audit::{AuditRecord, Notes};
use kubefan_cache::{Refusal, Store, sliced_scan::SLICE_TESTS};
use kubefan_common::{
    proto::v1alpha1::{
        self, GetFreshnessRequest, GetFreshnessResponse, GetRequest, GetResponse, ListRequest, ListResourcesRequest,
        ListResourcesResponse, ListResponse, WatchRequest, WatchResponse, watch_service_server::WatchService,
    },
    text::without_user,
};
use kubefan_fanout::{HubStatus, Patience, ReadSource, Served, Start, StreamWaker, SubscribeOptions};
use kubefan_model::{Media, ObjectKey, ResourceVersion, format::Format, object::Object};
use kubefan_telemetry::{
    metrics::Metrics,
    requests::{AnsweredBy, OTHER, Protocol, RequestGuard},
};
use tokio::time::Instant;
use tonic::{Code, Request, Response, Status};

use super::{request, status};
use crate::{
    client_info::{ClientInfo, RequestOrigin},
    reader::{NotReached, Reader},
    request_caller::RequestCaller,
    sliced_list::{CHUNK_BYTES, Chunk, SelectedAfter, SlicedList, Visited, chunks},
    staleness::Staleness,
    target_lookup::Selected,
    watch::{OpenedWatch, WatchProtocol},
};

/// The verb of a watch in metrics; its duration is not measured.
const WATCH: &str = "watch";

/// The implementation of the service.
#[derive(Clone)]
pub struct Service {
    reader: Arc<Reader>,
    metrics: Arc<Metrics>,
}

impl Service {
    /// A service that answers from `reader`.
    pub fn new(reader: Arc<Reader>, metrics: Arc<Metrics>) -> Self {
        Self { reader, metrics }
    }

    /// Waits until the cache has reached the version that a list or get names. Upstream cannot
    /// answer instead.
    async fn wait_for_version(
        &self,
        selected: &Selected,
        version: Option<ResourceVersion>,
    ) -> Result<ReadSource, Refusal> {
        let Some(version) = version else { return Ok(ReadSource::Cache) };
        let reached = self.reader.reach(&selected.served, version.least_reached(), Patience::NoFallback).await;
        reached.map_err(|NotReached { refusal, .. }| refusal)
    }

    /// A place for a stream of another service.
    ///
    /// # Errors
    /// The status that refuses the call.
    pub fn admit_stream(&self, holder: Holder) -> Result<FairPermit, Status> {
        self.reader.admit_stream(holder).map_err(|refusal| status::refused(&refusal))
    }

    fn count(&self, verb: &'static str) -> RequestGuard {
        self.metrics.requests().begin(Protocol::Grpc, verb, verb == WATCH)
    }

    /// Opens a watch. It wakes `stream_waker` when it has something to send.
    ///
    /// # Errors
    /// The status that refuses the request.
    pub async fn open(
        &self,
        request: WatchRequest,
        presented: Presented,
        sender: RequestOrigin,
        notes: Notes,
        stream_waker: StreamWaker,
    ) -> Result<OpenedWatch, Status> {
        let reader = &self.reader;
        let caller = RequestCaller::new(presented, notes);
        let mut counted = self.count(WATCH);
        let open = async {
            caller.notes.parameter("resourceVersion", &request.resource_version);
            if request.timeout_seconds != 0 {
                caller.notes.parameter("timeoutSeconds", request.timeout_seconds);
            }
            let read = Read::collection(ReadVerb::Watch, request.target.clone().unwrap_or_default());
            read.check_names()?;
            let read = reader.authorize(&caller, read).await?;
            let holder = read.holder(caller.presented.holder);
            let place = reader.admit_stream(holder)?;
            let version = request::place(&request)?;
            let ends_after = request::timeout(request.timeout_seconds)?;
            let bookmark_interval = request::bookmark_interval(request.bookmark_interval)?;
            let format = request::watch_format(&request)?;
            let state_kept = request::state_kept(&request)?;
            let (on_lag, on_expired) = request::policy(&request)?;
            let Selected { served, selection } = match version {
                None => reader.select(&read, holder, format.media()).await?,
                Some(_) => reader.select_synced(&read, holder, format.media()).await?,
            };
            let start = match version {
                None => Start::Snapshot,
                Some(version) if state_kept => Start::ResumeWithObjects(version),
                Some(version) => Start::Resume(version),
            };
            let terms = SubscribeOptions {
                on_lag,
                on_expired,
                cluster: request.cluster,
                may_be_complete: request.version_is_complete.is_none(),
                holder: Some(holder),
                ..start.into()
            };
            let of_stream = stream_waker.of_stream();
            let of_registered = stream_waker.of_stream();
            let subscription = reader.subscribe(&served, selection, format, terms, stream_waker).await?;
            let registered = reader.register(&read, sender, &served, &subscription, of_registered);
            let lease = reader.lease(read, &served.gvr, holder, of_stream);
            let timeout_at = ends_after.map(|ends_after| Instant::now() + ends_after);
            answered(&mut counted, &served);
            Ok(OpenedWatch {
                subscription,
                bookmark_interval: Some(bookmark_interval),
                timeout_at,
                protocol: WatchProtocol::Grpc,
                place,
                lease,
                registered,
                staleness: Staleness::default(),
                cross_origin: Arc::default(),
                record: AuditRecord::default(),
            })
        };
        let opened = open.await;
        opened.map_err(|refusal: Refusal| refused(&mut counted, status::refused(&refusal)))
    }
}

/// A list that is being sent.
struct Listing {
    selected: Selected,
    store: Store,
    version: ResourceVersion,
    format: Format,
    notes: Notes,
    /// Fields of the first chunk only: the resource and the cluster.
    first: Option<(v1alpha1::ResolvedResource, String)>,
    /// The last object that was tested.
    last: Option<ObjectKey>,
}

impl SlicedList for Listing {
    type Content = ListResponse;

    async fn next_chunk(&mut self) -> Chunk<ListResponse> {
        let mut objects = Vec::new();
        let mut bytes = 0;
        let put = |object: &Arc<Object>| {
            bytes += object.json_len();
            objects.push(object.clone());
            if bytes < CHUNK_BYTES { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        let selection = &self.selected.selection;
        let selected = SelectedAfter { store: &self.store, selection, last: self.last.as_ref() };
        let Visited { last, is_complete } = selected.visit(SLICE_TESTS, put).await;
        self.last = last;
        self.selected.served.hub.metrics().snapshot_sent(objects.len(), bytes);
        self.notes.sent(objects.len(), bytes);
        let objects = objects.iter().map(|object| message(object, &self.format)).collect();
        let (resource, cluster) = self.first.take().unzip();
        let content = ListResponse {
            resource_version: self.version.least_reached().to_string(),
            version_is_complete: self.version.is_end(),
            objects,
            resource,
            cluster: cluster.unwrap_or_default(),
        };
        Chunk { content, is_last: is_complete }
    }
}

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl WatchService for Service {
    type WatchStream = stream::Empty<Result<WatchResponse, Status>>;
    type ListStream = BoxStream<ListResponse>;

    /// Always refuses: the transport takes watches over plain gRPC before they get here.
    async fn watch(&self, _request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(status::not_grpc())
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<Self::ListStream>, Status> {
        let mut counted = self.count("list");
        let caller = caller_of(&request);
        let request = request.into_inner();
        let open = async {
            let format = request::list_format(&request)?;
            let ListRequest { target, resource_version, .. } = request;
            caller.notes.parameter("resourceVersion", &resource_version);
            let read = Read::collection(ReadVerb::List, target.unwrap_or_default());
            read.check_names()?;
            let read = self.reader.authorize(&caller, read).await?;
            let holder = read.holder(caller.presented.holder);
            let place = self.reader.admit_stream(holder)?;
            let version = request::version(&resource_version)?;
            let selected = self.reader.select(&read, holder, format.media()).await?;
            let source = self.wait_for_version(&selected, version).await?;
            selected.served.hub.index_for(&selected.selection, Some(holder)).await;
            let pass = selected.served.hub.gate().acquire(Some(holder)).await?;
            let (store, version) = selected.served.hub.snapshot_of(&source)?;
            Ok((selected, store, version, (place, pass), format))
        };
        let opened = open.await;
        let (selected, store, version, permits, format) =
            opened.map_err(|refusal: Refusal| refused(&mut counted, status::refused(&refusal)))?;
        answered(&mut counted, &selected.served);
        let hub = &selected.served.hub;
        let first = Some((hub.resource().clone(), hub.cluster().unwrap_or_default()));
        let listing = Listing { selected, store, version, format, notes: caller.notes, first, last: None };
        Ok(Response::new(Box::pin(chunks(listing, (permits, counted)).map(Ok))))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetResponse>, Status> {
        let mut counted = self.count("get");
        let caller = caller_of(&request);
        let request = request.into_inner();
        let format =
            request::get_format(&request).map_err(|refusal| refused(&mut counted, status::refused(&refusal)))?;
        let GetRequest { target, resource_version, .. } = request;
        let (namespace, name) = target.as_ref().map_or(("", ""), |target| (&*target.namespace, &*target.name));
        let key = ObjectKey::new(namespace, name);
        let open = async {
            caller.notes.parameter("resourceVersion", &resource_version);
            let read = Read::object(target.unwrap_or_default());
            read.check_names()?;
            let invalid = |field, message: &str| Err(Refusal::Invalid { field, message: message.to_owned() });
            if !read.spec().is_empty() {
                return invalid("target", "selectors are not allowed: a get names one object");
            }
            if key.name().is_empty() {
                return invalid("target.name", "required");
            }
            let read = self.reader.authorize(&caller, read).await?;
            let holder = read.holder(caller.presented.holder);
            let _place = self.reader.admit_read(holder)?;
            let version = request::version(&resource_version)?;
            let selected = self.reader.select(&read, holder, format.media()).await?;
            if selected.served.namespaced && key.namespace().is_empty() {
                return invalid("target.namespace", "required: the resource is namespaced");
            }
            let source = self.wait_for_version(&selected, version).await?;
            let (store, version) = selected.served.hub.snapshot_of(&source)?;
            Ok((selected.served, store, version))
        };
        let opened = open.await;
        let (served, store, version) =
            opened.map_err(|refusal: Refusal| refused(&mut counted, status::refused(&refusal)))?;
        let object = store.get(key.as_str());
        let object = object.ok_or_else(|| status::object_not_found(&served.gvr.to_string(), key.name()));
        counted.answered(&served.gvr.to_string(), code(&object), AnsweredBy::Cache);
        let object = object?;
        caller.notes.sent(1, object.json_len());
        Ok(Response::new(GetResponse {
            object: Some(message(object, &format)),
            resource_version: version.least_reached().to_string(),
            resource: Some(served.hub.resource().clone()),
            cluster: served.hub.cluster().unwrap_or_default(),
        }))
    }

    async fn get_freshness(
        &self,
        request: Request<GetFreshnessRequest>,
    ) -> Result<Response<GetFreshnessResponse>, Status> {
        let mut counted = self.count("get_freshness");
        let caller = caller_of(&request);
        let GetFreshnessRequest { target, prove } = request.into_inner();
        let read = async {
            // Rights may depend on the selectors, as for the watch that this belongs to. The answer
            // is that of the whole cache.
            let read = Read::collection(ReadVerb::Watch, target.unwrap_or_default());
            read.check_names()?;
            let read = self.reader.authorize(&caller, read.without_name()).await?;
            let holder = read.holder(caller.presented.holder);
            let _place = self.reader.admit_read(holder)?;
            let Selected { served, .. } = self.reader.select_synced(&read, holder, Media::Json).await?;
            if prove {
                self.reader.prove(&served, None, Patience::NoFallback).await?;
            }
            let HubStatus { version, age, .. } = served.hub.status();
            let version = match version {
                Some(version) => version,
                None => served.hub.snapshot()?.1,
            };
            Ok((served, version, age))
        };
        let (served, version, age) =
            read.await.map_err(|refusal: Refusal| refused(&mut counted, status::refused(&refusal)))?;
        answered(&mut counted, &served);
        Ok(Response::new(GetFreshnessResponse {
            resource_version: version.least_reached().to_string(),
            age: age.and_then(|age| age.try_into().ok()),
            version_is_complete: version.is_end(),
            cluster: served.hub.cluster().unwrap_or_default(),
        }))
    }

    async fn list_resources(
        &self,
        request: Request<ListResourcesRequest>,
    ) -> Result<Response<ListResourcesResponse>, Status> {
        let resources = {
            let caller = caller_of(&request);
            self.reader.resources(&caller).await
        };
        let mut resources = resources.map_err(|refusal| status::refused(&refusal))?;
        for status in &mut resources {
            status.message = without_user(&status.message);
        }
        Ok(Response::new(ListResourcesResponse { resources }))
    }
}

/// Returns the caller of a call, not authenticated yet.
fn caller_of<T>(request: &Request<T>) -> RequestCaller {
    let client = request.extensions().get::<ClientInfo>().cloned().unwrap_or_default();
    let notes = request.extensions().get::<Notes>().cloned().unwrap_or_default();
    RequestCaller::new(client.presents(request.metadata().as_ref(), false), notes)
}

/// Counts a request as answered from the cache.
fn answered(counted: &mut RequestGuard, served: &Served) {
    counted.answered(&served.gvr.to_string(), status::name(Code::Ok), AnsweredBy::Cache);
}

fn code<T>(result: &Result<T, Status>) -> &'static str {
    status::name(result.as_ref().map_or_else(Status::code, |_| Code::Ok))
}

/// Counts a request as refused by kubefan.
fn refused(counted: &mut RequestGuard, status: Status) -> Status {
    counted.answered(OTHER, status::name(status.code()), AnsweredBy::Kubefan);
    status
}

fn message(object: &Object, format: &Format) -> v1alpha1::Object {
    let whole = object.bytes();
    v1alpha1::Object {
        namespace: object.key().namespace().to_owned(),
        name: object.key().name().to_owned(),
        uid: object.uid().to_owned(),
        resource_version: object.version().to_string(),
        object: format.bytes_of(&whole, None).unwrap_or(whole),
    }
}
