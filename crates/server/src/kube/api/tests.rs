//! Tests of the server that answers a request, each with passthrough and without.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use bytes::Bytes;
use http::Uri;
use http_body_util::{BodyExt, Full};
use kubefan_access::{
    Switches,
    modes::{ModeRule, Modes},
};
use kubefan_admission::Holder;
use kubefan_fanout::ConnectionWaker;
use kubefan_upstream::{
    client::ConnectionLimits,
    passthrough::{Credentials, ForwardService, Passthrough, PassthroughOptions},
};
use prometheus::Registry;
use tower::service_fn;

use super::*;
use crate::{
    client_info::ClientInfo,
    fallback_budget::KUBEFAN_FALLBACK,
    kube::{
        allowed_hosts::AllowedHosts,
        answer::WatchHeaders,
        forward::{ForwardOptions, Forwarder},
    },
    reader::tests::{OneCache, allowed},
};

/// A state of the only cache.
#[derive(Debug, Clone, Copy)]
enum World {
    /// At version 430, with the pod p in the namespace a. Upstream proves that it is current.
    Current,
    /// As `Current`, but upstream proves nothing.
    Unproved,
    /// As `Current`, but no cache exists before the request.
    Unheld,
    /// The first list is not complete.
    Syncing,
    /// As `Current`, but all permits are taken.
    Busy,
}
use World::*;

const POD: &str =
    r#"{"apiVersion":"v1","kind":"Pod","metadata":{"namespace":"a","name":"p","uid":"u","resourceVersion":"7"}}"#;

/// Forwards to a server that answers every request with an empty object.
fn forwarder(credentials: Credentials) -> Arc<Forwarder> {
    let service = service_fn(|_| async {
        let body = Full::new(Bytes::from_static(b"{}")).map_err(|never| match never {});
        Ok(Response::new(body.boxed_unsync()))
    });
    let options = PassthroughOptions {
        credentials,
        requests_max: 100,
        allows_insecure_upstream: false,
        connection: ConnectionLimits::APISERVER,
    };
    let upstream = Passthrough::over(ForwardService::new(service), &Uri::from_static("http://h"), options).unwrap();
    let options =
        ForwardOptions { upgrades: true, hosts: AllowedHosts::default(), per_identity_max: None, is_to_kubefan: false };
    Arc::new(Forwarder::new(upstream, options, 1, Arc::new(Metrics::new(Registry::new()).unwrap())))
}

fn budget() -> Arc<FallbackBudget> {
    Arc::new(FallbackBudget::new(Arc::new(|| 3), Some(50)))
}

/// Opens a watch with bookmarks from version 430 on, of a cache with one pod at that version.
pub(crate) async fn opened_watch(query: &str, waker: &Arc<ConnectionWaker>) -> OpenedWatch {
    let catalog = OneCache::new();
    catalog.list_objects(430, &[POD]);
    let metrics = Arc::new(Metrics::new(Registry::new()).unwrap());
    let upstream = KubeUpstream::default();
    let api = KubeApi::new(catalog.reader(), upstream, options("", &[]), budget(), AuditLog::default(), metrics);
    let path = format!("/api/v1/pods?watch=1&allowWatchBookmarks=true&resourceVersion=430{query}");
    let request = Request::get(path).body(Body::empty()).unwrap();
    match api.answer(request, StreamWaker::new(waker, 1)).await {
        Answer::Watch(opened) => *opened,
        Answer::Response(response) | Answer::Forwarded(response) => panic!("{}", response.status()),
    }
}

