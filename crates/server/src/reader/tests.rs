use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use kubefan_access::{
    AccessOptions, Mode, StreamOptions, Switches,
    authentication::AuthenticationOptions,
    authorization::AuthorizationOptions,
    modes::{ModeRule, Modes},
    review::QueueLimits,
};
use kubefan_admission::{Gate, GateLimits};
use kubefan_audit::Notes;
use kubefan_cache::{Backfill, CacheWriter, Commit, ProcessBudgets, RelistReason, RingLimits, StreamEnd, Update};
use kubefan_common::{
    proto::v1alpha1::{ResolvedResource, ResourceStatus},
    sync::watch,
};
use kubefan_fanout::{CacheRequest, Hub, HubOptions, ReadSource, SavedState};
use kubefan_model::{GroupVersionResource, ObjectKey, Scope, fields::FieldTable, object::ObjectParser};
use kubefan_telemetry::metrics::Metrics;
use kubefan_upstream::{
    Upstream,
    client::{UpstreamBody, UpstreamOptions},
};
use prometheus::Registry;
use tokio::time::advance;
use tower::{BoxError, service_fn, util::BoxCloneSyncService};

use super::*;

/// A catalog with one cache, which is not synced, and a count of the searches for it.
pub(crate) struct OneCache {
    pub(crate) served: Served,
    /// Whether the cache exists before a read searches for it.
    pub(crate) is_held: AtomicBool,
    /// Whether upstream proves that the cache is current.
    pub(crate) is_current: AtomicBool,
    searches: AtomicUsize,
    changes: watch::Sender<u64>,
}

impl OneCache {
    pub(crate) fn new() -> Arc<Self> {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let fields = Arc::new(FieldTable::new(&gvr, true, &[]));
        let parser = Arc::new(ObjectParser::new(&fields).of("Pod", "v1"));
        let all = Arc::new(Metrics::new(Registry::new()).unwrap());
        let gate = GateLimits { snapshots_max: 1, snapshot_queue_timeout: Duration::ZERO };
        let options = HubOptions {
            limits: RingLimits {
                ring_bytes_max: None,
                ring_events_max: 1,
                ring_age_max: Duration::ZERO,
                conflated_bytes_max: None,
            },
            coalesce_max: Duration::ZERO,
            gate: Gate::new(gate, all.gate()),
            budgets: ProcessBudgets::default(),
            cluster: Arc::new(|| None),
        };
        let metrics = all.cache(&gvr, &Scope::Cluster, Media::Json, &StreamEnd::ALL);
        let hub = Hub::new(ResolvedResource::default(), parser.clone(), options, metrics);
        let list_kind = "PodList".into();
        let scope = Scope::Cluster;
        let reading = None;
        let served = Served { gvr, namespaced: true, scope, fields, list_kind, parser, hub, reading };
        let is_held = AtomicBool::new(true);
        let is_current = AtomicBool::new(false);
        Arc::new(Self { served, is_held, is_current, searches: AtomicUsize::new(0), changes: watch::Sender::new(0) })
    }

    /// Lists no objects at `version`, which starts a history of its own.
    pub(crate) fn list(&self, version: u64) {
        self.list_objects(version, &[]);
    }

    /// Lists these objects as JSON at `version`, which starts a history of its own.
    pub(crate) fn list_objects(&self, version: u64, objects: &[&str]) {
        for commit in self.commits(version, objects) {
            self.served.hub.batch().commit(commit, Instant::now());
        }
    }

    /// Starts with these objects as a saved state of this age.
    pub(crate) fn restore(&self, version: u64, objects: &[&str], age: Duration) {
        for commit in self.commits(version, objects) {
            let proven_at = Instant::now().checked_sub(age);
            self.served.hub.start_unconfirmed(SavedState { commit, proven_at, message: String::new() });
        }
    }

    fn commits(&self, version: u64, objects: &[&str]) -> Vec<Commit> {
        let version = ResourceVersion::new(version).unwrap();
        let mut writer = CacheWriter::default();
        let items = objects.iter().map(|json| self.served.parser.parse(json.as_bytes()).unwrap());
        let begin = std::iter::once(Update::ListBegin { reason: RelistReason::Expired });
        let updates = begin.chain(items.map(Update::ListItem)).chain([Update::ListEnd(version)]);
        updates.filter_map(|update| writer.apply(update).unwrap()).collect()
    }

