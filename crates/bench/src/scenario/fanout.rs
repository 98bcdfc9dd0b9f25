//! `fanout` and `paced`: every subscriber watches every pod, at full speed and at a rate.

use std::sync::Arc;

use super::{Sample, Variant};
use crate::{
    BenchError,
    board::Board,
    load::{Load, Trigger, drive},
    source::Source,
    stage::{READY_TIMEOUT, Selection, Stage},
};

pub(super) async fn closed(stage: &Stage<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let loads = stage.options.batches.iter().map(|batch| Load::Closed { batch: *batch });
    run(stage, source, loads.collect()).await
}

pub(super) async fn paced(stage: &Stage<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    run(stage, source, vec![Load::Paced { rate: stage.options.rate_of_paced() }]).await
}

async fn run(stage: &Stage<'_>, source: &mut Source, loads: Vec<Load>) -> Result<Vec<Sample>, BenchError> {
    let subscribers = stage.options.subscribers;
    let mut measured = Vec::with_capacity(loads.len());
    {
        let mut server = stage.server(source).await?;
        let mut writes = Vec::with_capacity(loads.len());
        for load in &loads {
            writes.push(stage.write_cost(*load, source, &mut server).await?);
        }
        let board = Arc::new(Board::new(subscribers, true));
        let _receivers =
            stage.subscribe(&server, source, &board, Some(server.version(source)), |_| Selection::default());
        board.all_ready(READY_TIMEOUT).await?;
        for (load, writes) in loads.into_iter().zip(writes) {
            let each = subscribers as u64;
            for duration in [stage.options.warm_up(), stage.options.duration] {
                let mut driven =
                    drive(load, Trigger::Source(source), &mut server.meter, &board, each, duration).await?;
                driven.without_writes(writes);
                measured.retain(|(of, _)| *of != load);
                measured.push((load, driven));
            }
        }
    }
    let mut samples = Vec::with_capacity(measured.len());
    for (load, driven) in measured {
        let mut figures = driven.figures();
        stage.floor_driven(load, subscribers, &driven, &mut figures).await?;
        let batch = match load {
            Load::Closed { batch } => Some(batch),
            Load::Paced { .. } => None,
        };
        samples.push((Variant { name: "", subscribers, batch }, figures));
    }
    Ok(samples)
}
