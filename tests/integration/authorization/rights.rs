//! The rights that are shipped: with all of them everything works, and without any single one a
//! promise breaks. So none is missing, and none is too much.

use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::{
    identities::Who::{self, Anonymous, Cert, Lister},
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
    apiserver full: without_any_single_shipped_right_a_promise_breaks;
}

/// The shipped ClusterRoles, and the one of Kubernetes for reviews.
const ROLES: [&str; 3] = ["kubefan", "kubefan-client-cas", "system:auth-delegator"];

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

/// What the shipped kubefan promises.
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
    /// A caller reads what it may.
    KnowsRights,
}

impl Promise {
    /// Whether it is kept now.
    async fn is_kept(&self, world: &World, kubefan: &Kubefan) -> bool {
        let ready = kubefan.admin("/readyz?verbose").await.map(|(_, text)| text).unwrap_or_default();
        let line = |resource: &str| ready.lines().find(|line| line.starts_with(&format!("[+]{resource}")));
        let answer = async |who: Who, resource: &str| {
            let url = format!("https://{}/api/v1/{resource}?resourceVersion=0", kubefan.grpc_addr);
            world.client(who).get(url).send().await.unwrap().status()
        };
        match self {
            Self::IsCached(resource) => line(resource).is_some_and(|line| line.contains(" synced")),
            Self::IsCompared(resource) => line(resource).is_some_and(|line| !line.contains("kubefan may not list")),
            Self::KnowsItsCluster => ready.contains("[+]identity kube-system uid "),
            // It may read no nodes, and is refused as that user.
            Self::KnowsCertificates => answer(Cert, "nodes").await == StatusCode::FORBIDDEN,
            Self::KnowsTokens => {
                let answer = answer(Lister, "pods").await;
                ![StatusCode::UNAUTHORIZED, StatusCode::SERVICE_UNAVAILABLE].contains(&answer)
            }
            Self::KnowsRights => {
                answer(Lister, "pods").await == StatusCode::OK
                    && answer(Anonymous, "pods").await == StatusCode::UNAUTHORIZED
            }
        }
    }
}

/// kubefan as it is shipped, but with these rights.
async fn kubefan_with(world: &World, shipped: &[String], rights: &[Right]) -> Kubefan {
    let (api, namespace) = (&world.api, &world.own);
    let name = api.unique("proxy");
    let account = ServiceAccount::create(api, namespace, &name).await;
    let rules: Vec<Value> = rights.iter().map(Right::rule).collect();
    grant(api, None, &format!("{namespace}-{name}"), &json!(rules), &account.subject()).await;
    let more = [
        "--passthrough=off",
        "--self-check-interval=1s",
        "--authentication-token-webhook-cache-ttl=1s",
        "--authorization-webhook-cache-unauthorized-ttl=1s",
    ];
    let flags: Vec<&str> = shipped.iter().map(String::as_str).chain(more).collect();
    Kubefan::spawn_over_tls(api, &account.kubeconfig().await, &flags).await
}

async fn without_any_single_shipped_right_a_promise_breaks() {
    let world = World::start(ApiServer::shared().await, &[]).await;
    let api = &world.api;
    CLUSTER_PROXY.apply(api).await;
    let dir = tempfile::tempdir().unwrap();
    let shipped = CLUSTER_PROXY.flags(api, dir.path()).await;
    let mut rights = Vec::new();
    for role in ROLES {
        let role = api.get_json(&format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/{role}")).await;
        rights.extend(role["rules"].as_array().unwrap().iter().flat_map(rights_of));
    }
    assert!(rights.len() >= 14, "{rights:?}");
    let whole = kubefan_with(&world, &shipped, &rights).await;
    for right in &rights {
        becomes_kept(&world, &whole, &right.promise(), "with all rights").await;
    }
    drop(whole);
    for missing in &rights {
        let others: Vec<Right> = rights.iter().filter(|right| *right != missing).cloned().collect();
        let kubefan = kubefan_with(&world, &shipped, &others).await;
        let promise = missing.promise();
        // Everything else works, so kubefan has started.
        for other in others.iter().map(Right::promise) {
            if other != promise && !depends(&other, missing) {
                becomes_kept(&world, &kubefan, &other, &format!("without {missing:?}")).await;
            }
        }
        wait::until(&format!("{promise:?} to break without {missing:?}"), wait::SOON, || async {
            (!promise.is_kept(&world, &kubefan).await).then_some(())
        })
        .await;
    }
}

async fn becomes_kept(world: &World, kubefan: &Kubefan, promise: &Promise, when: &str) {
    wait::until(&format!("{promise:?} {when}"), KEPT_AT_MOST, || async {
        promise.is_kept(world, kubefan).await.then_some(())
    })
    .await;
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
