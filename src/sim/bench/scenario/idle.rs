//! `idle`: the memory that a subscriber costs while nothing happens, and what a time of load leaves behind.

use std::sync::Arc;

use super::{Sample, Variant};
use crate::sim::bench::{
    BenchError,
    board::Board,
    figures::{Figure, Figures},
    load::{Load, Trigger, drive},
    source::Source,
    stage::{READY_TIMEOUT, Selection, Stage, settled},
};

/// Changes per burst of the load.
const BATCH: usize = 32;

pub(super) async fn run(stage: &Stage<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let subscribers = stage.options.subscribers;
    let mut server = stage.server(source).await?;
    let alone = settled(&server.meter).await?;
    let board = Arc::new(Board::new(subscribers, true));
    let _receivers = stage.subscribe(&server, source, &board, Some(server.version(source)), |_| Selection::default());
    board.all_ready(READY_TIMEOUT).await?;
    let idle = settled(&server.meter).await?;
    let (load, each) = (Load::Closed { batch: BATCH }, subscribers as u64);
    drive(load, Trigger::Source(source), &mut server.meter, &board, each, stage.options.duration).await?;
    let after = settled(&server.meter).await?;
    let each = |bytes: u64| bytes.saturating_sub(alone) as f64 / subscribers as f64;
    let mut figures = Figures::default();
    figures.set(Figure::RssPerSubscriber, each(idle));
    figures.set(Figure::RssPerSubscriberAfterLoad, each(after));
    Ok(vec![(Variant { name: "", subscribers, batch: None }, figures)])
}
