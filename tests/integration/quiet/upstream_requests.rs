//! Counts the reads that an apiserver received, by purpose.

use std::collections::HashMap;

use crate::harness::{apiserver::ApiServer, audit::Request};

/// The `User-Agent` of kubefan's own requests starts with this.
pub(crate) const KUBEFAN: &str = "kubefan/";

/// Lists and watches by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UpstreamRequests {
    /// Lists, each page counted, without the self-check's.
    pub(crate) lists: usize,
    pub(crate) watches: usize,
    /// Lists at an exact version, each page counted.
    pub(crate) self_checks: usize,
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
            match request.verb.as_str() {
                "watch" => counts.watches += 1,
                "list" => {
                    if !request.uri.contains("continue=") {
                        exact.insert(key, request.uri.contains("resourceVersionMatch=Exact"));
                    }
                    match exact.get(&key) {
                        Some(true) => counts.self_checks += 1,
                        _ => counts.lists += 1,
                    }
                }
                _ => {}
            }
        }
        counts
    }
}

/// The objects of a resource such as `pods` that the apiserver has sent in lists and as initial
/// events of watches, by its own metrics. The events that a watch from a version catches up with
/// count as initial.
pub(crate) async fn objects_sent(api: &ApiServer, resource: &str) -> f64 {
    const METRICS: [&str; 3] = [
        "apiserver_cache_list_returned_objects_total",
        "apiserver_storage_list_returned_objects_total",
        "apiserver_init_events_total",
    ];
    let label = format!(r#"resource="{resource}""#);
    let mut sum = 0.0;
    for metric in METRICS {
        let text = api.metric(metric).await;
        let ours = text.lines().filter(|line| line.contains(&label));
        sum += ours.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>();
    }
    sum
}