/// Returns the server that answers, and the status.
async fn answered(world: World, request: Request<Body>, options: KubeApiOptions, is_passed_through: bool) -> String {
    let catalog = OneCache::new();
    if !matches!(world, Syncing) {
        catalog.list_objects(430, &[POD]);
    }
    catalog.is_current.store(!matches!(world, Unproved), Ordering::Relaxed);
    catalog.is_held.store(!matches!(world, Unheld), Ordering::Relaxed);
    let reader = catalog.reader();
    let holder = Holder::new(1, None);
    let _places = matches!(world, Busy).then(|| (reader.admit_read(holder), reader.admit_stream(holder)));
    let upstream = KubeUpstream { forwarder: is_passed_through.then(|| forwarder(Credentials::Caller)), origins: None };
    let metrics = Arc::new(Metrics::new(Registry::new()).unwrap());
    let api = KubeApi::new(reader, upstream, options, budget(), AuditLog::default(), metrics);
    let waker = StreamWaker::new(&ConnectionWaker::new(), 1);
    match api.answer(request, waker).await {
        Answer::Watch(_) => "watch".to_owned(),
        Answer::Response(response) | Answer::Forwarded(response) => {
            let is_named = response.headers().contains_key(PROXY_STATUS);
            let told = response.headers().get(KUBEFAN_FALLBACK);
            let by = match response.extensions().get::<FromUpstream>() {
                Some(_) => {
                    assert!(!is_named && told.is_none(), "upstream has answered");
                    assert_eq!(response.headers()[CACHE_STATUS], "kubefan; fwd=bypass");
                    return "upstream".to_owned();
                }
                None => match response.headers().get(CACHE_STATUS) {
                    Some(status) if status == NOT_CACHED => "client",
                    Some(_) => "cache",
                    None => "kubefan",
                },
            };
            let answer = format!("{by} {}", response.status().as_u16());
            let about_the_request = ["kubefan 400", "kubefan 405", "kubefan 406", "kubefan 410", "client 504"];
            let is_answer = match by {
                "cache" => !["cache 429", "cache 503"].contains(&&*answer),
                _ => about_the_request.contains(&&*answer),
            };
            assert_eq!(is_named, !is_answer, "{answer}: an error of kubefan is named, and an answer is not");
            let expected = (by == "cache" && is_answer).then_some("clients=3, rate=50");
            assert_eq!(told.map(|value| value.to_str().unwrap()), expected, "{answer}");
            answer
        }
    }
}

fn options(narrowed_by: &str, gates: &[&str]) -> KubeApiOptions {
    let mut feature_gates = FeatureGates::default();
    for gate in gates {
        feature_gates.set(gate).unwrap();
    }
    let narrowed_by = FieldSelector::parse(narrowed_by).unwrap();
    KubeApiOptions { consistent_list_bytes_min: 0, feature_gates, gzip: true, narrowed_by, guard: None }
}

/// Sends a request with these headers, with passthrough and without.
///
/// A client that reads at upstream by itself gets the same answers, and a 504 instead of
/// upstream's.
async fn both(world: World, request: &str, headers: &[(&str, &str)], options: &KubeApiOptions) -> [String; 2] {
    let (method, uri) = request.split_once(' ').unwrap_or(("GET", request));
    let built = |headers: &[(&str, &str)]| {
        let request = Request::builder().method(method).uri(uri);
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        request.body(Body::empty()).unwrap()
    };
    let with = answered(world, built(headers), options.clone(), true).await;
    let without = answered(world, built(headers), options.clone(), false).await;
    if method == "GET" {
        let cached_only = [headers, &[("cache-control", "no-transform, only-if-cached")]].concat();
        for is_passed_through in [true, false] {
            let answer = answered(world, built(&cached_only), options.clone(), is_passed_through).await;
            let expected = if with == "upstream" { "client 504" } else { &with };
            assert_eq!(answer, expected, "{world:?}: {uri} {headers:?}, only if cached");
        }
    }
    [with, without]
}

