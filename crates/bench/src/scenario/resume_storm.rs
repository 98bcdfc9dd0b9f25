//! `resume-storm`: everyone leaves, changes go on, and everyone comes back at once, as after a network's failure.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Sample, Variant};
use crate::{
    BenchError,
    board::Board,
    figures::{Figure, Figures},
    process::Meter,
    receivers::Receivers,
    source::Source,
    stage::{READY_TIMEOUT, Selection, Stage, whole_bytes},
};

pub(super) async fn run(stage: &Stage<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let (subscribers, missed) = (stage.options.subscribers, stage.options.missed);
    let deliveries = (subscribers * missed) as u64;
    let mut figures = Figures::default();
    {
        let server = stage.server(source).await?;
        let version = server.version(source);
        let board = Arc::new(Board::new(subscribers, false));
        let present = stage.subscribe(&server, source, &board, Some(version), |_| Selection::default());
        board.all_ready(READY_TIMEOUT).await?;
        drop(present);
        // One stays, to tell when the server has all.
        let witness = Arc::new(Board::new(1, false));
        let stayed = stage.subscribe(&server, source, &witness, Some(version), |_| Selection::default());
        witness.all_ready(READY_TIMEOUT).await?;
        witness.expect(missed as u64);
        source.change(missed, &witness.times).await?;
        witness.all_received(READY_TIMEOUT).await?;
        drop(stayed);

        let board = Arc::new(Board::new(subscribers, false));
        let start = || stage.subscribe(&server, source, &board, Some(version), |_| Selection::default());
        let mut meter = server.meter_again();
        let (cpu, elapsed) = storm(&mut meter, &board, deliveries, start).await?;
        figures.set(Figure::CpuPerDelivery, cpu as f64 / 1e3 / deliveries as f64);
        figures.set(Figure::CpuPerClient, cpu as f64 / 1e6 / subscribers as f64);
        figures.set(Figure::DeliveriesPerSecond, deliveries as f64 / elapsed.as_secs_f64());
        figures.set(Figure::BytesPerDelivery, board.counts().bytes as f64 / deliveries as f64);
        figures.set(Figure::Seconds, elapsed.as_secs_f64());
    }
    let bytes = whole_bytes(figures.get(Figure::BytesPerDelivery).unwrap_or(1.0));
    let (_floor, mut meter, board, start) = stage.floor(subscribers, bytes, missed as u64).await?;
    let (cpu, _) = storm(&mut meter, &board, deliveries, start).await?;
    figures.set_floor(cpu as f64 / 1e3 / deliveries as f64);
    Ok(vec![(Variant { name: "", subscribers, batch: Some(missed) }, figures)])
}

/// From the first connection until everyone has everything: CPU time in nanoseconds, and time.
async fn storm(
    meter: &mut Meter,
    board: &Board,
    deliveries: u64,
    start: impl FnOnce() -> Receivers,
) -> Result<(u64, Duration), BenchError> {
    board.expect(deliveries);
    let (cpu, began) = (meter.cpu_nanos()?, Instant::now());
    let _receivers = start();
    board.all_received(READY_TIMEOUT).await?;
    Ok((meter.cpu_nanos()? - cpu, began.elapsed()))
}
