//! `selectors`: the cost of an event that few of many watchers match: with watchers whose selectors
//! do not match, and with one view per node.

use std::sync::Arc;

use super::{Sample, Variant};
use crate::{
    BenchError,
    counters::Counters,
    figures::{Figure, Figures},
    load::{Load, Trigger, drive},
    server_process::{READY_TIMEOUT, Run, Selection},
    source::Source,
};

/// Number of values of the label `app`.
pub(super) const APPS: usize = 20;

/// Changes per burst: enough that waking the receiving subscriber costs little compared to
/// evaluating the selectors.
const BATCH: usize = 32;
/// One watcher in this many has a selector without an equality term.
const SET_BASED_INTERVAL: usize = 10;

/// The cost of an event that one subscriber receives, without and with many other subscribers whose
/// selectors do not match.
pub(super) async fn without_match(run: &Run<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let subscribers = run.options.subscribers;
    let mut server = run.start_server(source).await?;
    let load = Load::Closed { batch: BATCH };
    let writes = run.write_cost(load, source, &mut server).await?;
    let observer = Arc::new(Counters::new(1, true));
    let _observing = run.subscribe(&server, source, &observer, Some(server.version(source)), |_| Selection::default());
    observer.all_ready(READY_TIMEOUT).await?;
    let warm_up = run.options.warm_up();
    let duration = run.options.duration;
    drive(load, Trigger::Source(source), &mut server.meter, &observer, 1, warm_up).await?;
    let alone = drive(load, Trigger::Source(source), &mut server.meter, &observer, 1, duration).await?;

    let counters = Arc::new(Counters::new(subscribers, false));
    let _others = run.subscribe(&server, source, &counters, Some(server.version(source)), selection_without_match);
    counters.all_ready(READY_TIMEOUT).await?;
    drive(load, Trigger::Source(source), &mut server.meter, &observer, 1, warm_up).await?;
    let among = drive(load, Trigger::Source(source), &mut server.meter, &observer, 1, duration).await?;
    if counters.counts().received > 0 {
        return Err(BenchError::Subscriber("a selector that must not match has matched".to_owned()));
    }
    let mut figures = Figures::default();
    figures.set(Figure::CpuPerEvent, among.cpu_micros_per_event() - writes);
    let added = among.cpu_micros_per_event() - alone.cpu_micros_per_event();
    figures.set(Figure::CpuPerEventAndWatcher, added / subscribers as f64);
    Ok(vec![(Variant { name: "no match", subscribers, batch: Some(BATCH) }, figures)])
}

/// The cost of an event that one of many views by `spec.nodeName` receives.
pub(super) async fn by_node(run: &Run<'_>, source: &mut Source, views: usize) -> Result<Vec<Sample>, BenchError> {
    let mut server = run.start_server(source).await?;
    let load = Load::Closed { batch: BATCH };
    let writes = run.write_cost(load, source, &mut server).await?;
    let counters = Arc::new(Counters::new(views, false));
    let node = |view| Selection { fields: format!("spec.nodeName=node-{view}"), ..Selection::default() };
    let _receivers = run.subscribe(&server, source, &counters, Some(server.version(source)), node);
    counters.all_ready(READY_TIMEOUT).await?;
    drive(load, Trigger::Source(source), &mut server.meter, &counters, 1, run.options.warm_up()).await?;
    let mut load_result =
        drive(load, Trigger::Source(source), &mut server.meter, &counters, 1, run.options.duration).await?;
    load_result.without_writes(writes);
    let mut figures = Figures::default();
    figures.set(Figure::CpuPerEvent, load_result.cpu_micros_per_event());
    figures.set(Figure::CpuPerDelivery, load_result.cpu_micros());
    figures.set(Figure::BodyBytesPerDelivery, load_result.body_bytes());
    figures.set(Figure::BytesPerDelivery, load_result.bytes());
    Ok(vec![(Variant { name: "views by node", subscribers: views, batch: Some(BATCH) }, figures)])
}

/// A selector that no pod of the workload matches: nine in ten by equality, the others set-based or
/// negative.
fn selection_without_match(watcher: usize) -> Selection {
    let apps = || (0..APPS).map(|app| format!("web-{app}")).collect::<Vec<_>>().join(",");
    let labels = match (watcher % SET_BASED_INTERVAL, watcher / SET_BASED_INTERVAL % 3) {
        (0, 0) => format!("app notin ({},other-{watcher})", apps()),
        (0, 1) => format!("!app,!app-{watcher}"),
        (0, _) => format!("tier in (none-{watcher},other-{watcher})"),
        _ => format!("app=none-{watcher}"),
    };
    Selection { labels, ..Selection::default() }
}
