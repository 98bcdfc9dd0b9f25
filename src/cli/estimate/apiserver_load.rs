//! The load of an apiserver by its own metrics: a sample, and the rates between two of them.
//!
//! Names and labels changed over the versions. Until 1.33 `apiserver_watch_events_*` had the label
//! `kind` instead of `resource`, and the metrics of the watch cache and of the storage named a
//! resource by one label (`deployments.apps`); since 1.34 all have `group` and `resource`.

use std::collections::BTreeMap;

use serde::Serialize;
use tokio::time::Instant;

use kubefan_upstream::{
    Upstream, UpstreamError,
    client::Verb,
    discovery::{Discovery, DiscoveryOptions},
};

use super::exposition::{Sample, samples};

const METRICS_PATH: &str = "/metrics";

const LONG_RUNNING: &str = "apiserver_longrunning_requests";
const WATCH_EVENTS: &str = "apiserver_watch_events_total";
const WATCH_BYTES: &str = "apiserver_watch_events_sizes_sum";
const RECEIVED: &str = "apiserver_watch_cache_events_received_total";
const REQUESTS: &str = "apiserver_request_total";
const RESPONSE_BYTES: &str = "apiserver_response_sizes_sum";
const OBJECTS: &str = "apiserver_resource_objects";
const OBJECTS_UNTIL_1_33: &str = "apiserver_storage_objects";
/// Since 1.34.
const STORED_BYTES: &str = "apiserver_resource_size_estimate_bytes";
const DURATIONS: &str = "apiserver_request_duration_seconds_sum";
const NOMINAL_SEATS: &str = "apiserver_flowcontrol_nominal_limit_seats";
const WOKEN: &str = "apiserver_flowcontrol_watch_count_samples_sum";
const CPU: &str = "process_cpu_seconds_total";
const RESIDENT: &str = "process_resident_memory_bytes";
const START: &str = "process_start_time_seconds";

/// Verbs of requests that change objects, and so wake watches.
const WRITES: [&str; 5] = ["POST", "PUT", "PATCH", "APPLY", "DELETE"];

/// A resource of any version.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GroupResource {
    pub(super) group: String,
    pub(super) resource: String,
}

impl GroupResource {
    /// `deployments.apps`, as kubectl writes it.
    pub(super) fn name(&self) -> String {
        if self.group.is_empty() { self.resource.clone() } else { format!("{}.{}", self.resource, self.group) }
    }
}

/// Counters of one resource since the start of the process.
#[derive(Debug, Clone, Default, PartialEq)]
struct Counters {
    /// Open watches by scope: `cluster`, `namespace` or `resource`.
    watches: BTreeMap<String, f64>,
    watch_events: f64,
    watch_bytes: f64,
    received: f64,
    lists: f64,
    list_bytes: f64,
    /// The time that all lists took together.
    list_seconds: f64,
    writes: f64,
    objects: f64,
    stored_bytes: f64,
}

/// A sample of the metrics.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Reading {
    at: Instant,
    /// Start time of the process, in seconds since 1970. It tells apiservers behind one address
    /// apart.
    started: f64,
    cpu_seconds: f64,
    resident_bytes: f64,
    /// Seats of all priority levels. 0 without API Priority and Fairness.
    seats: f64,
    /// The watches that each write woke, all writes together.
    woken: f64,
    resources: BTreeMap<GroupResource, Counters>,
}

/// The load of one resource between two samples.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ResourceLoad {
    pub(super) resource: String,
    #[serde(skip)]
    pub(super) key: GroupResource,
    /// Open watches by scope.
    pub(super) watches_by_scope: BTreeMap<String, f64>,
    /// Events sent to all watches together.
    pub(super) events_per_second: f64,
    pub(super) event_bytes_per_second: f64,
    /// Changes of the resource, however many watches see them. `None` if the watch cache received
    /// none, or does not count them.
    pub(super) changes_per_second: Option<f64>,
    pub(super) lists_per_minute: f64,
    pub(super) list_bytes_per_second: f64,
    /// Lists that run at a time, on average.
    pub(super) lists_running: f64,
    pub(super) writes_per_second: f64,
    /// `None` if not known.
    pub(super) objects: Option<f64>,
    /// The objects as they are stored. `None` before Kubernetes 1.34.
    pub(super) stored_bytes: Option<f64>,
}

impl ResourceLoad {
    /// All open watches.
    pub(super) fn watches(&self) -> f64 {
        self.watches_by_scope.values().sum()
    }

