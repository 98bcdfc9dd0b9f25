//! kubefan inside the test process: the library's registry and gRPC service over a simulated
//! apiserver, without a network, for tests on a paused clock. Subscribers are recorded by
//! [`Watch`], as in all other tests.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use futures::StreamExt;
use http_body_util::Empty;
use hyper_util::rt::TokioIo;
use kubefan_access::AccessControl;
use kubefan_admission::GateLimits;
use kubefan_app::{config::ServeConfig, open_files::CONNECTIONS_MAX, server_options};
use kubefan_audit::AuditLog;
use kubefan_cache::{RetainedLimits, RingLimits};
use kubefan_client::{Client, ClientOptions, FallbackBudget};
use kubefan_common::proto::v1alpha1::{
    ListRequest, ListResourcesRequest, ListResponse, OnExpired, ResourceStatus, Target, WatchRequest,
    watch_service_client::WatchServiceClient,
};
use kubefan_fanout::CacheRequest;
use kubefan_informers::{
    CacheCatalog, CacheContext, ConfiguredResource, ListScheduler, OnDemandLimits, Registry, RegistryOptions,
    SizeLimits,
};
use kubefan_model::{GroupVersionResource, Media};
use kubefan_peer::Peers;
use kubefan_server::{ClientInfo, Server, ServerHandles, kube::kube_upstream::KubeUpstream};
use kubefan_sim::apiserver::{Fault, FaultRule, SimApiserver, SimOptions, Verb};
use kubefan_telemetry::metrics::Metrics;
use kubefan_upstream::{
    Source, Upstream,
    direct_apiserver::DirectApiserver,
    discovery::{Discovery, DiscoveryOptions},
    fallback::{Fallback, FallbackOptions},
    kubefan_client::KubefanClient,
    lines::LineOptions,
    reflector::ReflectorOptions,
};
use rand::{SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{
    Status,
    service::Routes,
    transport::{Channel, Endpoint},
};
use tower::service_fn;

use super::{
    kubefan::value_of,
    network::{Network, RecordedRequest},
    record::{Recorded, Watch, recorded},
};

/// The collection that most tests watch.
pub(crate) const PODS: &str = "/api/v1/pods";

/// The options of kubefan and of its simulated apiserver.
pub(crate) struct Setup {
    pub(crate) sim: SimOptions,
    pub(crate) reflector: ReflectorOptions,
    pub(crate) registry: RegistryOptions,
    pub(crate) schema_check_interval: Duration,
    /// Lists of upstream at the same time.
    pub(crate) lists_max: usize,
    pub(crate) upstream_field_selector: String,
    pub(crate) cache_compression: bool,
    pub(crate) peers: Option<Peers>,
    /// The seed of random choices; `None` draws one.
    pub(crate) seed: Option<u64>,
}

impl Setup {
    /// kubefan's defaults, with these resources and without on-demand caches.
    pub(crate) fn of(resources: &[&str]) -> Setup {
        Setup {
            sim: SimOptions::default(),
            reflector: ReflectorOptions {
                page_size: 500,
                watch_list: true,
                upstream_idle_timeout: Duration::from_secs(90),
                line_bytes_max: 16 << 20,
            },
            registry: RegistryOptions {
                resources: resources.iter().map(|resource| ConfiguredResource::parse(resource).unwrap()).collect(),
                namespaces: Vec::new(),
                ring: RingLimits {
                    ring_bytes_max: None,
                    ring_events_max: 100_000,
                    ring_age_max: Duration::from_secs(24 * 3600),
                    conflated_bytes_max: None,
                },
                coalesce_max: Duration::ZERO,
                gate: GateLimits { snapshots_max: 256, snapshot_queue_timeout: Duration::from_secs(10) },
                on_demand: None,
                protobuf: None,
                tables: None,
                staleness_max: None,
                proves: true,
                self_check_interval: None,
                retained: RetainedLimits::default(),
            },
            // Schema checks would add requests to those that tests count.
            schema_check_interval: Duration::from_secs(24 * 3600),
            lists_max: 8,
            upstream_field_selector: String::new(),
            cache_compression: false,
            peers: None,
            seed: None,
        }
    }

    /// Loads the initial state with LIST instead of WatchList.
    pub(crate) fn by_list(self) -> Setup {
        self.with_watch_list(false)
    }

    /// Loads the initial state with WatchList or with LIST.
    pub(crate) fn with_watch_list(mut self, watch_list: bool) -> Setup {
        self.reflector.watch_list = watch_list;
        self
    }

    pub(crate) fn namespaces(mut self, namespaces: &[&str]) -> Setup {
        self.registry.namespaces = namespaces.iter().map(|name| name.to_string()).collect();
        self
    }

    /// Enables on-demand caches for other resources.
    pub(crate) fn on_demand(mut self, on_demand: OnDemandLimits) -> Setup {
        self.registry.on_demand = Some(on_demand);
        self
    }

    /// Creates the simulated apiserver of this setup.
    pub(crate) fn sim(&self) -> SimApiserver {
        SimApiserver::new(self.sim.clone())
    }
}

/// Generous limits for on-demand caches.
pub(crate) fn on_demand() -> OnDemandLimits {
    OnDemandLimits {
        on_demand_resources_max: 16,
        size: SizeLimits { on_demand_objects_max: 100_000, on_demand_bytes_max: 512 << 20 },
        on_demand_idle_timeout: Duration::from_secs(600),
    }
}

/// A running kubefan and its apiserver.
pub(crate) struct Rig {
    pub(crate) sim: SimApiserver,
    pub(crate) network: Network,
    pub(crate) registry: Arc<Registry>,
    /// The same caches, as servers find them.
    pub(crate) catalog: CacheCatalog,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) server: Arc<Server>,
    /// Ends every subscriber's stream.
    drain: CancellationToken,
    client: WatchServiceClient<Channel>,
    _stop: DropGuard,
}

