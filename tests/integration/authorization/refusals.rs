//! What a refused caller sees, and what does not depend on what there is.

use kubefan_common::proto::v1alpha1::{Target, WatchRequest};
use reqwest::StatusCode;
use tonic::Code;

use super::{
    identities::Who::{Invalid, Stranger},
    world::World,
};
use crate::harness::{apiserver::ApiServer, tests};

tests! {
    apiserver full: a_refusal_shows_nothing_and_is_counted;
}

async fn a_refusal_shows_nothing_and_is_counted() {
    let world = World::start(ApiServer::shared().await, &["--passthrough=off", "--on-demand"]).await;
    let mut grpc = world.grpc().await;
    // Cached or not, existing or not: the same answer, but for the names that were asked for.
    let told = |text: &str, name: &str| text.replace(name, "X");
    let mut answers = Vec::new();
    for resource in ["configmaps", "secrets", "nosuchthings"] {
        let target = Some(Target { resource: resource.to_owned(), ..Target::default() });
        let watch = world.call(Stranger, WatchRequest { target, ..WatchRequest::default() });
        let status = grpc.watch(watch).await.unwrap_err();
        answers.push((status.code(), told(status.message(), resource), status.metadata().len()));
    }
    assert_eq!(answers[0].0, Code::PermissionDenied);
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    let mut answers = Vec::new();
    for (resource, name) in [("configmaps", "one"), ("configmaps", "missing"), ("secrets", "x"), ("nosuchthings", "x")]
    {
        let url = world.url(&format!("/api/v1/namespaces/{}/{resource}/{name}?resourceVersion=0", world.own));
        let answer = world.client(Stranger).get(url).send().await.unwrap();
        let mut headers: Vec<_> = answer.headers().keys().map(ToString::to_string).collect();
        headers.sort_unstable();
        answers.push((answer.status(), headers));
    }
    assert_eq!(answers[0].0, StatusCode::FORBIDDEN);
    assert!(!answers[0].1.iter().any(|name| name == "cache-status"), "{answers:?}");
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    let unknown = world.client(Invalid).get(world.url("/api/v1/pods?resourceVersion=0")).send().await.unwrap();
    assert_eq!(unknown.status(), StatusCode::UNAUTHORIZED);
    let count = async |line| world.kubefan.metric(line).await;
    assert_eq!(count("kubefan_authentication_attempts_total{result=\"failure\"}").await, Some(1.0));
    assert_eq!(count("kubefan_authorization_attempts_total{result=\"denied\"}").await, Some(7.0));
}
