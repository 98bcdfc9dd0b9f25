//! Callers and the audit log: reviews that fail, denials, credentials that are not accepted, and a
//! disk that is full. The apiserver is the real one, because it judges the callers.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use serde_json::json;

use super::scene::{OFTEN, Ongoing, Scene, asks, lively};
use crate::harness::{
    apiserver::ApiServer,
    kubefan::Kubefan,
    link::Link,
    rbac::{ServiceAccount, grant},
    simulated::Simulated,
};

/// kubefan with an account of its own, over TLS, with verdicts that count for a second. The one
/// about a token counts for `token_ttl`.
async fn reviewing(api: &ApiServer, namespace: &str, token_ttl: &str) -> Kubefan {
    let own = ServiceAccount::create(api, namespace, "kubefan").await;
    own.may_read_pods().await;
    own.may_review().await;
    reviewing_by(api, &own.kubeconfig().await, token_ttl).await
}

async fn reviewing_by(api: &ApiServer, kubeconfig: &Path, token_ttl: &str) -> Kubefan {
    let token_ttl = format!("tuning.authenticationTokenWebhookCacheTtl={token_ttl}");
    let (cert, key) = api.server_certificate();
    let cert = format!("--tls-cert-file={}", cert.display());
    let key = format!("--tls-private-key-file={}", key.display());
    let args = [
        "--access=authorized",
        "--resource=pods",
        "tuning.authenticationSkipLookup",
        &token_ttl,
        "tuning.authorizationWebhookCacheAuthorizedTtl=1s",
        "tuning.authorizationWebhookCacheUnauthorizedTtl=1s",
    ];
    let kubefan = Kubefan::spawn(kubeconfig, &[&args[..], &[&*cert, &*key]].concat()).await;
    kubefan.ready().await;
    kubefan
}

fn pods_of(kubefan: &Kubefan) -> String {
    format!("https://{}/api/v1/pods?resourceVersion=0", kubefan.grpc_addr)
}

/// The right to review is taken from kubefan's account: the tokens of its callers are reviewed no
/// more.
pub(super) async fn reviews_of_tokens(scene: Scene) {
    reviews(scene, "1s", "KubefanReviewsFailing{review=token}").await;
}

/// Reviews with tokens that are already known, so that only their rights are reviewed.
pub(super) async fn reviews_of_access(scene: Scene) {
    reviews(scene, "1h", "KubefanReviewsFailing{review=access}").await;
}

async fn reviews(scene: Scene, token_ttl: &str, alert: &str) {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("reviews").await;
    let kubefan = reviewing(&api, &namespace, token_ttl).await;
    scene.scrape(&kubefan);
    let _known = asks(OFTEN, api.client_with_token(&caller(&api, &namespace).await), pods_of(&kubefan));
    scene.sees("kubefan_authorization_attempts_total{JOB, result=\"allowed\"}", |count| count > 5.0).await;
    let binding = format!("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/{namespace}-reviews");
    api.delete(&binding).await;
    let firing = scene.fired("kubefan's account lost `system:auth-delegator`", &[alert]).await;
    let role =
        json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:auth-delegator" });
    let subject = json!({ "kind": "ServiceAccount", "name": "kubefan", "namespace": namespace });
    let (collection, name) = binding.rsplit_once('/').unwrap();
    api.create(collection, &json!({ "metadata": { "name": name }, "roleRef": role, "subjects": [subject] })).await;
    firing.resolved("the ClusterRole bound again").await;
}

/// The apiserver goes away, and known callers keep their verdicts.
pub(super) async fn grace(scene: Scene) {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("grace").await;
    let link = Link::to(api.addr()).await;
    let kubefan = reviewing_by(&api, &api.kubeconfig_to(&format!("https://{}", link.addr)), "1s").await;
    scene.scrape(&kubefan);
    let _known = asks(OFTEN, api.client_with_token(&caller(&api, &namespace).await), pods_of(&kubefan));
    scene.sees("kubefan_authorization_attempts_total{JOB, result=\"allowed\"}", |count| count > 5.0).await;
    link.cut();
    let firing = scene.fired("the apiserver cut off, under a known caller", &["KubefanOutageGrace"]).await;
    link.mend();
    firing.resolved("the apiserver is back").await;
}

/// The token of a caller that may list pods.
async fn caller(api: &ApiServer, namespace: &str) -> String {
    let caller = ServiceAccount::create(api, namespace, "caller").await;
    let rules = json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["list"] }]);
    grant(api, None, &format!("{namespace}-caller"), &rules, &caller.subject()).await;
    caller.token().await
}

/// A program lost its right, and another has a token that is none.
pub(super) async fn denied(scene: Scene) {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("denied").await;
    let kubefan = reviewing(&api, &namespace, "1s").await;
    scene.scrape(&kubefan);
    let caller = ServiceAccount::create(&api, &namespace, "caller").await;
    let token = caller.token().await;
    let _denied = asks(OFTEN, api.client_with_token(&token), pods_of(&kubefan));
    let wrong = asks(OFTEN, api.client_with_token("expired"), pods_of(&kubefan));
    let alerts = ["KubefanDenialsSurging", "KubefanAuthenticationFailing"];
    let firing = scene.fired("a program without the right, one with an expired token", &alerts).await;
    let rules = json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["list"] }]);
    grant(&api, None, &format!("{namespace}-caller"), &rules, &caller.subject()).await;
    drop(wrong);
    firing.resolved("the right granted, the other client ended").await;
}

/// kubefan with an audit log on a full disk: the file leads to a device that has no room. The other
/// values keep its world going.
struct FullDisk {
    kubefan: Kubefan,
    log: PathBuf,
    _asking: Ongoing,
    _world: (Simulated, Ongoing),
}

impl FullDisk {
    async fn start(mode: &str, scene: &Scene) -> FullDisk {
        let world = lively().await;
        let log = world.0.dir.path().join("audit.log");
        symlink("/dev/full", &log).unwrap();
        let path = format!("--audit-log-path={}", log.display());
        let mode = format!("--audit-log-mode={mode}");
        let kubefan = world.0.kubefan(&["--resource=pods", &*path, &*mode, "limits.auditLogBatchBufferSize=10"]).await;
        scene.scrape(&kubefan);
        let url = format!("http://{}/api/v1/pods?resourceVersion=0", kubefan.grpc_addr);
        FullDisk { kubefan, log, _asking: asks(OFTEN, reqwest::Client::new(), url), _world: world }
    }

    /// The disk has room again: the log is a file, which kubefan opens on SIGHUP.
    fn free(&self) {
        fs::remove_file(&self.log).unwrap();
        self.kubefan.process.hang_up();
    }
}

pub(super) async fn audit_log(scene: Scene) {
    let disk = FullDisk::start("batch", &scene).await;
    let firing = scene.fired("a full disk", &["KubefanAuditLogFailing", "KubefanAuditRecordsDropped"]).await;
    let log = disk.kubefan.process.log();
    assert!(log.contains("the audit log cannot be written"), "{log}");
    disk.free();
    firing.resolved("room made, SIGHUP").await;
}

pub(super) async fn strict_audit_log(scene: Scene) {
    let disk = FullDisk::start("blocking-strict", &scene).await;
    let firing = scene.fired("a full disk, in the strict mode", &["KubefanAuditRefusesRequests"]).await;
    disk.free();
    firing.resolved("room made, SIGHUP").await;
}
