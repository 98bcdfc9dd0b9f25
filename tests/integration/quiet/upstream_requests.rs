//! Counts the reads that an apiserver received, by what they are for. The requests that kubefan
//! sends on its own behalf are shown apart from lists and watches, so that nothing hides in a sum.

use std::collections::{BTreeMap, HashMap};

use crate::harness::{apiserver::ApiServer, audit::Request};

/// The `User-Agent` of kubefan's own requests starts with this.
pub(crate) const KUBEFAN: &str = "kubefan/";

/// Reads by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UpstreamRequests {
    /// Lists, each page counted, without the self-check's.
    pub(crate) lists: usize,
    /// Lists of no object, which only ask for the cluster's version. Part of `lists`.
    pub(crate) version_lookups: usize,
    pub(crate) watches: usize,
    /// First pages of whole lists, and watches with initial events: how often the whole state was
    /// asked for. Part of `lists` and `watches`.
    pub(crate) states: usize,
    /// Which cluster answers.
    pub(crate) identity: usize,
    pub(crate) discovery: usize,
    /// OpenAPI and the server's version.
    pub(crate) schema: usize,
    /// Lists at an exact version, each page counted.
    pub(crate) self_checks: usize,
    /// Other gets.
    pub(crate) other: usize,
}

impl UpstreamRequests {
    /// Counts the requests of clients whose `User-Agent` starts with one of `agents`.
    pub(crate) fn of(requests: &[Request], agents: &[&str]) -> UpstreamRequests {
        let mut counts = UpstreamRequests::default();
        // Whether the last first page of a client and path was the self-check's.
        let mut exact: HashMap<(&str, &str), bool> = HashMap::new();
        let ours = requests.iter().filter(|request| agents.iter().any(|agent| request.agent.starts_with(agent)));
        for request in ours {
            let path = request.uri.split('?').next().unwrap_or_default();
            let key = (request.agent.as_str(), path);
            counts.states += usize::from(request.requests_full_state() && !request.is_exact());
            match request.verb.as_str() {
                "watch" => counts.watches += 1,
                "list" => {
                    if !request.uri.contains("continue=") {
                        exact.insert(key, request.is_exact());
                    }
                    match exact.get(&key) {
                        Some(true) => counts.self_checks += 1,
                        _ => counts.lists += 1,
                    }
                    counts.version_lookups += usize::from(request.uri.contains("fieldSelector=metadata.name%3D"));
                }
                _ if path == "/api/v1/namespaces/kube-system" => counts.identity += 1,
                _ if path.starts_with("/openapi/") || path == "/version" => counts.schema += 1,
                _ if is_discovery(path) => counts.discovery += 1,
                _ => counts.other += 1,
            }
        }
        counts
    }

    /// Lists and watches.
    pub(crate) fn lists_and_watches(&self) -> usize {
        self.lists + self.watches
    }

    /// What is shown apart.
    pub(crate) fn apart(&self) -> String {
        let UpstreamRequests { identity, discovery, schema, self_checks, other, .. } = self;
        format!("{identity} / {discovery} / {schema} / {self_checks} / {other}")
    }
}

/// The title of the column [`UpstreamRequests::apart`].
pub(crate) const APART: &str = "identity / discovery / schema / self-check / other gets";

impl Request {
    fn is_exact(&self) -> bool {
        self.uri.contains("resourceVersionMatch=Exact")
    }
}

fn is_discovery(path: &str) -> bool {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    matches!(parts[..], ["api"] | ["apis"] | ["api", _] | ["apis", _] | ["apis", _, _])
}

/// The lists of whole collections by path, for clients whose `User-Agent` starts with one of
/// `agents`.
pub(crate) fn states_by_path(requests: &[Request], agents: &[&str]) -> HashMap<String, usize> {
    let mut counts = HashMap::new();
    for request in requests {
        let is_ours = agents.iter().any(|agent| request.agent.starts_with(agent));
        if is_ours && request.requests_full_state() && !request.is_exact() && request.code < 400 {
            let path = request.uri.split('?').next().unwrap_or_default();
            *counts.entry(path.to_owned()).or_default() += 1;
        }
    }
    counts
}

/// The number of requests by `User-Agent` up to the first space, and verb.
pub(crate) fn requests_by_agent(requests: &[Request]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for request in requests.iter().filter(|request| !request.agent.is_empty()) {
        let agent = request.agent.split(' ').next().unwrap_or_default();
        *counts.entry(format!("{agent} {}", request.verb)).or_default() += 1;
    }
    counts
}

/// The paths that one client asked for most often with gets, with their numbers.
pub(crate) fn most_frequent_gets(requests: &[Request], agent: &str, most: usize) -> Vec<(usize, String)> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for request in requests.iter().filter(|request| request.verb == "get" && request.agent.starts_with(agent)) {
        *counts.entry(request.uri.split('?').next().unwrap_or_default()).or_default() += 1;
    }
    let mut sorted: Vec<_> = counts.into_iter().map(|(path, count)| (count, path.to_owned())).collect();
    sorted.sort_by(|a, b| b.cmp(a));
    sorted.truncate(most);
    sorted
}

/// The objects that the apiserver has sent in lists and as initial events of watches, by its own
/// metrics; with a resource such as `pods`, of that resource only. The events that a watch from a
/// version catches up with count as initial.
pub(crate) async fn objects_sent(api: &ApiServer, resource: Option<&str>) -> f64 {
    const METRICS: [&str; 3] = [
        "apiserver_cache_list_returned_objects_total",
        "apiserver_storage_list_returned_objects_total",
        "apiserver_init_events_total",
    ];
    let label = resource.map(|resource| format!(r#"resource="{resource}""#));
    let mut sum = 0.0;
    for metric in METRICS {
        let text = api.metric(metric).await;
        let ours = text.lines().filter(|line| label.as_ref().is_none_or(|label| line.contains(label.as_str())));
        sum += ours.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>();
    }
    sum
}
