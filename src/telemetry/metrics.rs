//! Every metric kubefan has, in one place; `docs/METRICS.md` lists them, and a test holds the two together.
//!
//! One registry is passed in, so that two servers in one process do not collide. Label values that are known are created up front,
//! so that a counter starts at zero. No label names a client.

use std::{sync::Arc, time::Duration};

use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry,
};

use super::requests::RequestMetrics;
use crate::{
    fanout::StreamEnd,
    model::{GroupVersionResource, Media, Scope, event::EventType},
};

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

/// Why a request was not passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// There are too many.
    Limit,
    /// A client certificate is all that the caller has.
    Certificate,
    /// It wants to become something else, and may not.
    Upgrade,
    /// It is not of this machine, and would have been passed on as kubefan's own.
    Foreign,
    /// It is for a proxy of another kind.
    Method,
    /// It would have been passed on as kubefan, where its caller wants to be somebody else.
    Impersonation,
    /// It was passed on by this very process before.
    Loop,
}

impl Refused {
    /// Every label.
    pub const ALL: [Self; 7] =
        [Self::Limit, Self::Certificate, Self::Upgrade, Self::Foreign, Self::Method, Self::Impersonation, Self::Loop];

    fn as_str(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Certificate => "certificate",
            Self::Upgrade => "upgrade",
            Self::Foreign => "foreign",
            Self::Method => "method",
            Self::Impersonation => "impersonation",
            Self::Loop => "loop",
        }
    }
}

/// How a connection to the data port ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionEnd {
    /// The peer closed it.
    Closed,
    /// The peer broke the protocol.
    Error,
    /// Nothing was asked for on it.
    Idle,
    /// TLS or HTTP did not come about.
    Handshake,
    /// The peer did not answer.
    Keepalive,
    /// kubefan is shutting down.
    Draining,
    /// There were too many.
    Refused,
}

impl ConnectionEnd {
    /// Every label.
    pub const ALL: [Self; 7] =
        [Self::Closed, Self::Error, Self::Idle, Self::Handshake, Self::Keepalive, Self::Draining, Self::Refused];

    fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Error => "error",
            Self::Idle => "idle",
            Self::Handshake => "handshake",
            Self::Keepalive => "keepalive",
            Self::Draining => "draining",
            Self::Refused => "refused",
        }
    }
}

/// How a request to go on from a version was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resume {
    /// From the ring.
    Ring,
    /// By a catch-up, from the state and the residue.
    Residue,
    /// By events that were read again from upstream.
    Backfill,
    /// By a snapshot, because nothing led on.
    Restart,
    /// The events are no longer held.
    Expired,
    /// The version is not reached yet.
    Future,
}

impl Resume {
    /// Every label.
    pub const ALL: [&str; 6] = ["ring", "residue", "backfill", "restart", "expired", "future"];

    /// The label in metrics and traces.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Residue => "residue",
            Self::Backfill => "backfill",
            Self::Restart => "restart",
            Self::Expired => "expired",
            Self::Future => "future",
        }
    }
}

/// What became of a subscription that had fallen behind the events that are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lag {
    /// It went on with a catch-up.
    CatchUp,
    /// It started over with a snapshot.
    Restart,
    /// It ended.
    Expired,
}

impl Lag {
    /// Every label.
    pub const ALL: [&str; 3] = ["catch_up", "restart", "expired"];

    fn as_str(self) -> &'static str {
        match self {
            Self::CatchUp => "catch_up",
            Self::Restart => "restart",
            Self::Expired => "expired",
        }
    }
}

/// How the transfer of a cache to a peer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// All was sent.
    Given,
    /// The peer went away, or took too long.
    CutOff,
}

impl Transfer {
    /// Every label.
    pub const ALL: [&str; 2] = ["given", "cut_off"];

    /// The label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Given => "given",
            Self::CutOff => "cut_off",
        }
    }
}

/// How an attempt to take over a cache from a peer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WarmStart {
    /// It was taken over.
    Warm,
    /// There is no other replica.
    Alone,
    /// No replica gave it whole.
    Failed,
    /// Upstream did not confirm what was given.
    Unconfirmed,
    /// It took too long.
    Timeout,
}

impl WarmStart {
    /// Every label.
    pub const ALL: [&str; 5] = ["warm", "alone", "failed", "unconfirmed", "timeout"];

    /// The label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Alone => "alone",
            Self::Failed => "failed",
            Self::Unconfirmed => "unconfirmed",
            Self::Timeout => "timeout",
        }
    }
}

/// What a self-check has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SelfCheck {
    /// The cache is what upstream has.
    Equal,
    /// It is not.
    Different,
    /// Upstream no longer holds the version of the cache.
    Expired,
    /// Upstream could not be read.
    Failed,
}

