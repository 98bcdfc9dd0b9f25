//! The numbers of informers as Prometheus metrics. The names follow client-go's reflector metrics,
//! with the prefix `kubefan_client_`.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use prometheus::{
    GaugeVec, IntCounterVec, IntGaugeVec, Opts,
    core::{Collector, Desc},
    proto::MetricFamily,
};

use crate::{informer::SharedInformer, object::Decode, stats::InformerStats, version::number};

type Read = Box<dyn Fn() -> Option<InformerStats> + Send>;

/// Collects the numbers of informers, each with the label `name`. Clones are the same collector.
///
/// ```
/// use kubefan_client::{FakeListWatch, InformerMetrics, SharedInformer};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let metrics = InformerMetrics::new()?;
/// let registry = prometheus::Registry::new();
/// registry.register(Box::new(metrics.clone()))?;
///
/// let pods = SharedInformer::<serde_json::Value>::new(FakeListWatch::new());
/// metrics.add("pods", &pods);
/// let families = registry.gather();
/// assert!(families.iter().any(|family| family.name() == "kubefan_client_store_objects"));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct InformerMetrics {
    informers: Arc<Mutex<BTreeMap<String, Read>>>,
    /// Only for the descriptions. Each collection fills families of its own.
    empty: Arc<Families>,
}

impl InformerMetrics {
    /// Returns a collector without informers.
    ///
    /// # Errors
    /// None in practice: Prometheus checks the metrics' names, which are fixed.
    pub fn new() -> Result<Self, prometheus::Error> {
        Ok(Self { informers: Arc::default(), empty: Arc::new(Families::new()?) })
    }

    /// Adds an informer. It replaces one with the same name. A stopped informer is left out.
    pub fn add<K: Decode>(&self, name: &str, informer: &SharedInformer<K>) {
        let informer = informer.clone();
        let read = move || (!informer.is_stopped()).then(|| informer.stats());
        self.informers().insert(name.to_owned(), Box::new(read));
    }

    /// Removes the informer of this name.
    pub fn remove(&self, name: &str) {
        self.informers().remove(name);
    }

    fn informers(&self) -> MutexGuard<'_, BTreeMap<String, Read>> {
        self.informers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collector for InformerMetrics {
    fn desc(&self) -> Vec<&Desc> {
        self.empty.all().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let Ok(families) = Families::new() else { return Vec::new() };
        // A stopped informer stays stopped, so its store need not stay in memory for its numbers.
        self.informers().retain(|name, read| {
            let stats = read();
            if let Some(stats) = &stats {
                families.fill(name, stats);
            }
            stats.is_some()
        });
        families.all().into_iter().flat_map(Collector::collect).collect()
    }
}

impl fmt::Debug for InformerMetrics {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("InformerMetrics").field("informers", &self.informers().len()).finish_non_exhaustive()
    }
}

struct Families {
    lists: IntCounterVec,
    watches: IntCounterVec,
    snapshots: IntCounterVec,
    events: IntCounterVec,
    errors: IntCounterVec,
    resource_version: IntGaugeVec,
    objects: IntGaugeVec,
    backlog: IntGaugeVec,
    since_last_event: GaugeVec,
}

fn counter(name: &str, help: &str, label: Option<&str>) -> Result<IntCounterVec, prometheus::Error> {
    let labels: Vec<_> = std::iter::once("name").chain(label).collect();
    IntCounterVec::new(options(name, help), &labels)
}

fn gauge(name: &str, help: &str) -> Result<IntGaugeVec, prometheus::Error> {
    IntGaugeVec::new(options(name, help), &["name"])
}

fn options(name: &str, help: &str) -> Opts {
    Opts::new(name, help).namespace("kubefan_client")
}

