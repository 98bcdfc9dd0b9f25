//! kubefan's own alarms: signs that its answers are wrong, late or refused where the apiserver's
//! would not be.
//!
//! Each follows from the metrics of an alert in `deploy/helm/kubefan/files/alerts.yaml`, but is
//! decided in the process, so that kubefan can act on it. Alarms fire earlier than alerts, because
//! reading elsewhere for some minutes costs little.
//!
//! | alarm | fires if |
//! |---|---|
//! | `difference` | a self-check found a difference from the apiserver, within an hour |
//! | `other_cluster` | another cluster answered at the apiserver's address, within 15 minutes |
//! | `relisting` | a cache listed again more than three times for one reason, within 30 minutes |
//! | `slow_dispatch` | of the events of five minutes, one in a hundred took more than a second |
//! | `memory` | there was no memory for new snapshots for two minutes |
//! | `reviews_failing` | a fifth of the reviews of callers failed, within five minutes |
//!
//! An alarm fires for at least five minutes. If it fires again soon after its end, it fires for
//! twice as long as before, up to an hour, so that clients do not move to and fro.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use prometheus::proto::{Metric, MetricFamily};
use tokio::time::Instant;

use super::series::{CacheLabels, label, metrics, total, value};

/// The time for which an alarm fires at least.
const HOLD_MIN: Duration = Duration::from_secs(5 * 60);
/// The longest such time, of an alarm that fires again and again.
const HOLD_MAX: Duration = Duration::from_secs(60 * 60);
/// The longest time that a sample is compared with later ones.
const KEPT_MAX: Duration = Duration::from_secs(60 * 60);
/// Maximum number of samples: one more than an hour of them.
const SAMPLES_MAX: usize = 361;
/// Maximum number of series of relists in a sample.
const RELISTS_MAX: usize = 256;
/// The fewest events, or reviews, from which a share of them is judged.
const JUDGED_MIN: f64 = 20.0;
/// The bound of the histogram from which an event is late, in seconds.
const LATE: f64 = 1.0;
/// `kubefan_memory_pressure_step` from which there is no memory for new snapshots.
const MEMORY_STEP: f64 = 3.0;

const MINUTE: Duration = Duration::from_secs(60);

/// An alarm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Alarm {
    /// A cache differed from the apiserver.
    Difference,
    /// Another cluster answers at the apiserver's address.
    OtherCluster,
    /// A resource is listed again and again.
    Relisting,
    /// Events reach subscribers late.
    SlowDispatch,
    /// There is no memory for new snapshots.
    Memory,
    /// The apiserver does not review callers.
    ReviewsFailing,
}

impl Alarm {
    /// All alarms.
    pub const ALL: [Self; 6] =
        [Self::Difference, Self::OtherCluster, Self::Relisting, Self::SlowDispatch, Self::Memory, Self::ReviewsFailing];

    /// Whether only this kubefan's answers suffer, so that reading elsewhere helps. Others may have
    /// their cause in the apiserver, which then has no need of more readers, or in one slow reader.
    pub fn is_of_this_kubefan(self) -> bool {
        matches!(self, Self::Difference | Self::Memory)
    }

    /// The name in metrics and in the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Difference => "difference",
            Self::OtherCluster => "other_cluster",
            Self::Relisting => "relisting",
            Self::SlowDispatch => "slow_dispatch",
            Self::Memory => "memory",
            Self::ReviewsFailing => "reviews_failing",
        }
    }
}

/// Counters at one moment.
#[derive(Debug, Clone, Default)]
struct Sample {
    differences: f64,
    other_clusters: f64,
    /// By cache and reason. They seldom change, so samples share them.
    relists: Arc<HashMap<(CacheLabels, String), f64>>,
    dispatched: f64,
    dispatched_late: f64,
    memory_step: f64,
    reviews: f64,
    reviews_failed: f64,
}

impl Sample {
    fn of(families: &[MetricFamily]) -> Self {
        let with = |name, of, wanted: &str| {
            metrics(families, name).iter().filter(|metric| label(metric, of) == wanted).map(value).sum()
        };
        let reviews = ["kubefan_delegated_authn_request_total", "kubefan_delegated_authz_request_total"];
        let reviews = reviews.map(|name| metrics(families, name)).concat();
        let latency = metrics(families, "kubefan_dispatch_latency_seconds");
        Self {
            differences: with("kubefan_self_checks_total", "result", "different"),
            other_clusters: with("kubefan_upstream_watch_restarts_total", "reason", "other_cluster"),
            relists: Arc::new(relists(families)),
            dispatched: latency.iter().map(|metric| metric.get_histogram().get_sample_count() as f64).sum(),
            dispatched_late: latency.iter().map(late).sum(),
            memory_step: total(families, "kubefan_memory_pressure_step"),
            reviews: reviews.iter().map(value).sum(),
            reviews_failed: reviews.iter().filter(|metric| label(metric, "result") != "ok").map(value).sum(),
        }
    }
}

