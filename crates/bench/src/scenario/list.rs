//! `list`: everything that there is, by many clients at once, as programs do it that do not watch.

use futures::future::try_join_all;
use tokio::time::timeout;

use super::{Sample, Variant, whole::Whole};
use crate::{
    BenchError,
    rest::Rest,
    source::Source,
    stage::{READY_TIMEOUT, Stage, settled},
};

pub(super) async fn run(stage: &Stage<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let clients = stage.options.clients;
    let mut server = stage.server(source).await?;
    let endpoint = server.http();
    let path = match source.namespace() {
        "" => "/api/v1/pods?resourceVersion=0".to_owned(),
        namespace => format!("/api/v1/namespaces/{namespace}/pods?resourceVersion=0"),
    };
    let connections = try_join_all((0..clients).map(|_| Rest::connect(endpoint.clone()))).await?;
    // The first list of a process is no measure of the next.
    connections[0].drain(&path).await?;
    let resident = settled(&server.meter_again()).await?;
    let whole = Whole::begin(&mut server.meter, resident)?;
    let lists = try_join_all(connections.iter().map(|connection| connection.drain(&path)));
    let stuck = |_| BenchError::Stuck { doing: "listing", limit: READY_TIMEOUT, there: 0, expected: clients as u64 };
    let bytes: u64 = timeout(READY_TIMEOUT, lists).await.map_err(stuck)??.into_iter().sum();
    let figures = whole.end(&mut server.meter, clients, source.objects() * clients, || bytes)?;
    Ok(vec![(Variant { name: "", subscribers: clients, batch: None }, figures)])
}