impl Families {
    fn new() -> Result<Self, prometheus::Error> {
        Ok(Self {
            lists: counter("reflector_lists_total", "Lists that were started.", None)?,
            watches: counter("reflector_watches_total", "Watches that were started.", None)?,
            snapshots: counter("reflector_snapshots_total", "Complete states that arrived in a watch.", None)?,
            events: counter("reflector_events_total", "Events that arrived in watches, by type.", Some("type"))?,
            errors: counter("reflector_errors_total", "Errors that were reported, by kind.", Some("kind"))?,
            resource_version: gauge(
                "reflector_last_resource_version",
                "The version up to which the store is complete, if it is a number.",
            )?,
            objects: gauge("store_objects", "Objects in the store.")?,
            backlog: gauge("handler_backlog_calls", "Calls that wait for the handler with the most.")?,
            since_last_event: GaugeVec::new(
                options("reflector_last_event_age_seconds", "Time since the last event or bookmark of a watch."),
                &["name"],
            )?,
        })
    }

    fn all(&self) -> [&dyn Collector; 9] {
        [
            &self.lists,
            &self.watches,
            &self.snapshots,
            &self.events,
            &self.errors,
            &self.resource_version,
            &self.objects,
            &self.backlog,
            &self.since_last_event,
        ]
    }

    fn fill(&self, name: &str, stats: &InformerStats) {
        self.lists.with_label_values(&[name]).inc_by(stats.lists);
        self.watches.with_label_values(&[name]).inc_by(stats.watches);
        self.snapshots.with_label_values(&[name]).inc_by(stats.snapshots);
        let events = stats.events;
        let events = [
            ("added", events.added),
            ("modified", events.modified),
            ("deleted", events.deleted),
            ("bookmark", events.bookmarks),
        ];
        for (kind, count) in events {
            self.events.with_label_values(&[name, kind]).inc_by(count);
        }
        let errors = stats.errors;
        let errors = [
            ("request", errors.requests),
            ("expired", errors.expired),
            ("undecodable", errors.undecodable),
            ("unreadable", errors.unreadable),
            ("handler", errors.handlers),
        ];
        for (kind, count) in errors {
            self.errors.with_label_values(&[name, kind]).inc_by(count);
        }
        if let Some(version) = number(&stats.resource_version).and_then(|version| i64::try_from(version).ok()) {
            self.resource_version.with_label_values(&[name]).set(version);
        }
        self.objects.with_label_values(&[name]).set(i64::try_from(stats.objects).unwrap_or(i64::MAX));
        self.backlog.with_label_values(&[name]).set(i64::try_from(stats.longest_backlog).unwrap_or(i64::MAX));
        if let Some(age) = stats.since_last_event {
            self.since_last_event.with_label_values(&[name]).set(age.as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use prometheus::{Registry, TextEncoder};

    use super::*;
    use crate::FakeListWatch;

    #[tokio::test(start_paused = true)]
    async fn each_informer_has_its_numbers_until_it_stops() {
        let metrics = InformerMetrics::new().unwrap();
        let registry = Registry::new();
        registry.register(Box::new(metrics.clone())).unwrap();
        let fake = FakeListWatch::new();
        fake.put("a/1", "1");
        let informer = SharedInformer::<u64>::new(fake);
        metrics.add("pods", &informer);
        let running = informer.clone();
        let task = tokio::spawn(async move { running.run(pending::<()>()).await });
        informer.synced().await.unwrap();
        let text = || TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        for line in [
            r#"kubefan_client_reflector_watches_total{name="pods"} 1"#,
            r#"kubefan_client_reflector_events_total{name="pods",type="added"} 1"#,
            r#"kubefan_client_reflector_errors_total{kind="expired",name="pods"} 0"#,
            r#"kubefan_client_reflector_last_resource_version{name="pods"} 2"#,
            r#"kubefan_client_store_objects{name="pods"} 1"#,
            r#"kubefan_client_reflector_last_event_age_seconds{name="pods"} 0"#,
        ] {
            assert!(text().lines().any(|found| found == line), "{line} is missing in\n{}", text());
        }
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        assert!(!text().contains("pods"), "{}", text());
    }
}