#[tokio::test(start_paused = true)]
async fn each_read_is_answered_by_the_cache_or_upstream_or_refused() {
    const PODS: &str = "/api/v1/pods";
    const POD_P: &str = "/api/v1/namespaces/a/pods/p";
    const STATE: &str = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion";
    for (world, path, query, with, without) in [
        // Any state.
        (Unproved, PODS, "resourceVersion=0", "cache 200", "cache 200"),
        (Unproved, POD_P, "resourceVersion=0", "cache 200", "cache 200"),
        (Unproved, "/api/v1/namespaces/a/pods/q", "resourceVersion=0", "cache 404", "cache 404"),
        (Unproved, PODS, "watch=1&resourceVersion=0", "watch", "watch"),
        (Syncing, PODS, "resourceVersion=0", "cache 429", "cache 429"),
        (Syncing, POD_P, "resourceVersion=0", "upstream", "kubefan 429"),
        (Syncing, PODS, "watch=1&resourceVersion=0", "cache 429", "cache 429"),
        (Unheld, PODS, "resourceVersion=0", "cache 200", "cache 200"),
        (Unheld, PODS, "resourceVersion=0&labelSelector=a", "upstream", "cache 200"),
        (Unheld, "/api/v1/namespaces/a/pods", "resourceVersion=0", "upstream", "cache 200"),
        (Unheld, POD_P, "resourceVersion=0", "upstream", "cache 200"),
        (Unheld, PODS, "watch=1&resourceVersion=0", "watch", "watch"),
        (Busy, PODS, "resourceVersion=0", "cache 429", "cache 429"),
        (Busy, PODS, "watch=1&resourceVersion=0", "cache 429", "cache 429"),
        // A consistent read.
        (Current, PODS, "", "cache 200", "cache 200"),
        (Current, PODS, "watch=1", "watch", "watch"),
        (Current, POD_P, "", "upstream", "cache 200"),
        (Unproved, PODS, "", "upstream", "kubefan 503"),
        (Unproved, PODS, "watch=1", "upstream", "kubefan 503"),
        (Unproved, POD_P, "", "upstream", "kubefan 503"),
        (Unheld, PODS, "", "upstream", "cache 200"),
        (Syncing, PODS, "", "upstream", "kubefan 429"),
        (Syncing, PODS, "watch=1", "cache 429", "cache 429"),
        // At least a version.
        (Unproved, PODS, "resourceVersion=430", "cache 200", "cache 200"),
        (Unproved, PODS, "resourceVersion=431", "upstream", "kubefan 504"),
        (Current, PODS, "resourceVersion=431", "cache 504", "cache 504"),
        (Unproved, POD_P, "resourceVersion=430", "cache 200", "cache 200"),
        (Unproved, POD_P, "resourceVersion=431", "upstream", "kubefan 504"),
        (Current, POD_P, "resourceVersion=431", "cache 504", "cache 504"),
        (Syncing, PODS, "resourceVersion=430", "cache 429", "cache 429"),
        (Syncing, POD_P, "resourceVersion=430", "upstream", "kubefan 429"),
        // Exactly a version.
        (Unproved, PODS, "resourceVersion=430&resourceVersionMatch=Exact", "cache 200", "cache 200"),
        (Unproved, PODS, "resourceVersion=429&limit=5", "upstream", "kubefan 410"),
        (Current, PODS, "resourceVersion=431&resourceVersionMatch=Exact", "upstream", "kubefan 410"),
        // A later page.
        (Current, PODS, "continue=x", "upstream", "kubefan 400"),
        // {"v":"meta.k8s.io/v1","rv":430,"start":"a/p\u0000"}
        (
            Current,
            PODS,
            "continue=eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6NDMwLCJzdGFydCI6ImEvcFx1MDAwMCJ9",
            "upstream",
            "kubefan 410",
        ),
        // A watch that starts with the state at a version.
        (Unproved, PODS, &format!("{STATE}=430"), "watch", "watch"),
        (Unproved, PODS, &format!("{STATE}=431"), "upstream", "kubefan 504"),
        (Current, PODS, &format!("{STATE}=431"), "cache 200", "cache 200"),
        // A watch from a version.
        (Unproved, PODS, "watch=1&resourceVersion=430", "watch", "watch"),
        (Unproved, PODS, "watch=1&resourceVersion=431", "watch", "watch"),
        (Unproved, PODS, "watch=1&resourceVersion=6", "upstream", "kubefan 503"),
        // A watch from now.
        (Current, PODS, "watch=1&sendInitialEvents=false&resourceVersionMatch=NotOlderThan", "watch", "watch"),
        (
            Unproved,
            PODS,
            "watch=1&sendInitialEvents=false&resourceVersionMatch=NotOlderThan",
            "upstream",
            "kubefan 503",
        ),
        // The request itself.
        (Current, "/api/v1/pods/p", "resourceVersion=0", "upstream", "kubefan 404"),
        (Current, "/apis", "", "upstream", "kubefan 404"),
        (Current, "POST /api/v1/namespaces/a/pods", "", "upstream", "kubefan 405"),
        (Current, "HEAD /api/v1/pods", "", "upstream", "kubefan 405"),
        (Current, PODS, "resourceVersion=x", "upstream", "kubefan 400"),
        (Current, PODS, "resourceVersion=0&labelSelector=%3D", "upstream", "kubefan 400"),
        (Current, PODS, "resourceVersion=0&fieldSelector=a", "upstream", "kubefan 400"),
        (Current, PODS, "resourceVersion=0&fieldSelector=spec.none%3Da", "upstream", "kubefan 400"),
        (Current, PODS, "resourceVersion=0&labelSelector=a,b", "upstream", "kubefan 400"),
        (Current, PODS, "resourceVersion=0&shardSelector=x", "upstream", "kubefan 400"),
        (Current, "/api/v1/watch/namespaces/a/pods/p", "resourceVersion=430", "watch", "watch"),
        (
            Current,
            "/api/v1/watch/namespaces/a/pods/p",
            "resourceVersion=430&fieldSelector=a%3Db",
            "upstream",
            "kubefan 400",
        ),
    ] {
        let is = both(world, &format!("{path}?{query}"), &[], &options("", &[])).await;
        assert_eq!(is, [with, without], "{world:?}: {path}?{query}");
    }
}

