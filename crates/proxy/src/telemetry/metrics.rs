//! Every metric kubefan has, in one place; `docs/metrics.md` lists them, and a test holds the two together.
//!
//! One registry is passed in, so that two servers in one process do not collide. Label values that are known are created up front,
//! so that a counter starts at zero. No label names a client.

mod cache;
mod labels;

use std::sync::Arc;

use prometheus::{
    GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

pub use self::{
    cache::{CacheGauges, CacheMetrics, UpstreamWatchGuard},
    labels::{ConnectionEnd, Lag, Proof, Refused, Resume, SelfCheck, Transfer, WarmStart, WatchPurpose},
};
use super::requests::RequestMetrics;
use kubefan_model::{GroupVersionResource, Media, Scope};

/// The labels of everything that belongs to one cache.
const CACHE: [&str; 4] = ["group", "resource", "namespace", "media"];

/// All metrics of one kubefan.
pub struct Metrics {
    gate: GateMetrics,
    memory_used: IntGauge,
    memory_max: IntGauge,
    memory_step: IntGauge,
    registry: Registry,
    events_received: IntCounterVec,
    events_dispatched: IntCounterVec,
    deliveries: IntCounterVec,
    sent_bytes: IntCounterVec,
    snapshot_objects_sent: IntCounterVec,
    subscriptions_started: IntCounterVec,
    subscriptions_finished: IntCounterVec,
    resumes: IntCounterVec,
    lags: IntCounterVec,
    warm_starts: IntCounterVec,
    transfers: IntCounterVec,
    peers_refused: IntCounter,
    relists: IntCounterVec,
    self_checks: IntCounterVec,
    proofs: IntCounterVec,
    proof_duration: HistogramVec,
    watch_restarts: IntCounterVec,
    latency: HistogramVec,
    subscribers: IntGaugeVec,
    views: IntGaugeVec,
    ring_bytes: IntGaugeVec,
    residue_bytes: IntGaugeVec,
    log_bytes: IntGaugeVec,
    ring_events: IntGaugeVec,
    ring_age: GaugeVec,
    objects: IntGaugeVec,
    object_bytes: IntGaugeVec,
    object_memory: IntGaugeVec,
    version: GaugeVec,
    staleness: GaugeVec,
    synced: IntGaugeVec,
    upstream_watches: IntGaugeVec,
    upstream_watches_started: IntCounterVec,
    upstream_requests: IntCounterVec,
    requests: RequestMetrics,
    connections: IntGauge,
    connections_started: IntCounter,
    connections_finished: IntCounterVec,
    passthrough: IntCounterVec,
    passthrough_in_flight: IntGauge,
    passthrough_refused: IntCounterVec,
}

type Registered<T> = Result<T, prometheus::Error>;

impl Metrics {
    /// Registers all metrics. Fails only if the registry already has one of them.
    pub fn new(registry: Registry) -> Registered<Self> {
        let with = |extra: &[&'static str]| [&CACHE[..], extra].concat();
        let counter = |name: &str, help: &str, labels: &[&str]| -> Registered<IntCounterVec> {
            let counter = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let int_gauge = |name: &str, help: &str, labels: &[&str]| -> Registered<IntGaugeVec> {
            let gauge = IntGaugeVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let gauge = |name: &str, help: &str, labels: &[&str]| -> Registered<GaugeVec> {
            let gauge = GaugeVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let buckets = vec![0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];
        let latency = HistogramVec::new(
            HistogramOpts::new(
                "kubefan_dispatch_latency_seconds",
                "Time from reading an event from upstream to handing it to a subscriber's connection; the oldest event of each batch.",
            )
            .buckets(buckets),
            &CACHE,
        )?;
        registry.register(Box::new(latency.clone()))?;
        let buckets = vec![0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0];
        let proof_duration = HistogramVec::new(
            HistogramOpts::new("kubefan_proof_duration_seconds", "Duration of a freshness proof, successful or not.")
                .buckets(buckets),
            &CACHE,
        )?;
        registry.register(Box::new(proof_duration.clone()))?;
        let build = gauge("kubefan_build_info", "Always 1; the version is the label.", &["version"])?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1.0);
        #[cfg(target_os = "linux")]
        registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
        let gate = GateMetrics {
            in_flight: IntGauge::new(
                "kubefan_snapshots",
                "Snapshots, lists, catch-ups, backfills and transfers to peers in progress.",
            )?,
            waiting: IntGauge::new("kubefan_snapshots_waiting", "Requests that wait for a snapshot permit.")?,
            refused: IntCounter::new(
                "kubefan_snapshots_refused_total",
                "Requests refused because no snapshot permit was free in time, or memory was short.",
            )?,
        };
        registry.register(Box::new(gate.in_flight.clone()))?;
        registry.register(Box::new(gate.waiting.clone()))?;
        registry.register(Box::new(gate.refused.clone()))?;
        let connections = IntGauge::new("kubefan_connections", "Open connections to the data port.")?;
        registry.register(Box::new(connections.clone()))?;
        let connections_started =
            IntCounter::new("kubefan_connections_started_total", "Accepted connections to the data port.")?;
        registry.register(Box::new(connections_started.clone()))?;
        let connections_finished = counter(
            "kubefan_connections_finished_total",
            "Connections to the data port that ended, by reason.",
            &["reason"],
        )?;
        for end in ConnectionEnd::ALL {
            connections_finished.with_label_values(&[end.as_str()]);
        }
        let peers_refused = IntCounter::new(
            "kubefan_peers_refused_total",
            "Connections to the peer port that did not authenticate as a peer.",
        )?;
        registry.register(Box::new(peers_refused.clone()))?;
        let passthrough_refused = counter(
            "kubefan_passthrough_refused_total",
            "Requests that were not passed on to upstream, by reason.",
            &["reason"],
        )?;
        for refused in Refused::ALL {
            passthrough_refused.with_label_values(&[refused.as_str()]);
        }
        let single = |name: &str, help: &str| -> Registered<IntGauge> {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        Ok(Self {
            memory_used: single(
                "kubefan_memory_used_bytes",
                "Resident memory at the last comparison with the budget.",
            )?,
            memory_max: single("kubefan_memory_budget_bytes", "Memory budget of the process; 0 if there is no limit.")?,
            memory_step: single(
                "kubefan_memory_pressure_step",
                "Memory pressure: 0 is none, 4 refuses all new snapshots.",
            )?,
            passthrough: counter(
                "kubefan_passthrough_requests_total",
                "Callers' requests passed on to upstream, by verb and HTTP status code; 'error' if there was no answer.",
                &["verb", "code"],
            )?,
            passthrough_in_flight: single(
                "kubefan_passthrough_requests",
                "Callers' requests being passed on, watches and tunnels included.",
            )?,
            passthrough_refused,
            gate,
            requests: RequestMetrics::new(&registry)?,
            connections,
            connections_started,
            connections_finished,
            events_received: counter(
                "kubefan_events_received_total",
                "Events received from upstream.",
                &with(&["type"]),
            )?,
            events_dispatched: counter(
                "kubefan_events_dispatched_total",
                "Entries appended to the logs of views: the cost of an event before subscribers are counted.",
                &CACHE,
            )?,
            deliveries: counter("kubefan_deliveries_total", "Messages handed to subscribers' connections.", &CACHE)?,
            sent_bytes: counter(
                "kubefan_sent_bytes_total",
                "Bytes of messages handed to subscribers' connections, before compression and TLS.",
                &CACHE,
            )?,
            snapshot_objects_sent: counter(
                "kubefan_snapshot_objects_sent_total",
                "Objects sent as part of a snapshot or a list.",
                &CACHE,
            )?,
            subscriptions_started: counter(
                "kubefan_subscriptions_started_total",
                "Watches started by subscribers.",
                &CACHE,
            )?,
            subscriptions_finished: counter(
                "kubefan_subscriptions_finished_total",
                "Watches that ended, by reason.",
                &with(&["reason"]),
            )?,
            resumes: counter(
                "kubefan_resumes_total",
                "Requests to resume from a resource version, by result.",
                &with(&["result"]),
            )?,
            lags: counter("kubefan_lags_total", "Watches that fell behind the ring, by result.", &with(&["result"]))?,
            warm_starts: counter(
                "kubefan_warm_starts_total",
                "Attempts to take over a cache from a peer, by result.",
                &with(&["result"]),
            )?,
            transfers: counter(
                "kubefan_transfers_total",
                "Transfers of caches to peers, by result.",
                &with(&["result"]),
            )?,
            peers_refused,
            relists: counter("kubefan_relists_total", "Full lists of upstream, by reason.", &with(&["reason"]))?,
            self_checks: counter(
                "kubefan_self_checks_total",
                "Comparisons of the cache with upstream, by result.",
                &with(&["result"]),
            )?,
            proofs: counter(
                "kubefan_proofs_total",
                "Freshness proofs attempted for consistent reads, by result.",
                &with(&["result"]),
            )?,
            watch_restarts: counter(
                "kubefan_upstream_watch_restarts_total",
                "Times the upstream watch ended and was restarted from its last version, by reason.",
                &with(&["reason"]),
            )?,
            subscribers: int_gauge("kubefan_subscribers", "Open watches of subscribers.", &CACHE)?,
            views: int_gauge("kubefan_views", "Distinct selections; equal subscriptions share one view.", &CACHE)?,
            ring_bytes: int_gauge("kubefan_ring_bytes", "Bytes of the ring beyond the cached objects.", &CACHE)?,
            residue_bytes: int_gauge(
                "kubefan_residue_bytes",
                "Bytes of conflated history, which covers changes that the ring has evicted.",
                &CACHE,
            )?,
            log_bytes: int_gauge(
                "kubefan_view_log_bytes",
                "Bytes of views beyond the objects they share: logs, encoded messages, projected objects, compressed snapshots.",
                &CACHE,
            )?,
            ring_events: int_gauge("kubefan_ring_events", "Records in the ring.", &CACHE)?,
            ring_age: gauge("kubefan_ring_oldest_age_seconds", "Age of the oldest record in the ring.", &CACHE)?,
            objects: int_gauge("kubefan_cached_objects", "Cached objects.", &CACHE)?,
            object_bytes: int_gauge(
                "kubefan_cached_object_bytes",
                "Bytes of the cached objects, in the encoding of the cache.",
                &CACHE,
            )?,
            object_memory: int_gauge(
                "kubefan_cached_object_memory_bytes",
                "Memory of the cached objects in bytes, packed or not, with their parsed attributes.",
                &CACHE,
            )?,
            version: gauge(
                "kubefan_resource_version",
                "The resource version of the cache. Compare between replicas, not between resources.",
                &CACHE,
            )?,
            staleness: gauge(
                "kubefan_staleness_seconds",
                "Time since upstream last proved the version of the cache.",
                &CACHE,
            )?,
            synced: int_gauge("kubefan_synced", "1 if the resource is served.", &CACHE)?,
            upstream_watches: int_gauge(
                "kubefan_upstream_watches",
                "Open upstream watches, by purpose; 'standing' is at most 1.",
                &with(&["purpose"]),
            )?,
            upstream_watches_started: counter(
                "kubefan_upstream_watches_started_total",
                "Upstream watches started, by purpose.",
                &with(&["purpose"]),
            )?,
            upstream_requests: counter(
                "kubefan_upstream_requests_total",
                "Requests to upstream, by verb and HTTP status code; 'error' if there was no answer.",
                &["verb", "code"],
            )?,
            latency,
            proof_duration,
            registry,
        })
    }

    /// The registry.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// A connection to the data port was accepted; it counts as open until the guard is dropped.
    pub fn connection(self: &Arc<Self>) -> ConnectionGuard {
        self.connections_started.inc();
        self.connections.inc();
        ConnectionGuard { all: self.clone(), end: ConnectionEnd::Draining }
    }

    /// Somebody came to the port for peers and has not proved to be one.
    pub fn peer_refused(&self) {
        self.peers_refused.inc();
    }

    /// Those of requests.
    pub fn requests(&self) -> &RequestMetrics {
        &self.requests
    }

    /// Counts a request to upstream.
    pub fn upstream_request(&self, verb: &str, code: &str) {
        self.upstream_requests.with_label_values(&[verb, code]).inc();
    }

    /// A request of a caller is passed on; it counts as under way until the guard is dropped.
    pub fn passed_on(self: &Arc<Self>, verb: &'static str) -> PassedOn {
        self.passthrough_in_flight.inc();
        PassedOn { all: self.clone(), verb, is_counted: false }
    }

    /// A request of a caller is not passed on.
    pub fn refused_to_pass_on(&self, refused: Refused) {
        self.passthrough_refused.with_label_values(&[refused.as_str()]).inc();
    }

    /// What the process takes and may take, in bytes, and how many steps were taken to take less.
    pub fn memory(&self, used: usize, bytes_max: usize, step: usize) {
        let number = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        self.memory_used.set(number(used));
        self.memory_max.set(number(bytes_max));
        self.memory_step.set(number(step));
    }

    /// Those of the gate for snapshots.
    pub fn gate(&self) -> GateMetrics {
        self.gate.clone()
    }

    /// The metrics of one cache, with their labels filled in.
    pub fn cache(self: &Arc<Self>, resource: &GroupVersionResource, scope: &Scope, media: Media) -> CacheMetrics {
        CacheMetrics::new(self, resource, scope, media)
    }
}

/// What a gate counts.
#[derive(Clone)]
pub struct GateMetrics {
    /// What was let in and pins state now.
    pub in_flight: IntGauge,
    /// Who waits.
    pub waiting: IntGauge,
    /// Who waited in vain.
    pub refused: IntCounter,
}

/// One request that is passed on; one that is dropped without an answer had none, or nobody waited for it.
pub struct PassedOn {
    all: Arc<Metrics>,
    verb: &'static str,
    is_counted: bool,
}

impl PassedOn {
    /// Upstream has answered.
    pub fn answered(&mut self, code: http::StatusCode) {
        self.is_counted = true;
        self.all.passthrough.with_label_values(&[self.verb, code.as_str()]).inc();
    }
}

impl Drop for PassedOn {
    fn drop(&mut self) {
        self.all.passthrough_in_flight.dec();
        if !self.is_counted {
            self.all.passthrough.with_label_values(&[self.verb, "error"]).inc();
        }
    }
}

/// One open connection to the data port; one that is dropped without a word was cut off by the end of kubefan.
pub struct ConnectionGuard {
    all: Arc<Metrics>,
    end: ConnectionEnd,
}

impl ConnectionGuard {
    /// It has ended.
    pub fn finished(mut self, end: ConnectionEnd) {
        self.end = end;
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.all.connections.dec();
        self.all.connections_finished.with_label_values(&[self.end.as_str()]).inc();
    }
}
