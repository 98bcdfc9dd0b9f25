//! `fanout` and `paced`: every subscriber watches every pod, with changes at full speed and at a
//! fixed rate.

use std::sync::Arc;

use super::{Sample, Variant};
use crate::{
    BenchError,
    counters::Counters,
    load::{Load, Trigger, drive},
    server_process::{READY_TIMEOUT, Run, Selection},
    source::Source,
};

pub(super) async fn closed_loop(run: &Run<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let loads = run.options.batches.iter().map(|batch| Load::Closed { batch: *batch });
    measure(run, source, loads.collect()).await
}

pub(super) async fn paced(run: &Run<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    measure(run, source, vec![Load::Paced { rate: run.options.paced_rate() }]).await
}

async fn measure(run: &Run<'_>, source: &mut Source, loads: Vec<Load>) -> Result<Vec<Sample>, BenchError> {
    let subscribers = run.options.subscribers;
    let mut measured = Vec::with_capacity(loads.len());
    {
        let mut server = run.start_server(source).await?;
        let mut writes = Vec::with_capacity(loads.len());
        for load in &loads {
            writes.push(run.write_cost(*load, source, &mut server).await?);
        }
        let counters = Arc::new(Counters::new(subscribers, true));
        let _receivers =
            run.subscribe(&server, source, &counters, Some(server.version(source)), |_| Selection::default());
        counters.all_ready(READY_TIMEOUT).await?;
        for (load, writes) in loads.into_iter().zip(writes) {
            let each = subscribers as u64;
            for duration in [run.options.warm_up(), run.options.duration] {
                let mut load_result =
                    drive(load, Trigger::Source(source), &mut server.meter, &counters, each, duration).await?;
                load_result.without_writes(writes);
                measured.retain(|(measured_load, _)| *measured_load != load);
                measured.push((load, load_result));
            }
        }
    }
    let mut samples = Vec::with_capacity(measured.len());
    for (load, load_result) in measured {
        let mut figures = load_result.figures();
        run.measure_floor(load, subscribers, &load_result, &mut figures).await?;
        let batch = match load {
            Load::Closed { batch } => Some(batch),
            Load::Paced { .. } => None,
        };
        samples.push((Variant { name: "", subscribers, batch }, figures));
    }
    Ok(samples)
}