#[tokio::test(start_paused = true)]
async fn headers_may_request_formats_that_only_upstream_has() {
    const ANY: &str = "/api/v1/namespaces/a/pods/q?resourceVersion=0";
    const PODS: &str = "/api/v1/pods?resourceVersion=0";
    const PARTIAL: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
    let partial_or_yaml = &*format!("{PARTIAL},application/yaml");
    for (world, uri, header, with, without) in [
        (Current, PODS, ("accept", "application/yaml"), "upstream", "kubefan 406"),
        (Current, PODS, ("accept", "text/plain"), "upstream", "kubefan 406"),
        (Current, PODS, ("accept", "\u{e9}"), "upstream", "kubefan 406"),
        (Current, PODS, ("accept", "application/yaml,application/json"), "upstream", "cache 200"),
        (Current, ANY, ("accept", PARTIAL), "upstream", "cache 404"),
        (Current, ANY, ("accept", partial_or_yaml), "upstream", "cache 404"),
        (Unheld, PODS, ("accept", "application/vnd.kubernetes.protobuf"), "cache 200", "cache 200"),
        (Unheld, "/api/v1/pods", ("accept", "application/vnd.kubernetes.protobuf"), "upstream", "cache 200"),
        (Current, PODS, ("impersonate-user", "x"), "upstream", "kubefan 403"),
    ] {
        let is = both(world, uri, &[header], &options("", &[])).await;
        assert_eq!(is, [with, without], "{world:?}: {uri} {header:?}");
    }
    let socket = [("connection", "upgrade"), ("upgrade", "websocket")];
    let is = both(Current, PODS, &socket, &options("", &[])).await;
    assert_eq!(is, ["upstream", "kubefan 404"], "a websocket that is no watch");
}

#[tokio::test(start_paused = true)]
async fn a_narrowed_cache_answers_for_the_objects_that_it_covers() {
    let narrowed = options("spec.nodeName=n", &[]);
    for (uri, with, without) in [
        ("/api/v1/pods?resourceVersion=0", "upstream", "kubefan 400"),
        ("/api/v1/pods?resourceVersion=0&fieldSelector=x", "upstream", "kubefan 400"),
        ("/api/v1/pods?resourceVersion=0&fieldSelector=spec.nodeName%3Dn", "cache 200", "cache 200"),
        ("/api/v1/pods?watch=1&resourceVersion=430", "upstream", "kubefan 400"),
        ("/api/v1/namespaces/a/pods/p?resourceVersion=0", "upstream", "cache 200"),
        ("/api/v1/namespaces/a/pods/q?resourceVersion=0", "upstream", "cache 503"),
    ] {
        assert_eq!(both(Current, uri, &[], &narrowed).await, [with, without], "{uri}");
    }
}

