//! The state of kubefan on the admin port, as JSON: for the status page and `kubefan top`.
//!
//! The numbers are those of the metrics. It names no caller.

use prometheus::proto::MetricFamily;
use serde::Serialize;
use tokio::time::Instant;

use kubefan_common::proto::v1alpha1::{ResourceState, ResourceStatus};
use kubefan_model::Media;
use kubefan_telemetry::{
    last_hour::{History, SAMPLE_INTERVAL},
    process,
    series::{CacheLabels, label, metrics, of_cache, total, value},
};

/// The overall readiness, and the readiness of each resource with a line of text.
pub type Readiness = (bool, Vec<(bool, String)>);

/// The state of kubefan.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    version: &'static str,
    uptime_seconds: f64,
    is_ready: bool,
    checks: Vec<Check>,
    process: Process,
    subscribers: u64,
    connections: u64,
    /// Upstream.
    upstream: Upstream,
    caches: Vec<Cache>,
    /// The latest first.
    recent: Vec<Recent>,
    /// The time between two numbers of a history.
    sample_seconds: u64,
}

#[derive(Debug, Serialize)]
struct Check {
    ok: bool,
    text: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Process {
    resident_bytes: f64,
    /// 0 without a budget.
    memory_budget_bytes: f64,
    cpu_seconds: f64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Upstream {
    requests: Vec<Requests>,
    lists: f64,
    lists_waiting: f64,
    watches: f64,
}

#[derive(Debug, Serialize)]
struct Requests {
    verb: String,
    code: String,
    total: f64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Cache {
    resource: String,
    namespace: String,
    encoding: &'static str,
    state: String,
    message: String,
    resource_version: String,
    /// Time since upstream proved the version; `None` if it never has.
    age_seconds: Option<f64>,
    objects: i64,
    /// The memory of objects, history and views.
    memory_bytes: f64,
    subscribers: i64,
    events_total: f64,
    deliveries_total: f64,
    sent_bytes_total: f64,
    /// Events per second, the oldest first; empty if histories were not asked for.
    events_history: Vec<f32>,
    subscribers_history: Vec<u32>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Recent {
    seconds_ago: f64,
    what: &'static str,
    resource: String,
    reason: String,
    count: u64,
}

/// The sources of a status.
pub struct Sources<'a> {
    /// The metrics, whose gauges are up to date.
    pub families: &'a [MetricFamily],
    /// Every cache with its encoding.
    pub caches: Vec<(Media, ResourceStatus)>,
    /// The readiness.
    pub readiness: Readiness,
    /// The last hour.
    pub history: &'a History,
    /// Whether the histories of caches are asked for.
    pub with_histories: bool,
}

impl Status {
    /// The state now.
    pub fn of(sources: Sources<'_>) -> Self {
        let Sources { families, caches, readiness: (is_ready, lines), history, with_histories } = sources;
        let now = Instant::now();
        let requests = metrics(families, "kubefan_upstream_requests_total");
        let recent = history.recent().into_iter().map(|one| Recent {
            seconds_ago: now.saturating_duration_since(one.at).as_secs_f64(),
            what: one.kind.as_str(),
            resource: one.resource,
            reason: one.reason,
            count: one.count,
        });
        let histories = with_histories.then_some(history);
        Self {
            version: env!("CARGO_PKG_VERSION"),
            uptime_seconds: now.saturating_duration_since(history.started_at()).as_secs_f64(),
            is_ready,
            checks: lines.into_iter().map(|(ok, text)| Check { ok, text }).collect(),
            process: Process {
                resident_bytes: total(families, "process_resident_memory_bytes"),
                memory_budget_bytes: total(families, "kubefan_memory_budget_bytes"),
                cpu_seconds: process::cpu_seconds().unwrap_or_default(),
            },
            subscribers: total(families, "kubefan_subscribers") as u64,
            connections: total(families, "kubefan_connections") as u64,
            upstream: Upstream {
                requests: requests.iter().map(requests_of).collect(),
                lists: total(families, "kubefan_upstream_lists"),
                lists_waiting: total(families, "kubefan_upstream_lists_waiting"),
                watches: total(families, "kubefan_upstream_watches"),
            },
            caches: caches.into_iter().map(|(media, status)| cache_of(media, status, families, histories)).collect(),
            recent: recent.collect(),
            sample_seconds: SAMPLE_INTERVAL.as_secs(),
        }
    }
}

fn requests_of(metric: &prometheus::proto::Metric) -> Requests {
    Requests { verb: label(metric, "verb").to_owned(), code: label(metric, "code").to_owned(), total: value(metric) }
}

fn cache_of(media: Media, status: ResourceStatus, families: &[MetricFamily], history: Option<&History>) -> Cache {
    let resource = status.resource.clone().unwrap_or_default();
    let labels = CacheLabels {
        group: resource.group,
        resource: resource.resource,
        namespace: status.namespace.clone(),
        media: media.as_str().to_owned(),
    };
    let of = |name| of_cache(families, name, &labels);
    let memory =
        ["kubefan_cached_object_memory_bytes", "kubefan_ring_bytes", "kubefan_residue_bytes", "kubefan_view_log_bytes"];
    let age = of("kubefan_staleness_seconds");
    let has_state = !status.resource_version.is_empty();
    let samples = history.map(|history| history.of(&labels)).unwrap_or_default();
    let state = status.state();
    Cache {
        state: name(state),
        resource: status.name,
        namespace: status.namespace,
        encoding: media.as_str(),
        message: status.message,
        resource_version: status.resource_version,
        age_seconds: Some(age).filter(|age| has_state && age.is_finite()),
        objects: status.object_count,
        memory_bytes: memory.into_iter().map(of).sum(),
        subscribers: status.subscribers,
        events_total: of("kubefan_events_received_total"),
        deliveries_total: of("kubefan_deliveries_total"),
        sent_bytes_total: of("kubefan_sent_bytes_total"),
        events_history: samples.events.into(),
        subscribers_history: samples.subscribers.into(),
    }
}

/// `synced`, `not found`.
fn name(state: ResourceState) -> String {
    state.as_str_name().trim_start_matches("RESOURCE_STATE_").to_lowercase().replace('_', " ")
}