impl Rig {
    /// Starts kubefan in front of `sim`, without waiting for the sync.
    pub(crate) fn start(sim: SimApiserver, setup: Setup) -> Rig {
        Rig::over(Network::to(sim.clone()), sim, setup)
    }

    /// Like [`Self::start`], over a network that the test has prepared.
    pub(crate) fn over(network: Network, sim: SimApiserver, setup: Setup) -> Rig {
        Rig::at(network, sim, setup, Source::apiserver)
    }

    /// Starts a kubefan that lists and watches at `front` over gRPC, through the link. All else
    /// goes to the apiserver of `front`.
    pub(crate) fn behind(front: &Rig, setup: Setup) -> (Rig, GrpcLink) {
        let (client, link) = front.grpc_client();
        let source = |apiserver| Source::grpc(client, apiserver);
        (Rig::at(Network::to(front.sim.clone()), front.sim.clone(), setup, source), link)
    }

    /// Like [`Self::behind`]. The kubefan lists and watches at the apiserver while `front` is away.
    pub(crate) fn falling_back(front: &Rig, setup: Setup) -> (Rig, GrpcLink) {
        let (client, link) = front.grpc_client();
        let metrics = Metrics::new(prometheus::Registry::new()).unwrap();
        let source = |apiserver: Upstream| {
            let fallback = Fallback::new(FallbackOptions {
                apiserver: apiserver.server().to_owned(),
                kubefan: "kubefan.test".to_owned(),
                budget: FallbackBudget { clients: 500, starts_per_second: 50.0 },
                metrics: metrics.fallback().clone(),
                random: StdRng::seed_from_u64(1),
            });
            let direct = DirectApiserver::new(fallback, apiserver.clone());
            let source = Source::grpc(client, apiserver.clone()).with_fallback(direct, apiserver);
            tokio::spawn(source.clone().keep_probing(None));
            source
        };
        (Rig::at(Network::to(front.sim.clone()), front.sim.clone(), setup, source), link)
    }

    /// A client of this kubefan, as another one has it.
    fn grpc_client(&self) -> (KubefanClient, GrpcLink) {
        let link = GrpcLink::default();
        let channel = in_memory_through(self.server.clone(), link.clone());
        let client = Client::from_channel(channel, "kubefan.test", &ClientOptions::default());
        (KubefanClient::from_client(client), link)
    }

