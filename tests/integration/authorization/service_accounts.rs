//! Tokens of service accounts that kubefan checks itself: the verdict is that of a TokenReview,
//! without one.

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::world::World;
use crate::harness::{apiserver::ApiServer, kubefan::Kubefan, tests, wait};

tests! {
    apiserver slow_faults: a_token_of_kubefans_own_is_known_without_a_review_until_its_pod_is_deleted;
}

const AUDIENCE: &str = "kubefan.example.com";
const REVIEWS: &str = "kubefan_delegated_authn_request_total{result=\"ok\"}";

/// The user that a record of the audit log names.
fn users(log: &str, path: &str) -> Vec<Value> {
    // The last line may not be whole yet.
    let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let records = whole.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let of_path = records.filter(|record| record["requestURI"].as_str().unwrap().starts_with(path));
    of_path.map(|record| record["user"].clone()).collect()
}

async fn a_token_of_kubefans_own_is_known_without_a_review_until_its_pod_is_deleted() {
    let world = World::start(ApiServer::shared().await, &[]).await;
    let (cert, key) = world.api.server_certificate();
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("audit.log");
    let args = [
        "--resource=pods,configmaps,serviceaccounts",
        "tuning.serviceAccountJwks",
        "--access=authorized-cache-only",
        // No verdict is kept, so each request is checked.
        "tuning.authenticationTokenWebhookCacheTtl=0s",
        &format!("--api-audiences={AUDIENCE}"),
        &format!("--audit-log-path={}", log.display()),
        "--tls-cert-file",
        cert.to_str().unwrap(),
        "--tls-private-key-file",
        key.to_str().unwrap(),
    ];
    let kubefan = Kubefan::spawn_as_given(&world.api.kubeconfig(), &args).await;
    kubefan.ready().await;
    let pods = format!("/api/v1/namespaces/{}/pods", world.own);
    let spec = json!({ "serviceAccountName": "own", "containers": [{ "name": "c", "image": "i" }] });
    world.api.create(&pods, &json!({ "metadata": { "name": "holder" }, "spec": spec })).await;
    let token = async |audience: &str| {
        let bound = ["--bound-object-kind", "Pod", "--bound-object-name", "holder", "--audience", audience];
        let token = world.api.kubectl(&[&["create", "token", "own", "-n", &world.own], &bound[..]].concat()).await;
        token.trim().to_owned()
    };
    let own = token(AUDIENCE).await;
    let foreign = token("another.example.com").await;
    let path = format!("/api/v1/namespaces/{}/configmaps", world.own);
    let ask = |token: &str| {
        let url = format!("https://{}{path}?resourceVersion=0", kubefan.grpc_addr);
        let request = world.api.client_with_token(token).get(url);
        async move { request.send().await.unwrap().status() }
    };
    // The first is reviewed: the keys are read after it.
    assert_eq!(ask(&own).await, StatusCode::OK);
    assert_eq!(kubefan.metric(REVIEWS).await, Some(1.0));
    kubefan.metric_becomes("kubefan_authentication_local_checks_total{result=\"known\"}", 0.0).await;
    wait::until("a check without a review", wait::SOON, || async {
        assert_eq!(ask(&own).await, StatusCode::OK);
        kubefan.metric("kubefan_authentication_local_checks_total{result=\"known\"}").await.filter(|count| *count > 0.0)
    })
    .await;
    let reviewed = kubefan.metric(REVIEWS).await.unwrap();
    for _ in 0..10 {
        assert_eq!(ask(&own).await, StatusCode::OK);
    }
    assert_eq!(kubefan.metric(REVIEWS).await, Some(reviewed));
    let read = || std::fs::read_to_string(&log).unwrap();
    wait::until("the records", wait::SOON, || async { (users(&read(), &path).len() >= 12).then_some(()) }).await;
    let known = users(&read(), &path);
    assert!(known.iter().all(|user| *user == known[0]), "the same user: {known:?}");
    let extra = &known[0]["extra"];
    assert_eq!(extra["authentication.kubernetes.io/pod-name"], json!(["holder"]), "{known:?}");
    // A token for another audience is the apiserver's to refuse.
    assert_eq!(ask(&foreign).await, StatusCode::UNAUTHORIZED);
    assert_eq!(ask(&world.api.admin_token()).await, StatusCode::UNAUTHORIZED);
    world.api.delete(&format!("{pods}/holder")).await;
    wait::until("the token of a deleted pod to end", wait::SOON, || async {
        (ask(&own).await == StatusCode::UNAUTHORIZED).then_some(())
    })
    .await;
}