    /// Open watches of all namespaces, which each write wakes.
    pub(super) fn cluster_watches(&self) -> f64 {
        self.watches_by_scope.get("cluster").copied().unwrap_or_default()
    }
}

/// The load of the apiserver between two samples.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Load {
    pub(super) seconds: f64,
    /// Cores in use.
    pub(super) cores: f64,
    pub(super) resident_bytes: f64,
    /// Seats of all priority levels. `None` without API Priority and Fairness.
    pub(super) seats: Option<f64>,
    /// The watches that all writes of a second woke.
    pub(super) woken_per_second: f64,
    pub(super) resources: Vec<ResourceLoad>,
}

/// Reads samples.
pub(super) struct LoadReader<'a> {
    upstream: &'a Upstream,
    discovery: Discovery,
}

impl<'a> LoadReader<'a> {
    pub(super) fn new(upstream: &'a Upstream) -> Self {
        Self { upstream, discovery: Discovery::new(upstream.clone(), DiscoveryOptions::default()) }
    }

    /// Reads a sample.
    ///
    /// # Errors
    /// The reason why it cannot be read, and the advice.
    pub(super) async fn read(&self) -> Result<Reading, String> {
        let body = self.upstream.get_accept(Verb::Get, METRICS_PATH, "text/plain").await;
        let body = body.map_err(|error| explain(&error))?.into_body();
        let mut reading = Reading::parse(&String::from_utf8_lossy(&body), Instant::now());
        if reading.resources.is_empty() || reading.cpu_seconds == 0.0 {
            let server = self.upstream.server();
            return Err(format!("the metrics of {server} are not those of a kube-apiserver; name its own kubeconfig"));
        }
        self.name_kinds(&mut reading).await;
        Ok(reading)
    }

    /// Gives the counters of kinds to their resources.
    async fn name_kinds(&self, reading: &mut Reading) {
        let is_kind = |key: &&GroupResource| key.resource.starts_with(char::is_uppercase);
        let kinds: Vec<_> = reading.resources.keys().filter(is_kind).cloned().collect();
        for kind in kinds {
            // A singular name is the kind in small letters.
            let name = GroupResource { resource: kind.resource.to_lowercase(), ..kind.clone() }.name();
            let Some(counters) = reading.resources.remove(&kind) else { continue };
            if let Ok(found) = self.discovery.resolve(&name).await {
                let key = GroupResource { group: found.gvr.group, resource: found.gvr.resource };
                let of_resource = reading.resources.entry(key).or_default();
                of_resource.watch_events += counters.watch_events;
                of_resource.watch_bytes += counters.watch_bytes;
            }
        }
    }
}

fn explain(error: &UpstreamError) -> String {
    match error {
        UpstreamError::Forbidden { message } => format!(
            "the user of the kubeconfig may not read {METRICS_PATH} ({message}); grant it {{ nonResourceURLs: [\"{METRICS_PATH}\"], \
             verbs: [get] }} by a ClusterRole, as system:monitoring has it"
        ),
        error => error.to_string(),
    }
}

impl Reading {
    fn parse(text: &str, at: Instant) -> Self {
        let mut reading = Self {
            at,
            started: 0.0,
            cpu_seconds: 0.0,
            resident_bytes: 0.0,
            seats: 0.0,
            woken: 0.0,
            resources: BTreeMap::new(),
        };
        let wanted = [
            LONG_RUNNING,
            WATCH_EVENTS,
            WATCH_BYTES,
            RECEIVED,
            REQUESTS,
            RESPONSE_BYTES,
            OBJECTS,
            OBJECTS_UNTIL_1_33,
            STORED_BYTES,
            DURATIONS,
            NOMINAL_SEATS,
            WOKEN,
            CPU,
            RESIDENT,
            START,
        ];
        for sample in samples(text, |name| wanted.contains(&name)) {
            match sample.name {
                CPU => reading.cpu_seconds = sample.value,
                RESIDENT => reading.resident_bytes = sample.value,
                START => reading.started = sample.value,
                NOMINAL_SEATS => reading.seats += sample.value,
                WOKEN => reading.woken += sample.value,
                _ => reading.add(&sample),
            }
        }
        reading
    }

