//! Answers to a refused caller, and the effects that its requests must not have.

use kubefan_common::proto::v1alpha1::{ListRequest, ListResourcesRequest, Target, WatchRequest};
use reqwest::{Method, StatusCode};
use serde_json::json;
use tonic::{Code, Status};

use super::{
    identities::{
        Who,
        Who::{Admin, Anonymous, Invalid, Lister, Own, Stranger},
    },
    world::World,
};
use crate::harness::{
    apiserver::{ADMIN, ApiServer},
    rbac::grant,
    tests,
};

tests! {
    apiserver slow_faults: a_refusal_shows_nothing_and_starts_nothing,
        with_passthrough_the_apiserver_refuses_in_its_own_words,
        requests_that_act_as_others_are_not_answered_from_the_cache, no_token_is_in_a_log_or_metric,
        a_caller_without_the_right_to_discovery_learns_no_resource_names;
}

async fn a_refusal_shows_nothing_and_starts_nothing() {
    let world = World::start(ApiServer::shared().await, &["--access=authorized-cache-only", "--on-demand"]).await;
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
        let status = answer.status();
        let text = told(&told(&answer.text().await.unwrap(), resource), &format!("\"{name}"));
        answers.push((status, headers, told(&text, &format!("\\\"{name}\\"))));
    }
    assert_eq!(answers[0].0, StatusCode::FORBIDDEN);
    assert!(!answers[0].1.iter().any(|name| name == "cache-status"), "{answers:?}");
    let shapes: Vec<_> = answers.iter().map(|(status, headers, _)| (status, headers)).collect();
    assert!(shapes.iter().all(|shape| *shape == shapes[0]), "{answers:?}");
    // The admin sees the caches, and a refused reader has started none.
    let names = |resources: Vec<kubefan_common::proto::v1alpha1::ResourceStatus>| {
        resources.into_iter().map(|resource| resource.name).collect::<Vec<_>>()
    };
    let of = |who| world.call(who, ListResourcesRequest {});
    let all = names(grpc.list_resources(of(Admin)).await.unwrap().into_inner().resources);
    assert!(all.contains(&"pods".to_owned()) && !all.iter().any(|name| name.contains("secrets")), "{all:?}");
    let listed = names(grpc.list_resources(of(Lister)).await.unwrap().into_inner().resources);
    assert_eq!(listed, ["configmaps", "pods"]);
    assert_eq!(names(grpc.list_resources(of(Stranger)).await.unwrap().into_inner().resources), [] as [&str; 0]);
    let refused = grpc.list_resources(of(Anonymous)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    let sees = world.kubefan.admin("/metrics").await.unwrap().1;
    let secrets = sees.lines().find(|line| line.starts_with("kubefan_synced{") && line.contains("secrets"));
    assert_eq!(secrets, None, "a cache was started");
}

async fn a_caller_without_the_right_to_discovery_learns_no_resource_names() {
    let world =
        World::start(ApiServer::shared().await, &["--access=authorized-cache-only", "--on-demand", "--anonymous-auth"])
            .await;
    let discovery = world.client(Anonymous).get(format!("{}/api/v1", world.api.url())).send().await.unwrap();
    assert_eq!(discovery.status(), StatusCode::FORBIDDEN);
    for (who, names) in [(Anonymous, false), (Stranger, true)] {
        let target = Some(Target { resource: "cm".to_owned(), ..Target::default() });
        let call = world.call(who, ListRequest { target, ..ListRequest::default() });
        let refused = world.grpc().await.list(call).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
        assert_eq!(refused.message().contains("configmaps"), names, "{refused}");
    }
    // A right to the core group is none to a resource of another group that has only its short
    // name.
    let rules = json!([{ "apiGroups": [""], "resources": ["*"], "verbs": ["list"] }]);
    let anonymous = json!({ "kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "system:anonymous" });
    grant(&world.api, Some(&world.own), &format!("{}-core", world.own), &rules, &anonymous).await;
    for (resource, code) in [("deployments", Code::NotFound), ("cm", Code::NotFound), ("configmaps", Code::Ok)] {
        let namespace = world.own.clone();
        let target = Some(Target { resource: resource.to_owned(), namespace, ..Target::default() });
        let answer =
            world.grpc().await.list(world.call(Anonymous, ListRequest { target, ..ListRequest::default() })).await;
        assert_eq!(answer.as_ref().err().map_or(Code::Ok, Status::code), code, "{resource}: {answer:?}");
    }
}

async fn with_passthrough_the_apiserver_refuses_in_its_own_words() {
    let world = World::start(ApiServer::shared().await, &[]).await;
    let path = format!("/api/v1/namespaces/{}/pods?resourceVersion=0", world.own);
    for (who, status) in [(Stranger, StatusCode::FORBIDDEN), (Invalid, StatusCode::UNAUTHORIZED)] {
        let answer = world.client(who).get(world.url(&path)).send().await.unwrap();
        assert_eq!(answer.status(), status);
        // Only the apiserver sends this header.
        assert!(answer.headers().contains_key("audit-id"), "{answer:?}");
    }
    let answer = world.client(Own).get(world.url(&path)).send().await.unwrap();
    assert_eq!((answer.status(), answer.headers()["cache-status"].to_str().unwrap()), (StatusCode::OK, "kubefan; hit"));
}

async fn requests_that_act_as_others_are_not_answered_from_the_cache() {
    let api = ApiServer::shared().await;
    let world = World::start(api, &[]).await;
    let url = world.url(&format!("/api/v1/namespaces/{}/pods?resourceVersion=0", world.own));
    let asked = |who: Who, user: &str| world.client(who).get(&url).header("impersonate-user", user).send();
    let forwarded = asked(Admin, "x").await.unwrap();
    assert_eq!(forwarded.status(), StatusCode::FORBIDDEN, "the apiserver asks what x may do");
    assert!(forwarded.headers().contains_key("audit-id"));
    assert_eq!(asked(Own, ADMIN).await.unwrap().status(), StatusCode::FORBIDDEN, "it may not act as others");
    let target = Some(Target { resource: "pods".to_owned(), ..Target::default() });
    let mut call = world.call(Admin, ListRequest { target, ..ListRequest::default() });
    call.metadata_mut().insert("impersonate-user", "x".parse().unwrap());
    let refused = world.grpc().await.list(call).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
}

async fn no_token_is_in_a_log_or_metric() {
    let world = World::start(ApiServer::shared().await, &["--access=authorized-cache-only"]).await;
    for who in [Own, Stranger, Invalid] {
        let request = world.client(who).request(Method::GET, world.url("/api/v1/pods?resourceVersion=0"));
        request.send().await.unwrap();
    }
    let (_, metrics) = world.kubefan.admin("/metrics").await.unwrap();
    let (_, page) = world.kubefan.admin("/").await.unwrap();
    let log = world.kubefan.process.log();
    for text in [&metrics, &page, &log] {
        for who in [Own, Stranger, Invalid, Admin] {
            assert!(!text.contains(world.token(who).unwrap()), "{who:?}: {text}");
        }
    }
    let count = |line: &str| {
        let found = metrics.lines().find_map(|found| found.strip_prefix(line)?.trim().parse::<f64>().ok());
        found.unwrap_or_else(|| panic!("{line}"))
    };
    assert_eq!(count("kubefan_authentication_attempts_total{result=\"failure\"}"), 1.0);
    assert_eq!(count("kubefan_authorization_attempts_total{result=\"denied\"}"), 2.0);
}
