//! Figures: named values, one per run, and their median and range over all runs.
//!
//! A mean over runs on a shared machine is a mean of its disturbances. The median and the range
//! show both the figure and how far it can be trusted.

use std::collections::BTreeMap;

/// A kind of figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Figure {
    /// CPU time of the server, user and system, per message received by a subscriber.
    CpuPerDelivery,
    /// CPU time of the floor per message: as many bytes over raw TCP.
    FloorCpuPerDelivery,
    /// The floor's CPU as a share of the server's.
    FloorShare,
    /// CPU time of the server per change upstream.
    CpuPerEvent,
    /// CPU time that each additional watcher without a match adds to the cost of a change.
    CpuPerEventAndWatcher,
    /// CPU time of the server per client that receives the initial state.
    CpuPerClient,
    /// CPU time per client, relative to a server that does not know its callers, in the same run.
    CpuRatio,
    /// Messages received by all subscribers together, per second of wall clock.
    DeliveriesPerSecond,
    /// Bytes of response bodies, as sent, per message.
    BodyBytesPerDelivery,
    /// Bytes read from the sockets, per message.
    BytesPerDelivery,
    /// Messages that a subscriber receives per wake-up.
    MessagesPerRead,
    /// Median age of a delivery: from just before the change upstream to its receipt.
    LatencyP50,
    /// 99th percentile of the age.
    LatencyP99,
    /// Highest age.
    LatencyMax,
    /// Mean age over all deliveries.
    LatencyMean,
    /// Mean age of the subscriber with the largest mean.
    LatencySlowestSubscriber,
    /// 99th percentile with stalled subscribers, relative to the 99th percentile while all were
    /// reading; or with an attack, relative to the baseline.
    LatencyP99Ratio,
    /// 99th percentile of the age beside the same attackers against a sink.
    BaselineP99,
    /// Honest requests that were refused or failed.
    Refused,
    /// The slowest list of the honest client.
    ListMax,
    /// The slowest answer of `/livez`.
    LivezMax,
    /// Bytes of log per second, as far as they are read.
    LogRate,
    /// 1 if the goals of `hostile` are met, otherwise 0.
    GoalsMet,
    /// The slowest answer of `/livez` beside the same attackers against a sink.
    BaselineLivezMax,
    /// Deliveries of the slowest subscriber at the end of the measured time, as a share of the
    /// mean.
    SlowestSubscriberShare,
    /// Resident memory per subscriber while no changes are made.
    RssPerSubscriber,
    /// Resident memory per subscriber after a load.
    RssPerSubscriberAfterLoad,
    /// Peak resident memory above the level before the clients connected.
    RssAddedPeak,
    /// Highest resident memory observed.
    RssMax,
    /// The server's limit of memory.
    MemoryMax,
    /// Resident memory at the end.
    RssEnd,
    /// Subscribers that received a catch-up.
    CatchUps,
    /// Times a subscriber had to reconnect.
    Resumes,
    /// Clients whose version was too old, so that they started from scratch.
    Restarted,
    /// Time until every subscriber had received everything.
    Seconds,
}

impl Figure {
    /// All figures, in the order of their columns.
    pub const ALL: [Self; 35] = [
        Self::CpuPerDelivery,
        Self::FloorCpuPerDelivery,
        Self::FloorShare,
        Self::CpuPerEvent,
        Self::CpuPerEventAndWatcher,
        Self::CpuPerClient,
        Self::CpuRatio,
        Self::BodyBytesPerDelivery,
        Self::DeliveriesPerSecond,
        Self::SlowestSubscriberShare,
        Self::BytesPerDelivery,
        Self::MessagesPerRead,
        Self::LatencyP50,
        Self::LatencyP99,
        Self::LatencyMax,
        Self::LatencyMean,
        Self::LatencySlowestSubscriber,
        Self::BaselineP99,
        Self::LatencyP99Ratio,
        Self::Refused,
        Self::ListMax,
        Self::LivezMax,
        Self::BaselineLivezMax,
        Self::LogRate,
        Self::GoalsMet,
        Self::RssPerSubscriber,
        Self::RssPerSubscriberAfterLoad,
        Self::RssAddedPeak,
        Self::RssMax,
        Self::MemoryMax,
        Self::RssEnd,
        Self::CatchUps,
        Self::Resumes,
        Self::Restarted,
        Self::Seconds,
    ];

