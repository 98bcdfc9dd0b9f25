//! `resume-storm`: all subscribers disconnect, changes continue, and all reconnect at once, as
//! after a network failure.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Sample, Variant};
use crate::{
    BenchError,
    counters::Counters,
    figures::{Figure, Figures},
    process::Meter,
    receivers::Receivers,
    server_process::{READY_TIMEOUT, Run, Selection, floor_message_bytes},
    source::Source,
};

pub(super) async fn measure(run: &Run<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let subscribers = run.options.subscribers;
    let missed = run.options.missed;
    let deliveries = (subscribers * missed) as u64;
    let mut figures = Figures::default();
    {
        let server = run.start_server(source).await?;
        let version = server.version(source);
        let counters = Arc::new(Counters::new(subscribers, false));
        let subscribed = run.subscribe(&server, source, &counters, Some(version), |_| Selection::default());
        counters.all_ready(READY_TIMEOUT).await?;
        drop(subscribed);
        // One subscriber stays connected, to detect when the server has received all changes.
        let observer = Arc::new(Counters::new(1, false));
        let observing = run.subscribe(&server, source, &observer, Some(version), |_| Selection::default());
        observer.all_ready(READY_TIMEOUT).await?;
        observer.expect_received(missed as u64);
        source.make_changes(missed, &observer.times).await?;
        observer.all_received(READY_TIMEOUT).await?;
        drop(observing);

        let counters = Arc::new(Counters::new(subscribers, false));
        let start = || run.subscribe(&server, source, &counters, Some(version), |_| Selection::default());
        let mut meter = server.new_meter();
        let (cpu, elapsed) = connect_all(&mut meter, &counters, deliveries, start).await?;
        figures.set(Figure::CpuPerDelivery, cpu as f64 / 1e3 / deliveries as f64);
        figures.set(Figure::CpuPerClient, cpu as f64 / 1e6 / subscribers as f64);
        figures.set(Figure::DeliveriesPerSecond, deliveries as f64 / elapsed.as_secs_f64());
        let counts = counters.counts();
        figures.set(Figure::BodyBytesPerDelivery, counts.body_bytes as f64 / deliveries as f64);
        figures.set(Figure::BytesPerDelivery, counts.bytes as f64 / deliveries as f64);
        figures.set(Figure::Seconds, elapsed.as_secs_f64());
    }
    let bytes = floor_message_bytes(figures.get(Figure::BytesPerDelivery).unwrap_or(1.0));
    let (_floor, mut meter, counters, start) = run.start_floor(subscribers, bytes, missed as u64).await?;
    let (cpu, _) = connect_all(&mut meter, &counters, deliveries, start).await?;
    figures.set_floor(cpu as f64 / 1e3 / deliveries as f64);
    Ok(vec![(Variant { name: "", subscribers, batch: Some(missed) }, figures)])
}

/// Connects all subscribers and waits for `deliveries` events. Returns the CPU time in nanoseconds
/// and the elapsed time.
async fn connect_all(
    meter: &mut Meter,
    counters: &Counters,
    deliveries: u64,
    start: impl FnOnce() -> Receivers,
) -> Result<(u64, Duration), BenchError> {
    counters.expect_received(deliveries);
    let cpu = meter.cpu_nanos()?;
    let began = Instant::now();
    let _receivers = start();
    counters.all_received(READY_TIMEOUT).await?;
    Ok((meter.cpu_nanos()? - cpu, began.elapsed()))
}
