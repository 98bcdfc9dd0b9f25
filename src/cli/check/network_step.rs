//! One step over the network: each has the same limit of time, and an error that is a text.

use std::{fmt::Display, future::Future, net::SocketAddr, time::Duration};

use tokio::{net::lookup_host, time::timeout};

/// The limit for one step.
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs a step with its limit of time. An error is its text.
pub(super) async fn step<T, E: Display>(work: impl Future<Output = Result<T, E>>) -> Result<T, String> {
    match timeout(STEP_TIMEOUT, work).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {STEP_TIMEOUT:?}")),
    }
}

/// The addresses of a name, each once.
pub(super) async fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, String> {
    let host = host.trim_matches(['[', ']']);
    let mut addresses: Vec<_> = step(lookup_host((host, port))).await?.collect();
    addresses.sort();
    addresses.dedup();
    if addresses.is_empty() { Err("it has no address".to_owned()) } else { Ok(addresses) }
}
