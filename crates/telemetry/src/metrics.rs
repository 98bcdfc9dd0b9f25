//! Every metric kubefan has, in one place. `docs/metrics.md` lists them, and a test compares that
//! page with the served metrics.
//!
//! The registry is passed in, so that two servers in one process do not collide. Counters with
//! known label values are created up front, so that they start at zero. No label names a client.

mod access;
mod audit;
mod cache;
mod config_reload;
mod fallback;
mod labels;
mod managed_tls;
mod moved_watches;
mod register;
mod saved_states;
mod span_export;

use std::sync::Arc;

use kubefan_model::{GroupVersionResource, Media, Scope};
use prometheus::{Gauge, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry};

pub use self::{
    access::{AccessMetrics, ReviewMetrics},
    audit::AuditMetrics,
    cache::{CacheGauges, CacheMetrics, GzipPieces, UpstreamWatchGuard},
    config_reload::ReloadMetrics,
    fallback::FallbackMetrics,
    labels::{
        ConnectionEnd, Lag, PassthroughRefusal, Proof, Resume, SavedStart, SelfCheck, Transfer, WarmStart, WatchPurpose,
    },
    managed_tls::ManagedTlsMetrics,
    moved_watches::RebalanceMetrics,
    saved_states::SavedStateMetrics,
    span_export::TraceMetrics,
};
use self::{cache::CacheFamilies, register::Registrar};
use super::{alarms::Alarm, requests::RequestMetrics};

/// All metrics of one kubefan.
pub struct Metrics {
    registry: Registry,
    caches: Arc<CacheFamilies>,
    requests: RequestMetrics,
    access: AccessMetrics,
    audit: AuditMetrics,
    rebalance: RebalanceMetrics,
    reload: ReloadMetrics,
    fallback: FallbackMetrics,
    traces: TraceMetrics,
    gate: GateMetrics,
    lists: ListMetrics,
    ready: IntGauge,
    caches_unsynced: IntGauge,
    memory_used: IntGauge,
    memory_max: IntGauge,
    memory_step: IntGauge,
    alarms: IntGaugeVec,
    peers_refused: IntCounter,
    upstream_requests: IntCounterVec,
    connections: IntGauge,
    connections_started: IntCounter,
    connections_finished: IntCounterVec,
    calls_pending: IntGauge,
    managed_tls: ManagedTlsMetrics,
    passthrough: IntCounterVec,
    passthrough_in_flight: IntGauge,
    passthrough_refused: IntCounterVec,
}

