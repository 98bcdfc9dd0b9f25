//! `snapshot`: the initial state, for the first client, and for many at once.

use std::sync::Arc;

use super::{Sample, Variant, whole::Whole};
use crate::{
    BenchError,
    board::Board,
    figures::{Figure, Figures},
    source::Source,
    stage::{READY_TIMEOUT, Selection, Server, Stage, whole_bytes},
};

pub(super) async fn run(stage: &Stage<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let clients = stage.options.clients;
    let mut samples = Vec::new();
    {
        let mut server = stage.server(source).await?;
        samples
            .push((Variant { name: "first", subscribers: 1, batch: None }, once(stage, source, &mut server, 1).await?));
        let figures = once(stage, source, &mut server, clients).await?;
        samples.push((Variant { name: "at once", subscribers: clients, batch: None }, figures));
    }
    for (variant, figures) in &mut samples {
        let objects = source.objects() as u64;
        let bytes = whole_bytes(figures.get(Figure::BytesPerDelivery).unwrap_or(1.0));
        let (_floor, mut meter, board, start) = stage.floor(variant.subscribers, bytes, objects).await?;
        let before = meter.cpu_nanos()?;
        let deliveries = objects * variant.subscribers as u64;
        board.expect(deliveries);
        let _receivers = start();
        board.all_received(READY_TIMEOUT).await?;
        figures.set_floor((meter.cpu_nanos()? - before) as f64 / 1e3 / deliveries as f64);
    }
    Ok(samples)
}

/// So many clients at once, from their connection to the end of their snapshot.
async fn once(
    stage: &Stage<'_>,
    source: &mut Source,
    server: &mut Server,
    clients: usize,
) -> Result<Figures, BenchError> {
    let board = Arc::new(Board::new(clients, false));
    let resident = server.meter.resident_bytes()?;
    let whole = Whole::begin(&mut server.meter, resident)?;
    let receivers = stage.subscribe(server, source, &board, None, |_| Selection::default());
    match stage.options.rate {
        None => board.all_ready(READY_TIMEOUT).await?,
        Some(rate) => tokio::select! {
            result = board.all_ready(READY_TIMEOUT) => result?,
            result = churn(source, &board, rate) => result?,
        },
    }
    let figures = whole.end(&mut server.meter, clients, source.objects() * clients, || board.counts().bytes)?;
    drop(receivers);
    Ok(figures)
}

/// Changes at a rate while the snapshot is sent. Ends only with an error.
async fn churn(source: &mut Source, board: &Board, rate: u32) -> Result<(), BenchError> {
    let mut ticks = tokio::time::interval(std::time::Duration::from_secs(1) / rate);
    loop {
        ticks.tick().await;
        source.change(1, &board.times).await?;
    }
}