    fn at(network: Network, sim: SimApiserver, setup: Setup, source: impl FnOnce(Upstream) -> Source) -> Rig {
        let metrics = Arc::new(Metrics::new(prometheus::Registry::new()).unwrap());
        let counted = metrics.clone();
        let upstream = network.upstream().with_observer(Arc::new(move |verb, code| {
            counted.upstream_request(
                verb.as_str(),
                code.map_or("error".to_owned(), |code| code.as_u16().to_string()).as_str(),
            );
        }));
        let context = CacheContext {
            upstream: upstream.clone(),
            source: source(upstream.clone()),
            discovery: Arc::new(Discovery::new(upstream, DiscoveryOptions::default())),
            lists: ListScheduler::new(setup.lists_max, metrics.lists()),
            reflector: setup.reflector,
            upstream_field_selector: setup.upstream_field_selector,
            schema_check_interval: setup.schema_check_interval,
            cache_compression: setup.cache_compression,
            peers: setup.peers,
            saved: None,
            seed: setup.seed,
        };
        let stop = CancellationToken::new();
        let registry = Registry::new(context, setup.registry, metrics.clone(), stop.clone());
        tokio::spawn(registry.clone().run());
        let options = server_options::from_config(&ServeConfig::default(), CONNECTIONS_MAX);
        let catalog = CacheCatalog(registry.clone());
        let drain = CancellationToken::new();
        let handles = ServerHandles {
            access: Arc::new(AccessControl::always_allow()),
            audit: AuditLog::default(),
            upstream: KubeUpstream::default(),
            metrics: metrics.clone(),
            drain: drain.clone(),
        };
        let server = Server::new(Arc::new(catalog.clone()), Routes::default(), options, handles);
        let client = WatchServiceClient::new(in_memory(server.clone())).max_decoding_message_size(64 << 20);
        Rig { sim, network, registry, catalog, metrics, server, drain, client, _stop: stop.drop_guard() }
    }

    /// Ends every stream with DRAINING.
    pub(crate) fn drain(&self) {
        self.drain.cancel();
        self.server.connections().drain();
    }

    /// Starts kubefan and waits until it is ready.
    pub(crate) async fn synced(sim: SimApiserver, setup: Setup) -> Rig {
        let rig = Rig::start(sim, setup);
        rig.ready().await;
        rig
    }

    /// Waits until every configured resource is synced.
    pub(crate) async fn ready(&self) {
        let mut changes = self.registry.changes();
        let ready = async {
            while !self.registry.readiness().0 {
                changes.changed().await.unwrap();
            }
        };
        let limit = Duration::from_secs(600);
        assert!(tokio::time::timeout(limit, ready).await.is_ok(), "not ready: {}", self.readyz());
    }

    /// The lines of /readyz about resources.
    pub(crate) fn readyz(&self) -> String {
        let (_, lines) = self.registry.readiness();
        let lines = lines.into_iter().map(|(_, line)| line).filter(|line| !line.starts_with("identity "));
        lines.collect::<Vec<_>>().join("\n")
    }

    /// The cluster identity in /readyz; empty while it is unknown.
    pub(crate) fn identity(&self) -> String {
        let (_, lines) = self.registry.readiness();
        let identity = lines.iter().find_map(|(_, line)| line.strip_prefix("identity "));
        identity.unwrap_or_default().to_owned()
    }

    /// Like [`Self::readyz`], without the ages of the freshness proofs.
    pub(crate) fn readyz_states(&self) -> String {
        let text = self.readyz();
        let states = text.lines().filter_map(|line| line.split_once("; proven ")).map(|(state, _)| state);
        states.collect::<Vec<_>>().join("\n")
    }

    /// Waits until /readyz contains this text.
    pub(crate) async fn readyz_has(&self, text: &str) {
        self.until(|| self.readyz().contains(text), || format!("no {text:?} in {}", self.readyz())).await;
    }

