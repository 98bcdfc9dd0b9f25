//! The last hour, for the status page: events and subscribers of each cache, and failures.
//!
//! One task samples the metrics every ten seconds. Occurrences are not recorded at their place in
//! the code: they follow from counters that grew between two samples. The memory is fixed: 360
//! samples of 8 bytes for each of at most 64 caches, 180 KiB, and 100 short records.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use prometheus::proto::MetricFamily;
use tokio::time::Instant;

use super::series::{CacheLabels, label, metrics, value};

/// The time between two samples.
pub const SAMPLE_INTERVAL: Duration = Duration::from_secs(10);

/// Samples that are kept of each cache: an hour.
const SAMPLES_MAX: usize = 360;

/// Maximum number of caches with samples.
const CACHES_MAX: usize = 64;

/// Maximum number of recent occurrences.
const RECENT_MAX: usize = 100;

/// The counters worth a record, each with the label that has the reason, and the normal values.
const WATCHED: [(&str, Kind, &str, &[&str]); 8] = [
    ("kubefan_relists_total", Kind::Relist, "reason", &["initial"]),
    ("kubefan_upstream_watch_restarts_total", Kind::WatchRestart, "reason", &["timeout", "idle"]),
    ("kubefan_self_checks_total", Kind::SelfCheck, "result", &["equal"]),
    ("kubefan_lags_total", Kind::Lag, "result", &[]),
    (
        "kubefan_subscriptions_finished_total",
        Kind::StreamEnd,
        "reason",
        &["timeout", "deadline", "cancelled", "draining", "expired", "reauthenticate"],
    ),
    ("kubefan_requests_total", Kind::Refusal, "code", &[]),
    ("kubefan_upstream_requests_total", Kind::UpstreamFailure, "code", &[]),
    ("kubefan_config_reloads_total", Kind::Configuration, "result", &[]),
];

/// The codes of requests that were refused, over HTTP and gRPC, and their meaning.
const REFUSALS: [(&str, &str); 7] = [
    ("401", "not authenticated"),
    ("403", "not permitted"),
    ("429", "a limit is reached"),
    ("503", "unavailable"),
    ("UNAUTHENTICATED", ""),
    ("PERMISSION_DENIED", ""),
    ("RESOURCE_EXHAUSTED", ""),
];

/// The kind of an occurrence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A full list of upstream.
    Relist,
    /// The upstream watch broke, and was started again.
    WatchRestart,
    /// A comparison with upstream that found a difference, or failed.
    SelfCheck,
    /// A watch that fell behind the retained events.
    Lag,
    /// A watch that was ended.
    StreamEnd,
    /// A request that was refused.
    Refusal,
    /// A request to upstream that failed.
    UpstreamFailure,
    /// A change of the configuration file.
    Configuration,
}

impl Kind {
    /// The name on the status page.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Relist => "relist",
            Self::WatchRestart => "watch restarted",
            Self::SelfCheck => "self-check",
            Self::Lag => "subscriber lagged",
            Self::StreamEnd => "stream ended",
            Self::Refusal => "request refused",
            Self::UpstreamFailure => "apiserver request failed",
            Self::Configuration => "configuration changed",
        }
    }
}

/// Something that happened between two samples, as often as `count`.
#[derive(Debug, Clone, PartialEq)]
pub struct Occurrence {
    /// Time at which it was noticed.
    pub at: Instant,
    /// The kind.
    pub kind: Kind,
    /// The resource and its namespace; empty if it concerns none.
    pub resource: String,
    /// Reason: the value of the counter's label.
    pub reason: String,
    /// The number of times.
    pub count: u64,
}

/// The samples of one cache, the oldest first.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Samples {
    /// Events per second that were received from upstream.
    pub events: VecDeque<f32>,
    /// Subscribers.
    pub subscribers: VecDeque<u32>,
}

/// The last hour.
pub struct History {
    started_at: Instant,
    state: Mutex<Window>,
}

#[derive(Default)]
struct Window {
    sampled_at: Option<Instant>,
    caches: BTreeMap<CacheLabels, CacheHistory>,
    counters: HashMap<(Kind, CacheLabels, String), f64>,
    recent: VecDeque<Occurrence>,
}

#[derive(Default)]
struct CacheHistory {
    received: f64,
    samples: Samples,
}

impl History {
    /// Empty, of a kubefan that starts now.
    pub fn new(started_at: Instant) -> Self {
        Self { started_at, state: Mutex::default() }
    }

    /// Start time of kubefan.
    pub fn started_at(&self) -> Instant {
        self.started_at
    }

    /// Takes a sample of metrics whose gauges are up to date.
    pub fn sample(&self, families: &[MetricFamily], now: Instant) {
        let mut state = self.lock();
        let elapsed = state.sampled_at.replace(now).map(|before| now.saturating_duration_since(before).as_secs_f64());
        state.sample_caches(families, elapsed);
        state.sample_counters(families, elapsed.is_some(), now);
    }

