//! A resource that the apiserver cannot list, such as one whose conversion webhook is down: readers
//! of its cache learn it at once, in the apiserver's words, and do not wait for a list that will
//! not come.

use std::time::Duration;

use http_body_util::BodyExt;
use kubefan_sim::apiserver::Verb;
use serde_json::Value;
use tokio::time::Instant;
use tonic::Code;
use tonic_types::StatusExt;

use crate::{
    harness::{
        rig::{PODS, Rig, Setup, on_demand, pod, pods, target},
        tests,
    },
    upstream_faults::status,
};

tests! {
    paused: a_list_that_fails_upstream_is_reported_at_once_with_its_cause,
        a_list_that_only_is_not_ready_is_waited_for;
}

const CAUSE: &str = "conversion webhook for example.com/v1, Kind=Widget failed: connection refused";

/// The code and message of a refusal over HTTP, and the time that it took.
async fn refused(rig: &Rig, query: &str) -> (u16, String, Duration) {
    let asked_at = Instant::now();
    let response = rig.get(&format!("{PODS}?{query}")).await;
    let (code, body) = (response.status().as_u16(), response.into_body().collect().await.unwrap().to_bytes());
    let status: Value = serde_json::from_slice(&body).unwrap();
    (code, status["message"].as_str().unwrap_or_default().to_owned(), asked_at.elapsed())
}

/// A kubefan whose first list fails, with what an apiserver answers to a list and to a watch.
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

async fn a_list_that_only_is_not_ready_is_waited_for() {
    for (code, message) in [(429, "storage is (re)initializing"), (429, "Too many requests, please try again later.")] {
        let rig = failing(&["pods"], true, code, message).await;
        rig.readyz_has("pods syncing: ").await;
        let (code, said, after) = refused(&rig, "watch=1").await;
        assert_eq!((code, &*said), (429, "storage is (re)initializing"), "{message}");
        assert!(after >= Duration::from_secs(5), "{message}: after {after:?}");
    }
}
