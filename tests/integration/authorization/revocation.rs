//! A right or a pod that is gone ends what it allowed, and nothing else.

use std::time::Duration;

use kubefan_common::proto::v1alpha1::{Target, WatchRequest, WatchResponse};
use reqwest::StatusCode;
use serde_json::json;
use tonic::{Code, Status, Streaming};

use super::{
    identities::Who::{self, BoundToPod, Named, Own},
    world::World,
};
use crate::harness::{apiserver::ApiServer, tests, wait};

tests! {
    apiserver full: watches_end_with_their_pod_or_their_right_and_others_continue;
}

async fn watches_end_with_their_pod_or_their_right_and_others_continue() {
    let args = ["--passthrough=off", "--reauthorize-interval=1s"];
    let world = World::start(ApiServer::shared().await, &args).await.with_pods().await;
    let watch = async |who: Who, name: &str| {
        let (resource, namespace) = ("configmaps".to_owned(), world.own.clone());
        let target = Some(Target { resource, namespace, name: name.to_owned(), ..Target::default() });
        let call = world.call(who, WatchRequest { target, ..WatchRequest::default() });
        world.grpc().await.watch(call).await.unwrap().into_inner()
    };
    let url = world.url(&format!("/api/v1/namespaces/{}/configmaps?watch=1&resourceVersion=0", world.own));
    let http_watch = async |who: Who| {
        let answer = world.client(who).get(&url).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK, "{who:?}");
        answer
    };
    let mut other = watch(Named, "one").await;
    let (mut own, own_over_http) = (watch(Own, "").await, http_watch(Own).await);

    let (mut bound, bound_over_http) = (watch(BoundToPod, "").await, http_watch(BoundToPod).await);
    world.api.delete(&format!("/api/v1/namespaces/{}/pods/bound", world.own)).await;
    let both = async { tokio::join!(end_of(&mut bound), bound_over_http.bytes()) };
    let (end, body) = tokio::time::timeout(Duration::from_secs(90), both).await.expect("the watches end");
    assert_eq!(end.code(), Code::Unavailable, "{end:?}");
    assert!(end.message().contains("was deleted"), "{end:?}");
    body.expect("the body ends without an error");
    continues(&world, &mut own).await;

    let base = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{}", world.own);
    world.api.delete(&format!("{base}/rolebindings/{}-own", world.own)).await;
    let both = async { tokio::join!(end_of(&mut own), own_over_http.bytes()) };
    let (end, body) = tokio::time::timeout(wait::SOON, both).await.expect("the watches end");
    assert_eq!(end.code(), Code::PermissionDenied, "{end:?}");
    body.expect("the body ends without an error");
    let again = world.client(Own).get(&url).send().await.unwrap();
    assert_eq!(again.status(), StatusCode::FORBIDDEN, "the verdict in the cache has ended too");
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
    let data = json!({ "data": { "changed": world.api.unique("now") } });
    let changed = world.api.patch(&one, &data).await;
    let version = changed["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    let reaches = async { while watch.message().await.unwrap().expect("it continues").resume_version != version {} };
    tokio::time::timeout(wait::SOON, reaches).await.expect("the other watch continues");
}