impl Metrics {
    /// Creates and registers all metrics.
    ///
    /// # Errors
    /// The registry already has one of them.
    pub fn new(registry: Registry) -> Result<Self, prometheus::Error> {
        let register = Registrar(&registry);
        let build = register.gauges("kubefan_build_info", "Always 1; the version is the label.", &["version"])?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1.0);
        #[cfg(target_os = "linux")]
        registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
        let gate = GateMetrics {
            in_flight: register.int_gauge(
                "kubefan_snapshots",
                "Snapshots, lists, catch-ups, backfills, transfers to peers and replays in progress.",
            )?,
            waiting: register.int_gauge(
                "kubefan_snapshots_waiting",
                "Snapshots, lists, catch-ups, backfills, transfers and replays that wait for a permit now.",
            )?,
            refused: register.counter(
                "kubefan_snapshots_refused_total",
                "Snapshots, lists, catch-ups, backfills, transfers and replays refused because no permit became free in time or \
                 memory was short.",
            )?,
        };
        let lists = ListMetrics {
            running: register.int_gauge("kubefan_upstream_lists", "Lists of upstream that caches are reading now.")?,
            waiting: register
                .int_gauge("kubefan_upstream_lists_waiting", "Lists of upstream that wait for others to end.")?,
        };
        let connections_finished = register.counters(
            "kubefan_connections_finished_total",
            "Connections to the data port that ended, by reason.",
            &["reason"],
        )?;
        for end in ConnectionEnd::ALL {
            connections_finished.with_label_values(&[end.as_str()]);
        }
        let certificate_expiration = register.gauge(
            "kubefan_serving_certificate_expiration_timestamp_seconds",
            "End of the validity of the data port's certificate, in seconds since 1970; inf without TLS.",
        )?;
        certificate_expiration.set(f64::INFINITY);
        let passthrough_refused = register.counters(
            "kubefan_passthrough_refused_total",
            "Requests refused instead of forwarded upstream, by reason.",
            &["reason"],
        )?;
        for refused in PassthroughRefusal::ALL {
            passthrough_refused.with_label_values(&[refused.as_str()]);
        }
        let alarms = register.int_gauges(
            "kubefan_alarm",
            "1 while this alarm of kubefan itself fires, by alarm.",
            &["alarm"],
        )?;
        for alarm in Alarm::ALL {
            alarms.with_label_values(&[alarm.as_str()]);
        }
        Ok(Self {
            caches: Arc::new(CacheFamilies::new(&register)?),
            requests: RequestMetrics::new(&registry)?,
            access: AccessMetrics::new(&register)?,
            audit: AuditMetrics::new(&register)?,
            rebalance: RebalanceMetrics::new(&register)?,
            reload: ReloadMetrics::new(&register)?,
            fallback: FallbackMetrics::new(&register)?,
            traces: TraceMetrics::new(&register)?,
            gate,
            lists,
            ready: register.int_gauge("kubefan_ready", "1 if /readyz passes.")?,
            caches_unsynced: register.int_gauge(
                "kubefan_caches_unsynced",
                "Caches that are wanted and not served: they have no complete state.",
            )?,
            memory_used: register
                .int_gauge("kubefan_memory_used_bytes", "Memory in use at the last comparison with the budget.")?,
            memory_max: register
                .int_gauge("kubefan_memory_budget_bytes", "Memory budget of the process; 0 if there is none.")?,
            memory_step: register.int_gauge(
                "kubefan_memory_pressure_step",
                "Memory pressure step, from 0 (none) to 4 (no snapshot is admitted).",
            )?,
            alarms,
            peers_refused: register.counter(
                "kubefan_peers_refused_total",
                "Connections to the peer port whose client did not prove to be a peer.",
            )?,
            upstream_requests: register.counters(
                "kubefan_upstream_requests_total",
                "Requests to upstream, by verb and HTTP status code; 'error' if there was no answer.",
                &["verb", "code"],
            )?,
            connections: register.int_gauge("kubefan_connections", "Open connections to the data port.")?,
            connections_started: register
                .counter("kubefan_connections_started_total", "Connections accepted on the data port.")?,
            connections_finished,
            calls_pending: register.int_gauge(
                "kubefan_calls_pending",
                "gRPC calls whose request has not arrived yet; at most limits.callsPendingMax.",
            )?,
            managed_tls: ManagedTlsMetrics::new(&register, certificate_expiration)?,
            passthrough: register.counters(
                "kubefan_passthrough_requests_total",
                "Requests forwarded upstream, by verb and HTTP status code; 'error' if there was no answer.",
                &["verb", "code"],
            )?,
            passthrough_in_flight: register.int_gauge(
                "kubefan_passthrough_requests",
                "Requests being forwarded upstream now, including watches and tunnels.",
            )?,
            passthrough_refused,
            registry,
        })
    }

    /// The registry.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Counts a connection accepted on the data port. It counts as open until the guard is dropped.
    pub fn connection(self: &Arc<Self>) -> ConnectionGuard {
        self.connections_started.inc();
        self.connections.inc();
        ConnectionGuard { all: self.clone(), end: ConnectionEnd::Draining }
    }

    /// The number of gRPC calls whose request has not arrived.
    pub fn calls_pending(&self) -> IntGauge {
        self.calls_pending.clone()
    }

    /// The metrics of the configuration file.
    pub fn reload(&self) -> &ReloadMetrics {
        &self.reload
    }

    /// The metrics of the fallback to the apiserver.
    pub fn fallback(&self) -> &FallbackMetrics {
        &self.fallback
    }

    /// Sets whether `/readyz` passes, and how many caches are not served. Called for every scrape.
    pub fn set_readiness(&self, is_ready: bool, caches_unsynced: usize) {
        self.ready.set(i64::from(is_ready));
        self.caches_unsynced.set(i64::try_from(caches_unsynced).unwrap_or(i64::MAX));
    }

    /// The end of the data port's certificate, in seconds since 1970.
    pub fn certificate_expiration(&self) -> Gauge {
        self.managed_tls.certificate_expiration.clone()
    }

    /// The metrics of the managed certificate.
    pub fn managed_tls(&self) -> ManagedTlsMetrics {
        self.managed_tls.clone()
    }

    /// Counts a connection to the peer port whose client did not prove to be a peer.
    pub fn peer_refused(&self) {
        self.peers_refused.inc();
    }

    /// The metrics of requests.
    pub fn requests(&self) -> &RequestMetrics {
        &self.requests
    }

    /// The metrics of authentication and authorization.
    pub fn access(&self) -> &AccessMetrics {
        &self.access
    }

    /// The metrics of the audit log.
    pub fn audit(&self) -> &AuditMetrics {
        &self.audit
    }

    /// The metrics of the export of spans.
    pub fn traces(&self) -> &TraceMetrics {
        &self.traces
    }

    /// The metrics of rebalancing.
    pub fn rebalance(&self) -> &RebalanceMetrics {
        &self.rebalance
    }

    /// Counts a request to upstream.
    pub fn upstream_request(&self, verb: &str, code: &str) {
        self.upstream_requests.with_label_values(&[verb, code]).inc();
    }

    /// Counts a forwarded request. It counts as in flight until the guard is dropped.
    pub fn passthrough_started(self: &Arc<Self>, verb: &'static str) -> PassthroughGuard {
        self.passthrough_in_flight.inc();
        PassthroughGuard { all: self.clone(), verb, is_counted: false }
    }

    /// Counts a request that was refused instead of forwarded.
    pub fn count_passthrough_refusal(&self, refused: PassthroughRefusal) {
        self.passthrough_refused.with_label_values(&[refused.as_str()]).inc();
    }

    /// Sets memory in use and budget, in bytes, and the memory pressure step.
    pub fn memory(&self, used: usize, bytes_max: usize, step: usize) {
        let number = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        self.memory_used.set(number(used));
        self.memory_max.set(number(bytes_max));
        self.memory_step.set(number(step));
    }

    /// Sets the alarms that fire.
    pub fn set_alarms(&self, firing: &[Alarm]) {
        for alarm in Alarm::ALL {
            self.alarms.with_label_values(&[alarm.as_str()]).set(i64::from(firing.contains(&alarm)));
        }
    }

    /// The metrics of the gate for snapshots.
    pub fn gate(&self) -> GateMetrics {
        self.gate.clone()
    }

    /// The metrics of the lists of upstream.
    pub fn lists(&self) -> ListMetrics {
        self.lists.clone()
    }

    /// The metrics of one cache, with the labels of the cache filled in. `ends` lists every reason
    /// why a subscription can end.
    pub fn cache(
        &self,
        resource: &GroupVersionResource,
        scope: &Scope,
        media: Media,
        ends: &[&'static str],
    ) -> CacheMetrics {
        CacheMetrics::new(&self.caches, resource, scope, media, ends)
    }
}