/// Returns the number of events in a histogram that were late.
fn late(metric: &Metric) -> f64 {
    let histogram = metric.get_histogram();
    let bound = histogram.get_bucket().iter().find(|bucket| bucket.upper_bound() >= LATE);
    bound.map_or(0.0, |bucket| histogram.get_sample_count().saturating_sub(bucket.cumulative_count()) as f64)
}

fn relists(families: &[MetricFamily]) -> HashMap<(CacheLabels, String), f64> {
    let all = metrics(families, "kubefan_relists_total").iter();
    let unusual = all.filter(|metric| !["initial", "schema_changed"].contains(&label(metric, "reason")));
    let series = unusual.map(|metric| ((CacheLabels::of(metric), label(metric, "reason").to_owned()), value(metric)));
    series.filter(|(_, count)| *count > 0.0).take(RELISTS_MAX).collect()
}

/// Decides which alarms fire. It keeps an hour of samples.
#[derive(Debug, Default)]
pub struct Alarms {
    /// The oldest first.
    samples: VecDeque<(Instant, Sample)>,
    fired: HashMap<Alarm, Fired>,
}

/// An alarm that fires, or has fired.
#[derive(Debug, Clone, Copy)]
struct Fired {
    until: Instant,
    hold: Duration,
}

impl Fired {
    /// The alarm is due: for as long as it fires, or again after this.
    fn renewed(self, now: Instant) -> Self {
        let hold = if now < self.until {
            self.hold
        } else if now < self.until + 2 * self.hold {
            (2 * self.hold).min(HOLD_MAX)
        } else {
            HOLD_MIN
        };
        Self { until: now + hold, hold }
    }
}

impl Alarms {
    /// Takes a sample of metrics whose gauges are up to date. Returns the alarms that fire now.
    pub fn sample(&mut self, families: &[MetricFamily], now: Instant) -> Vec<Alarm> {
        let mut sample = Sample::of(families);
        if let Some((_, last)) = self.samples.back()
            && last.relists == sample.relists
        {
            sample.relists = last.relists.clone();
        }
        for alarm in Alarm::ALL {
            if !self.is_due(alarm, &sample, now) {
                continue;
            }
            let first = Fired { until: now + HOLD_MIN, hold: HOLD_MIN };
            self.fired.entry(alarm).and_modify(|fired| *fired = fired.renewed(now)).or_insert(first);
        }
        self.samples.push_back((now, sample));
        while self.samples.len() > SAMPLES_MAX
            || self.samples.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > KEPT_MAX)
        {
            self.samples.pop_front();
        }
        let fires = |alarm: &Alarm| self.fired.get(alarm).is_some_and(|fired| now < fired.until);
        Alarm::ALL.into_iter().filter(fires).collect()
    }

    fn is_due(&self, alarm: Alarm, sample: &Sample, now: Instant) -> bool {
        match alarm {
            Alarm::Difference => {
                self.before(now, KEPT_MAX).is_some_and(|before| sample.differences > before.differences)
            }
            Alarm::OtherCluster => {
                self.before(now, 15 * MINUTE).is_some_and(|before| sample.other_clusters > before.other_clusters)
            }
            Alarm::Relisting => self.before(now, 30 * MINUTE).is_some_and(|before| {
                let earlier = |series| before.relists.get(series).copied().unwrap_or_default();
                sample.relists.iter().any(|(series, count)| count - earlier(series) > 3.0)
            }),
            Alarm::SlowDispatch => self.before(now, 5 * MINUTE).is_some_and(|before| {
                let all = sample.dispatched - before.dispatched;
                all >= JUDGED_MIN && sample.dispatched_late - before.dispatched_late > 0.01 * all
            }),
            Alarm::Memory => {
                let recent = self.samples.iter().rev().take_while(|(at, _)| *at + 2 * MINUTE >= now);
                let is_covered = self.samples.front().is_some_and(|(at, _)| *at + 2 * MINUTE <= now);
                let is_full = |sample: &Sample| sample.memory_step >= MEMORY_STEP;
                is_covered && is_full(sample) && recent.map(|(_, sample)| sample).all(is_full)
            }
            Alarm::ReviewsFailing => self.before(now, 5 * MINUTE).is_some_and(|before| {
                let all = sample.reviews - before.reviews;
                all >= JUDGED_MIN && sample.reviews_failed - before.reviews_failed > 0.2 * all
            }),
        }
    }

    /// The oldest sample that is at most this old.
    fn before(&self, now: Instant, window: Duration) -> Option<&Sample> {
        let is_within = |at: Instant| now.saturating_duration_since(at) <= window;
        self.samples.iter().find(|(at, _)| is_within(*at)).map(|(_, sample)| sample)
    }
}

#[cfg(test)]
mod tests;
