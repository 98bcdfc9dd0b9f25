//! Reads the values of metrics that were gathered.

use prometheus::proto::{Metric, MetricFamily};

/// The labels that name a cache: group, resource, namespace, media.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CacheLabels {
    /// The group; empty for the core group.
    pub group: String,
    /// The plural name.
    pub resource: String,
    /// The namespace; empty for all.
    pub namespace: String,
    /// The encoding.
    pub media: String,
}

impl CacheLabels {
    /// The labels of a metric; empty where it has none.
    pub fn of(metric: &Metric) -> Self {
        let of = |name| label(metric, name).to_owned();
        Self { group: of("group"), resource: of("resource"), namespace: of("namespace"), media: of("media") }
    }

    /// The resource as kubectl names it, and its namespace if it has one.
    pub fn title(&self) -> String {
        let group = if self.group.is_empty() { String::new() } else { format!(".{}", self.group) };
        let namespace = if self.namespace.is_empty() { String::new() } else { format!("/{}", self.namespace) };
        format!("{}{group}{namespace}", self.resource)
    }
}

/// The metrics of one family.
pub fn metrics<'a>(families: &'a [MetricFamily], name: &str) -> &'a [Metric] {
    families.iter().find(|family| family.name() == name).map_or(&[], |family| family.get_metric())
}

/// A label of a metric; empty if it has none of this name.
pub fn label<'a>(metric: &'a Metric, name: &str) -> &'a str {
    metric.get_label().iter().find(|label| label.name() == name).map_or("", |label| label.value())
}

/// The value of a counter or a gauge.
pub fn value(metric: &Metric) -> f64 {
    // A metric has one of the two, and 0 for the other.
    metric.get_counter().get_value() + metric.get_gauge().get_value()
}

/// The sum of a family over the metrics of one cache.
pub fn of_cache(families: &[MetricFamily], name: &str, labels: &CacheLabels) -> f64 {
    metrics(families, name).iter().filter(|metric| CacheLabels::of(metric) == *labels).map(value).sum()
}

/// The sum of a family.
pub fn total(families: &[MetricFamily], name: &str) -> f64 {
    metrics(families, name).iter().map(value).sum()
}