/// The metrics of a gate.
#[derive(Clone)]
pub struct GateMetrics {
    /// Permits in use.
    pub in_flight: IntGauge,
    /// Requests that wait for a permit.
    pub waiting: IntGauge,
    /// Requests that got no permit.
    pub refused: IntCounter,
}

/// The metrics of the lists of upstream.
#[derive(Clone)]
pub struct ListMetrics {
    /// Lists in progress.
    pub running: IntGauge,
    /// Lists that wait.
    pub waiting: IntGauge,
}

/// Counts one forwarded request. Dropped without an answer, it counts as `error`: upstream did not
/// answer, or the caller went away.
pub struct PassthroughGuard {
    all: Arc<Metrics>,
    verb: &'static str,
    is_counted: bool,
}

impl PassthroughGuard {
    /// Counts upstream's answer.
    pub fn answered(&mut self, code: http::StatusCode) {
        self.is_counted = true;
        self.all.passthrough.with_label_values(&[self.verb, code.as_str()]).inc();
    }
}

impl Drop for PassthroughGuard {
    fn drop(&mut self) {
        self.all.passthrough_in_flight.dec();
        if !self.is_counted {
            self.all.passthrough.with_label_values(&[self.verb, "error"]).inc();
        }
    }
}

/// Counts one open connection to the data port. Dropped without [`Self::finished`], it counts as
/// `draining`: the process ended first.
pub struct ConnectionGuard {
    all: Arc<Metrics>,
    end: ConnectionEnd,
}

impl ConnectionGuard {
    /// Counts the end of the connection.
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
