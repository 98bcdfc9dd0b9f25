//! What `kubefan top` shows: one answer of the admin port, compared with the one before.

use std::collections::HashMap;

use serde::Deserialize;
use tokio::time::Instant;

use crate::cli::{
    admin::Admin,
    subscribers::{Listed, bytes},
    visible::visible,
};
use kubefan_model::human_duration::human_duration;

/// Shown where there is no number.
const NOTHING: &str = "-";

/// Subscribers that are asked for. Those that are furthest behind come first.
const SUBSCRIBERS: &str = "1000";

/// The state at one moment.
pub(super) struct Sample {
    status: Status,
    /// Who is furthest behind, by resource and namespace; `None` if that may not be seen.
    behind: Option<HashMap<String, String>>,
    at: Instant,
}

/// The state with rates, as text.
pub(super) struct Shown {
    /// A few lines about the process.
    pub(super) summary: Vec<String>,
    /// The caches.
    pub(super) caches: Vec<CacheRow>,
}

/// A cache.
pub(super) struct CacheRow {
    /// The cells below [`Shown::header`].
    pub(super) cells: Vec<String>,
    /// Whether it is served, and its upstream watch is live.
    pub(super) is_synced: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    version: String,
    uptime_seconds: f64,
    is_ready: bool,
    process: Process,
    subscribers: u64,
    connections: u64,
    upstream: Upstream,
    caches: Vec<Cache>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Process {
    resident_bytes: f64,
    memory_budget_bytes: f64,
    cpu_seconds: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Upstream {
    requests: Vec<Requests>,
    lists: f64,
    lists_waiting: f64,
    watches: f64,
}

#[derive(Deserialize)]
struct Requests {
    verb: String,
    code: String,
    total: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Cache {
    resource: String,
    namespace: String,
    encoding: String,
    state: String,
    age_seconds: Option<f64>,
    objects: u64,
    memory_bytes: f64,
    subscribers: u64,
    events_total: f64,
    deliveries_total: f64,
    sent_bytes_total: f64,
}

impl Cache {
    fn key(&self) -> [&str; 3] {
        [&self.resource, &self.namespace, &self.encoding]
    }
}

impl Sample {
    /// Asks the admin port.
    ///
    /// # Errors
    /// Why it gives no answer.
    pub(super) async fn take(admin: &Admin) -> Result<Self, String> {
        let status = admin.parse(&admin.get("/status", &[]).await?)?;
        let query = [("sort", "lag".to_owned()), ("limit", SUBSCRIBERS.to_owned())];
        // Not everyone who sees the state may see who is connected.
        let listed = admin.get("/subscribers", &query).await.ok().and_then(|text| admin.parse::<Listed>(&text).ok());
        let behind = listed.map(|listed| {
            let mut behind = HashMap::new();
            for subscriber in listed.subscribers {
                behind.entry(subscriber.cache()).or_insert_with(|| subscriber.lag());
            }
            behind
        });
        Ok(Self { status, behind, at: Instant::now() })
    }

    /// The state, with the rates since an earlier sample.
    pub(super) fn since(&self, before: Option<&Self>) -> Shown {
        let Status { version, uptime_seconds, is_ready, process, subscribers, connections, upstream, caches } =
            &self.status;
        let before = before.filter(|before| before.status.uptime_seconds <= *uptime_seconds);
        let elapsed = before.map(|before| self.at.duration_since(before.at).as_secs_f64());
        // A cache that was started again counts anew.
        let rate = |now: f64, earlier: Option<f64>| {
            let elapsed = elapsed.filter(|elapsed| *elapsed > 0.0)?;
            Some((now - earlier?) / elapsed).filter(|rate| *rate >= 0.0)
        };
        let sum = |status: &Status, of: fn(&Cache) -> f64| status.caches.iter().map(of).sum::<f64>();
        let rate_of = |of: fn(&Cache) -> f64| rate(sum(&self.status, of), before.map(|before| sum(&before.status, of)));
        let cpu = rate(process.cpu_seconds, before.map(|before| before.status.process.cpu_seconds));
        let requests = |status: &Status| status.upstream.requests.iter().map(|one| one.total).sum::<f64>();
        let failed =
            upstream.requests.iter().filter(|one| !one.code.starts_with('2')).map(|one| one.total).sum::<f64>();
        let watches = upstream.requests.iter().filter(|one| one.verb == "watch").map(|one| one.total).sum::<f64>();
        let budget = match process.memory_budget_bytes {
            0.0 => String::new(),
            most => format!(" of {}", bytes(most as u64)),
        };
        let summary = vec![
            format!(
                "kubefan {}, up {}, {}",
                visible(version),
                human_duration(*uptime_seconds as i64),
                if *is_ready { "ready" } else { "NOT READY" }
            ),
            format!(
                "process    memory {}{budget}, CPU {} cores",
                bytes(process.resident_bytes as u64),
                cpu.map_or_else(|| NOTHING.to_owned(), |cpu| format!("{cpu:.2}"))
            ),
            format!(
                "clients    {subscribers} subscribers, {connections} connections, {} deliveries/s, {}/s",
                text(rate_of(|cache| cache.deliveries_total)),
                rate_of(|cache| cache.sent_bytes_total).map_or_else(|| NOTHING.to_owned(), |rate| bytes(rate as u64))
            ),
            format!(
                "apiserver  {} watches open ({} requested), {} lists, {} waiting, {} requests/s, {} failed",
                upstream.watches,
                watches as u64,
                upstream.lists,
                upstream.lists_waiting,
                text(rate(requests(&self.status), before.map(|before| requests(&before.status)))),
                failed as u64
            ),
        ];
        let caches = caches.iter().map(|cache| {
            let earlier = before.and_then(|before| before.status.caches.iter().find(|one| one.key() == cache.key()));
            let events = rate(cache.events_total, earlier.map(|earlier| earlier.events_total));
            self.row(cache, events)
        });
        Shown { summary, caches: caches.collect() }
    }

    fn row(&self, cache: &Cache, events: Option<f64>) -> CacheRow {
        let or = |text: &str, none: &str| if text.is_empty() { none.to_owned() } else { visible(text) };
        let key = cache_key(&cache.resource, &cache.namespace, &cache.encoding);
        let lag = match &self.behind {
            None => NOTHING.to_owned(),
            Some(behind) => behind.get(&key).cloned().unwrap_or_else(|| "0".to_owned()),
        };
        let cells = vec![
            visible(&cache.resource),
            or(&cache.namespace, "<all>"),
            visible(&cache.encoding),
            visible(&cache.state),
            cache.objects.to_string(),
            text(events),
            cache.subscribers.to_string(),
            lag,
            bytes(cache.memory_bytes as u64),
            cache.age_seconds.map_or_else(|| "never".to_owned(), |age| human_duration(age as i64)),
        ];
        CacheRow { cells, is_synced: cache.state == "synced" }
    }
}

/// The cache that a subscriber reads from.
pub(super) fn cache_key(resource: &str, namespace: &str, media: &str) -> String {
    [resource, namespace, media].join("/")
}

impl Shown {
    /// The names of the columns.
    pub(super) fn header() -> Vec<String> {
        let names = [
            "RESOURCE",
            "NAMESPACE",
            "ENCODING",
            "STATE",
            "OBJECTS",
            "EVENTS/S",
            "SUBSCRIBERS",
            "LAG",
            "MEMORY",
            "PROVED",
        ];
        names.map(str::to_owned).to_vec()
    }
}

fn text(rate: Option<f64>) -> String {
    rate.map_or_else(
        || NOTHING.to_owned(),
        |rate| if rate < 10.0 { format!("{rate:.1}") } else { format!("{rate:.0}") },
    )
}
