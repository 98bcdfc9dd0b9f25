//! One replica of kubefan: the library's registry and server over connections in memory. A test can
//! kill it as SIGKILL does, drain it as SIGTERM does, and start it again with an empty cache.

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kubefan_access::AccessControl;
use kubefan_admission::GateLimits;
use kubefan_app::{config::ServeConfig, open_files::CONNECTIONS_MAX, server_options};
use kubefan_audit::AuditLog;
use kubefan_cache::{RetainedLimits, RingLimits};
use kubefan_informers::{
    CacheCatalog, CacheContext, EncodingLimits, ListScheduler, Registry, RegistryOptions, memory_pressure,
};
use kubefan_server::{
    ClientInfo, Server, ServerHandles, ServerOptions,
    kube::{feature_gates::FeatureGates, kube_upstream::KubeUpstream},
};
use kubefan_telemetry::metrics::Metrics;
use kubefan_upstream::{
    Source,
    discovery::{Discovery, DiscoveryOptions},
    reflector::ReflectorOptions,
};
use tokio::{task::JoinSet, time::Instant};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::Routes;

use super::{
    link::{End, Route},
    peering::Peering,
    upstream::Transport,
};

/// The configuration of every replica of a seed.
#[derive(Clone, Debug)]
pub(crate) struct NodeOptions {
    pub(crate) ring_events_max: usize,
    pub(crate) ring_age_max: Duration,
    pub(crate) conflated_bytes_max: Option<usize>,
    pub(crate) watch_list: bool,
    pub(crate) page_size: u32,
    pub(crate) coalesce_max: Duration,
    pub(crate) cache_compression: bool,
    pub(crate) upstream_idle_timeout: Duration,
    /// One connection to the apiservers for all requests, over HTTP/2.
    pub(crate) upstream_http2: bool,
    /// Readers may start a protobuf cache.
    pub(crate) protobuf: bool,
    /// A replica starts with the state and the history of another one.
    pub(crate) peers: bool,
    pub(crate) ring_bytes_max: Option<usize>,
    /// Maximum number of requests that pin state at a time.
    pub(crate) snapshots_max: usize,
    pub(crate) snapshot_queue_timeout: Duration,
    /// Maximum number of caches that list upstream at a time.
    pub(crate) lists_max: usize,
    /// Whether another resource is cached too, which the apiserver never serves.
    pub(crate) broken_resource: bool,
    /// A consistent list of at least this many bytes waits for a bookmark.
    pub(crate) consistent_list_bytes_min: usize,
    /// Whether there is CPU time to compress events for a few readers.
    pub(crate) compresses_for_few: bool,
    pub(crate) seed: u64,
}

impl Default for NodeOptions {
    /// kubefan's own defaults, for the options that the simulation sets.
    fn default() -> NodeOptions {
        NodeOptions {
            ring_events_max: 100_000,
            ring_age_max: Duration::from_secs(24 * 3600),
            conflated_bytes_max: None,
            watch_list: true,
            page_size: 500,
            coalesce_max: Duration::ZERO,
            cache_compression: false,
            upstream_idle_timeout: Duration::from_secs(90),
            upstream_http2: false,
            protobuf: true,
            peers: false,
            ring_bytes_max: None,
            snapshots_max: 256,
            snapshot_queue_timeout: Duration::from_secs(10),
            lists_max: 8,
            broken_resource: false,
            consistent_list_bytes_min: server_options::from_config(&ServeConfig::default(), CONNECTIONS_MAX)
                .consistent_list_bytes_min,
            compresses_for_few: true,
            seed: 0,
        }
    }
}

/// With so small a part of a core, no event is compressed for a few readers.
const NO_CPU_TIME_DIVISOR: u64 = 1 << 32;

/// The resource that the apiserver does not serve in some seeds.
pub(crate) const BROKEN_RESOURCE: &str = "services";

/// The counters of the metrics that the table of a sweep shows.
const COUNTED: [&str; 10] = [
    "kubefan_lags_total",
    "kubefan_proofs_total",
    "kubefan_relists_total",
    "kubefan_requests_total",
    "kubefan_resumes_total",
    "kubefan_snapshots_refused_total",
    "kubefan_transfers_total",
    "kubefan_upstream_watch_restarts_total",
    "kubefan_upstream_watches_started_total",
    "kubefan_warm_starts_total",
];

/// A replica, running or stopped.
pub(crate) struct Node {
    number: usize,
    options: NodeOptions,
    pub(crate) transport: Arc<Transport>,
    peering: Arc<Peering>,
    /// The memory in use, in percent of the budget.
    pub(crate) memory_percent: Arc<AtomicU64>,
    running: Mutex<Option<Running>>,
    /// Counters of the metrics of earlier runs of this replica.
    counts: Mutex<BTreeMap<String, u64>>,
    starts: Mutex<Vec<Instant>>,
}

struct Running {
    server: Arc<Server>,
    metrics: Arc<Metrics>,
    drain: CancellationToken,
    /// All tasks of the replica. Dropping the set ends them.
    tasks: JoinSet<()>,
    _stop: DropGuard,
}

impl Node {
    pub(crate) fn new(number: usize, options: NodeOptions, transport: Arc<Transport>, peering: Arc<Peering>) -> Node {
        Node {
            number,
            options,
            transport,
            peering,
            memory_percent: Default::default(),
            running: Default::default(),
            counts: Mutex::default(),
            starts: Mutex::default(),
        }
    }

