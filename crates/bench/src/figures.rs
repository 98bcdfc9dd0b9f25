//! What is measured: figures by name, one value per run, and their median with its spread over the runs.
//!
//! A mean of runs on a shared machine is a mean of its disturbances; the median and the range show both the figure and how far it can
//! be trusted.

use std::collections::BTreeMap;

/// One kind of figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Figure {
    /// CPU time of the server, user and system, per message received by a subscriber.
    CpuPerDelivery,
    /// The same of the floor: as many bytes over raw TCP.
    FloorCpuPerDelivery,
    /// The floor's CPU as a share of the server's.
    FloorShare,
    /// CPU time of the server per change upstream.
    CpuPerEvent,
    /// What one more watcher that does not match adds to that.
    CpuPerEventAndWatcher,
    /// CPU time of the server per client that is sent the initial state.
    CpuPerClient,
    /// Messages received by all subscribers together, per second of wall clock.
    DeliveriesPerSecond,
    /// Bytes read from the sockets, per message.
    BytesPerDelivery,
    /// Messages that a subscriber finds each time it is woken.
    MessagesPerRead,
    /// From just before the change upstream to its receipt: the median over all deliveries.
    LatencyP50,
    /// 99 of 100 deliveries are not older.
    LatencyP99,
    /// The oldest delivery.
    LatencyMax,
    /// The mean over all deliveries.
    LatencyMean,
    /// The mean of the subscriber that waits longest.
    LatencySlowestSubscriber,
    /// The 99th percentile as a multiple of what it was while everyone read.
    LatencyP99Ratio,
    /// What the slowest subscriber had received, as a share of the mean, when the measured time ended.
    SlowestSubscriberShare,
    /// Resident memory that a subscriber adds while nothing happens.
    RssPerSubscriber,
    /// The same after the load has passed.
    RssPerSubscriberAfterLoad,
    /// How far the resident memory rises above what it was before the clients came.
    RssAddedPeak,
    /// The largest resident memory that was seen.
    RssMax,
    /// The resident memory at the end.
    RssEnd,
    /// Subscribers that were sent a catch-up.
    CatchUps,
    /// Connections that subscribers had to make again.
    Resumes,
    /// Until every subscriber had everything.
    Seconds,
}

impl Figure {
    /// All, in the order in which they are shown.
    pub const ALL: [Self; 24] = [
        Self::CpuPerDelivery,
        Self::FloorCpuPerDelivery,
        Self::FloorShare,
        Self::CpuPerEvent,
        Self::CpuPerEventAndWatcher,
        Self::CpuPerClient,
        Self::DeliveriesPerSecond,
        Self::SlowestSubscriberShare,
        Self::BytesPerDelivery,
        Self::MessagesPerRead,
        Self::LatencyP50,
        Self::LatencyP99,
        Self::LatencyMax,
        Self::LatencyMean,
        Self::LatencySlowestSubscriber,
        Self::LatencyP99Ratio,
        Self::RssPerSubscriber,
        Self::RssPerSubscriberAfterLoad,
        Self::RssAddedPeak,
        Self::RssMax,
        Self::RssEnd,
        Self::CatchUps,
        Self::Resumes,
        Self::Seconds,
    ];

