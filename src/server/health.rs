//! grpc.health.v1: overall (the empty name, and the service's), and per resource (`pods`, `deployments.apps`, `pods/my-namespace`).
//!
//! A resource is SERVING only once it is synced, and stays so through an outage upstream, when it is served from the cache.

use std::collections::HashMap;

use tokio::sync::watch;
use tonic_health::{ServingStatus, server::HealthReporter};

use crate::proto::service::watch_service_server::SERVICE_NAME;

/// What the health service says: whether all is well, and each resource.
pub type Health = (bool, HashMap<String, bool>);

/// Brings the reporter up to date whenever `changes` says so; ends with its sender.
pub async fn follow(mut changes: watch::Receiver<u64>, health: impl Fn() -> Health, mut reporter: HealthReporter) {
    let status = |serving| if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
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
            reporter.clear_service_status(gone).await;
        }
        told = resources;
        if changes.changed().await.is_err() {
            return;
        }
    }
}
