//! The rights that are shipped: with all of them everything works, and without any single one a
//! promise breaks. So none is missing, and none is too much.

use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::{
    identities::Who::{Anonymous, Cert, Lister},
    world::World,
};
use crate::{
    deploy::{CLUSTER_PROXY, Right, rights_of},
    harness::{
        apiserver::ApiServer,
        kubefan::Kubefan,
        rbac::{ServiceAccount, grant},
        tests, wait,
    },
};

tests! {
    apiserver slow_faults: each_right_that_the_chart_grants_is_needed;
}

/// The shipped ClusterRole, and those of Kubernetes for reviews and for the CAs of clients.
const ROLES: [&str; 3] = [
    "clusterroles/kubefan",
    "clusterroles/system:auth-delegator",
    "namespaces/kube-system/roles/extension-apiserver-authentication-reader",
];

/// kubefan looks once a minute for the CAs of clients, and the first look may come before its right
/// is in effect.
const KEPT_AT_MOST: Duration = Duration::from_secs(90);

impl Right {
    fn rule(&self) -> Value {
        let Self { verb, group, resource, name } = self;
        let names = if name.is_empty() { json!([]) } else { json!([name]) };
        json!({ "verbs": [verb], "apiGroups": [group], "resources": [resource], "resourceNames": names })
    }

    /// The promise that it is needed for.
    fn promise(&self) -> Promise {
        match (self.verb.as_str(), self.resource.as_str()) {
            ("watch", resource) => Promise::IsCached(resource.to_owned()),
            ("list", resource) => Promise::IsCompared(resource.to_owned()),
            ("get", "namespaces") => Promise::KnowsItsCluster,
            ("get", "configmaps") => Promise::KnowsCertificates,
            ("create", "tokenreviews") => Promise::KnowsTokens,
            ("create", "subjectaccessreviews") => Promise::KnowsRights,
            _ => panic!("no promise needs {self:?}"),
        }
    }
}

/// Promises of the shipped kubefan.
#[derive(Debug, PartialEq, Eq)]
enum Promise {
    /// A resource is listed and watched.
    IsCached(String),
    /// The cache of a resource is compared with the apiserver.
    IsCompared(String),
    /// The cluster is identified by the uid of a namespace.
    KnowsItsCluster,
    /// A caller with a client certificate of the cluster is known.
    KnowsCertificates,
    /// A caller with a token is known.
    KnowsTokens,
    /// A caller reads everything that it may.
    KnowsRights,
}

impl Promise {
    /// Whether it is kept now.
    async fn is_kept(&self, world: &World, kubefan: &Kubefan) -> bool {
        let ready = || async { kubefan.admin("/readyz?verbose").await.map(|(_, text)| text).unwrap_or_default() };
        let nodes = format!("https://{}/api/v1/nodes?resourceVersion=0", kubefan.grpc_addr);
        let answer = async |client: reqwest::Client, url: &str| client.get(url).send().await.unwrap().status();
        match self {
            Self::IsCached(resource) => ready()
                .await
                .lines()
                .any(|line| line.starts_with(&format!("[+]{resource}")) && line.contains(" synced")),
            Self::IsCompared(resource) => {
                let text = ready().await;
                let line = text.lines().find(|line| line.starts_with(&format!("[+]{resource}")));
                line.is_some_and(|line| !line.contains("kubefan may not list"))
            }
            Self::KnowsItsCluster => ready().await.contains("[+]identity kube-system uid "),
            // It may read no nodes, and is refused as that user.
            Self::KnowsCertificates => answer(world.client(Cert), &nodes).await == StatusCode::FORBIDDEN,
            Self::KnowsTokens => {
                let pods = nodes.replace("/nodes", "/pods");
                !matches!(
                    answer(world.client(Lister), &pods).await,
                    StatusCode::UNAUTHORIZED | StatusCode::SERVICE_UNAVAILABLE
                )
            }
            Self::KnowsRights => {
                let pods = nodes.replace("/nodes", "/pods");
                answer(world.client(Lister), &pods).await == StatusCode::OK
                    && answer(world.client(Anonymous), &pods).await == StatusCode::UNAUTHORIZED
            }
        }
    }
}