impl SelfCheck {
    /// Every label.
    pub const ALL: [&str; 4] = ["equal", "different", "expired", "failed"];

    fn as_str(self) -> &'static str {
        match self {
            Self::Equal => "equal",
            Self::Different => "different",
            Self::Expired => "expired",
            Self::Failed => "failed",
        }
    }
}

/// How upstream's word was had that a cache is fresh, or in which way not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The cache was at the cluster's version already.
    Held,
    /// Its own watch brought it there.
    CaughtUp,
    /// A bookmark has moved it there.
    Bookmark,
    /// It is behind, and nobody had the time, or the apiserver that was asked is behind too.
    Behind,
    /// Upstream could not be asked, or the cache is not watched just now.
    Failed,
}

impl Proof {
    /// Every label.
    pub const ALL: [&str; 5] = ["held", "caught_up", "bookmark", "behind", "failed"];

    fn as_str(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::CaughtUp => "caught_up",
            Self::Bookmark => "bookmark",
            Self::Behind => "behind",
            Self::Failed => "failed",
        }
    }
}

/// What a watch upstream is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchPurpose {
    /// The one that feeds the cache.
    Standing,
    /// A short one, for events from before the cache began.
    Backfill,
    /// A short one, for a bookmark that proves a cache to be fresh.
    Probe,
}

impl WatchPurpose {
    fn as_str(self) -> &'static str {
        match self {
            Self::Standing => "standing",
            Self::Backfill => "backfill",
            Self::Probe => "probe",
        }
    }
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
                "From reading an event's line upstream to handing it to a subscriber's connection; the oldest of each batch.",
            )
            .buckets(buckets),
            &CACHE,
        )?;
        registry.register(Box::new(latency.clone()))?;
        let buckets = vec![0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0];
        let proof_duration = HistogramVec::new(
            HistogramOpts::new(
                "kubefan_proof_duration_seconds",
                "From asking upstream how fresh the cache is to its answer, proof or not.",
            )
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
                "Snapshots, lists, catch-ups, backfills and transfers to peers that are being sent or read now.",
            )?,
            waiting: IntGauge::new("kubefan_snapshots_waiting", "Those that wait for their turn now.")?,
            refused: IntCounter::new(
                "kubefan_snapshots_refused_total",
                "Those that were told to come back, because others took too long or memory was short.",
            )?,
        };
        registry.register(Box::new(gate.in_flight.clone()))?;
        registry.register(Box::new(gate.waiting.clone()))?;
        registry.register(Box::new(gate.refused.clone()))?;
        let connections = IntGauge::new("kubefan_connections", "Connections to the data port now.")?;
        registry.register(Box::new(connections.clone()))?;
        let connections_started =
            IntCounter::new("kubefan_connections_started_total", "Connections to the data port that were accepted.")?;
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
            "Connections to the port for peers of those who have not proved to be one.",
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
                "Resident memory, as it was last compared with the budget.",
            )?,
            memory_max: single("kubefan_memory_budget_bytes", "What the process may take; 0 where there is no limit.")?,
            memory_step: single(
                "kubefan_memory_pressure_step",
                "How far kubefan has gone to take less memory: 0 not at all, 4 letting no snapshot in.",
            )?,
            passthrough: counter(
                "kubefan_passthrough_requests_total",
                "Requests of callers that were passed on to upstream, by verb and HTTP status code; 'error' where there was no answer.",
                &["verb", "code"],
            )?,
            passthrough_in_flight: single(
                "kubefan_passthrough_requests",
                "Requests of callers that are being passed on now, watches and tunnels too.",
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
                "Messages appended to views: what an event costs before subscribers are counted.",
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
                "Requests to go on from a resource version, by how they were answered.",
                &with(&["result"]),
            )?,
            lags: counter(
                "kubefan_lags_total",
                "Watches that had fallen behind the events that are held, by what became of them.",
                &with(&["result"]),
            )?,
            warm_starts: counter(
                "kubefan_warm_starts_total",
                "Attempts to take over a cache from a peer, by how they ended.",
                &with(&["result"]),
            )?,
            transfers: counter(
                "kubefan_transfers_total",
                "Caches that were given to a peer, by how that ended.",
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
                "Questions to upstream whether the cache is fresh, for consistent reads, by result.",
                &with(&["result"]),
            )?,
            watch_restarts: counter(
                "kubefan_upstream_watch_restarts_total",
                "Times the upstream watch ended and was started again from its last version, by reason.",
                &with(&["reason"]),
            )?,
            subscribers: int_gauge("kubefan_subscribers", "Watches of subscribers now.", &CACHE)?,
            views: int_gauge("kubefan_views", "Distinct selections now; equal subscriptions share one.", &CACHE)?,
            ring_bytes: int_gauge("kubefan_ring_bytes", "Bytes that history keeps beyond the cached objects.", &CACHE)?,
            residue_bytes: int_gauge(
                "kubefan_residue_bytes",
                "Bytes of what is remembered of changes that are older than the history.",
                &CACHE,
            )?,
            log_bytes: int_gauge(
                "kubefan_view_log_bytes",
                "Bytes that views take beyond the objects they share: logs, messages on their way, projected objects, compressed snapshots.",
                &CACHE,
            )?,
            ring_events: int_gauge("kubefan_ring_events", "Records of history held.", &CACHE)?,
            ring_age: gauge("kubefan_ring_oldest_age_seconds", "Age of the oldest record of history.", &CACHE)?,
            objects: int_gauge("kubefan_cached_objects", "Objects cached.", &CACHE)?,
            object_bytes: int_gauge(
                "kubefan_cached_object_bytes",
                "Bytes of the objects cached, in the form that the cache holds.",
                &CACHE,
            )?,
            object_memory: int_gauge(
                "kubefan_cached_object_memory_bytes",
                "Bytes that the objects cached take in memory, packed or not, with what is read from them.",
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
                "Watches open upstream now, by purpose; 'standing' is at most 1.",
                &with(&["purpose"]),
            )?,
            upstream_watches_started: counter(
                "kubefan_upstream_watches_started_total",
                "Watches started upstream, by purpose.",
                &with(&["purpose"]),
            )?,
            upstream_requests: counter(
                "kubefan_upstream_requests_total",
                "Requests to upstream, by verb and HTTP status code; 'error' where there was no answer.",
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
        let labels = [&resource.group, &resource.resource, scope.namespace(), media.as_str()].map(str::to_owned);
        let base: [&str; 4] = labels.each_ref().map(String::as_str);
        let with = |extra: &'static str| [base[0], base[1], base[2], base[3], extra];
        for reason in StreamEnd::ALL {
            self.subscriptions_finished.with_label_values(&with(reason));
        }
        for result in Resume::ALL {
            self.resumes.with_label_values(&with(result));
        }
        for result in Lag::ALL {
            self.lags.with_label_values(&with(result));
        }
        for result in WarmStart::ALL {
            self.warm_starts.with_label_values(&with(result));
        }
        for result in Transfer::ALL {
            self.transfers.with_label_values(&with(result));
        }
        for result in SelfCheck::ALL {
            self.self_checks.with_label_values(&with(result));
        }
        for result in Proof::ALL {
            self.proofs.with_label_values(&with(result));
        }
        self.proof_duration.with_label_values(&base);
        let received = [EventType::Added, EventType::Modified, EventType::Deleted]
            .map(|kind| self.events_received.with_label_values(&with(kind.as_str())));
        CacheMetrics {
            received,
            dispatched: self.events_dispatched.with_label_values(&base),
            deliveries: self.deliveries.with_label_values(&base),
            sent_bytes: self.sent_bytes.with_label_values(&base),
            snapshot_objects_sent: self.snapshot_objects_sent.with_label_values(&base),
            started: self.subscriptions_started.with_label_values(&base),
            latency: self.latency.with_label_values(&base),
            ring_age: self.ring_age.with_label_values(&base),
            version: self.version.with_label_values(&base),
            staleness: self.staleness.with_label_values(&base),
            all: self.clone(),
            labels,
        }
    }
}