    /// The samples of a cache.
    pub fn of(&self, labels: &CacheLabels) -> Samples {
        self.lock().caches.get(labels).map(|cache| cache.samples.clone()).unwrap_or_default()
    }

    /// Returns recent occurrences, the latest first.
    pub fn recent(&self) -> Vec<Occurrence> {
        self.lock().recent.iter().rev().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Window> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Window {
    fn sample_caches(&mut self, families: &[MetricFamily], elapsed: Option<f64>) {
        let mut received: HashMap<CacheLabels, f64> = HashMap::new();
        for metric in metrics(families, "kubefan_events_received_total") {
            *received.entry(CacheLabels::of(metric)).or_default() += value(metric);
        }
        let subscribers = metrics(families, "kubefan_subscribers");
        let now: HashMap<CacheLabels, f64> =
            subscribers.iter().map(|metric| (CacheLabels::of(metric), value(metric))).collect();
        self.caches.retain(|labels, _| now.contains_key(labels));
        for (labels, subscribers) in now {
            if self.caches.len() >= CACHES_MAX && !self.caches.contains_key(&labels) {
                continue;
            }
            let total = received.get(&labels).copied().unwrap_or_default();
            let is_new = !self.caches.contains_key(&labels);
            let cache = self.caches.entry(labels).or_default();
            let grown = (total - cache.received).max(0.0);
            cache.received = total;
            let Some(elapsed) = elapsed.filter(|elapsed| *elapsed > 0.0 && !is_new) else { continue };
            push(&mut cache.samples.events, (grown / elapsed) as f32, SAMPLES_MAX);
            push(&mut cache.samples.subscribers, subscribers as u32, SAMPLES_MAX);
        }
    }

    fn sample_counters(&mut self, families: &[MetricFamily], is_compared: bool, now: Instant) {
        let mut counters: HashMap<_, f64> = HashMap::new();
        for (name, kind, of_reason, normal) in WATCHED {
            for metric in metrics(families, name) {
                let value_of = label(metric, of_reason);
                let Some(reason) =
                    reason(kind, label(metric, "verb"), value_of).filter(|_| !normal.contains(&value_of))
                else {
                    continue;
                };
                let cache = CacheLabels { media: String::new(), ..CacheLabels::of(metric) };
                *counters.entry((kind, cache, reason)).or_default() += value(metric);
            }
        }
        for (key, total) in counters.iter().filter(|_| is_compared) {
            let earlier: f64 = self.counters.get(key).copied().unwrap_or_default();
            let grown = *total - earlier;
            if grown >= 1.0 {
                let (kind, cache, reason) = key.clone();
                let occurrence = Occurrence { at: now, kind, resource: cache.title(), reason, count: grown as u64 };
                push(&mut self.recent, occurrence, RECENT_MAX);
            }
        }
        // Those of caches that are gone go too.
        self.counters = counters;
    }
}

/// The reason in words, by the verb and the value of the counter's label. `None` if nothing went
/// wrong.
fn reason(kind: Kind, verb: &str, value: &str) -> Option<String> {
    match kind {
        Kind::Refusal => {
            let (_, meaning) = REFUSALS.iter().find(|(code, _)| *code == value)?;
            Some(if meaning.is_empty() { format!("{verb} {value}") } else { format!("{verb} {value}: {meaning}") })
        }
        // 101 is a tunnel, and 304 would be an answer, too.
        Kind::UpstreamFailure if value.starts_with(['1', '2', '3']) => None,
        Kind::UpstreamFailure if value == "error" => Some(format!("{verb}: no answer")),
        Kind::UpstreamFailure => Some(format!("{verb} {value}")),
        Kind::Configuration if value == "success" => Some("taken over".to_owned()),
        Kind::Configuration => Some("refused; the log says why".to_owned()),
        _ => Some(value.replace('_', " ")),
    }
}

fn push<T>(queue: &mut VecDeque<T>, value: T, most: usize) {
    if queue.len() >= most {
        queue.pop_front();
    }
    queue.push_back(value);
}

#[cfg(test)]
mod tests {
    use prometheus::{IntCounterVec, IntGaugeVec, Opts, Registry};

    use super::*;

    const LABELS: [&str; 4] = ["group", "resource", "namespace", "media"];

    struct World {
        registry: Registry,
        received: IntCounterVec,
        subscribers: IntGaugeVec,
        relists: IntCounterVec,
        requests: IntCounterVec,
    }

    impl World {
        fn new() -> Self {
            let registry = Registry::new();
            let with = |extra| [&LABELS[..], &[extra]].concat();
            let counters = |name: &str, labels: &[&str]| {
                let counters = IntCounterVec::new(Opts::new(name, "x"), labels).unwrap();
                registry.register(Box::new(counters.clone())).unwrap();
                counters
            };
            let received = counters("kubefan_events_received_total", &with("type"));
            let relists = counters("kubefan_relists_total", &with("reason"));
            let requests = counters("kubefan_requests_total", &["verb", "resource", "code"]);
            let subscribers = IntGaugeVec::new(Opts::new("kubefan_subscribers", "x"), &LABELS).unwrap();
            registry.register(Box::new(subscribers.clone())).unwrap();
            Self { registry, received, subscribers, relists, requests }
        }
    }

    fn pods() -> CacheLabels {
        CacheLabels { resource: "pods".to_owned(), media: "json".to_owned(), ..CacheLabels::default() }
    }

    #[test]
    fn samples_are_rates_and_the_oldest_of_more_than_an_hour_goes() {
        let world = World::new();
        let history = History::new(Instant::now());
        let start = Instant::now();
        world.subscribers.with_label_values(&["", "pods", "", "json"]).set(3);
        for number in 0..=SAMPLES_MAX as u32 + 1 {
            world.received.with_label_values(&["", "pods", "", "json", "modified"]).inc_by(40);
            world.received.with_label_values(&["", "pods", "", "json", "deleted"]).inc_by(10);
            history.sample(&world.registry.gather(), start + SAMPLE_INTERVAL * number);
        }
        let Samples { events, subscribers } = history.of(&pods());
        assert_eq!((events.len(), subscribers.len()), (SAMPLES_MAX, SAMPLES_MAX));
        assert!(events.iter().all(|rate| *rate == 5.0) && subscribers.iter().all(|number| *number == 3));
        world.subscribers.remove_label_values(&["", "pods", "", "json"]).unwrap();
        history.sample(&world.registry.gather(), start + SAMPLE_INTERVAL * 1000);
        assert_eq!(history.of(&pods()), Samples::default(), "the cache is gone");
    }

    #[test]
    fn a_counter_that_grew_between_two_samples_is_a_record_with_its_reason() {
        let world = World::new();
        let history = History::new(Instant::now());
        let start = Instant::now();
        let relist = |reason: &str| world.relists.with_label_values(&["apps", "deployments", "", "json", reason]).inc();
        relist("expired");
        history.sample(&world.registry.gather(), start);
        assert_eq!(history.recent(), [], "it may be long ago");
        relist("initial");
        relist("self_check");
        relist("self_check");
        world.requests.with_label_values(&["watch", "secrets", "403"]).inc();
        world.requests.with_label_values(&["watch", "secrets", "200"]).inc();
        history.sample(&world.registry.gather(), start + SAMPLE_INTERVAL);
        let mut recent = history.recent();
        recent.sort_by_key(|one| one.count);
        let of = |one: &Occurrence| (one.kind, one.resource.clone(), one.reason.clone(), one.count);
        assert_eq!(
            recent.iter().map(of).collect::<Vec<_>>(),
            [
                (Kind::Refusal, "secrets".to_owned(), "watch 403: not permitted".to_owned(), 1),
                (Kind::Relist, "deployments.apps".to_owned(), "self check".to_owned(), 2),
            ]
        );
    }

    #[test]
    fn a_reason_is_in_words_and_what_is_normal_has_none() {
        let of = |kind, value| reason(kind, "watch", value);
        assert_eq!(of(Kind::Refusal, "429").as_deref(), Some("watch 429: a limit is reached"));
        assert_eq!(of(Kind::Refusal, "UNAUTHENTICATED").as_deref(), Some("watch UNAUTHENTICATED"));
        assert_eq!((of(Kind::Refusal, "200"), of(Kind::UpstreamFailure, "201")), (None, None));
        assert_eq!(of(Kind::UpstreamFailure, "error").as_deref(), Some("watch: no answer"));
        assert_eq!(of(Kind::UpstreamFailure, "503").as_deref(), Some("watch 503"));
        assert!(of(Kind::Configuration, "failure").unwrap().starts_with("refused"));
    }

    #[test]
    fn memory_is_bounded() {
        let world = World::new();
        let history = History::new(Instant::now());
        let start = Instant::now();
        for number in 0..2 * CACHES_MAX {
            world.subscribers.with_label_values(&["", &*format!("r{number}"), "", "json"]).set(1);
        }
        for round in 0..3 {
            for number in 0..2 * RECENT_MAX {
                world.relists.with_label_values(&["", &*format!("r{number}"), "", "json", "expired"]).inc();
            }
            history.sample(&world.registry.gather(), start + SAMPLE_INTERVAL * round);
        }
        let caches = history.lock().caches.len();
        assert_eq!((caches, history.recent().len()), (CACHES_MAX, RECENT_MAX));
    }
}