    /// The key in JSON, including the unit.
    pub fn key(self) -> &'static str {
        match self {
            Self::CpuPerDelivery => "cpu_us_per_delivery",
            Self::FloorCpuPerDelivery => "floor_cpu_us_per_delivery",
            Self::FloorShare => "floor_share",
            Self::CpuPerEvent => "cpu_us_per_event",
            Self::CpuPerEventAndWatcher => "cpu_us_per_event_and_watcher",
            Self::CpuPerClient => "cpu_ms_per_client",
            Self::CpuRatio => "cpu_ratio",
            Self::DeliveriesPerSecond => "deliveries_per_second",
            Self::SlowestSubscriberShare => "slowest_subscriber_share",
            Self::BodyBytesPerDelivery => "body_bytes_per_delivery",
            Self::BytesPerDelivery => "bytes_per_delivery",
            Self::MessagesPerRead => "messages_per_read",
            Self::LatencyP50 => "latency_ms_p50",
            Self::LatencyP99 => "latency_ms_p99",
            Self::LatencyMax => "latency_ms_max",
            Self::LatencyMean => "latency_ms_mean",
            Self::LatencySlowestSubscriber => "latency_ms_slowest_subscriber",
            Self::RssPerSubscriber => "rss_bytes_per_subscriber",
            Self::RssPerSubscriberAfterLoad => "rss_bytes_per_subscriber_after_load",
            Self::LatencyP99Ratio => "p99_ratio",
            Self::BaselineP99 => "baseline_p99_ms",
            Self::Refused => "honest_requests_refused",
            Self::ListMax => "list_ms_max",
            Self::LivezMax => "livez_ms_max",
            Self::LogRate => "log_bytes_per_second",
            Self::GoalsMet => "goals_met",
            Self::BaselineLivezMax => "baseline_livez_ms_max",
            Self::MemoryMax => "memory_bytes_max",
            Self::RssAddedPeak => "rss_bytes_added_peak",
            Self::RssMax => "rss_bytes_max",
            Self::RssEnd => "rss_bytes_end",
            Self::CatchUps => "catch_ups",
            Self::Resumes => "resumes",
            Self::Restarted => "restarted",
            Self::Seconds => "seconds",
        }
    }

    /// The header of the column, and the number of decimals.
    pub fn column(self) -> (&'static str, usize) {
        match self {
            Self::CpuPerDelivery => ("µs/delivery", 2),
            Self::FloorCpuPerDelivery => ("floor", 2),
            Self::FloorShare => ("share", 2),
            Self::CpuPerEvent => ("µs/event", 1),
            Self::CpuPerEventAndWatcher => ("µs/event+watcher", 4),
            Self::CpuPerClient => ("CPU ms/client", 3),
            Self::CpuRatio => ("CPU ratio", 3),
            Self::DeliveriesPerSecond => ("deliveries/s", 0),
            Self::SlowestSubscriberShare => ("slowest", 3),
            Self::BodyBytesPerDelivery => ("body B/delivery", 0),
            Self::BytesPerDelivery => ("B/delivery", 0),
            Self::MessagesPerRead => ("msgs/read", 1),
            Self::LatencyP50 => ("p50 ms", 2),
            Self::LatencyP99 => ("p99 ms", 2),
            Self::LatencyMax => ("max ms", 2),
            Self::LatencyMean => ("mean ms", 2),
            Self::LatencySlowestSubscriber => ("slowest ms", 2),
            Self::RssPerSubscriber => ("RSS B/subscriber", 0),
            Self::RssPerSubscriberAfterLoad => ("after load", 0),
            Self::LatencyP99Ratio => ("p99 ratio", 2),
            Self::BaselineP99 => ("baseline p99 ms", 2),
            Self::Refused => ("refused", 0),
            Self::ListMax => ("list ms max", 1),
            Self::LivezMax => ("livez ms max", 1),
            Self::LogRate => ("log B/s", 0),
            Self::GoalsMet => ("goals met", 0),
            Self::BaselineLivezMax => ("baseline", 1),
            Self::MemoryMax => ("memory max", 0),
            Self::RssAddedPeak => ("added RSS B", 0),
            Self::RssMax => ("RSS B max", 0),
            Self::RssEnd => ("RSS B end", 0),
            Self::CatchUps => ("caught up", 0),
            Self::Resumes => ("resumed", 0),
            Self::Restarted => ("restarted", 0),
            Self::Seconds => ("seconds", 2),
        }
    }
}

