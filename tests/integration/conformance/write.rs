//! Writes, as far as the other rows depend on them.

use serde_json::json;

use super::api::{Api, version};

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
