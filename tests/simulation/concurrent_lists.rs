//! Single lists over HTTP, beside those of the programs whose histories are judged.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::time::sleep;
use tower::BoxError;

use super::{link::Route, world::World};

/// Number of programs that list at the same time.
pub(crate) const PROGRAMS: u64 = 60;
/// The time between two of them.
const INTERVAL: Duration = Duration::from_millis(30);

/// Many programs send consistent lists to a replica while every list upstream fails.
pub(crate) async fn read(world: &Arc<World>, node: usize) {
    world.fail_lists();
    for _ in 0..PROGRAMS {
        let world = world.clone();
        // The oracle only judges the other readers.
        tokio::spawn(async move { list(&world, node, "/api/v1/pods", "application/json").await.is_ok() });
        sleep(INTERVAL).await;
    }
    world.clear_faults();
}

/// Sends one list to a replica. Returns the body of its answer, or of its refusal.
pub(crate) async fn list(world: &World, node: usize, path: &str, accept: &str) -> Result<Bytes, BoxError> {
    let connection = world.nodes[node].connect(&Route::default())?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(connection)).await?;
    tokio::spawn(connection);
    let request = http::Request::get(path).header(http::header::HOST, "kubefan.test");
    let request = request.header(http::header::ACCEPT, accept).body(Empty::<Bytes>::new())?;
    Ok(sender.send_request(request).await?.into_body().collect().await?.to_bytes())
}
