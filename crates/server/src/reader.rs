//! Reads and subscriptions, for both APIs of the data port: find the cache, enforce the admission
//! limits, and resume a watch from the version that its client has reached.
//!
//! The hazard is a crowd of clients after a restart. They wait here for the first list, with
//! limits, instead of asking the apiserver one by one.

mod subscribe;

use std::{sync::Arc, time::Duration};

use kubefan_access::{
    AccessControl, Authorized, BoundObject, Caller, Denial, Lease, Mode, Presented, Read, ReadVerb, Switches,
    switches::Switched,
};
use kubefan_admission::{FairPermit, FairPool, Holder, PermitKind, PermitLimits};
use kubefan_cache::{Phase, Refusal};
use kubefan_common::proto::v1alpha1;
use kubefan_fanout::{Catalog, OWN_WATCH_WAIT, OfStream, Patience, ReadSource, Served, Subscription};
use kubefan_model::{GroupVersionResource, Media, ResourceVersion, selection::Selection};
use kubefan_telemetry::traces;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

use super::{
    client_info::RequestOrigin,
    request_caller::RequestCaller,
    selector_limits::SelectorLimits,
    subscribers::{Registered, Subscribers},
    target_lookup::{self, Selected},
};

/// Time that a read waits for the cache to reach the requested version; the apiserver waits as
/// long.
pub const FRESHNESS_TIMEOUT: Duration = Duration::from_secs(3);

/// Time that a request waits for the first list of a cache.
const SYNC_TIMEOUT: Duration = Duration::from_secs(5);

/// The unit of the memory of requests that wait for their verdict, in bytes.
const PENDING_UNIT_BYTES: usize = 1 << 10;

const STREAMS: PermitKind = PermitKind {
    name: "streams",
    setting: "limits.subscribersMax",
    identity_setting: "limits.subscribersMaxPerIdentity",
};
const READS: PermitKind =
    PermitKind { name: "reads", setting: "limits.readsMax", identity_setting: "limits.readsMaxPerIdentity" };
const PENDING_REQUESTS: PermitKind = PermitKind {
    name: "MiB of requests that wait for the verdict about their caller",
    setting: "limits.pendingRequestsMemoryMax",
    identity_setting: "",
};

/// Limits of concurrent reads.
#[derive(Debug, Clone, Copy)]
pub struct ReaderLimits {
    /// Streams.
    pub subscribers_max: PermitLimits,
    /// Lists and gets over HTTP, and unary calls of the watch service over gRPC.
    pub reads_max: PermitLimits,
    /// The memory of requests that wait for the verdict about their caller, in bytes.
    pub pending_bytes_max: usize,
    /// Limits of selectors.
    pub selectors: SelectorLimits,
    /// Random, so that the ids of streams are not those of another replica.
    pub ids_seed: u32,
}

/// Reads from a catalog, within the limits of the data port.
pub struct Reader {
    catalog: Arc<dyn Catalog>,
    access: Arc<AccessControl>,
    drain: CancellationToken,
    stream_places: Arc<FairPool>,
    read_places: Arc<FairPool>,
    /// The memory of requests that wait for their verdict, in units.
    pending: Arc<FairPool>,
    selectors: SelectorLimits,
    subscribers: Arc<Subscribers>,
}

/// The reason why a read that names a version is refused.
#[derive(Debug, Clone)]
pub struct NotReached {
    /// The cache is below the version.
    pub refusal: Refusal,
    /// Whether upstream proved the cache fresh meanwhile: then the cluster is below it as well.
    pub is_proved: bool,
}

impl Reader {
    /// A reader of `catalog` within these limits, for callers that `access` lets read. Once `drain`
    /// is cancelled it refuses every request.
    pub fn new(
        catalog: Arc<dyn Catalog>,
        access: Arc<AccessControl>,
        drain: CancellationToken,
        limits: ReaderLimits,
    ) -> Self {
        let ReaderLimits { subscribers_max, reads_max, pending_bytes_max, selectors, ids_seed } = limits;
        let stream_places = FairPool::new(subscribers_max);
        let read_places = FairPool::new(reads_max);
        let pending = FairPool::new(pending_bytes_max / PENDING_UNIT_BYTES);
        let subscribers = Subscribers::new(ids_seed);
        Self { catalog, access, drain, stream_places, read_places, pending, selectors, subscribers }
    }

    /// Changes how many streams, and how many lists and gets, are served at a time.
    pub fn set_places(&self, subscribers_max: PermitLimits, reads_max: PermitLimits) {
        self.stream_places.set(subscribers_max);
        self.read_places.set(reads_max);
    }

