//! A resource that the apiserver cannot list, such as one whose conversion webhook is down: readers
//! of its cache receive the apiserver's error at once, and do not wait for a list that will not
//! come.

use std::time::Duration;

use http_body_util::BodyExt;
use kubefan_sim::apiserver::Verb;
use reqwest::{Method, Response};
use serde_json::{Value, json};
use tokio::time::Instant;
use tonic::Code;
use tonic_types::StatusExt;

use crate::{
    harness::{
        apiserver::ApiServer,
        process::closed_port,
        rest::CRDS,
        rig::{PODS, Rig, Setup, on_demand, pod, pods, target},
        servers::Servers,
        tests, wait,
    },
    upstream_faults::status,
};

tests! {
    paused: a_list_that_fails_upstream_is_reported_at_once_with_its_cause,
        a_list_that_fails_upstream_is_reported_with_its_cause_behind_two_kubefans,
        a_list_that_only_is_not_ready_is_waited_for;
    apiserver: a_conversion_webhook_that_is_down_is_reported_as_by_the_apiserver;
}

const CAUSE: &str = "conversion webhook for example.com/v1, Kind=Widget failed: connection refused";

/// The code and message of a refusal over HTTP, and the time that it took.
async fn refused(rig: &Rig, query: &str) -> (u16, String, Duration) {
    let asked_at = Instant::now();
    let response = rig.get(&format!("{PODS}?{query}")).await;
    let code = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let status: Value = serde_json::from_slice(&body).unwrap();
    (code, status["message"].as_str().unwrap_or_default().to_owned(), asked_at.elapsed())
}

/// Starts a kubefan whose first list fails, with an apiserver's answer to a list and to a watch.
async fn failing(resources: &[&str], watch_list: bool, code: u16, message: &str) -> Rig {
    let setup = Setup::of(resources).on_demand(on_demand()).with_watch_list(watch_list);
    let sim = setup.sim();
    sim.create(&pods(), pod("a", "first")).unwrap();
    let rig = Rig::start(sim, setup);
    let reason = if code == 429 { "TooManyRequests" } else { "InternalError" };
    rig.fault(Verb::Watch, status(code, reason, message), 1000);
    rig.fault(Verb::List, status(500, "InternalError", message), 1000);
    rig
}

async fn a_list_that_fails_upstream_is_reported_at_once_with_its_cause() {
    let initializing = format!("storage is (re)initializing: {CAUSE}");
    for (watch_list, code, message) in [(true, 429, &*initializing), (true, 500, CAUSE), (false, 500, CAUSE)] {
        for resources in [&["pods"][..], &[]] {
            let what = format!("{watch_list}, {code}, {resources:?}");
            let rig = failing(resources, watch_list, code, message).await;
            for query in ["watch=1", "watch=1&resourceVersion=0", "resourceVersion=0"] {
                let (code, said, after) = refused(&rig, query).await;
                assert_eq!((code, &*said), (429, &*initializing), "{what}: {query}");
                assert!(after < Duration::from_secs(1), "{what}: {query}: after {after:?}");
            }
            let asked_at = Instant::now();
            let refused = rig.watch(target("pods"), "").await.err().unwrap();
            assert!(asked_at.elapsed() < Duration::from_secs(1), "{what}: after {:?}", asked_at.elapsed());
            assert_eq!(refused.code(), Code::Unavailable, "{what}: {refused}");
            assert_eq!(refused.get_details_error_info().unwrap().reason, "NOT_SYNCED", "{what}");
            assert!(refused.message().contains(CAUSE), "{what}: {refused}");
            rig.sim.clear_faults();
            if !resources.is_empty() {
                rig.readyz_has("pods synced").await;
                assert_eq!(rig.watch_all("pods").await.state.len(), 1, "{what}");
            }
        }
    }
}

async fn a_list_that_fails_upstream_is_reported_with_its_cause_behind_two_kubefans() {
    for resources in [&["pods"][..], &[]] {
        let front = failing(resources, true, 500, CAUSE).await;
        let (node, _link) = Rig::behind(&front, Setup::of(resources).on_demand(on_demand()));
        for query in ["watch=1", "watch=1&resourceVersion=0", "resourceVersion=0"] {
            let (code, said, after) = refused(&node, query).await;
            let initializing = format!("storage is (re)initializing: {CAUSE}");
            assert_eq!((code, said), (429, initializing), "{resources:?}: {query}");
            assert!(after < Duration::from_secs(1), "{resources:?}: {query}: after {after:?}");
        }
        let refused = node.watch(target("pods"), "").await.err().unwrap();
        assert!(refused.message().contains(CAUSE), "{resources:?}: {refused}");
    }
}

async fn a_list_that_only_is_not_ready_is_waited_for() {
    for (code, message) in [(429, "storage is (re)initializing"), (429, "Too many requests, please try again later.")] {
        let rig = failing(&["pods"], true, code, message).await;
        rig.readyz_has("pods syncing: ").await;
        let (code, said, after) = refused(&rig, "watch=1").await;
        assert_eq!((code, &*said), (429, "storage is (re)initializing"), "{message}");
        assert!(after >= Duration::from_secs(5), "{message}: after {after:?}");
    }
}

/// The code, reason and message of a refusal. An apiserver that does not serve a path yet answers
/// with a plain text.
async fn refusal(response: Response) -> (u16, Value, Value) {
    let code = response.status().as_u16();
    let body = response.text().await.unwrap();
    let status: Value = serde_json::from_str(&body).unwrap_or_else(|_| json!({ "message": body }));
    (code, status["reason"].clone(), status["message"].clone())
}

async fn a_conversion_webhook_that_is_down_is_reported_as_by_the_apiserver() {
    let servers = Servers::start(ApiServer::shared().await, &["--resource=pods"]).await;
    let api = &servers.api;
    let (_closed, address) = closed_port();
    let group = format!("{}.example.com", api.unique("webhook"));
    api.create_crd(&group, "widgets", "Widget").await;
    let widget = json!({ "apiVersion": format!("{group}/v1"), "kind": "Widget", "metadata": { "name": "a" } });
    api.create(&format!("/apis/{group}/v1/namespaces/default/widgets"), &widget).await;
    let version = |name: &str| {
        json!({
            "name": name, "served": true, "storage": name == "v1",
            "schema": { "openAPIV3Schema": { "type": "object" } },
        })
    };
    let webhook = json!({
        "clientConfig": { "url": format!("https://{address}/convert") }, "conversionReviewVersions": ["v1"],
    });
    let spec = json!({ "versions": [version("v1"), version("v2")], "conversion": { "strategy": "Webhook", "webhook": webhook } });
    api.patch(&format!("{CRDS}/widgets.{group}"), &json!({ "spec": spec })).await;
    let path = format!("/apis/{group}/v2/widgets");
    for query in ["", "?limit=1", "?resourceVersion=0", "?watch=1", "?watch=1&resourceVersion=0"] {
        let asked = format!("{path}{query}");
        let straight = wait::until("the failed conversion", wait::SOON, || async {
            let refused = refusal(servers.straight(&asked).send().await.unwrap()).await;
            refused.2.as_str().is_some_and(|said| said.contains("connection refused")).then_some(refused)
        })
        .await;
        let through = refusal(servers.through(Method::GET, &asked).send().await.unwrap()).await;
        assert_eq!(through, straight, "{query}");
    }
    api.delete_crd(&group, "widgets").await;
}