/// The metrics of one cache. Cheap to use on the path of every event.
pub struct CacheMetrics {
    received: [IntCounter; 3],
    dispatched: IntCounter,
    deliveries: IntCounter,
    sent_bytes: IntCounter,
    snapshot_objects_sent: IntCounter,
    started: IntCounter,
    latency: Histogram,
    ring_age: Gauge,
    version: Gauge,
    staleness: Gauge,
    all: Arc<Metrics>,
    labels: [String; 4],
}

/// The gauges of one cache at one moment.
#[derive(Debug, Default, Clone, Copy)]
pub struct CacheGauges {
    /// Watches of subscribers.
    pub subscribers: usize,
    /// Distinct selections.
    pub views: usize,
    /// Bytes of history.
    pub ring_bytes: usize,
    /// Bytes of what is left of older history.
    pub residue_bytes: usize,
    /// Bytes of the views' logs.
    pub log_bytes: usize,
    /// Records of history.
    pub ring_events: usize,
    /// Age of the oldest record.
    pub ring_age: Duration,
    /// Objects.
    pub objects: usize,
    /// Their JSON bytes.
    pub object_bytes: usize,
    /// What they take in memory, in bytes.
    pub object_memory_bytes: usize,
    /// The version; 0 before the first list.
    pub version: u64,
    /// How long ago upstream proved it; infinite where it never has, 0 before the first list.
    pub staleness_seconds: f64,
    /// Whether it is served.
    pub synced: bool,
}

