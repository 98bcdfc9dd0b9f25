//! A revoked right ends the streams that it allowed. An outage of the apiserver does not end them.

use std::time::Duration;

use kubefan_common::proto::v1alpha1::{Target, WatchRequest, WatchResponse};
use reqwest::StatusCode;
use serde_json::json;
use tonic::{Code, Status, Streaming};

use super::{
    identities::Who::{BoundToPod, ListOnly, Named, Own, Stranger},
    world::World,
};
use crate::harness::{
    apiserver::{ApiServer, Options},
    tests, wait,
};

tests! {
    apiserver slow_faults: a_revoked_right_ends_with_its_verdict,
        a_live_watch_ends_when_its_right_is_revoked_and_others_continue,
        the_watches_of_a_deleted_pod_end_and_others_continue,
        known_callers_are_served_through_an_outage_and_new_ones_are_not;
}

async fn a_revoked_right_ends_with_its_verdict() {
    let args = ["--access=authorized-cache-only", "tuning.authorizationWebhookCacheAuthorizedTtl=1s"];
    let world = World::start(ApiServer::shared().await, &args).await;
    let url = world.url(&format!("/api/v1/namespaces/{}/pods?resourceVersion=0", world.own));
    let client = world.client(Own);
    assert_eq!(client.get(&url).send().await.unwrap().status(), StatusCode::OK);
    let base = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{}", world.own);
    world.api.delete(&format!("{base}/rolebindings/{}-own", world.own)).await;
    wait::until("the right to end", wait::SOON, || async {
        (client.get(&url).send().await.unwrap().status() == StatusCode::FORBIDDEN).then_some(())
    })
    .await;
}

async fn a_live_watch_ends_when_its_right_is_revoked_and_others_continue() {
    let args = ["--access=authorized-cache-only", "tuning.reauthorizeInterval=1s"];
    let world = World::start(ApiServer::shared().await, &args).await;
    let target = |name: &str| {
        let resource = "configmaps".to_owned();
        let namespace = world.own.clone();
        Some(Target { resource, namespace, name: name.to_owned(), ..Target::default() })
    };
    let watch = |who, name| world.call(who, WatchRequest { target: target(name), ..WatchRequest::default() });
    let mut client = world.grpc().await;
    let mut revoked = client.watch(watch(Own, "")).await.unwrap().into_inner();
    let mut other = client.watch(watch(Named, "one")).await.unwrap().into_inner();
    let path = format!("/api/v1/namespaces/{}/configmaps?watch=1&resourceVersion=0", world.own);
    let over_http = world.client(Own).get(world.url(&path)).send().await.unwrap();
    assert_eq!(over_http.status(), StatusCode::OK);
    let base = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{}", world.own);
    world.api.delete(&format!("{base}/rolebindings/{}-own", world.own)).await;
    let end = tokio::time::timeout(wait::SOON, end_of(&mut revoked)).await.expect("the watch ends");
    assert_eq!(end.code(), Code::PermissionDenied, "{end:?}");
    // The body ends, without an error.
    tokio::time::timeout(wait::SOON, over_http.bytes()).await.expect("the watch ends").unwrap();
    continues(&world, &mut other).await;
}

/// The status with which a watch ends.
async fn end_of(watch: &mut Streaming<WatchResponse>) -> Status {
    loop {
        match watch.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("it ended without a reason"),
            Err(status) => return status,
        }
    }
}

/// Changes a configmap, and waits until a watch has the change.
async fn continues(world: &World, watch: &mut Streaming<WatchResponse>) {
    let one = format!("/api/v1/namespaces/{}/configmaps/one", world.own);
    let changed = world.api.patch(&one, &json!({ "data": { "changed": "yes" } })).await;
    let version = changed["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    let reaches = async { while watch.message().await.unwrap().expect("it continues").resume_version != version {} };
    tokio::time::timeout(wait::SOON, reaches).await.expect("the other watch continues");
}

async fn the_watches_of_a_deleted_pod_end_and_others_continue() {
    let world = World::start(ApiServer::shared().await, &["--access=authorized-cache-only"]).await.with_pods().await;
    let resource = "configmaps".to_owned();
    let namespace = world.own.clone();
    let target = Some(Target { resource, namespace, ..Target::default() });
    let watch = |who| world.call(who, WatchRequest { target: target.clone(), ..WatchRequest::default() });
    let mut client = world.grpc().await;
    let mut bound = client.watch(watch(BoundToPod)).await.unwrap().into_inner();
    let mut other = client.watch(watch(Own)).await.unwrap().into_inner();
    let path = format!("/api/v1/namespaces/{}/configmaps?watch=1&resourceVersion=0", world.own);
    let over_http = world.client(BoundToPod).get(world.url(&path)).send().await.unwrap();
    assert_eq!(over_http.status(), StatusCode::OK);
    world.api.delete(&format!("/api/v1/namespaces/{}/pods/bound", world.own)).await;
    let both = async { tokio::join!(end_of(&mut bound), over_http.bytes()) };
    let (end, body) = tokio::time::timeout(Duration::from_secs(90), both).await.expect("the watches end");
    assert_eq!(end.code(), Code::Unavailable, "{end:?}");
    assert!(end.message().contains("was deleted"), "{end:?}");
    body.unwrap();
    continues(&world, &mut other).await;
}

async fn known_callers_are_served_through_an_outage_and_new_ones_are_not() {
    let api = ApiServer::start(Options::default()).await;
    let args = [
        "--access=authorized-cache-only",
        "tuning.authenticationTokenWebhookCacheTtl=1s",
        "tuning.authorizationWebhookCacheAuthorizedTtl=1s",
    ];
    let world = World::start(api, &args).await;
    let url = world.url(&format!("/api/v1/namespaces/{}/pods?resourceVersion=0", world.own));
    let ask = |who| {
        let request = world.client(who).get(&url);
        async move { request.send().await.unwrap().status() }
    };
    assert_eq!((ask(Own).await, ask(Stranger).await), (StatusCode::OK, StatusCode::FORBIDDEN));
    world.api.kill9();
    let grace = "kubefan_delegated_grace_total{review=\"access\"}";
    wait::until("a verdict in grace", wait::SOON, || async {
        assert_eq!(ask(Own).await, StatusCode::OK);
        world.kubefan.metric(grace).await.filter(|count| *count > 0.0).map(drop)
    })
    .await;
    assert_eq!(ask(ListOnly).await, StatusCode::SERVICE_UNAVAILABLE, "a new caller");
    let text = world.client(ListOnly).get(&url).send().await.unwrap().text().await.unwrap();
    assert!(text.contains("kubefan cannot ask the apiserver now"), "{text}");
    world.api.restart().await;
    wait::until("the new caller to be served", wait::SOON, || async {
        (ask(ListOnly).await == StatusCode::OK).then_some(())
    })
    .await;
}