    fn proof<T>(&self, proved: T) -> Result<T, Refusal> {
        if self.is_current.load(Ordering::Relaxed) { Ok(proved) } else { unavailable() }
    }

    /// A reader of it.
    pub(crate) fn reader(self: &Arc<Self>) -> Arc<Reader> {
        self.reader_for(AccessControl::always_allow())
    }

    pub(crate) fn reader_for(self: &Arc<Self>, access: AccessControl) -> Arc<Reader> {
        let limits = ReaderLimits {
            subscribers_max: 1.into(),
            reads_max: 1.into(),
            pending_bytes_max: PENDING_UNIT_BYTES,
            selectors: SelectorLimits { terms_max: 1, values_max: 1 },
            ids_seed: 0,
        };
        Arc::new(Reader::new(self.clone(), Arc::new(access), CancellationToken::new(), limits))
    }
}

fn unavailable<T>() -> Result<T, Refusal> {
    Err(Refusal::Unavailable("a test".to_owned()))
}

#[async_trait]
impl Catalog for OneCache {
    async fn find(&self, _: CacheRequest<'_>) -> Result<Served, Refusal> {
        self.searches.fetch_add(1, Ordering::Relaxed);
        Ok(self.served.clone())
    }

    async fn full_name(&self, _: &str, _: &str, _: &str) -> Option<GroupVersionResource> {
        None
    }

    async fn backfill(&self, _: &Served, _: ResourceVersion, _: bool) -> Result<Arc<Backfill>, Refusal> {
        unavailable()
    }

    async fn prove(&self, _: &Served, _: Option<&Selection>, _: Patience) -> Result<ReadSource, Refusal> {
        self.proof(ReadSource::Cache)
    }

    async fn advance(&self, _: &Served, _: Patience) -> Result<(), Refusal> {
        self.proof(())
    }

    async fn cluster_version(&self, _: &Served, _: Instant) -> Result<ResourceVersion, Refusal> {
        unavailable()
    }

    fn exists(&self, _: &GroupVersionResource, _: &ObjectKey, _: &str) -> Option<bool> {
        None
    }

    fn holds(&self, _: &GroupVersionResource, _: Media) -> bool {
        self.is_held.load(Ordering::Relaxed)
    }