/// The figures of one run. Figures that a scenario does not measure are absent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Figures {
    values: BTreeMap<Figure, f64>,
    note: String,
}

impl Figures {
    /// Sets a figure, unless the value is not finite (because nothing was counted).
    pub(super) fn set(&mut self, figure: Figure, value: f64) {
        if value.is_finite() {
            self.values.insert(figure, value);
        }
    }

    /// The value of a figure; `None` if it was not measured.
    pub fn get(&self, figure: Figure) -> Option<f64> {
        self.values.get(&figure).copied()
    }

    /// Sets a result that no figure can express.
    pub(super) fn set_note(&mut self, note: String) {
        self.note = note;
    }

    /// A result that no figure can express; empty in most scenarios.
    pub fn note(&self) -> &str {
        &self.note
    }

    /// Sets the floor's CPU time per delivery and its share of the server's.
    pub(super) fn set_floor(&mut self, floor_micros: f64) {
        self.set(Figure::FloorCpuPerDelivery, floor_micros);
        if let Some(own) = self.get(Figure::CpuPerDelivery).filter(|own| *own > 0.0) {
            self.set(Figure::FloorShare, floor_micros / own);
        }
    }
}

/// The median of several runs and their range.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The median. For an even number of runs, the mean of the two middle values.
    pub median: f64,
    /// The lowest value.
    pub min: f64,
    /// The highest value.
    pub max: f64,
}

/// The spread of some values; `None` if there are none.
pub fn spread(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let min = *sorted.first()?;
    let max = *sorted.last()?;
    let middle = sorted.len() / 2;
    let median =
        if sorted.len().is_multiple_of(2) { f64::midpoint(sorted[middle - 1], sorted[middle]) } else { sorted[middle] };
    Some(Spread { median, min, max })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_the_median_and_the_range() {
        let of = |values: &[f64]| spread(values.iter().copied());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[3.0]), Some(Spread { median: 3.0, min: 3.0, max: 3.0 }));
        assert_eq!(of(&[9.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 9.0 }));
        assert_eq!(of(&[4.0, 1.0, 2.0, 9.0]), Some(Spread { median: 3.0, min: 1.0, max: 9.0 }));
    }

    #[test]
    fn a_value_that_is_not_finite_is_absent_and_a_share_needs_both_values() {
        let mut figures = Figures::default();
        figures.set(Figure::BytesPerDelivery, f64::NAN);
        figures.set_floor(4.0);
        assert_eq!((figures.get(Figure::BytesPerDelivery), figures.get(Figure::FloorShare)), (None, None));
        figures.set(Figure::CpuPerDelivery, 8.0);
        figures.set_floor(4.0);
        assert_eq!(figures.get(Figure::FloorShare), Some(0.5));
    }

    #[test]
    fn every_figure_has_a_unique_key() {
        let keys: std::collections::HashSet<_> = Figure::ALL.iter().map(|figure| figure.key()).collect();
        assert_eq!(keys.len(), Figure::ALL.len());
    }
}
