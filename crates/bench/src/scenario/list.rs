//! `list`: all pods, requested over HTTP by many clients at once, as by programs that do not watch.

use std::sync::Arc;

use futures::future::try_join_all;
use tokio::time::timeout;

use super::{Sample, Variant, full_state::FullStateCost};
use crate::{
    BenchError,
    counters::{Counters, Counts},
    rest::RestClient,
    server_process::{READY_TIMEOUT, Run, settled_memory},
    source::{Source, pods_path},
};

pub(super) async fn measure(run: &Run<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let clients = run.options.clients;
    let mut server = run.start_server(source).await?;
    let endpoint = server.http_endpoint();
    let path = format!("{}?resourceVersion=0", pods_path(source.namespace()));
    let encoding = run.options.encoding;
    let counters = Arc::new(Counters::new(0, false));
    let connections = (0..clients).map(|_| RestClient::connect_counted(endpoint.clone(), &counters));
    let connections = try_join_all(connections).await?;
    // The first list of a process is not representative. The others are not decoded, because that
    // would take the CPU of the server.
    connections[0].check_list(&path, encoding).await?;
    let resident = settled_memory(&server.new_meter()).await?;
    let before = counters.counts();
    let cost = FullStateCost::start(&mut server.meter, resident)?;
    let lists = try_join_all(connections.iter().map(|connection| connection.list(&path, encoding)));
    let stuck = |_| BenchError::Stuck { doing: "listing", limit: READY_TIMEOUT, reached: 0, expected: clients as u64 };
    let body_bytes: u64 = timeout(READY_TIMEOUT, lists).await.map_err(stuck)??.into_iter().sum();
    let counts = || Counts { body_bytes, bytes: counters.counts().bytes - before.bytes, ..Counts::default() };
    let figures = cost.finish(&mut server.meter, clients, source.objects() * clients, counts)?;
    Ok(vec![(Variant { name: "", subscribers: clients, batch: None }, figures)])
}