#[tokio::test(start_paused = true)]
async fn requests_that_upstream_might_misread_are_never_forwarded() {
    let gates = options("", &["ShardedListAndWatch=true", "ManagedFieldsOptOut=true"]);
    const SHARD: &str =
        "shardSelector=shardRange(object.metadata.uid,%270x0000000000000000%27,%270x8000000000000000%27)";
    let drop = ("accept", "application/json;drop=metadata.managedFields");
    let any = "resourceVersion=0";
    for (world, uri, headers, expected) in [
        (Current, format!("/api/v1/pods?{any}&{SHARD}"), &[][..], "cache 200"),
        (Current, format!("/api/v1/pods?{any}&shardSelector=x"), &[], "cache 400"),
        (Unheld, format!("/api/v1/pods?{SHARD}"), &[], "cache 200"),
        (Unproved, format!("/api/v1/pods?{SHARD}"), &[], "kubefan 503"),
        (Current, format!("/api/v1/pods?continue=x&{SHARD}"), &[], "kubefan 400"),
        (Current, format!("DELETE /api/v1/namespaces/a/pods?{SHARD}"), &[], "kubefan 400"),
        (Current, format!("/api/v1/namespaces/a/pods/p/log?{SHARD}"), &[], "kubefan 400"),
        (Current, format!("/api/v1/pods?{any}"), &[drop], "cache 200"),
        (Unproved, "/api/v1/pods".to_owned(), &[drop], "kubefan 503"),
        (Unheld, format!("/api/v1/namespaces/a/pods/p?{any}"), &[drop], "upstream"),
        (Current, format!("/api/v1/namespaces/a/pods/p?{any}"), &[drop], "cache 200"),
        (Current, "/api/v1/namespaces/a/pods/p".to_owned(), &[drop], "cache 200"),
    ] {
        let [with, _] = both(world, &uri, headers, &gates).await;
        assert_eq!(with, expected, "{world:?}: {uri} {headers:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_forwarded_read_costs_one_review_of_its_token() {
    // The mode, the right to the read and the user that the request acts as depend on the caller.
    let rule = ModeRule {
        resources: vec!["pods".parse().unwrap()],
        users: Some(vec!["other".parse().unwrap()]),
        groups: None,
        mode: Mode::Deny,
    };
    let token_reviews = Arc::new(AtomicUsize::new(0));
    let access = allowed(token_reviews.clone()).with_switches(Switches::fixed(Modes::new(vec![rule])));
    let catalog = OneCache::new();
    catalog.list_objects(430, &[POD]);
    let upstream = KubeUpstream { forwarder: Some(forwarder(Credentials::Impersonate)), origins: None };
    let metrics = Arc::new(Metrics::new(Registry::new()).unwrap());
    let reader = catalog.reader_for(access);
    let api = KubeApi::new(reader, upstream, options("", &[]), budget(), AuditLog::default(), metrics);
    let request = Request::get("/api/v1/pods").header("authorization", "Bearer x").body(Body::empty()).unwrap();
    let answer = api.answer(request, StreamWaker::new(&ConnectionWaker::new(), 1)).await;
    let Answer::Response(response) = answer else { panic!("a list has one response") };
    assert!(response.extensions().get::<FromUpstream>().is_some(), "no proof arrives: {}", response.status());
    assert_eq!(token_reviews.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn every_answer_from_a_saved_state_has_its_age_and_one_of_a_connection_a_warning() {
    let catalog = OneCache::new();
    catalog.restore(430, &[POD], Duration::from_secs(75));
    let metrics = Arc::new(Metrics::new(Registry::new()).unwrap());
    let upstream = KubeUpstream { forwarder: None, origins: None };
    let api = KubeApi::new(catalog.reader(), upstream, options("", &[]), budget(), AuditLog::default(), metrics);
    let headers = async |path: &str, client: &ClientInfo| {
        let mut request = Request::get(format!("/api/v1/{path}")).body(Body::empty()).unwrap();
        request.extensions_mut().insert(client.clone());
        match api.answer(request, StreamWaker::new(&ConnectionWaker::new(), 1)).await {
            Answer::Watch(opened) => {
                let mut headers = http::HeaderMap::new();
                WatchHeaders::of(&opened, kubefan_model::Media::Json).put(&mut headers);
                headers
            }
            Answer::Response(response) | Answer::Forwarded(response) => response.headers().clone(),
        }
    };
    let connection = ClientInfo::default();
    let reads = [
        "pods?resourceVersion=0",
        "namespaces/a/pods/p?resourceVersion=0",
        "namespaces/a/pods/q?resourceVersion=0",
        "pods?watch=1&resourceVersion=0",
    ];
    for (at, path) in reads.iter().enumerate() {
        let headers = headers(path, &connection).await;
        assert_eq!(headers["age"], "75", "{path}");
        assert_eq!(headers[CACHE_STATUS], "kubefan; hit; ttl=-75; detail=saved-state", "{path}");
        assert_eq!(headers.contains_key("warning"), at == 0, "{path}");
    }
    assert!(headers(reads[0], &ClientInfo::default()).await.contains_key("warning"), "another connection");
    catalog.served.hub.confirmed();
    let headers = headers(reads[0], &ClientInfo::default()).await;
    assert_eq!((headers.get("age"), &headers[CACHE_STATUS]), (None, &http::HeaderValue::from_static("kubefan; hit")));
}