/// kubefan as it is shipped, but with these rights.
async fn kubefan_with(
    api: &ApiServer,
    shipped: &[String],
    namespace: &str,
    number: usize,
    rights: &[Right],
) -> Kubefan {
    let name = format!("proxy-{number}");
    let account = ServiceAccount::create(api, namespace, &name).await;
    let rules: Vec<Value> = rights.iter().map(Right::rule).collect();
    grant(api, None, &format!("{namespace}-{name}"), &json!(rules), &account.subject()).await;
    let (cert, key) = api.server_certificate();
    let more = [
        "--access=authorized-cache-only",
        "tuning.selfCheckInterval=1s",
        "tuning.authenticationTokenWebhookCacheTtl=1s",
        "tuning.authorizationWebhookCacheUnauthorizedTtl=1s",
        "--tls-cert-file",
        cert.to_str().unwrap(),
        "--tls-private-key-file",
        key.to_str().unwrap(),
    ];
    let flags = shipped.iter().map(String::as_str).chain(more);
    Kubefan::spawn_as_given(&account.kubeconfig().await, &flags.collect::<Vec<_>>()).await
}

async fn each_right_that_the_chart_grants_is_needed() {
    let world = World::start(ApiServer::shared().await, &[]).await;
    let api = &world.api;
    CLUSTER_PROXY.apply(api).await;
    let dir = tempfile::tempdir().unwrap();
    let shipped = CLUSTER_PROXY.flags(api, dir.path()).await;
    let mut rights = Vec::new();
    for role in ROLES {
        let role = api.get_json(&format!("/apis/rbac.authorization.k8s.io/v1/{role}")).await;
        rights.extend(role["rules"].as_array().unwrap().iter().flat_map(rights_of));
    }
    // The Role of Kubernetes has more rights than kubefan needs.
    rights.retain(|right| right.resource != "configmaps" || right.verb == "get");
    assert!(rights.len() >= 14, "{rights:?}");
    let whole = kubefan_with(api, &shipped, &world.own, 0, &rights).await;
    for right in &rights {
        let promise = right.promise();
        wait::until(&format!("{promise:?} with all rights"), KEPT_AT_MOST, || async {
            promise.is_kept(&world, &whole).await.then_some(())
        })
        .await;
    }
    drop(whole);
    for (at, missing) in rights.iter().enumerate() {
        let others: Vec<Right> = rights.iter().filter(|right| *right != missing).cloned().collect();
        let kubefan = kubefan_with(api, &shipped, &world.own, at + 1, &others).await;
        // Everything else works, so kubefan has started.
        for right in &others {
            let promise = right.promise();
            if promise == missing.promise() || depends(&promise, missing) {
                continue;
            }
            wait::until(&format!("{promise:?} without {missing:?}"), KEPT_AT_MOST, || async {
                promise.is_kept(&world, &kubefan).await.then_some(())
            })
            .await;
        }
        let promise = missing.promise();
        wait::until(&format!("{promise:?} to break without {missing:?}"), wait::SOON, || async {
            (!promise.is_kept(&world, &kubefan).await).then_some(())
        })
        .await;
    }
}

/// Whether a promise is broken too if this right is missing.
fn depends(promise: &Promise, missing: &Right) -> bool {
    let is_of_resource = |resource: &str| missing.resource == resource;
    match promise {
        Promise::IsCached(resource) | Promise::IsCompared(resource) => is_of_resource(resource),
        Promise::KnowsRights => is_of_resource("pods") || is_of_resource("tokenreviews"),
        Promise::KnowsTokens => is_of_resource("pods") || is_of_resource("subjectaccessreviews"),
        Promise::KnowsCertificates => is_of_resource("nodes") || is_of_resource("subjectaccessreviews"),
        Promise::KnowsItsCluster => false,
    }
}