    fn add(&mut self, sample: &Sample<'_>) {
        let verb = sample.label("verb");
        let value = sample.value;
        let is_counted = match sample.name {
            LONG_RUNNING => verb == "WATCH" && sample.label("subresource").is_empty(),
            RESPONSE_BYTES | DURATIONS => verb == "LIST" && sample.label("subresource").is_empty(),
            REQUESTS if verb == "LIST" => sample.label("subresource").is_empty(),
            // A token is written to no object.
            REQUESTS => WRITES.contains(&verb) && sample.label("subresource") != "token",
            // -1: the storage did not answer.
            OBJECTS | OBJECTS_UNTIL_1_33 | STORED_BYTES => value >= 0.0,
            _ => true,
        };
        let Some(key) = key(sample).filter(|_| is_counted) else { return };
        let counters = self.resources.entry(key).or_default();
        match sample.name {
            LONG_RUNNING => *counters.watches.entry(sample.label("scope").to_owned()).or_default() += value,
            WATCH_EVENTS => counters.watch_events += value,
            WATCH_BYTES => counters.watch_bytes += value,
            RECEIVED => counters.received += value,
            REQUESTS if verb == "LIST" => counters.lists += value,
            REQUESTS => counters.writes += value,
            RESPONSE_BYTES => counters.list_bytes += value,
            DURATIONS => counters.list_seconds += value,
            STORED_BYTES => counters.stored_bytes = value,
            // 1.34 and 1.35 have both.
            _ => counters.objects = counters.objects.max(value),
        }
    }

    /// The load since an earlier sample.
    ///
    /// # Errors
    /// The samples are not of one process.
    pub(super) fn since(&self, before: &Self) -> Result<Load, String> {
        if self.started != before.started || self.cpu_seconds < before.cpu_seconds {
            return Err(
                "the two samples are of two processes: the apiserver was restarted, or the address leads to several \
                of them; name one of them in a kubeconfig"
                    .to_owned(),
            );
        }
        let seconds = self.at.saturating_duration_since(before.at).as_secs_f64().max(f64::MIN_POSITIVE);
        let none = Counters::default();
        let resources = self.resources.iter().map(|(key, now)| {
            let then = before.resources.get(key).unwrap_or(&none);
            let rate = |of: fn(&Counters) -> f64| (of(now) - of(then)).max(0.0) / seconds;
            let changes = rate(|counters| counters.received);
            ResourceLoad {
                resource: key.name(),
                key: key.clone(),
                watches_by_scope: now
                    .watches
                    .iter()
                    .filter(|(_, count)| **count > 0.0)
                    .map(|(s, n)| (s.clone(), *n))
                    .collect(),
                events_per_second: rate(|counters| counters.watch_events),
                event_bytes_per_second: rate(|counters| counters.watch_bytes),
                changes_per_second: (changes > 0.0).then_some(changes),
                lists_per_minute: rate(|counters| counters.lists) * 60.0,
                list_bytes_per_second: rate(|counters| counters.list_bytes),
                lists_running: rate(|counters| counters.list_seconds),
                writes_per_second: rate(|counters| counters.writes),
                objects: (now.objects > 0.0).then_some(now.objects),
                stored_bytes: (now.stored_bytes > 0.0).then_some(now.stored_bytes),
            }
        });
        Ok(Load {
            seconds,
            cores: (self.cpu_seconds - before.cpu_seconds) / seconds,
            resident_bytes: self.resident_bytes,
            seats: (self.seats > 0.0).then_some(self.seats),
            woken_per_second: (self.woken - before.woken).max(0.0) / seconds,
            resources: resources.collect(),
        })
    }
}

