//! How changes are driven: at full speed, burst by burst, each once everyone has the last one; or at a rate, whoever has what.
//!
//! The same drives the server, by changes upstream, and the floor, by orders for as many bytes.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::{
    BenchError,
    board::{Board, Counts, PerStream},
    figures::{Figure, Figures},
    floor::Floor,
    latency::Ages,
    process::Meter,
    source::Source,
};

/// For one burst, or for what is still under way at the end, to reach everyone.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(60);

/// How changes come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Load {
    /// So many in one burst; the next once every subscriber has all.
    Closed { batch: usize },
    /// So many per second.
    Paced { rate: u32 },
}

/// What a change is made by.
pub(super) enum Trigger<'a> {
    /// A change upstream.
    Source(&'a mut Source),
    /// So many bytes more to each connection of the floor.
    Floor(&'a mut Floor, u64),
}

impl Trigger<'_> {
    async fn fire(&mut self, count: usize, board: &Board) -> Result<(), BenchError> {
        match self {
            Self::Source(source) => source.change(count, &board.times).await,
            Self::Floor(floor, bytes) => {
                (0..count).for_each(|_| board.times.made());
                Ok(floor.send(*bytes * count as u64).await?)
            }
        }
    }
}

/// What a time of load has cost, and what it has brought.
pub(super) struct Driven {
    pub(super) events: u64,
    cpu_nanos: f64,
    counts: Counts,
    elapsed: Duration,
    ages: Ages,
    slowest_share: f64,
    mean_age_millis: f64,
    slowest_age_millis: f64,
}

/// Drives a load for a time and until everything has arrived. `deliveries` is how many subscribers receive each change.
pub(super) async fn drive(
    load: Load,
    mut trigger: Trigger<'_>,
    meter: &mut Meter,
    board: &Board,
    deliveries: u64,
    duration: Duration,
) -> Result<Driven, BenchError> {
    board.ages.take();
    let (before, streams, cpu) = (board.counts(), board.per_stream(), meter.cpu_nanos()?);
    let start = Instant::now();
    let end = start + duration;
    let (mut events, mut expected, mut at_end) = (0_u64, before.received, None::<PerStream>);
    match load {
        Load::Closed { batch } => {
            while at_end.is_none() {
                events += batch as u64;
                expected += batch as u64 * deliveries;
                board.expect(expected);
                trigger.fire(batch, board).await?;
                let mut received = std::pin::pin!(board.all_received(DELIVERY_TIMEOUT));
                tokio::select! {
                    biased;
                    // Looked at before the deliveries: those of slow writes are there at once, every time.
                    () = sleep_until(end) => {
                        at_end = Some(board.per_stream());
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
                board.expect(expected);
                trigger.fire(1, board).await?;
            }
            sleep_until(end).await;
            at_end = Some(board.per_stream());
            board.all_received(DELIVERY_TIMEOUT).await?;
        }
    }
    let elapsed = start.elapsed();
    let (after, cpu_nanos) = (board.counts(), (meter.cpu_nanos()? - cpu) as f64);
    let (mean_age_millis, slowest_age_millis) = board.per_stream().ages(&streams);
    Ok(Driven {
        events,
        cpu_nanos,
        counts: Counts {
            received: after.received - before.received,
            objects: after.objects - before.objects,
            bytes: after.bytes - before.bytes,
            reads: after.reads - before.reads,
        },
        elapsed,
        ages: board.ages.take(),
        slowest_share: at_end.map_or(f64::NAN, |at_end| at_end.slowest_share(&streams)),
        mean_age_millis,
        slowest_age_millis,
    })
}

impl Driven {
    /// Takes off what the changes themselves cost the server, in microseconds each. Where the deliveries cost less than the noise of that,
    /// what remains may be below zero, and says so.
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

    /// Bytes on the wire per delivery.
    pub(super) fn bytes(&self) -> f64 {
        self.counts.bytes as f64 / self.counts.received as f64
    }

    /// All that a load of changes that everyone receives tells.
    pub(super) fn figures(&self) -> Figures {
        let mut figures = Figures::default();
        figures.set(Figure::CpuPerDelivery, self.cpu_micros());
        figures.set(Figure::DeliveriesPerSecond, self.counts.received as f64 / self.elapsed.as_secs_f64());
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
