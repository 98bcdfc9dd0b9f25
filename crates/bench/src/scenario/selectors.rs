//! `selectors`: what an event costs where many watch and few want it: watchers whose selectors do not match, and views by node.

use std::sync::Arc;

use super::{APPS, Sample, Variant};
use crate::{
    BenchError,
    board::Board,
    figures::{Figure, Figures},
    load::{Load, Trigger, drive},
    source::Source,
    stage::{READY_TIMEOUT, Selection, Stage},
};

/// Changes per burst. The waking of the one that receives is to be small beside the selection.
const BATCH: usize = 32;
/// Of so many watchers one has a selector without an equality term.
const SET_BASED_EACH: usize = 10;

/// The cost of an event for one that receives it, without and with so many beside it whose selectors do not match.
pub(super) async fn without_match(stage: &Stage<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let subscribers = stage.options.subscribers;
    let mut server = stage.server(source).await?;
    let load = Load::Closed { batch: BATCH };
    let writes = stage.write_cost(load, source, &mut server).await?;
    let witness = Arc::new(Board::new(1, true));
    let _stays = stage.subscribe(&server, source, &witness, Some(server.version(source)), |_| Selection::default());
    witness.all_ready(READY_TIMEOUT).await?;
    let (warm_up, duration) = (stage.options.warm_up(), stage.options.duration);
    drive(load, Trigger::Source(source), &mut server.meter, &witness, 1, warm_up).await?;
    let alone = drive(load, Trigger::Source(source), &mut server.meter, &witness, 1, duration).await?;

    let board = Arc::new(Board::new(subscribers, false));
    let _others = stage.subscribe(&server, source, &board, Some(server.version(source)), mismatch);
    board.all_ready(READY_TIMEOUT).await?;
    drive(load, Trigger::Source(source), &mut server.meter, &witness, 1, warm_up).await?;
    let among = drive(load, Trigger::Source(source), &mut server.meter, &witness, 1, duration).await?;
    if board.counts().received > 0 {
        return Err(BenchError::Subscriber("a selector matched that must not".to_owned()));
    }
    let mut figures = Figures::default();
    figures.set(Figure::CpuPerEvent, among.cpu_micros_per_event() - writes);
    let added = among.cpu_micros_per_event() - alone.cpu_micros_per_event();
    figures.set(Figure::CpuPerEventAndWatcher, added / subscribers as f64);
    Ok(vec![(Variant { name: "no match", subscribers, batch: Some(BATCH) }, figures)])
}

/// The cost of an event that one of so many views by `spec.nodeName` receives.
pub(super) async fn by_node(stage: &Stage<'_>, source: &mut Source, views: usize) -> Result<Vec<Sample>, BenchError> {
    let mut server = stage.server(source).await?;
    let load = Load::Closed { batch: BATCH };
    let writes = stage.write_cost(load, source, &mut server).await?;
    let board = Arc::new(Board::new(views, false));
    let node = |view| Selection { fields: format!("spec.nodeName=node-{view}"), ..Selection::default() };
    let _receivers = stage.subscribe(&server, source, &board, Some(server.version(source)), node);
    board.all_ready(READY_TIMEOUT).await?;
    drive(load, Trigger::Source(source), &mut server.meter, &board, 1, stage.options.warm_up()).await?;
    let mut driven = drive(load, Trigger::Source(source), &mut server.meter, &board, 1, stage.options.duration).await?;
    driven.without_writes(writes);
    let mut figures = Figures::default();
    figures.set(Figure::CpuPerEvent, driven.cpu_micros_per_event());
    figures.set(Figure::CpuPerDelivery, driven.cpu_micros());
    figures.set(Figure::BytesPerDelivery, driven.bytes());
    Ok(vec![(Variant { name: "views by node", subscribers: views, batch: Some(BATCH) }, figures)])
}

/// A selector that no pod of the workload matches: nine in ten by equality, the others set-based or negative.
fn mismatch(watcher: usize) -> Selection {
    let apps = || (0..APPS).map(|app| format!("web-{app}")).collect::<Vec<_>>().join(",");
    let labels = match (watcher % SET_BASED_EACH, watcher / SET_BASED_EACH % 3) {
        (0, 0) => format!("app notin ({},other-{watcher})", apps()),
        (0, 1) => format!("!app,!app-{watcher}"),
        (0, _) => format!("tier in (none-{watcher},other-{watcher})"),
        _ => format!("app=none-{watcher}"),
    };
    Selection { labels, ..Selection::default() }
}