    /// The key in JSON, with its unit.
    pub fn key(self) -> &'static str {
        match self {
            Self::CpuPerDelivery => "cpu_us_per_delivery",
            Self::FloorCpuPerDelivery => "floor_cpu_us_per_delivery",
            Self::FloorShare => "floor_share",
            Self::CpuPerEvent => "cpu_us_per_event",
            Self::CpuPerEventAndWatcher => "cpu_us_per_event_and_watcher",
            Self::CpuPerClient => "cpu_ms_per_client",
            Self::DeliveriesPerSecond => "deliveries_per_second",
            Self::SlowestSubscriberShare => "slowest_subscriber_share",
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
            Self::RssAddedPeak => "rss_bytes_added_peak",
            Self::RssMax => "rss_bytes_max",
            Self::RssEnd => "rss_bytes_end",
            Self::CatchUps => "catch_ups",
            Self::Resumes => "resumes",
            Self::Seconds => "seconds",
        }
    }

    /// The column's header, and the digits after the point.
    pub fn column(self) -> (&'static str, usize) {
        match self {
            Self::CpuPerDelivery => ("µs/delivery", 2),
            Self::FloorCpuPerDelivery => ("floor", 2),
            Self::FloorShare => ("share", 2),
            Self::CpuPerEvent => ("µs/event", 1),
            Self::CpuPerEventAndWatcher => ("µs/event+watcher", 4),
            Self::CpuPerClient => ("CPU ms/client", 2),
            Self::DeliveriesPerSecond => ("deliveries/s", 0),
            Self::SlowestSubscriberShare => ("slowest", 3),
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
            Self::RssAddedPeak => ("added RSS B", 0),
            Self::RssMax => ("RSS B max", 0),
            Self::RssEnd => ("RSS B end", 0),
            Self::CatchUps => ("caught up", 0),
            Self::Resumes => ("resumed", 0),
            Self::Seconds => ("seconds", 2),
        }
    }
}

/// The figures of one run. What a scenario does not have is absent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Figures(BTreeMap<Figure, f64>);

impl Figures {
    /// Notes a figure; one that is no number (nothing was counted) is left out.
    pub(super) fn set(&mut self, figure: Figure, value: f64) {
        if value.is_finite() {
            self.0.insert(figure, value);
        }
    }

    /// The value of a figure.
    pub fn get(&self, figure: Figure) -> Option<f64> {
        self.0.get(&figure).copied()
    }

    /// Notes what the floor took, and what share that is of the server's own.
    pub(super) fn set_floor(&mut self, floor_micros: f64) {
        self.set(Figure::FloorCpuPerDelivery, floor_micros);
        if let Some(own) = self.get(Figure::CpuPerDelivery).filter(|own| *own > 0.0) {
            self.set(Figure::FloorShare, floor_micros / own);
        }
    }
}

/// The median of several runs and the range they lie in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The median; of an even number of runs the mean of the two in the middle.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

/// The spread of some values; `None` of none.
pub fn spread(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let (min, max) = (*sorted.first()?, *sorted.last()?);
    let middle = sorted.len() / 2;
    let median =
        if sorted.len().is_multiple_of(2) { f64::midpoint(sorted[middle - 1], sorted[middle]) } else { sorted[middle] };
    Some(Spread { median, min, max })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_the_middle_and_the_spread_the_range() {
        let of = |values: &[f64]| spread(values.iter().copied());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[3.0]), Some(Spread { median: 3.0, min: 3.0, max: 3.0 }));
        assert_eq!(of(&[9.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 9.0 }));
        assert_eq!(of(&[4.0, 1.0, 2.0, 9.0]), Some(Spread { median: 3.0, min: 1.0, max: 9.0 }));
    }

    #[test]
    fn what_is_no_number_is_absent_and_a_share_needs_both() {
        let mut figures = Figures::default();
        figures.set(Figure::BytesPerDelivery, f64::NAN);
        figures.set_floor(4.0);
        assert_eq!((figures.get(Figure::BytesPerDelivery), figures.get(Figure::FloorShare)), (None, None));
        figures.set(Figure::CpuPerDelivery, 8.0);
        figures.set_floor(4.0);
        assert_eq!(figures.get(Figure::FloorShare), Some(0.5));
    }

    #[test]
    fn every_figure_is_listed_once_and_has_a_key_of_its_own() {
        let keys: std::collections::HashSet<_> = Figure::ALL.iter().map(|figure| figure.key()).collect();
        assert_eq!(keys.len(), Figure::ALL.len());
    }
}
