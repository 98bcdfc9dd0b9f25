//! grpc.health.v1: overall (the empty name, and the service's), and per resource, by the name it was configured by and by its full
//! one (`po`, `pods`, `deployments.apps`); with `--namespace`s also per namespace (`pods/my-namespace`).
//!
//! A resource is SERVING only once it is synced, and stays so through an outage upstream, when it is served from the cache.

use std::collections::HashMap;

use tokio_util::sync::CancellationToken;
use tonic_health::{ServingStatus, server::HealthReporter};

use kubefan_common::proto::v1alpha1::watch_service_server::SERVICE_NAME;
use kubefan_common::sync::watch;

/// What the health service says: whether all is well, and each resource.
pub type Health = (bool, HashMap<String, bool>);

/// Brings the reporter up to date whenever `changes` says so, until `drain` is cancelled: then those who watch are told, and their
/// streams end, which would otherwise hold up the end of the server.
pub async fn follow(
    mut changes: watch::Receiver<u64>,
    health: impl Fn() -> Health,
    reporter: HealthReporter,
    drain: CancellationToken,
) {
    let mut told: HashMap<String, bool> = HashMap::new();
    loop {
        changes.mark_unchanged();
        let (overall, mut resources) = health();
        for service in ["", SERVICE_NAME] {
            resources.insert(service.to_owned(), overall);
        }
        for (name, serving) in &resources {
            if told.get(name) != Some(serving) {
                reporter.set_service_status(name, status(*serving)).await;
            }
        }
        for gone in told.keys().filter(|name| !resources.contains_key(*name)) {
            clear(&reporter, gone).await;
        }
        told = resources;
        tokio::select! {
            biased;
            changed = changes.changed() => if changed.is_err() { break },
            () = drain.cancelled() => break,
        }
    }
    for name in told.keys() {
        clear(&reporter, name).await;
    }
}

/// Before anything is known, nothing is well; the library's reporter begins with the opposite.
pub async fn begin(reporter: &HealthReporter) {
    reporter.set_service_status("", ServingStatus::NotServing).await;
}

async fn clear(reporter: &HealthReporter, name: &str) {
    reporter.set_service_status(name, ServingStatus::NotServing).await;
    reporter.clone().clear_service_status(name).await;
}

fn status(serving: bool) -> ServingStatus {
    if serving { ServingStatus::Serving } else { ServingStatus::NotServing }
}