    /// Waits until a condition is true. `otherwise` describes the state if it never is.
    pub(crate) async fn until(&self, is_so: impl Fn() -> bool, otherwise: impl Fn() -> String) {
        let waited = async {
            while !is_so() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        assert!(tokio::time::timeout(Duration::from_secs(600), waited).await.is_ok(), "{}", otherwise());
    }

    /// Starts a watch like a subscriber.
    pub(crate) async fn watch(&self, target: Target, resource_version: &str) -> Result<Watch, Status> {
        self.open(target, resource_version, 0).await
    }

    /// Starts a watch that ends after `timeout_seconds`.
    pub(crate) async fn watch_for(&self, target: Target, timeout_seconds: i64) -> Watch {
        self.open(target, "", timeout_seconds).await.unwrap()
    }

    async fn open(&self, target: Target, resource_version: &str, timeout_seconds: i64) -> Result<Watch, Status> {
        self.send(WatchRequest { timeout_seconds, ..self.request(target, resource_version) }).await
    }

    /// The request of [`Self::watch`].
    pub(crate) fn request(&self, target: Target, resource_version: &str) -> WatchRequest {
        WatchRequest {
            target: Some(target),
            resource_version: resource_version.to_owned(),
            bookmark_interval: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
            ..WatchRequest::default()
        }
    }

    /// Starts a watch with any request.
    pub(crate) async fn send(&self, request: WatchRequest) -> Result<Watch, Status> {
        let resource_version = request.resource_version.clone();
        let responses = self.client.clone().watch(request).await?.into_inner();
        Ok(Watch::over(Box::pin(responses), &resource_version))
    }

    /// Starts a watch that starts over with a snapshot if the version is expired.
    pub(crate) async fn watch_or_restart(&self, target: Target, resource_version: &str) -> Result<Watch, Status> {
        let on_expired = OnExpired::Restart.into();
        self.send(WatchRequest { on_expired, ..self.request(target, resource_version) }).await
    }

    /// Starts a watch of a resource in all namespaces, and receives its snapshot.
    pub(crate) async fn watch_all(&self, resource: &str) -> Watch {
        let mut watch = self.watch(target(resource), "").await.unwrap();
        watch.until_resumable().await;
        watch
    }

    /// Lists like a subscriber.
    pub(crate) async fn list(&self, target: Target) -> Result<Vec<ListResponse>, Status> {
        self.list_request(ListRequest { target: Some(target), ..ListRequest::default() }).await
    }

    /// Lists with any request.
    pub(crate) async fn list_request(&self, request: ListRequest) -> Result<Vec<ListResponse>, Status> {
        let chunks = self.client.clone().list(request).await?.into_inner();
        chunks.collect::<Vec<_>>().await.into_iter().collect()
    }

    /// The response of `ListResources`.
    pub(crate) async fn resources(&self) -> Vec<ResourceStatus> {
        self.client.clone().list_resources(ListResourcesRequest {}).await.unwrap().into_inner().resources
    }

    /// Sends a GET over HTTP, on a connection of its own.
    pub(crate) async fn get(&self, path: &str) -> http::Response<hyper::body::Incoming> {
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        tokio::spawn(self.server.clone().serve(theirs, ClientInfo::default()));
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(ours)).await.unwrap();
        tokio::spawn(connection);
        let request = http::Request::get(path).header("host", "kubefan.test");
        sender.send_request(request.body(Empty::<Bytes>::new()).unwrap()).await.unwrap()
    }

    /// The requests for a collection so far, in order.
    pub(crate) fn asked(&self, collection: &str) -> Vec<RecordedRequest> {
        self.network.recorded_requests(collection)
    }

    /// Breaks every connection to the apiserver, and waits until kubefan has noticed.
    pub(crate) async fn cut(&self) {
        self.sim.drop_connections();
        self.readyz_has(" stale: ").await;
    }

    /// Makes the next requests with this verb fail.
    pub(crate) fn fault(&self, verb: Verb, fault: Fault, requests: usize) {
        self.sim.set_fault(FaultRule { fault, verb: Some(verb), resource: Some(pods()), requests });
    }

    /// The apiserver's objects by key, in the bytes that a watch sends.
    pub(crate) async fn truth(&self, collection: &str) -> BTreeMap<String, String> {
        let upstream = Network::to(self.sim.clone()).upstream();
        let path = format!("{collection}?watch=1&timeoutSeconds=1");
        let (mut lines, _) = upstream.watch(&path, Media::Json, LineOptions::default()).await.unwrap();
        let mut state = BTreeMap::new();
        while let Some(line) = lines.next_line().await.unwrap() {
            if let Some(Recorded { kind: "ADDED", object }) = recorded(&line) {
                state.insert(key_of(&object), object);
            }
        }
        state
    }

    /// Waits until a line of the metrics has this value.
    pub(crate) async fn metric_becomes(&self, line: &str, value: f64) {
        self.until(|| self.metric(line) == value, || format!("{line} is {}", self.metric(line))).await;
    }

    /// The value of one line of the metrics, by name and labels as printed; 0 if there is no such
    /// line.
    pub(crate) fn metric(&self, line: &str) -> f64 {
        let text = self.metrics_text();
        let value = text.lines().find_map(|each| each.strip_prefix(line)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.parse().expect("a metric's value is a number"))
    }

