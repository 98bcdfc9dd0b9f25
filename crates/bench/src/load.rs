//! Load generation: in a closed loop, where each burst starts once all subscribers have received
//! the previous one, or at a fixed rate.
//!
//! The same code drives the server, through changes upstream, and the floor, through orders for the
//! same number of bytes.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::{
    BenchError,
    counters::{Counters, Counts, PerStream},
    figures::{Figure, Figures},
    floor::Floor,
    latency::Ages,
    process::Meter,
    source::Source,
};

/// Time limit for a burst, or for the deliveries outstanding at the end, to reach all subscribers.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(60);

/// The kind of load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Load {
    /// Bursts of `batch` changes. The next burst starts once every subscriber has received the
    /// last.
    Closed { batch: usize },
    /// A fixed number of changes per second.
    Paced { rate: u32 },
}

/// The source of the deliveries.
pub(super) enum Trigger<'a> {
    /// Changes made upstream.
    Source(&'a mut Source),
    /// An order to send this many more bytes on each connection of the floor.
    Floor(&'a mut Floor, u64),
}

impl Trigger<'_> {
    async fn fire(&mut self, count: usize, counters: &Counters) -> Result<(), BenchError> {
        match self {
            Self::Source(source) => source.make_changes(count, &counters.times).await,
            Self::Floor(floor, bytes) => {
                for _ in 0..count {
                    counters.times.record_change();
                }
                Ok(floor.send(*bytes * count as u64).await?)
            }
        }
    }
}

/// The cost and the deliveries of one load.
pub(super) struct LoadResult {
    pub(super) events: u64,
    cpu_nanos: f64,
    counts: Counts,
    elapsed: Duration,
    ages: Ages,
    slowest_share: f64,
    mean_age_millis: f64,
    slowest_age_millis: f64,
}

/// Generates a load for `duration` and then waits for the outstanding deliveries. `deliveries` is
/// the number of subscribers that receive each change.
pub(super) async fn drive(
    load: Load,
    mut trigger: Trigger<'_>,
    meter: &mut Meter,
    counters: &Counters,
    deliveries: u64,
    duration: Duration,
) -> Result<LoadResult, BenchError> {
    counters.ages.take();
    let before = counters.counts();
    let streams = counters.per_stream();
    let cpu = meter.cpu_nanos()?;
    let start = Instant::now();
    let end = start + duration;
    let mut events = 0_u64;
    let mut expected = before.received;
    let mut at_end = None::<PerStream>;
    match load {
        Load::Closed { batch } => {
            while at_end.is_none() {
                events += batch as u64;
                expected += batch as u64 * deliveries;
                counters.expect_received(expected);
                trigger.fire(batch, counters).await?;
                let mut received = std::pin::pin!(counters.all_received(DELIVERY_TIMEOUT));
                tokio::select! {
                    biased;
                    // Poll the timer first. With slow writes the deliveries are always complete
                    // already, so the other branch would win every time and the load would never
                    // end.
                    () = sleep_until(end) => {
                        at_end = Some(counters.per_stream());
                        received.await?;
                    }
                    result = &mut received => result?,
                }
            }
        }
        Load::Paced { rate } => {
            let period = Duration::from_secs(1) / rate;
            loop {
                let due = start + period * u32::try_from(events).unwrap_or(u32::MAX);
                if due >= end {
                    break;
                }
                sleep_until(due).await;
                events += 1;
                expected += deliveries;
                counters.expect_received(expected);
                trigger.fire(1, counters).await?;
            }
            sleep_until(end).await;
            at_end = Some(counters.per_stream());
            counters.all_received(DELIVERY_TIMEOUT).await?;
        }
    }
    let elapsed = start.elapsed();
    let after = counters.counts();
    let cpu_nanos = (meter.cpu_nanos()? - cpu) as f64;
    let (mean_age_millis, slowest_age_millis) = counters.per_stream().ages(&streams);
    Ok(LoadResult {
        events,
        cpu_nanos,
        counts: Counts {
            received: after.received - before.received,
            objects: after.objects - before.objects,
            bytes: after.bytes - before.bytes,
            body_bytes: after.body_bytes - before.body_bytes,
            reads: after.reads - before.reads,
        },
        elapsed,
        ages: counters.ages.take(),
        slowest_share: at_end.map_or(f64::NAN, |at_end| at_end.slowest_share(&streams)),
        mean_age_millis,
        slowest_age_millis,
    })
}

impl LoadResult {
    /// Subtracts the cost of the writes themselves, in microseconds per change. The result may be
    /// negative if the deliveries cost less than the noise of that measurement.
    pub(super) fn without_writes(&mut self, cpu_micros_per_event: f64) {
        self.cpu_nanos -= cpu_micros_per_event * 1e3 * self.events as f64;
    }

    /// CPU time per delivery, in microseconds.
    pub(super) fn cpu_micros(&self) -> f64 {
        self.cpu_nanos / 1e3 / self.counts.received as f64
    }

    /// CPU time per change, in microseconds.
    pub(super) fn cpu_micros_per_event(&self) -> f64 {
        self.cpu_nanos / 1e3 / self.events as f64
    }

    /// Bytes read from the sockets, per delivery.
    pub(super) fn bytes(&self) -> f64 {
        self.counts.bytes as f64 / self.counts.received as f64
    }

    /// Bytes of response bodies, per delivery.
    pub(super) fn body_bytes(&self) -> f64 {
        self.counts.body_bytes as f64 / self.counts.received as f64
    }

    /// The figures of a load where every subscriber receives every change.
    pub(super) fn figures(&self) -> Figures {
        let mut figures = Figures::default();
        figures.set(Figure::CpuPerDelivery, self.cpu_micros());
        figures.set(Figure::DeliveriesPerSecond, self.counts.received as f64 / self.elapsed.as_secs_f64());
        figures.set(Figure::BodyBytesPerDelivery, self.body_bytes());
        figures.set(Figure::BytesPerDelivery, self.bytes());
        figures.set(Figure::MessagesPerRead, self.counts.received as f64 / self.counts.reads as f64);
        figures.set(Figure::SlowestSubscriberShare, self.slowest_share);
        let millis = |age: Option<Duration>| age.map_or(f64::NAN, |age| age.as_secs_f64() * 1e3);
        figures.set(Figure::LatencyP50, millis(self.ages.percentile(50)));
        figures.set(Figure::LatencyP99, millis(self.ages.percentile(99)));
        figures.set(Figure::LatencyMax, millis(self.ages.max()));
        if self.ages.max().is_some() {
            figures.set(Figure::LatencyMean, self.mean_age_millis);
            figures.set(Figure::LatencySlowestSubscriber, self.slowest_age_millis);
        }
        figures
    }
}
