//! `snapshot`: the initial state, for one client and for many at once.

use std::sync::Arc;

use super::{Sample, Variant, full_state::FullStateCost};
use crate::{
    BenchError,
    counters::Counters,
    figures::{Figure, Figures},
    server_process::{READY_TIMEOUT, Run, Selection, Server, floor_message_bytes},
    source::Source,
};

pub(super) async fn measure(run: &Run<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let clients = run.options.clients;
    let mut samples = Vec::new();
    {
        let mut server = run.start_server(source).await?;
        samples.push((
            Variant { name: "first", subscribers: 1, batch: None },
            measure_clients(run, source, &mut server, 1).await?,
        ));
        let figures = measure_clients(run, source, &mut server, clients).await?;
        samples.push((Variant { name: "at once", subscribers: clients, batch: None }, figures));
    }
    for (variant, figures) in &mut samples {
        let objects = source.objects() as u64;
        let bytes = floor_message_bytes(figures.get(Figure::BytesPerDelivery).unwrap_or(1.0));
        let (_floor, mut meter, counters, start) = run.start_floor(variant.subscribers, bytes, objects).await?;
        let before = meter.cpu_nanos()?;
        let deliveries = objects * variant.subscribers as u64;
        counters.expect_received(deliveries);
        let _receivers = start();
        counters.all_received(READY_TIMEOUT).await?;
        figures.set_floor((meter.cpu_nanos()? - before) as f64 / 1e3 / deliveries as f64);
    }
    Ok(samples)
}

/// Measures `clients` concurrent clients from connecting to the end of their snapshots.
async fn measure_clients(
    run: &Run<'_>,
    source: &mut Source,
    server: &mut Server,
    clients: usize,
) -> Result<Figures, BenchError> {
    let counters = Arc::new(Counters::new(clients, false));
    let resident = server.meter.resident_bytes()?;
    let cost = FullStateCost::start(&mut server.meter, resident)?;
    let receivers = run.subscribe(server, source, &counters, None, |_| Selection::default());
    match run.options.rate {
        None => counters.all_ready(READY_TIMEOUT).await?,
        Some(rate) => tokio::select! {
            result = counters.all_ready(READY_TIMEOUT) => result?,
            result = churn(source, &counters, rate) => result?,
        },
    }
    let figures = cost.finish(&mut server.meter, clients, source.objects() * clients, || counters.counts())?;
    drop(receivers);
    Ok(figures)
}

/// Makes changes at a fixed rate while the snapshots are sent. Returns only on an error.
async fn churn(source: &mut Source, counters: &Counters, rate: u32) -> Result<(), BenchError> {
    let mut ticks = tokio::time::interval(std::time::Duration::from_secs(1) / rate);
    loop {
        ticks.tick().await;
        source.make_changes(1, &counters.times).await?;
    }
}