    /// Cancelled when kubefan shuts down and every stream must end.
    pub fn drain(&self) -> &CancellationToken {
        &self.drain
    }

    /// Authorizes a read for the caller of a request, if the caches may answer it. Until then
    /// nothing is looked up but the full name of the resource, for users that may see it. The notes
    /// of the request get the caller, the read and the verdict.
    ///
    /// # Errors
    /// The reason why the caller may not read, or why the verdict is not known.
    pub async fn authorize(&self, request: &RequestCaller, read: Read) -> Result<Authorized<Read>, Denial> {
        let _until_the_verdict = self.begin_verdict(request, &read)?;
        let caller = self.known(request).await?;
        let switches = self.access.switches();
        let needs_full_name = self.access.reviews() || request.notes.is_on() || switches.is_any_set();
        let read = if needs_full_name { self.with_full_name(read, &caller).await } else { read };
        request.notes.read(&read);
        self.verdict(request, &caller, read).await
    }

    /// Authorizes a read that has its full name, as one over HTTP has.
    ///
    /// # Errors
    /// The reason why the caller may not read, or why the verdict is not known.
    pub(crate) async fn authorize_named(
        &self,
        request: &RequestCaller,
        read: Read,
    ) -> Result<Authorized<Read>, Denial> {
        let _until_the_verdict = self.begin_verdict(request, &read)?;
        let caller = self.known(request).await?;
        self.verdict(request, &caller, read).await
    }

    /// Notes a read, and returns the memory of its request until the verdict.
    fn begin_verdict(&self, request: &RequestCaller, read: &Read) -> Result<Option<FairPermit>, Denial> {
        request.notes.read(read);
        if request.presented.impersonates {
            return Err(Denial::Impersonation);
        }
        self.pend(&request.presented, read.bytes())
    }

    /// Returns the verdict about a caller's read, and notes it.
    async fn verdict(&self, request: &RequestCaller, caller: &Caller, read: Read) -> Result<Authorized<Read>, Denial> {
        // Over HTTP too, where the mode is known already: it may have changed while the request
        // waited for its caller.
        let v1alpha1::Target { group, resource, .. } = read.target();
        self.access.switches().check(group, resource, caller).map_err(Denial::Switched)?;
        // Before the verdict, which may need the parsed selectors.
        self.selectors.check_texts(read.spec().texts())?;
        let wait = traces::wait("authorize");
        let verdict = self.access.authorize(caller, read, &request.presented).await;
        drop(wait);
        request.notes.decided(&verdict);
        verdict
    }

    /// Returns the mode of a read of a resource, and the caller if that decides it. Without rules
    /// it costs nothing. If no rule of the resource names callers, the caller is not looked up.
    ///
    /// # Errors
    /// The reason why the caller is not known, or that the read is denied.
    pub async fn mode(
        &self,
        request: &RequestCaller,
        group: &str,
        resource: &str,
    ) -> Result<(Mode, Option<Caller>), Denial> {
        let switches = self.access.switches();
        let (mode, caller) = match switches.mode(group, resource, None) {
            Some(mode) => (mode, None),
            None => {
                let caller = self.authenticate(request).await?;
                (switches.mode(group, resource, Some(&caller)).unwrap_or(Mode::Deny), Some(caller))
            }
        };
        match mode {
            Mode::Deny => Err(Denial::Switched(Switched::new(mode, group, resource))),
            _ => Ok((mode, caller)),
        }
    }

    /// The modes in force.
    pub fn switches(&self) -> &Arc<Switches> {
        self.access.switches()
    }

    /// The memory of a request that waits for its verdict. Its caller is not known yet, and many
    /// may wait for one review.
    fn pend(&self, presented: &Presented, read_bytes: usize) -> Result<Option<FairPermit>, Denial> {
        if !self.access.reviews() {
            return Ok(None);
        }
        let units = 1 + (presented.header_bytes + read_bytes) / PENDING_UNIT_BYTES;
        let place = self.pending.try_take_many(Some(presented.holder), units);
        place.map(Some).ok_or_else(|| {
            let most = (self.pending.places_max() * PENDING_UNIT_BYTES) >> 20;
            Denial::Busy(PENDING_REQUESTS.exhausted(most))
        })
    }