    fn is_known_uncached(&self, _: &GroupVersionResource) -> bool {
        false
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn list(&self) -> Vec<(Media, ResourceStatus)> {
        Vec::new()
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_its_cache_does_not_search_again_when_others_change() {
    let catalog = OneCache::new();
    let reader = catalog.reader();
    let target = v1alpha1::Target { resource: "pods".to_owned(), ..v1alpha1::Target::default() };
    let caller = unidentified();
    let read = reader.authorize(&caller, Read::collection(ReadVerb::List, target)).await.unwrap();
    let waiting =
        tokio::spawn(async move { reader.select_synced(&read, Holder::new(0, None), Media::Json).await.is_ok() });
    for _ in 0..100 {
        catalog.changes.send_modify(|changes| *changes += 1);
        advance(Duration::from_millis(1)).await;
        tokio::task::yield_now().await;
    }
    assert!(!waiting.is_finished());
    assert_eq!(catalog.searches.load(Ordering::Relaxed), 1, "changes of other caches do not concern it");
    catalog.served.hub.close(Phase::NotFound, StreamEnd::NotFound("gone".to_owned()));
    assert!(waiting.await.unwrap());
    assert_eq!(catalog.searches.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn a_list_of_the_caches_takes_the_place_of_a_read() {
    let reader = OneCache::new().reader();
    let caller = unidentified();
    let only_one = reader.admit_read(caller.presented.holder).unwrap();
    let refused = reader.resources(&caller).await;
    assert!(matches!(refused, Err(Refusal::Exhausted(_))), "{refused:?}");
    drop(only_one);
    assert!(reader.resources(&caller).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_read_that_waits_after_it_has_found_its_version_is_not_served_an_older_state() {
    let catalog = OneCache::new();
    let reader = catalog.reader();
    let hub = &catalog.served.hub;
    catalog.list(430);
    let reached = reader.reach(&catalog.served, ResourceVersion::new(422).unwrap(), Patience::AtOnce).await;
    let source = reached.ok().unwrap();
    assert!(hub.snapshot_of(&source).is_ok());
    // The list waits for a permit. Meanwhile etcd is restored from a backup.
    catalog.list(136);
    let refused = hub.snapshot_of(&source).err();
    assert!(matches!(refused, Some(Refusal::Future { .. })), "{refused:?}");
}

/// A caller without credentials.
fn unidentified() -> RequestCaller {
    let presented = Presented::new(&http::HeaderMap::new(), false, false, Holder::new(1, None));
    RequestCaller::new(presented, Notes::default())
}

/// A caller with a token.
fn with_token() -> RequestCaller {
    let mut headers = http::HeaderMap::new();
    headers.insert(http::header::AUTHORIZATION, "Bearer x".parse().unwrap());
    RequestCaller::new(Presented::new(&headers, false, false, Holder::new(1, None)), Notes::default())
}

/// Access to an apiserver that never answers.
fn unanswered() -> AccessControl {
    let never = |_: http::Request<Bytes>| std::future::pending::<Result<http::Response<UpstreamBody>, BoxError>>();
    access(BoxCloneSyncService::new(service_fn(never)))
}

/// Access to an apiserver that allows everything, and counts the reviews of tokens.
pub(crate) fn allowed(token_reviews: Arc<AtomicUsize>) -> AccessControl {
    let answer = move |request: http::Request<Bytes>| {
        let status = if request.uri().path().ends_with("/tokenreviews") {
            token_reviews.fetch_add(1, Ordering::Relaxed);
            r#"{"status":{"authenticated":true,"user":{"username":"u"}}}"#
        } else {
            r#"{"status":{"allowed":true}}"#
        };
        let body = Full::new(Bytes::from_static(status.as_bytes())).map_err(|never| match never {});
        std::future::ready(Ok::<_, BoxError>(http::Response::new(body.boxed_unsync())))
    };
    access(BoxCloneSyncService::new(service_fn(answer)))
}

/// Access to this apiserver. No verdict is kept.
fn access(
    apiserver: BoxCloneSyncService<http::Request<Bytes>, http::Response<UpstreamBody>, BoxError>,
) -> AccessControl {
    let base = http::Uri::from_static("https://sim.local:6443");
    let upstream = Upstream::from_service(apiserver, &base, UpstreamOptions::default());
    let queue = QueueLimits {
        per_second: 1000,
        burst: 1000,
        in_flight_max: 10,
        waiting_max: 10,
        wait_timeout: Duration::from_secs(10),
    };
    let outage_grace = Duration::ZERO;
    let authentication = AuthenticationOptions {
        api_audiences: Vec::new(),
        token_ttl: Duration::ZERO,
        outage_grace,
        anonymous: false,
        ignored_extra: Vec::new(),
        queue,
    };
    let authorization = AuthorizationOptions {
        authorized_ttl: Duration::ZERO,
        unauthorized_ttl: Duration::ZERO,
        outage_grace,
        always_allow_groups: Vec::new(),
        broad_first: true,
        queue,
    };
    let streams = StreamOptions { reauthorize_interval: Duration::from_secs(1), age_max: None };
    let options = AccessOptions { authentication, authorization, streams };
    let metrics = Metrics::new(Registry::new()).unwrap();
    AccessControl::webhook(&upstream, options, [7; 32], || std::time::SystemTime::UNIX_EPOCH, metrics.access())
}

#[tokio::test(start_paused = true)]
async fn a_request_is_authenticated_once_for_all_steps_that_ask_for_its_caller() {
    let token_reviews = Arc::new(AtomicUsize::new(0));
    let reader = OneCache::new().reader_for(allowed(token_reviews.clone()));
    let pods =
        v1alpha1::Target { version: "v1".to_owned(), resource: "pods".to_owned(), ..v1alpha1::Target::default() };
    let list = || Read::collection(ReadVerb::List, pods.clone());
    let caller = with_token();
    assert!(reader.mode(&caller, "", "pods").await.is_ok());
    assert_eq!(token_reviews.load(Ordering::Relaxed), 0, "no mode depends on the caller");
    assert!(reader.authorize(&caller, list()).await.is_ok());
    assert!(reader.authorize_named(&caller, list()).await.is_ok());
    assert!(reader.authenticate(&caller).await.is_ok());
    assert!(reader.resources(&caller).await.is_ok());
    assert_eq!(token_reviews.load(Ordering::Relaxed), 1);
    assert!(reader.authenticate(&with_token()).await.is_ok());
    assert_eq!(token_reviews.load(Ordering::Relaxed), 2, "another request");
}

#[tokio::test(start_paused = true)]
async fn a_mode_that_changes_while_a_request_waits_for_its_caller_holds_for_it() {
    let switches = Switches::new(Modes::default());
    let reader = OneCache::new().reader_for(allowed(Arc::default()).with_switches(switches.clone()));
    let caller = with_token();
    assert!(reader.mode(&caller, "", "pods").await.is_ok());
    let resources = vec!["pods".parse().unwrap()];
    switches.replace(Modes::new(vec![ModeRule { resources, users: None, groups: None, mode: Mode::Deny }]));
    let pods =
        v1alpha1::Target { version: "v1".to_owned(), resource: "pods".to_owned(), ..v1alpha1::Target::default() };
    let verdict = reader.authorize_named(&caller, Read::collection(ReadVerb::List, pods)).await.map(drop);
    assert!(matches!(verdict, Err(Denial::Switched(_))), "{verdict:?}");
}

#[tokio::test(start_paused = true)]
async fn a_selector_beyond_the_limits_is_refused_before_the_verdict_about_its_caller() {
    let reader = OneCache::new().reader();
    let caller = unidentified();
    let verdict = async |fields: &str| {
        let resource = "pods".to_owned();
        let field_selector = fields.to_owned();
        let target = v1alpha1::Target { resource, field_selector, ..v1alpha1::Target::default() };
        reader.authorize(&caller, Read::collection(ReadVerb::List, target)).await.map(drop)
    };
    assert!(verdict("spec.nodeName=n").await.is_ok());
    let refused = verdict(&"metadata.name!=a,".repeat(900)).await;
    assert!(matches!(refused, Err(Denial::Invalid { field: "target.field_selector", .. })), "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn requests_that_wait_for_their_verdict_take_little_memory() {
    let limits = ReaderLimits {
        subscribers_max: 1.into(),
        reads_max: 1.into(),
        pending_bytes_max: 64 * PENDING_UNIT_BYTES,
        selectors: SelectorLimits { terms_max: 1, values_max: 1 },
        ids_seed: 0,
    };
    let reader = Arc::new(Reader::new(OneCache::new(), Arc::new(unanswered()), CancellationToken::new(), limits));
    let ask = |connection: u64, header_bytes: usize| {
        let mut headers = http::HeaderMap::new();
        headers.insert(http::header::AUTHORIZATION, "Bearer x".parse().unwrap());
        headers.insert("x-long", "x".repeat(header_bytes).parse().unwrap());
        let address = std::net::IpAddr::from([127, 0, 0, connection as u8]);
        let presented = Presented::new(&headers, false, false, Holder::new(connection, Some(address)));
        let caller = RequestCaller::new(presented, Notes::default());
        let target = v1alpha1::Target { resource: "pods".to_owned(), ..v1alpha1::Target::default() };
        let reader = reader.clone();
        tokio::spawn(async move { reader.authorize(&caller, Read::collection(ReadVerb::List, target)).await.map(drop) })
    };
    let first = ask(1, 40 << 10);
    tokio::task::yield_now().await;
    let second = ask(2, 40 << 10).await.unwrap();
    assert!(matches!(second, Err(Denial::Busy(why)) if why.contains("limits.pendingRequestsMemoryMax")));
    let short = ask(3, 10);
    tokio::task::yield_now().await;
    assert!(!first.is_finished() && !short.is_finished(), "they wait for the verdict");
    first.abort();
    assert!(first.await.is_err());
    let again = ask(2, 40 << 10);
    tokio::task::yield_now().await;
    assert!(!again.is_finished(), "its memory is free again");
}
