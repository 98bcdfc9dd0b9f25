//! Writes, as far as the other rows depend on them.

use kubefan_sim::workload::{Operation, Workload, WorkloadOptions};
use reqwest::Method;
use serde_json::json;

use super::api::{Api, unique, version};

pub(crate) async fn invalid_writes_are_refused(api: &Api) {
    let path = api.config_maps().await;
    api.config_map(&path, "a", json!({})).await;
    let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}});
    api.post(&path, &object).await.fails(409, "AlreadyExists", "configmaps \"a\" already exists");
    let no_name = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {}});
    let message = "ConfigMap \"\" is invalid: metadata.name: Required value: name or generateName is required";
    api.post(&path, &no_name).await.fails(422, "Invalid", message);
    assert_eq!(api.post(&path, &json!({"kind": "ConfigMap", "metadata": {"name": "Bad_Name"}})).await.code, 422);
    let missing = "namespaces \"no-such\" not found";
    api.post("/api/v1/namespaces/no-such/configmaps", &object).await.fails(404, "NotFound", missing);
    api.patch(&format!("{path}/zz"), &json!({})).await.fails(404, "NotFound", "configmaps \"zz\" not found");
    api.delete(&format!("{path}/zz")).await.fails(404, "NotFound", "configmaps \"zz\" not found");
    let not_allowed = "the server does not allow this method on the requested resource";
    api.post(&format!("{path}/a"), &object).await.fails(405, "MethodNotAllowed", not_allowed);
    api.put(&path, &object).await.fails(405, "MethodNotAllowed", not_allowed);
    let unsupported = api.send(Method::PATCH, &format!("{path}/a"), "text/plain", "{}".into()).await;
    unsupported.fails(415, "UnsupportedMediaType", "415: Unsupported Media Type");
    let mut stale = object.clone();
    stale["metadata"]["resourceVersion"] = "1".into();
    let message = "Operation cannot be fulfilled on configmaps \"a\": the object has been modified; please apply your changes to \
                   the latest version and try again";
    api.put(&format!("{path}/a"), &stale).await.fails(409, "Conflict", message);
    let mut other = object.clone();
    other["metadata"]["name"] = "b".into();
    let message = "the name of the object (b) does not match the name on the URL (a)";
    api.put(&format!("{path}/a"), &other).await.fails(400, "BadRequest", message);
    let deleted = api.delete(&format!("{path}/a")).await.ok();
    assert_eq!((&deleted["status"], &deleted["details"]["name"]), (&json!("Success"), &json!("a")));
}

pub(crate) async fn a_write_without_changes_sends_no_event(api: &Api) {
    let path = api.config_maps().await;
    api.config_map(&path, "a", json!({})).await;
    let patch = json!({"data": {"k": "v"}});
    let changed = version(&api.patch(&format!("{path}/a"), &patch).await.ok());
    let mut events = api.watch(&format!("{path}?resourceVersion={changed}")).await;
    assert_eq!(version(&api.patch(&format!("{path}/a"), &patch).await.ok()), changed);
    api.config_map(&path, "b", json!({})).await;
    assert_eq!(events.next().await.unwrap().short(), "ADDED b");
}

pub(crate) async fn status_changes_only_through_its_subresource(api: &Api) {
    let path = format!("{}/pods", api.namespace().await);
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
        "spec": {"containers": [{"name": "c", "image": "example.com/c"}]}});
    let mut pod = api.post(&path, &pod).await.ok();
    pod["status"]["phase"] = "Running".into();
    pod["metadata"]["labels"] = json!({"from": "main"});
    let main = api.put(&format!("{path}/a"), &pod).await.ok();
    assert_ne!(main["status"]["phase"], "Running", "the main resource leaves the status alone");
    assert_eq!(main["metadata"]["labels"]["from"], "main");
    let status = json!({"metadata": {"labels": {"from": "status"}}, "status": {"phase": "Running"}});
    let status = api.patch(&format!("{path}/a/status"), &status).await.ok();
    assert_eq!(status["status"]["phase"], "Running");
    assert_eq!(status["metadata"]["generation"], main["metadata"]["generation"]);
}

/// The workload generator makes only changes that an apiserver accepts.
pub(crate) async fn the_generated_workload_is_accepted(api: &Api) {
    let mut workload = Workload::new(11, WorkloadOptions { objects: 20, nodes: 2, namespaces: 1, apps: 3 });
    let (namespace, node) = (unique("team"), unique("node"));
    api.post("/api/v1/namespaces", &json!({"metadata": {"name": namespace}})).await.ok();
    let setup: Vec<_> = std::iter::from_fn(|| workload.next_setup()).collect();
    let churn: Vec<_> = (0..60).map(|_| workload.next_change()).collect();
    for change in setup.into_iter().chain(churn) {
        let pods = change.resource.resource == "pods";
        let path = match (&*change.resource.resource, pods) {
            (_, true) => format!("/api/v1/namespaces/{namespace}/pods"),
            (resource, false) => format!("/api/v1/{resource}"),
        };
        let renamed = |mut value: serde_json::Value| {
            // The row uses its own names, because other tests may run the same workload.
            match pods {
                true => value["metadata"]["namespace"] = namespace.as_str().into(),
                false => {
                    value["metadata"]["name"] = format!("{node}-{}", value["metadata"]["name"].as_str().unwrap()).into()
                }
            }
            value
        };
        let (answer, subject) = match change.operation {
            Operation::Create(value) => {
                let value = renamed(value);
                (api.post(&path, &value).await, value)
            }
            Operation::Update(value) => {
                let value = renamed(value);
                (api.put(&format!("{path}/{}", value["metadata"]["name"].as_str().unwrap()), &value).await, value)
            }
            Operation::UpdateStatus(value) => {
                let value = renamed(value);
                (
                    api.put(&format!("{path}/{}/status", value["metadata"]["name"].as_str().unwrap()), &value).await,
                    value,
                )
            }
            Operation::Delete { name, .. } => {
                let body = json!({"gracePeriodSeconds": 0}).to_string();
                let answer = api.send(Method::DELETE, &format!("{path}/{name}"), "application/json", body).await;
                (answer, json!(name))
            }
        };
        assert!((200..300).contains(&answer.code), "{} for {subject}", answer.text);
    }
}
