//! `idle`: the memory per subscriber while no changes are made, and after a load.

use std::{sync::Arc, time::Duration};

use super::{Sample, Variant};
use crate::{
    BenchError,
    counters::Counters,
    figures::{Figure, Figures},
    load::{Load, Trigger, drive},
    server_process::{READY_TIMEOUT, Run, Selection, Server, settled_memory},
    source::Source,
};

/// Changes per burst of the load.
const BATCH: usize = 32;
/// Maximum number of rounds of load to fill the server's history.
const FILLS_MAX: usize = 10;

pub(super) async fn measure(run: &Run<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let subscribers = run.options.subscribers;
    let mut server = run.start_server(source).await?;
    let load = Load::Closed { batch: BATCH };
    let alone = fill_history(load, source, &mut server, run.options.duration).await?;
    let counters = Arc::new(Counters::new(subscribers, true));
    let _receivers = run.subscribe(&server, source, &counters, Some(server.version(source)), |_| Selection::default());
    counters.all_ready(READY_TIMEOUT).await?;
    let idle = settled_memory(&server.meter).await?;
    let each = subscribers as u64;
    drive(load, Trigger::Source(source), &mut server.meter, &counters, each, run.options.duration).await?;
    let after = settled_memory(&server.meter).await?;
    let each = |bytes: u64| bytes.saturating_sub(alone) as f64 / subscribers as f64;
    let mut figures = Figures::default();
    figures.set(Figure::RssPerSubscriber, each(idle));
    figures.set(Figure::RssPerSubscriberAfterLoad, each(after));
    Ok(vec![(Variant { name: "", subscribers, batch: None }, figures)])
}

/// Makes changes without subscribers until the server's memory stops growing, because its history
/// must not be attributed to subscribers. Returns its resident memory in bytes.
async fn fill_history(load: Load, source: &mut Source, server: &mut Server, time: Duration) -> Result<u64, BenchError> {
    let no_subscribers = Counters::new(0, false);
    let mut resident = settled_memory(&server.meter).await?;
    for _ in 0..FILLS_MAX {
        drive(load, Trigger::Source(source), &mut server.meter, &no_subscribers, 0, time).await?;
        let before = std::mem::replace(&mut resident, settled_memory(&server.meter).await?);
        if resident <= before + before / 100 {
            break;
        }
    }
    Ok(resident)
}