/// The resource of a sample; a kind instead of a resource begins with a capital letter.
fn key(sample: &Sample<'_>) -> Option<GroupResource> {
    let group = sample.label("group");
    let resource = sample.label("resource");
    let kind = sample.label("kind");
    let resource = if resource.is_empty() { kind } else { resource };
    // `deployments.apps` in one label.
    let (resource, group) = match resource.split_once('.') {
        Some((resource, group)) => (resource, group),
        None => (resource, group),
    };
    (!resource.is_empty()).then(|| GroupResource { group: group.to_owned(), resource: resource.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SINCE_1_34: &str = r#"
apiserver_longrunning_requests{component="apiserver",group="",resource="pods",scope="cluster",subresource="",verb="WATCH",version="v1"} 12
apiserver_longrunning_requests{component="apiserver",group="",resource="pods",scope="namespace",subresource="",verb="WATCH",version="v1"} 3
apiserver_longrunning_requests{component="apiserver",group="",resource="pods",scope="resource",subresource="exec",verb="CONNECT",version="v1"} 9
apiserver_watch_events_total{group="",resource="pods",version="v1"} 1000
apiserver_watch_events_sizes_sum{group="",resource="pods",version="v1"} 5e+06
apiserver_watch_cache_events_received_total{group="",resource="pods"} 100
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="pods",scope="cluster",subresource="",verb="LIST",version="v1"} 7
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="pods",scope="cluster",subresource="",verb="WATCH",version="v1"} 70
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="pods",scope="resource",subresource="status",verb="PATCH",version="v1"} 80
apiserver_request_total{code="201",component="apiserver",dry_run="",group="",resource="serviceaccounts",scope="resource",subresource="token",verb="POST",version="v1"} 90
apiserver_request_duration_seconds_sum{component="apiserver",dry_run="",group="",resource="pods",scope="cluster",subresource="",verb="LIST",version="v1"} 3
apiserver_response_sizes_sum{component="apiserver",group="",resource="pods",scope="cluster",subresource="",verb="LIST",version="v1"} 9e+06
apiserver_resource_objects{group="",resource="pods"} 42
apiserver_resource_size_estimate_bytes{group="",resource="pods"} 250000
apiserver_flowcontrol_nominal_limit_seats{priority_level="global-default"} 49
apiserver_flowcontrol_nominal_limit_seats{priority_level="workload-low"} 245
apiserver_flowcontrol_watch_count_samples_sum{flow_schema="a",priority_level="workload-low"} 1000
apiserver_storage_objects{resource="pods"} 42
apiserver_storage_objects{resource="deployments.apps"} 5
process_cpu_seconds_total 10
process_resident_memory_bytes 3e+08
process_start_time_seconds 1.7e+09
"#;

    fn reading(text: &str, at: Instant) -> Reading {
        Reading::parse(text, at)
    }

    #[tokio::test(start_paused = true)]
    async fn rates_are_differences_over_time() {
        let start = Instant::now();
        let later = SINCE_1_34
            .replace("version=\"v1\"} 1000\n", "version=\"v1\"} 1600\n")
            .replace("5e+06", "8e+06")
            .replace("pods\"} 100\n", "pods\"} 150\n")
            .replace("\"LIST\",version=\"v1\"} 7\n", "\"LIST\",version=\"v1\"} 9\n")
            .replace("\"LIST\",version=\"v1\"} 3\n", "\"LIST\",version=\"v1\"} 8\n")
            .replace("version=\"v1\"} 80\n", "version=\"v1\"} 110\n")
            .replace("workload-low\"} 1000\n", "workload-low\"} 3000\n")
            .replace("total 10\n", "total 15\n");
        let load = reading(&later, start + Duration::from_secs(10)).since(&reading(SINCE_1_34, start)).unwrap();
        assert_eq!((load.cores, load.resident_bytes), (0.5, 3e8));
        let pods = load.resources.iter().find(|load| load.resource == "pods").unwrap();
        assert_eq!((pods.watches(), pods.watches_by_scope["namespace"]), (15.0, 3.0));
        assert_eq!((pods.events_per_second, pods.event_bytes_per_second), (60.0, 3e5));
        assert_eq!((pods.changes_per_second, pods.lists_per_minute), (Some(5.0), 12.0));
        assert_eq!((pods.list_bytes_per_second, pods.objects), (0.0, Some(42.0)));
        assert_eq!((pods.lists_running, pods.writes_per_second, pods.stored_bytes), (0.5, 3.0, Some(250_000.0)));
        assert_eq!((load.seats, load.woken_per_second), (Some(294.0), 200.0));
        let accounts = load.resources.iter().find(|load| load.resource == "serviceaccounts");
        assert_eq!(accounts, None, "no write of an object");
        let deployments = load.resources.iter().find(|load| load.resource == "deployments.apps").unwrap();
        assert_eq!((deployments.objects, deployments.changes_per_second), (Some(5.0), None));
    }

    #[test]
    fn samples_of_two_processes_are_not_compared() {
        let start = Instant::now();
        let first = reading(SINCE_1_34, start);
        let other = reading(&SINCE_1_34.replace("1.7e+09", "1.8e+09"), start);
        assert!(other.since(&first).unwrap_err().contains("two processes"));
        assert!(first.since(&first).is_ok());
    }

    #[test]
    fn labels_of_older_versions_are_understood() {
        let keys = |text: &str| {
            samples(text, |_| true).filter_map(|sample| key(&sample)).map(|key| key.name()).collect::<Vec<_>>()
        };
        assert_eq!(keys("a{group=\"apps\",kind=\"Deployment\",version=\"v1\"} 1"), ["Deployment.apps"]);
        assert_eq!(keys("a{resource=\"deployments.apps\"} 1"), ["deployments.apps"]);
        assert_eq!(keys("a{resource=\"pods\"} 1\na 1"), ["pods"]);
    }
}
