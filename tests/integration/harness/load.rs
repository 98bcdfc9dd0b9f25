//! Sends a workload's changes to a real apiserver over HTTP.

use std::sync::Arc;

use kubefan_model::{GroupVersionResource, Scope};
use kubefan_sim::workload::{Change, Operation, Workload};
use reqwest::Method;
use tokio::{sync::Semaphore, task::JoinSet};

use super::apiserver::ApiServer;

/// Number of concurrent requests while the cluster is filled.
const CONCURRENCY: usize = 16;

/// Creates the workload's initial objects.
pub(crate) async fn populate(api: &ApiServer, workload: &mut Workload) {
    let permits = Arc::new(Semaphore::new(CONCURRENCY));
    let mut requests = JoinSet::new();
    while let Some(change) = workload.next_setup() {
        if change.resource.resource != "pods" {
            // Namespaces must exist before their objects.
            apply(api, change).await;
            continue;
        }
        let permit = permits.clone().acquire_owned().await.expect("the semaphore is never closed");
        let api = api.handle();
        requests.spawn(async move {
            apply(&api, change).await;
            drop(permit);
        });
        while requests.try_join_next().is_some_and(|joined| joined.is_ok()) {}
    }
    while let Some(joined) = requests.join_next().await {
        joined.expect("every object is created");
    }
}

/// Sends one change. Panics if the apiserver refuses it.
pub(crate) async fn apply(api: &ApiServer, change: Change) {
    let Change { resource, operation } = change;
    let path = |namespace: &str, name: &str| {
        let scope = if namespace.is_empty() { Scope::Cluster } else { Scope::Namespace(namespace.to_owned()) };
        let name = if name.is_empty() { String::new() } else { format!("/{name}") };
        GroupVersionResource::collection_path(&resource, &scope) + &name
    };
    let of = |object: &serde_json::Value| {
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        (text("namespace"), text("name"))
    };
    let (method, path, body) = match operation {
        Operation::Create(object) => (Method::POST, path(&of(&object).0, ""), Some(object)),
        Operation::Update(object) => {
            let (namespace, name) = of(&object);
            (Method::PUT, path(&namespace, &name), Some(object))
        }
        Operation::UpdateStatus(object) => {
            let (namespace, name) = of(&object);
            (Method::PUT, path(&namespace, &name) + "/status", Some(object))
        }
        Operation::Delete { namespace, name } => {
            (Method::DELETE, path(&namespace, &name) + "?gracePeriodSeconds=0", None)
        }
    };
    let (status, answer) =
        api.request(method.clone(), &path, body.as_ref().map(|body| ("application/json", body))).await;
    assert!(status.is_success(), "{method} {path}: {status} {answer}");
}