    /// Starts the replica with an empty cache.
    pub(crate) fn start(&self) {
        self.transport.forget();
        let starts = {
            let mut starts = self.starts.lock().unwrap();
            starts.push(Instant::now());
            starts.len() as u64
        };
        let options = &self.options;
        let metrics = Arc::new(Metrics::new(prometheus::Registry::new()).unwrap());
        let upstream = self.transport.upstream();
        let context = CacheContext {
            upstream: upstream.clone(),
            source: Source::apiserver(upstream.clone()),
            discovery: Arc::new(Discovery::new(upstream, DiscoveryOptions::default())),
            lists: ListScheduler::new(options.lists_max, metrics.lists()),
            reflector: ReflectorOptions {
                page_size: options.page_size,
                watch_list: options.watch_list,
                upstream_idle_timeout: options.upstream_idle_timeout,
                line_bytes_max: 1 << 20,
            },
            upstream_field_selector: String::new(),
            schema_check_interval: Duration::from_secs(10),
            cache_compression: options.cache_compression,
            peers: options.peers.then(|| self.peering.peers_of(self.number)),
            saved: None,
            seed: Some(options.seed.wrapping_add(starts)),
        };
        let broken = options.broken_resource.then(|| BROKEN_RESOURCE.into());
        let resources = ["pods".into()].into_iter().chain(broken).collect();
        let mut retained = RetainedLimits::default();
        if !options.compresses_for_few {
            retained.compression_core_divisor = NO_CPU_TIME_DIVISOR;
        }
        let registry_options = RegistryOptions {
            resources,
            namespaces: Vec::new(),
            ring: RingLimits {
                ring_bytes_max: options.ring_bytes_max,
                ring_events_max: options.ring_events_max,
                ring_age_max: options.ring_age_max,
                conflated_bytes_max: options.conflated_bytes_max,
            },
            coalesce_max: options.coalesce_max,
            gate: GateLimits {
                snapshots_max: options.snapshots_max,
                snapshot_queue_timeout: options.snapshot_queue_timeout,
            },
            on_demand: None,
            protobuf: options
                .protobuf
                .then_some(EncodingLimits { bytes_max: 64 << 20, idle_timeout: Duration::from_secs(600) }),
            tables: None,
            staleness_max: None,
            proves: true,
            self_check_interval: Some(Duration::from_secs(300)),
            retained,
        };
        let stop = CancellationToken::new();
        let registry = Registry::new(context, registry_options, metrics.clone(), stop.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(registry.clone().run());
        let percent = self.memory_percent.clone();
        let used = move || Ok(percent.load(Ordering::Relaxed));
        tasks.spawn(memory_pressure::keep_measured_within(registry.clone(), metrics.clone(), 100, used, || 0));
        self.peering.open(self.number, registry.clone());
        let drain = CancellationToken::new();
        let server_options = ServerOptions {
            consistent_list_bytes_min: options.consistent_list_bytes_min,
            feature_gates: FeatureGates { sharded_list_and_watch: true, managed_fields_opt_out: false },
            gzip: true,
            ..server_options::from_config(&ServeConfig::default(), CONNECTIONS_MAX)
        };
        let handles = ServerHandles {
            access: Arc::new(AccessControl::always_allow()),
            audit: AuditLog::default(),
            upstream: KubeUpstream::default(),
            metrics: metrics.clone(),
            drain: drain.clone(),
        };
        let catalog = Arc::new(CacheCatalog(registry));
        let server = Server::new(catalog, Routes::default(), server_options, handles);
        *self.running.lock().unwrap() = Some(Running { server, metrics, drain, tasks, _stop: stop.drop_guard() });
    }

    pub(crate) fn options(&self) -> &NodeOptions {
        &self.options
    }

    /// The times of its starts.
    pub(crate) fn started_at(&self) -> Vec<Instant> {
        self.starts.lock().unwrap().clone()
    }

    /// Ends the replica and its connections at once.
    pub(crate) fn kill(&self) {
        let running = self.running.lock().unwrap().take();
        if let Some(running) = running {
            self.count(&running.metrics);
        }
        self.peering.close(self.number);
        self.transport.route.each(|link| link.cut());
    }

    /// Ends every stream with DRAINING. [`Self::kill`] follows.
    pub(crate) fn drain(&self) {
        if let Some(running) = &*self.running.lock().unwrap() {
            running.drain.cancel();
            running.server.connections().drain();
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running.lock().unwrap().is_some()
    }

    /// Connects a subscriber to the replica.
    pub(crate) fn connect(&self, route: &Route) -> io::Result<End> {
        let mut running = self.running.lock().unwrap();
        let running = running.as_mut().filter(|running| !running.drain.is_cancelled());
        let running = running.ok_or(io::ErrorKind::ConnectionRefused)?;
        let (ours, theirs) = route.connect()?;
        let served = running.server.clone().serve(theirs, ClientInfo::default());
        running.tasks.spawn(async move {
            served.await;
        });
        while running.tasks.try_join_next().is_some() {}
        Ok(ours)
    }

    fn count(&self, metrics: &Metrics) {
        let mut counts = self.counts.lock().unwrap();
        for family in metrics.registry().gather() {
            if !COUNTED.contains(&family.name()) {
                continue;
            }
            for metric in family.get_metric() {
                let own = |label: &&prometheus::proto::LabelPair| {
                    !["group", "resource", "namespace", "media", "scope"].contains(&label.name())
                };
                let labels: Vec<_> = metric.get_label().iter().filter(own).map(|label| label.value()).collect();
                let name = format!("{} {}", family.name(), labels.join(" "));
                *counts.entry(name).or_default() += metric.get_counter().get_value() as u64;
            }
        }
    }

    /// The counters of the metrics, summed over all runs of the replica.
    pub(crate) fn counts(&self) -> BTreeMap<String, u64> {
        if let Some(running) = &*self.running.lock().unwrap() {
            self.count(&running.metrics);
        }
        std::mem::take(&mut self.counts.lock().unwrap())
    }
}