impl CacheMetrics {
    fn with<'a>(&'a self, extra: &'a str) -> [&'a str; 5] {
        [&self.labels[0], &self.labels[1], &self.labels[2], &self.labels[3], extra]
    }

    /// An event came from upstream.
    pub fn received(&self, kind: EventType) {
        self.received[kind as usize].inc();
    }

    /// Messages were appended to views.
    pub fn dispatched(&self, messages: usize) {
        self.dispatched.inc_by(messages as u64);
    }

    /// Messages were handed to a subscriber's connection.
    pub fn sent(&self, messages: usize, bytes: usize, latency: Option<Duration>) {
        self.deliveries.inc_by(messages as u64);
        self.sent_bytes.inc_by(bytes as u64);
        if let Some(latency) = latency {
            self.latency.observe(latency.as_secs_f64());
        }
    }

    /// Objects of a snapshot or a list were handed to a subscriber's connection.
    pub fn snapshot_sent(&self, objects: usize, bytes: usize) {
        self.snapshot_objects_sent.inc_by(objects as u64);
        self.sent_bytes.inc_by(bytes as u64);
    }

    /// A watch of a subscriber started.
    pub fn subscription_started(&self) {
        self.started.inc();
    }

    /// A watch of a subscriber ended.
    pub fn subscription_finished(&self, end: &StreamEnd) {
        self.all.subscriptions_finished.with_label_values(&self.with(end.as_str())).inc();
    }

    /// A request to go on from a version was answered.
    pub fn resume(&self, result: Resume) {
        self.all.resumes.with_label_values(&self.with(result.as_str())).inc();
    }

    /// A subscription had fallen behind.
    pub fn lag(&self, result: Lag) {
        self.all.lags.with_label_values(&self.with(result.as_str())).inc();
    }

    /// An attempt to take over this cache from a peer has ended.
    pub fn warm_start(&self, result: WarmStart) {
        self.all.warm_starts.with_label_values(&self.with(result.as_str())).inc();
    }

    /// A transfer of this cache to a peer has ended.
    pub fn transfer(&self, result: Transfer) {
        self.all.transfers.with_label_values(&self.with(result.as_str())).inc();
    }

    /// Upstream is listed again.
    pub fn relist(&self, reason: &str) {
        self.all.relists.with_label_values(&self.with(reason)).inc();
    }

    /// The cache was compared with upstream.
    pub fn self_check(&self, result: SelfCheck) {
        self.all.self_checks.with_label_values(&self.with(result.as_str())).inc();
    }

    /// Upstream was asked whether the cache is fresh.
    pub fn proof(&self, result: Proof, duration: Duration) {
        self.all.proofs.with_label_values(&self.with(result.as_str())).inc();
        self.all.proof_duration.with_label_values(&self.labels).observe(duration.as_secs_f64());
    }

    /// The upstream watch is started again.
    pub fn watch_restart(&self, reason: &str) {
        self.all.watch_restarts.with_label_values(&self.with(reason)).inc();
    }

    /// A watch upstream was opened; it counts as open until the guard is dropped.
    pub fn upstream_watch(&self, purpose: WatchPurpose) -> UpstreamWatchGuard {
        let labels = self.with(purpose.as_str());
        self.all.upstream_watches_started.with_label_values(&labels).inc();
        let open = self.all.upstream_watches.with_label_values(&labels);
        open.inc();
        UpstreamWatchGuard { open }
    }

    /// Sets the gauges; called when they are read.
    pub fn set(&self, gauges: CacheGauges) {
        let base: [&str; 4] = self.labels.each_ref().map(String::as_str);
        let set = |gauge: &IntGaugeVec, value: usize| {
            gauge.with_label_values(&base).set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        set(&self.all.subscribers, gauges.subscribers);
        set(&self.all.views, gauges.views);
        set(&self.all.ring_bytes, gauges.ring_bytes);
        set(&self.all.residue_bytes, gauges.residue_bytes);
        set(&self.all.log_bytes, gauges.log_bytes);
        set(&self.all.ring_events, gauges.ring_events);
        set(&self.all.objects, gauges.objects);
        set(&self.all.object_bytes, gauges.object_bytes);
        set(&self.all.object_memory, gauges.object_memory_bytes);
        set(&self.all.synced, usize::from(gauges.synced));
        self.ring_age.set(gauges.ring_age.as_secs_f64());
        self.version.set(gauges.version as f64);
        self.staleness.set(gauges.staleness_seconds);
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

/// One open upstream watch.
pub struct UpstreamWatchGuard {
    open: prometheus::IntGauge,
}

impl Drop for UpstreamWatchGuard {
    fn drop(&mut self) {
        self.open.dec();
    }
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
