//! The apiserver's REST interface, for tests that prepare and check state. Paths are those of the
//! Kubernetes API, bodies are JSON. An unexpected failure panics with the request and the answer.

use reqwest::{Method, StatusCode, header::CONTENT_TYPE};
use serde_json::{Value, json};

use super::{apiserver::ApiServer, wait};

/// Attempts of a write that etcd does not answer in time, which takes about seven seconds each.
const WRITE_ATTEMPTS_MAX: usize = 5;

impl ApiServer {
    /// Sends a request as the administrator and returns the status and body. A body that is not
    /// JSON becomes `Null`.
    pub(crate) async fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<(&str, &Value)>,
    ) -> (StatusCode, Value) {
        let mut request = self.http.request(method.clone(), format!("{}{path}", self.url()));
        if let Some((content_type, body)) = body {
            request = request.header(CONTENT_TYPE, content_type).body(body.to_string());
        }
        let response = request.send().await.unwrap_or_else(|error| panic!("{method} {path}: {error}"));
        let status = response.status();
        let body = response.bytes().await.unwrap_or_else(|error| panic!("{method} {path}: {error}"));
        (status, serde_json::from_slice(&body).unwrap_or_default())
    }

    async fn expect(&self, method: Method, path: &str, body: Option<(&str, &Value)>) -> Value {
        let (status, answer) = self.request(method.clone(), path, body).await;
        assert!(status.is_success(), "{method} {path}: {status} {answer}");
        answer
    }

    /// Sends a write, and repeats it if etcd did not answer in time, as on a busy machine. etcd may
    /// have made the write all the same. Then a repeated creation finds the object, a repeated
    /// deletion finds none, and a repeated merge patch changes nothing.
    async fn write(&self, method: Method, path: &str, content_type: &str, body: &Value) -> Value {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let (status, answer) = self.request(method.clone(), path, Some((content_type, body))).await;
            if status.is_success() {
                return answer;
            }
            let is_repeated = attempts > 1;
            if is_repeated && method == Method::POST && status == StatusCode::CONFLICT {
                return self.get_json(&created(path, body)).await;
            }
            if is_repeated && method == Method::DELETE && status == StatusCode::NOT_FOUND {
                // The version of the deletion is unknown.
                return json!({ "metadata": { "resourceVersion": "0" } });
            }
            let may_repeat = attempts < WRITE_ATTEMPTS_MAX && is_etcd_timeout(&answer);
            assert!(may_repeat, "{method} {path}: {status} {answer}");
        }
    }

    /// Gets the object or list at a path such as `/api/v1/namespaces/ns/pods?limit=10`.
    pub(crate) async fn get_json(&self, path: &str) -> Value {
        self.expect(Method::GET, path, None).await
    }

    /// Creates an object in the collection at `path`, and returns it as stored.
    pub(crate) async fn create(&self, path: &str, object: &Value) -> Value {
        self.write(Method::POST, path, "application/json", object).await
    }

    /// Changes an object with a JSON merge patch. `path` may name a subresource such as `…/status`.
    pub(crate) async fn patch(&self, path: &str, patch: &Value) -> Value {
        self.write(Method::PATCH, path, "application/merge-patch+json", patch).await
    }

    /// Changes an object with a JSON patch, which is never repeated: it may not apply twice.
    pub(crate) async fn json_patch(&self, path: &str, patch: &Value) -> Value {
        self.expect(Method::PATCH, path, Some(("application/json-patch+json", patch))).await
    }

    /// Deletes an object without a grace period. The version of the answer is 0 if it is unknown.
    pub(crate) async fn delete(&self, path: &str) -> Value {
        self.write(Method::DELETE, path, "application/json", &json!({ "gracePeriodSeconds": 0 })).await
    }

    /// Creates a namespace that no other test uses, and returns its name.
    pub(crate) async fn namespace(&self, prefix: &str) -> String {
        let name = self.unique(prefix);
        self.create("/api/v1/namespaces", &json!({ "metadata": { "name": name } })).await;
        name
    }

    /// The lines of one metric in /metrics.
    pub(crate) async fn metric(&self, name: &str) -> String {
        let url = format!("{}/metrics", self.url());
        let text = self.http.get(url).send().await.expect("metrics are served").text().await.expect("metrics are text");
        let ours = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
        text.lines().filter(ours).collect::<Vec<_>>().join("\n")
    }

    /// Creates a namespaced custom resource `plural.group` in version v1 that accepts any fields,
    /// and waits until it is served.
    pub(crate) async fn create_crd(&self, group: &str, plural: &str, kind: &str) {
        let crd = json!({
            "metadata": { "name": format!("{plural}.{group}") },
            "spec": {
                "group": group,
                "scope": "Namespaced",
                "names": { "plural": plural, "singular": kind.to_lowercase(), "kind": kind },
                "versions": [{
                    "name": "v1", "served": true, "storage": true,
                    "schema": { "openAPIV3Schema": { "type": "object", "x-kubernetes-preserve-unknown-fields": true } },
                }],
            },
        });
        self.create(CRDS, &crd).await;
        self.wait_for_status(&format!("/apis/{group}/v1/{plural}"), StatusCode::OK).await;
    }

    /// Deletes a custom resource and its objects, and waits until it is no longer served.
    pub(crate) async fn delete_crd(&self, group: &str, plural: &str) {
        self.delete(&format!("{CRDS}/{plural}.{group}")).await;
        self.wait_for_status(&format!("{CRDS}/{plural}.{group}"), StatusCode::NOT_FOUND).await;
        self.wait_for_status(&format!("/apis/{group}/v1/{plural}"), StatusCode::NOT_FOUND).await;
    }

    async fn wait_for_status(&self, path: &str, wanted: StatusCode) {
        wait::until(&format!("{wanted} from {path}"), wait::SOON, || async {
            (self.request(Method::GET, path, None).await.0 == wanted).then_some(())
        })
        .await
    }
}

/// Whether the apiserver passes on that etcd did not answer it in time.
fn is_etcd_timeout(answer: &Value) -> bool {
    answer["message"].as_str().is_some_and(|message| message.contains("etcdserver: request timed out"))
}

/// The path of an object that was created in a collection, or whose subresource `binding` was.
fn created(path: &str, body: &Value) -> String {
    let name = body["metadata"]["name"].as_str().unwrap_or_default();
    path.strip_suffix("/binding").map_or_else(|| format!("{path}/{name}"), str::to_owned)
}

/// The path of all definitions of custom resources.
pub(crate) const CRDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