    /// The caller of a request, which is noted for its record.
    ///
    /// # Errors
    /// The denial, if the caller is not known.
    pub async fn authenticate(&self, request: &RequestCaller) -> Result<Caller, Denial> {
        if let Some(verdict) = request.verdict.get() {
            return verdict.clone();
        }
        let _until_the_verdict = self.pend(&request.presented, 0)?;
        self.known(request).await
    }

    /// The same, for a request that has the memory for its wait.
    async fn known(&self, request: &RequestCaller) -> Result<Caller, Denial> {
        let authenticate = || async {
            let wait = traces::wait("authenticate");
            let caller = self.access.authenticate(&request.presented).await;
            wait.note("kubefan.authenticated", caller.is_ok());
            let caller = caller?;
            request.notes.caller(&caller);
            Ok(caller)
        };
        request.verdict.get_or_init(authenticate).await.clone()
    }

    /// Returns the right to continue an authorized watch, which is reviewed while the watch lasts.
    pub fn lease(&self, read: Authorized<Read>, gvr: &GroupVersionResource, holder: Holder, stream: OfStream) -> Lease {
        let catalog = self.catalog.clone();
        let exists = move |object: &BoundObject| catalog.exists(&object.gvr(), &object.key, &object.uid);
        let stream = Arc::new(stream);
        Lease::start(&self.access, read, gvr, holder, exists, move || {
            stream.wake();
        })
    }

    /// Enters a watch among the subscribers, until the entry is dropped.
    pub fn register(
        &self,
        read: &Authorized<Read>,
        sender: RequestOrigin,
        served: &Served,
        subscription: &Subscription,
        stream: OfStream,
    ) -> Registered {
        let observer = subscription.observer();
        self.subscribers.register(read.caller(), sender, observer, served, stream)
    }

    /// The subscribers.
    pub fn subscribers(&self) -> &Arc<Subscribers> {
        &self.subscribers
    }

    /// Replaces the name of the resource by its full name, which authorizers know. An unknown name
    /// is kept: then the caller needs the right to a resource of that name, so a refusal says
    /// nothing about it.
    async fn with_full_name(&self, read: Read, caller: &Caller) -> Read {
        if read.has_full_name() {
            return read;
        }
        let v1alpha1::Target { group, version, resource, .. } = read.target();
        // Every user that is authenticated may see the names of resources (`system:discovery`).
        // Others must know them, so a name without a group is one of the core group.
        if caller.is_anonymous() {
            let version = if group.is_empty() { "v1" } else { version };
            let gvr = GroupVersionResource::new(group, version, resource);
            return read.of_resource(gvr);
        }
        match self.catalog.full_name(group, version, resource).await {
            Some(gvr) => read.of_resource(gvr),
            None => read,
        }
    }

    /// The resources that are cached as JSON and that the caller of a request may list.
    ///
    /// # Errors
    /// The reason why the caller is refused, or why its rights are not known.
    pub async fn resources(&self, request: &RequestCaller) -> Result<Vec<v1alpha1::ResourceStatus>, Refusal> {
        let caller = self.authenticate(request).await?;
        // The states of all caches are held until the last verdict.
        let _place = self.admit_read(caller.holder(request.presented.holder))?;
        // A resource may also be cached in other encodings, which the answer does not tell apart.
        let all = self.catalog.list().into_iter().filter(|(media, _)| *media == Media::Json);
        let all = all.map(|(_, status)| status);
        if !self.access.reviews() {
            return Ok(all.collect());
        }
        // The record is of the call, and not of each resource.
        let apart = request.without_notes();
        let mut listed = Vec::new();
        for status in all {
            let Some(v1alpha1::ResolvedResource { group, version, resource, .. }) = status.resource.clone() else {
                continue;
            };
            let namespace = status.namespace.clone();
            let target = v1alpha1::Target { group, version, resource, namespace, ..v1alpha1::Target::default() };
            match self.authorize(&apart, Read::collection(ReadVerb::List, target)).await {
                Ok(_) => listed.push(status),
                Err(Denial::Forbidden(_) | Denial::Switched(_)) => {}
                Err(denial) => return Err(denial.into()),
            }
        }
        Ok(listed)
    }

    /// Whether a resource is cached in an encoding. Starts nothing.
    pub fn holds(&self, gvr: &GroupVersionResource, media: Media) -> bool {
        self.catalog.holds(gvr, media)
    }

    /// Whether a limit has refused a cache of a resource.
    pub fn is_known_uncached(&self, gvr: &GroupVersionResource) -> bool {
        self.catalog.is_known_uncached(gvr)
    }

