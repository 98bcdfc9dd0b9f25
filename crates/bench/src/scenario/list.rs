//! `list`: all pods, requested over HTTP by many clients at once, as by programs that do not watch.

use futures::future::try_join_all;
use tokio::time::timeout;

use super::{Sample, Variant, full_state::FullStateCost};
use crate::{
    BenchError,
    rest::RestClient,
    server_process::{READY_TIMEOUT, Run, settled_memory},
    source::{Source, pods_path},
};

pub(super) async fn measure(run: &Run<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let clients = run.options.clients;
    let mut server = run.start_server(source).await?;
    let endpoint = server.http_endpoint();
    let path = format!("{}?resourceVersion=0", pods_path(source.namespace()));
    let connections = try_join_all((0..clients).map(|_| RestClient::connect(endpoint.clone()))).await?;
    // The first list of a process is not representative.
    connections[0].download(&path).await?;
    let resident = settled_memory(&server.new_meter()).await?;
    let cost = FullStateCost::start(&mut server.meter, resident)?;
    let lists = try_join_all(connections.iter().map(|connection| connection.download(&path)));
    let stuck = |_| BenchError::Stuck { doing: "listing", limit: READY_TIMEOUT, reached: 0, expected: clients as u64 };
    let bytes: u64 = timeout(READY_TIMEOUT, lists).await.map_err(stuck)??.into_iter().sum();
    let figures = cost.finish(&mut server.meter, clients, source.objects() * clients, || bytes)?;
    Ok(vec![(Variant { name: "", subscribers: clients, batch: None }, figures)])
}
