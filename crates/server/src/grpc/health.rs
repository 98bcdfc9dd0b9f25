//! `grpc.health.v1`: the overall health (under the empty name and the service's name), and the
//! health of each resource.
//!
//! A resource has an entry for its configured name and one for its full name (`po`, `pods`,
//! `deployments.apps`); with `--namespace` also one for each namespace (`pods/my-namespace`). It is
//! SERVING once it is synced, and stays SERVING during an upstream outage, because it is still
//! served from the cache.

use std::collections::HashMap;

use tokio_util::sync::CancellationToken;
use tonic_health::{ServingStatus, server::HealthReporter};

use kubefan_common::proto::v1alpha1::watch_service_server::SERVICE_NAME;
use kubefan_common::sync::watch;

/// The overall health, and the health of each resource by name.
pub type Health = (bool, HashMap<String, bool>);

/// Reports the health once, where it differs from `reported`, and returns it by name. Until then
/// the library knows only the empty name, as SERVING: the first report must precede the first
/// request.
pub async fn report(
    reporter: &HealthReporter,
    (overall, mut resources): Health,
    reported: &HashMap<String, bool>,
) -> HashMap<String, bool> {
    for service in ["", SERVICE_NAME] {
        resources.insert(service.to_owned(), overall);
    }
    for (name, serving) in &resources {
        if reported.get(name) != Some(serving) {
            reporter.set_service_status(name, status(*serving)).await;
        }
    }
    for gone in reported.keys().filter(|name| !resources.contains_key(*name)) {
        clear(reporter, gone).await;
    }
    resources
}

/// Reports after each change, until `drain` is cancelled. Then it reports NOT_SERVING and removes
/// every entry, which ends the health watches; open streams would delay the shutdown of the server.
pub async fn follow(
    mut changes: watch::Receiver<u64>,
    health: impl Fn() -> Health,
    reporter: HealthReporter,
    mut reported: HashMap<String, bool>,
    drain: CancellationToken,
) {
    loop {
        changes.mark_unchanged();
        reported = report(&reporter, health(), &reported).await;
        tokio::select! {
            biased;
            changed = changes.changed() => if changed.is_err() { break },
            () = drain.cancelled() => break,
        }
    }
    for name in reported.keys() {
        clear(&reporter, name).await;
    }
}

async fn clear(reporter: &HealthReporter, name: &str) {
    reporter.set_service_status(name, ServingStatus::NotServing).await;
    reporter.clone().clear_service_status(name).await;
}

fn status(serving: bool) -> ServingStatus {
    if serving { ServingStatus::Serving } else { ServingStatus::NotServing }
}
