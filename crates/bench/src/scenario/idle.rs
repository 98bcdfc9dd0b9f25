//! `idle`: the memory that a subscriber costs while nothing happens, and what a time of load leaves behind.

use std::{sync::Arc, time::Duration};

use super::{Sample, Variant};
use crate::{
    BenchError,
    board::Board,
    figures::{Figure, Figures},
    load::{Load, Trigger, drive},
    source::Source,
    stage::{READY_TIMEOUT, Selection, Server, Stage, settled},
};

/// Changes per burst of the load.
const BATCH: usize = 32;
/// Times of load, at most, until the server's own history is full.
const FILLS_MAX: usize = 10;

pub(super) async fn run(stage: &Stage<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let subscribers = stage.options.subscribers;
    let mut server = stage.server(source).await?;
    let load = Load::Closed { batch: BATCH };
    let alone = filled(load, source, &mut server, stage.options.duration).await?;
    let board = Arc::new(Board::new(subscribers, true));
    let _receivers = stage.subscribe(&server, source, &board, Some(server.version(source)), |_| Selection::default());
    board.all_ready(READY_TIMEOUT).await?;
    let idle = settled(&server.meter).await?;
    let each = subscribers as u64;
    drive(load, Trigger::Source(source), &mut server.meter, &board, each, stage.options.duration).await?;
    let after = settled(&server.meter).await?;
    let each = |bytes: u64| bytes.saturating_sub(alone) as f64 / subscribers as f64;
    let mut figures = Figures::default();
    figures.set(Figure::RssPerSubscriber, each(idle));
    figures.set(Figure::RssPerSubscriberAfterLoad, each(after));
    Ok(vec![(Variant { name: "", subscribers, batch: None }, figures)])
}

/// Makes changes that nobody watches until the server's memory no longer grows by them: what it keeps of the past is not its
/// subscribers'. Its resident bytes then.
async fn filled(load: Load, source: &mut Source, server: &mut Server, time: Duration) -> Result<u64, BenchError> {
    let nobody = Board::new(0, false);
    let mut resident = settled(&server.meter).await?;
    for _ in 0..FILLS_MAX {
        drive(load, Trigger::Source(source), &mut server.meter, &nobody, 0, time).await?;
        let before = std::mem::replace(&mut resident, settled(&server.meter).await?);
        if resident <= before + before / 100 {
            break;
        }
    }
    Ok(resident)
}
