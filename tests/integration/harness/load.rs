//! Sends a workload's changes to a real apiserver over HTTP.

use std::{sync::Arc, time::Duration};

use kubefan_model::{GroupVersionResource, Scope};
use kubefan_sim::workload::{Change, Operation, Workload};
use reqwest::{Method, StatusCode, header::CONTENT_TYPE};
use serde_json::Value;
use tokio::{sync::Semaphore, task::JoinSet};

use super::{apiserver::ApiServer, wait};

/// Number of concurrent requests while the cluster is filled.
const CONCURRENCY: usize = 16;
/// Longest outage of an apiserver, its start included.
const OUTAGE_MAX: Duration = Duration::from_secs(180);
/// Limit for one request to an apiserver that may be killed meanwhile.
const ANSWER_MAX: Duration = Duration::from_secs(15);

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
        while let Some(joined) = requests.try_join_next() {
            joined.expect("every object is created");
        }
    }
    while let Some(joined) = requests.join_next().await {
        joined.expect("every object is created");
    }
}

/// Sends one change. Panics if the apiserver refuses it.
pub(crate) async fn apply(api: &ApiServer, change: Change) {
    let (method, path, body) = request(change);
    let (status, answer) =
        api.request(method.clone(), &path, body.as_ref().map(|body| ("application/json", body))).await;
    assert!(status.is_success(), "{method} {path}: {status} {answer}");
}

/// Sends one change until the apiserver has it. An apiserver that was killed may have applied the
/// change without an answer, so a create may then find the object, and a delete may not.
pub(crate) async fn apply_through_outages(api: &ApiServer, change: Change) {
    let (method, path, body) = request(change);
    let what = format!("the apiserver to take {method} {path}");
    wait::until(&what, OUTAGE_MAX, || async {
        let mut request = api.client().request(method.clone(), format!("{}{path}", api.url())).timeout(ANSWER_MAX);
        if let Some(body) = &body {
            request = request.header(CONTENT_TYPE, "application/json").body(body.to_string());
        }
        let response = request.send().await.ok()?;
        let status = response.status();
        let was_applied = match method {
            Method::POST => status == StatusCode::CONFLICT,
            Method::DELETE => status == StatusCode::NOT_FOUND,
            _ => false,
        };
        if status.is_success() || was_applied {
            return Some(());
        }
        let answer = response.text().await.unwrap_or_default();
        let is_temporary = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
        assert!(is_temporary, "{method} {path}: {status} {answer}");
        None
    })
    .await;
}

/// The method, path and body of a change.
fn request(change: Change) -> (Method, String, Option<Value>) {
    let Change { resource, operation } = change;
    let path = |namespace: &str, name: &str| {
        let scope = if namespace.is_empty() { Scope::Cluster } else { Scope::Namespace(namespace.to_owned()) };
        let name = if name.is_empty() { String::new() } else { format!("/{name}") };
        GroupVersionResource::collection_path(&resource, &scope) + &name
    };
    let of = |object: &Value| {
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        (text("namespace"), text("name"))
    };
    match operation {
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
    }
}
