//! Data of `kubefan top`: one answer of the admin port, compared with the one before.

use std::collections::HashMap;

use serde::Deserialize;
use tokio::time::Instant;

use super::fitted_table::Fitted;
use crate::cli::{
    admin::Admin,
    subscribers::{self, SortBy, SubscriberList, bytes, cache_key},
    visible::visible,
};
use kubefan_model::human_duration::human_duration;

/// Shown where there is no number.
const NOTHING: &str = "-";

/// Subscribers that are asked for. Those that are furthest behind come first.
const SUBSCRIBERS: u32 = 1000;
/// Subscribers that are asked for in another order: as many as a large screen has lines.
const SHOWN_MAX: u32 = 100;

/// The state at one moment.
pub(super) struct Sample {
    status: Status,
    /// The subscriber furthest behind, by resource and namespace; `None` if the caller may not see
    /// it.
    behind: Option<HashMap<String, String>>,
    /// The first subscribers in the order that was asked for, or why they may not be seen.
    subscribers: Result<Vec<Vec<String>>, String>,
    at: Instant,
}

/// The state with rates, as text.
pub(super) struct Shown {
    /// Figures of the process: their names, and the figures.
    pub(super) summary: Vec<(&'static str, Vec<String>)>,
    /// The caches.
    pub(super) caches: Vec<CacheRow>,
    /// The subscribers, as `kubefan subscribers` shows them, or why they may not be seen.
    pub(super) subscribers: Result<Vec<Vec<String>>, String>,
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
    fn key(&self) -> String {
        cache_key(&self.resource, &self.namespace, &self.encoding)
    }
}

impl Sample {
    /// Asks the admin port.
    ///
    /// # Errors
    /// The reason why kubefan gives no answer.
    pub(super) async fn take(admin: &Admin, sort: SortBy) -> Result<Self, String> {
        let status = admin.parse(&admin.get("/status", &[]).await?)?;
        let listed = async |sort, limit| admin.parse::<SubscriberList>(&subscribers::list(admin, sort, limit).await?);
        // Access to the state does not imply access to the list of subscribers.
        let by_lag = listed(SortBy::Lag, SUBSCRIBERS).await;
        let rows = |listed: &SubscriberList| {
            let first = listed.subscribers.iter().take(SHOWN_MAX as usize);
            first.map(|subscriber| subscriber.row(false)).collect::<Vec<_>>()
        };
        let subscribers = match (&by_lag, sort) {
            (Ok(listed), SortBy::Lag) => Ok(rows(listed)),
            (Ok(_), sort) => listed(sort, SHOWN_MAX).await.map(|listed| rows(&listed)),
            (Err(why), _) => Err(why.clone()),
        };
        let behind = by_lag.ok().map(|listed| {
            let mut behind = HashMap::new();
            for subscriber in listed.subscribers {
                behind.entry(subscriber.cache()).or_insert_with(|| subscriber.lag());
            }
            behind
        });
        Ok(Self { status, behind, subscribers, at: Instant::now() })
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
            (
                "",
                vec![
                    format!("kubefan {}", visible(version)),
                    format!("up {}", human_duration(*uptime_seconds as i64)),
                    if *is_ready { "ready" } else { "NOT READY" }.to_owned(),
                ],
            ),
            (
                "process",
                vec![
                    format!("memory {}{budget}", bytes(process.resident_bytes as u64)),
                    format!("CPU {} cores", cpu.map_or_else(|| NOTHING.to_owned(), |cpu| format!("{cpu:.2}"))),
                ],
            ),
            (
                "clients",
                vec![
                    format!("{subscribers} subscribers"),
                    format!("{connections} connections"),
                    format!("{} deliveries/s", text(rate_of(|cache| cache.deliveries_total))),
                    rate_of(|cache| cache.sent_bytes_total)
                        .map_or_else(|| format!("{NOTHING}/s"), |rate| format!("{}/s", bytes(rate as u64))),
                ],
            ),
            (
                "apiserver",
                vec![
                    format!("{} watches open ({} requested)", upstream.watches, watches as u64),
                    format!("{} lists", upstream.lists),
                    format!("{} waiting", upstream.lists_waiting),
                    format!(
                        "{} requests/s",
                        text(rate(requests(&self.status), before.map(|before| requests(&before.status))))
                    ),
                    format!("{} failed", failed as u64),
                ],
            ),
        ];
        let caches = caches.iter().map(|cache| {
            let earlier = before.and_then(|before| before.status.caches.iter().find(|one| one.key() == cache.key()));
            let events = rate(cache.events_total, earlier.map(|earlier| earlier.events_total));
            self.row(cache, events)
        });
        Shown { summary, caches: caches.collect(), subscribers: self.subscribers.clone() }
    }

    fn row(&self, cache: &Cache, events: Option<f64>) -> CacheRow {
        let or = |text: &str, none: &str| if text.is_empty() { none.to_owned() } else { visible(text) };
        let lag = match &self.behind {
            None => NOTHING.to_owned(),
            Some(behind) => behind.get(&cache.key()).cloned().unwrap_or_else(|| "0".to_owned()),
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

impl Shown {
    /// The names of the columns.
    pub(super) fn header() -> Vec<String> {
        CACHES.header.iter().map(|name| (*name).to_owned()).collect()
    }
}

/// As wide as a lag of a moment.
const LAG_WIDTH: usize = "1 (0s)".len();

/// The columns of caches. If the columns do not fit, the least useful ones are left out first.
/// NAMESPACE is left out last, because it is part of the cache's name.
pub(super) const CACHES: Fitted = Fitted {
    header: &[
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
    ],
    right: &[4, 5, 6, 8, 9],
    varying: 7,
    width_min: LAG_WIDTH,
    uniform: &[1, 2],
    dropped_first: &[9, 8, 4, 2, 7, 1],
};

/// The columns of subscribers, as `kubefan subscribers` has them.
pub(super) const SUBSCRIBER_COLUMNS: Fitted = Fitted {
    header: &subscribers::COLUMNS,
    right: &[6, 7],
    varying: 5,
    width_min: LAG_WIDTH,
    uniform: &[3],
    dropped_first: &[3, 7, 6, 4, 2],
};

fn text(rate: Option<f64>) -> String {
    rate.map_or_else(
        || NOTHING.to_owned(),
        |rate| if rate < 10.0 { format!("{rate:.1}") } else { format!("{rate:.0}") },
    )
}