    /// Waits for upstream's proof that a state is not older than this call: see
    /// [`Catalog::prove`].
    pub async fn prove(
        &self,
        served: &Served,
        listed: Option<&Selection>,
        patience: Patience,
    ) -> Result<ReadSource, Refusal> {
        let wait = traces::wait("freshness proof");
        let proved = self.catalog.prove(served, listed, patience).await;
        let way = match &proved {
            Ok(ReadSource::Cache | ReadSource::CacheAtLeast(_)) => "cache",
            Ok(ReadSource::Proved(_)) => "state",
            Err(_) => "none",
        };
        wait.note("kubefan.proof", way);
        proved
    }

    /// Starts the cache of an authorized read in an encoding, if that is allowed, without waiting
    /// for it.
    pub fn start_cache(&self, read: Authorized<Read>, media: Media) {
        let catalog = self.catalog.clone();
        let selectors = self.selectors;
        // Later requests find the cache started, so there are few of these tasks, and none waits
        // longer than a read would.
        tokio::spawn(async move {
            let found = target_lookup::select(&*catalog, &read, media, None, selectors).await;
            tracing::debug!(media = media.as_str(), refused = ?found.err(), "a cache was requested");
        });
    }

    /// Finds the cache of an authorized read, in an encoding, and binds its selectors. Their memory
    /// counts to `holder`.
    pub async fn select(&self, read: &Authorized<Read>, holder: Holder, media: Media) -> Result<Selected, Refusal> {
        if self.drain.is_cancelled() {
            return Err(Refusal::Draining);
        }
        target_lookup::select(&*self.catalog, read, media, Some(holder), self.selectors).await
    }

    /// Waits until the cache has reached `version`. The cache of a quiet resource stays at its last
    /// change, below the versions that upstream assigns to changes of other resources, until a
    /// proof advances it.
    pub async fn reach(
        &self,
        served: &Served,
        version: ResourceVersion,
        patience: Patience,
    ) -> Result<ReadSource, NotReached> {
        let mut is_proved = false;
        let proof = async {
            sleep(OWN_WATCH_WAIT).await;
            is_proved = self.catalog.advance(served, patience).await.is_ok();
            std::future::pending::<std::convert::Infallible>().await
        };
        let wait = traces::wait("version");
        let reached = tokio::select! {
            biased;
            reached = served.hub.reached(version, FRESHNESS_TIMEOUT) => reached,
            never = proof => match never {},
        };
        wait.note("kubefan.reached", reached.is_ok());
        reached.map(|()| ReadSource::CacheAtLeast(version)).map_err(|refusal| NotReached { refusal, is_proved })
    }

    /// A place for one stream: a watch, or a gRPC list, which pins a snapshot for as long as it is
    /// read, or any other gRPC stream.
    pub fn admit_stream(&self, holder: Holder) -> Result<FairPermit, Refusal> {
        let place = self.stream_places.try_take(Some(holder));
        place.ok_or_else(|| Refusal::Exhausted(STREAMS.refusal(&self.stream_places, holder)))
    }

    /// A place for one read, kept until the response has ended. Reads have a limit of their own, so
    /// that a crowd of them does not block watches.
    pub fn admit_read(&self, holder: Holder) -> Result<FairPermit, Refusal> {
        let place = self.read_places.try_take(Some(holder));
        place.ok_or_else(|| Refusal::Exhausted(READS.refusal(&self.read_places, holder)))
    }

    /// Like [`Self::select`], but waits for the first list: clients reconnect to a replica as soon
    /// as it starts.
    pub async fn select_synced(
        &self,
        read: &Authorized<Read>,
        holder: Holder,
        media: Media,
    ) -> Result<Selected, Refusal> {
        let mut changes = self.catalog.changes();
        let limit = Instant::now() + SYNC_TIMEOUT;
        loop {
            changes.mark_unchanged();
            let found = self.select(read, holder, media).await;
            let phase = match &found {
                Err(Refusal::NotSynced { .. }) => None,
                Err(_) => return found,
                Ok(selected) => Some(selected.served.hub.phase()),
            };
            let Some(mut phase) = phase else {
                // It has no cache yet: any new one may be its own.
                match timeout_at(limit, changes.changed()).await {
                    Ok(Ok(())) => continue,
                    _ => return found,
                }
            };
            phase.mark_unchanged();
            if *phase.borrow() != Phase::Syncing {
                return found;
            }
            // Only its own cache wakes it; the end of that too, because it is not held.
            drop(found);
            if timeout_at(limit, phase.changed()).await.is_err() {
                return self.select(read, holder, media).await;
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
