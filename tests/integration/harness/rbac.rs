//! Service accounts and roles on the real kube-apiserver.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::{apiserver::ApiServer, wait};

const GROUP: &str = "rbac.authorization.k8s.io";

/// A service account that exists.
pub(crate) struct ServiceAccount<'a> {
    api: &'a ApiServer,
    namespace: &'a str,
    name: &'a str,
}

impl<'a> ServiceAccount<'a> {
    pub(crate) async fn create(api: &'a ApiServer, namespace: &'a str, name: &'a str) -> Self {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
        api.create(&path, &json!({ "metadata": { "name": name } })).await;
        Self { api, namespace, name }
    }

    /// The subject of a binding.
    pub(crate) fn subject(&self) -> Value {
        json!({ "kind": "ServiceAccount", "name": self.name, "namespace": self.namespace })
    }

    /// Lets it list and watch the pods of all namespaces.
    pub(crate) async fn may_read_pods(&self) {
        let rules = json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"] }]);
        grant(self.api, None, &format!("{}-reads", self.namespace), &rules, &self.subject()).await;
    }

    /// Lets it create reviews of callers.
    pub(crate) async fn may_review(&self) {
        let binding = format!("{}-reviews", self.namespace);
        bind_cluster_role(self.api, &binding, "system:auth-delegator", &self.subject()).await;
        let reviews = json!([
            { "apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"] },
            { "apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"] },
        ]);
        applied(self.api, None, &reviews, &self.subject()).await;
    }

    /// A token of one hour.
    pub(crate) async fn token(&self) -> String {
        self.api.kubectl(&["create", "token", self.name, "-n", self.namespace]).await.trim().to_owned()
    }

    /// A kubeconfig with a token of one hour.
    pub(crate) async fn kubeconfig(&self) -> PathBuf {
        self.api.kubeconfig_with_token(&format!("{}-{}", self.namespace, self.name), &self.token().await)
    }
}

/// Creates a role, in a namespace or for the cluster, binds it, and waits until the apiserver
/// applies it.
pub(crate) async fn grant(api: &ApiServer, namespace: Option<&str>, name: &str, rules: &Value, subject: &Value) {
    let role = json!({ "metadata": { "name": name }, "rules": rules });
    match namespace {
        Some(namespace) => {
            let base = format!("/apis/{GROUP}/v1/namespaces/{namespace}");
            api.create(&format!("{base}/roles"), &role).await;
            api.create(&format!("{base}/rolebindings"), &binding(name, "Role", name, subject)).await;
        }
        None => {
            api.create(&format!("/apis/{GROUP}/v1/clusterroles"), &role).await;
            bind_cluster_role(api, name, name, subject).await;
        }
    }
    applied(api, namespace, rules, subject).await;
}

/// Waits until the apiserver applies all roles and bindings that were written so far, by any
/// program. It reads each kind of them in order, so one more of each kind shows it.
pub(crate) async fn settled(api: &ApiServer) {
    let rules = json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["get"] }]);
    for namespace in [None, Some("default")] {
        let name = api.unique("settled");
        let subject = json!({ "kind": "User", "apiGroup": GROUP, "name": name });
        grant(api, namespace, &name, &rules, &subject).await;
    }
}

/// Waits until the apiserver allows the same as the rules. Its authorizer reads roles and bindings
/// from a cache, which on a busy machine is late.
async fn applied(api: &ApiServer, namespace: Option<&str>, rules: &Value, subject: &Value) {
    let name = subject["name"].as_str().expect("a subject has a name");
    let who = match subject["kind"].as_str().expect("a subject has a kind") {
        "ServiceAccount" => {
            let of = subject["namespace"].as_str().expect("a service account has a namespace");
            json!({ "user": format!("system:serviceaccount:{of}:{name}") })
        }
        "Group" => json!({ "groups": [name] }),
        _ => json!({ "user": name }),
    };
    for rule in rules.as_array().expect("rules are a list") {
        let first = |field: &str| rule[field][0].as_str().unwrap_or_default();
        let mut spec = who.clone();
        if rule["nonResourceURLs"].is_array() {
            spec["nonResourceAttributes"] = json!({ "path": first("nonResourceURLs"), "verb": first("verbs") });
        } else {
            spec["resourceAttributes"] = json!({
                "namespace": namespace.unwrap_or_default(),
                "verb": first("verbs"),
                "group": first("apiGroups"),
                "resource": first("resources"),
                "name": first("resourceNames"),
            });
        }
        let review = json!({ "spec": spec });
        wait::until(&format!("the apiserver to allow {spec}"), wait::SOON, || async {
            let answer = api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", &review).await;
            (answer["status"]["allowed"] == true).then_some(())
        })
        .await;
    }
}

/// Binds a role of the cluster that exists.
async fn bind_cluster_role(api: &ApiServer, name: &str, role: &str, subject: &Value) {
    let path = format!("/apis/{GROUP}/v1/clusterrolebindings");
    api.create(&path, &binding(name, "ClusterRole", role, subject)).await;
}

fn binding(name: &str, kind: &str, role: &str, subject: &Value) -> Value {
    let role = json!({ "apiGroup": GROUP, "kind": kind, "name": role });
    json!({ "metadata": { "name": name }, "roleRef": role, "subjects": [subject] })
}