    /// The sum of a metric's lines about pods that contain `label`.
    pub(crate) fn of_pods(&self, name: &str, label: &str) -> f64 {
        let is_of = |line: &&str| {
            let labels = line.strip_prefix(name).filter(|rest| rest.starts_with('{'));
            labels.is_some_and(|labels| labels.contains(r#"resource="pods""#) && labels.contains(label))
        };
        self.metrics_text().lines().filter(is_of).map(value_of).fold(0.0, |sum, value| sum + value)
    }

    /// The time since the cached pods were last proved to be upstream's.
    pub(crate) fn age(&self) -> f64 {
        self.of_pods("kubefan_staleness_seconds", "")
    }

    fn metrics_text(&self) -> String {
        self.registry.refresh_gauges();
        prometheus::TextEncoder::new().encode_to_string(&self.metrics.registry().gather()).unwrap()
    }
}

/// The connections of one kubefan to another. Clones share it.
#[derive(Clone)]
pub(crate) struct GrpcLink(Arc<Mutex<Option<CancellationToken>>>);

impl Default for GrpcLink {
    fn default() -> Self {
        GrpcLink(Arc::new(Mutex::new(Some(CancellationToken::new()))))
    }
}

impl GrpcLink {
    fn token(&self) -> Option<CancellationToken> {
        self.0.lock().unwrap().clone()
    }

    /// Breaks all connections, and refuses new ones.
    pub(crate) fn cut(&self) {
        if let Some(token) = self.0.lock().unwrap().take() {
            token.cancel();
        }
    }

    /// Takes connections again.
    pub(crate) fn mend(&self) {
        *self.0.lock().unwrap() = Some(CancellationToken::new());
    }
}

/// A channel to `server` through memory. It covers everything but the socket.
fn in_memory(server: Arc<Server>) -> Channel {
    in_memory_through(server, GrpcLink::default())
}

fn in_memory_through(server: Arc<Server>, link: GrpcLink) -> Channel {
    let connect = move |_| {
        let connected = link.token().map(|cut| {
            let (ours, theirs) = tokio::io::duplex(64 << 10);
            tokio::spawn(cut.run_until_cancelled_owned(server.clone().serve(theirs, ClientInfo::default())));
            TokioIo::new(ours)
        });
        std::future::ready(connected.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::ConnectionRefused)))
    };
    Endpoint::from_static("http://kubefan.test").connect_with_connector_lazy(service_fn(connect))
}

fn key_of(object: &str) -> String {
    let object: Value = serde_json::from_str(object).expect("JSON");
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    format!("{}/{}", text("namespace"), text("name"))
}

/// The request of a cache of a core resource.
pub(crate) fn cache_of(resource: &str, media: Media) -> CacheRequest<'_> {
    CacheRequest { group: "", version: "v1", resource, namespace: "", media, tenant: None }
}

/// All objects of a resource.
pub(crate) fn target(resource: &str) -> Target {
    Target { resource: resource.to_owned(), ..Target::default() }
}

/// All pods with this `stage` label.
pub(crate) fn stage(stage: &str) -> Target {
    Target { label_selector: format!("stage={stage}"), ..target("pods") }
}

/// Repeatedly writes pods: they change between the stages `on` and `off`, are deleted and
/// recreated. Returns the last version.
pub(crate) fn churn(sim: &SimApiserver, from: usize, rounds: usize) -> u64 {
    let mut last = sim.revision();
    for round in from..from + rounds {
        let name = format!("pod-{}", round % 7);
        let label = ["on", "off"][(round / 3) % 2];
        last = match sim.create(&pods(), pod(&name, label)) {
            Ok(version) => version,
            Err(_) if round % 5 == 0 => sim.delete(&pods(), "default", &name).unwrap(),
            Err(_) => {
                let mut changed = pod(&name, label);
                changed["metadata"]["annotations"] = json!({ "round": round.to_string() });
                sim.update(&pods(), changed).unwrap()
            }
        };
    }
    last
}

pub(crate) fn pods() -> GroupVersionResource {
    core("pods")
}

/// A resource of the core group.
pub(crate) fn core(resource: &str) -> GroupVersionResource {
    GroupVersionResource::new("", "v1", resource)
}

/// A pod in the namespace `default`.
pub(crate) fn pod(name: &str, stage: &str) -> Value {
    pod_in("default", name, stage)
}

pub(crate) fn pod_in(namespace: &str, name: &str, stage: &str) -> Value {
    json!({
        "metadata": { "namespace": namespace, "name": name, "labels": { "stage": stage } },
        "spec": { "containers": [{ "name": "main", "image": "pause" }] },
    })
}

/// The versions of the events' objects, in order.
pub(crate) fn versions(events: &[Recorded]) -> Vec<u64> {
    let version = |event: &Recorded| {
        let object: Value = serde_json::from_str(&event.object).expect("JSON");
        super::objects::version_of(&object)
    };
    events.iter().map(version).collect()
}
