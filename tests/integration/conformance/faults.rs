//! Behaviour that only the simulator can produce on demand: expiry, faults, limits. The
//! expected bytes were taken from a real server.

use std::{io::Read as _, time::Duration};

use kubefan_model::GroupVersionResource;
use kubefan_sim::apiserver::{Fault, FaultRule, SimApiserver, SimOptions, Verb};
use serde_json::json;

use super::{Api, api::names, simulated, simulated_with};
use crate::harness::tests;

tests! {
    local: compaction_expires_older_versions_but_not_a_watch_that_is_up_to_date,
        a_watcher_behind_the_event_window_is_disconnected, faults_are_answered_like_a_real_apiserver,
        a_watch_can_be_corrupted_midway, large_lists_and_watches_are_compressed_on_request,
        an_older_server_has_no_watch_list, a_watch_that_starts_at_the_last_event_gets_no_bookmark,
        statistics_count_requests_and_events;
}

const PATH: &str = "/api/v1/namespaces/default/configmaps";

fn config_maps() -> GroupVersionResource {
    GroupVersionResource::new("", "v1", "configmaps")
}

fn create(sim: &SimApiserver, name: &str) -> u64 {
    sim.create(&config_maps(), json!({"metadata": {"name": name, "namespace": "default"}})).unwrap()
}

fn fault(sim: &SimApiserver, fault: Fault, verb: Verb) {
    sim.set_fault(FaultRule { fault, verb: Some(verb), resource: None, requests: 1 });
}

async fn compaction_expires_older_versions_but_not_a_watch_that_is_up_to_date() {
    let (sim, api) = simulated().await;
    let old = create(&sim, "a");
    for name in ["b", "c"] {
        create(&sim, name);
    }
    let page = api.get(&format!("{PATH}?limit=1")).await.ok();
    let token = page["metadata"]["continue"].as_str().unwrap().to_owned();
    let deleted = sim.delete(&config_maps(), "default", "c").unwrap();
    let exact = format!("{PATH}?resourceVersion={old}&resourceVersionMatch=Exact");
    let too_old = "The resourceVersion for the provided list is too old.";
    // etcd's compaction leaves the events of the watch cache.
    sim.compact_etcd();
    api.get(&exact).await.fails(410, "Expired", too_old);
    let mut events = api.watch(&format!("{PATH}?resourceVersion={old}")).await;
    assert_eq!(events.next().await.unwrap().short(), "ADDED b");

    let mut up_to_date = api.watch(&format!("{PATH}?resourceVersion={deleted}")).await;
    sim.create(&GroupVersionResource::new("", "v1", "namespaces"), json!({"metadata": {"name": "other"}})).unwrap();
    sim.compact();
    api.get(&exact).await.fails(410, "Expired", too_old);
    let events = api.watch(&format!("{PATH}?resourceVersion={old}")).await.rest().await;
    let expected = format!("too old resource version: {old} ({})", sim.revision());
    assert_eq!(events[0].object["message"], expected);
    let expired = api.get(&format!("{PATH}?limit=1&continue={token}")).await;
    let status = expired.json();
    assert_eq!((expired.code, &status["reason"]), (410, &json!("Expired")));
    assert!(status["message"].as_str().unwrap().starts_with("The provided continue parameter is too old to display"));
    let token = status["metadata"]["continue"].as_str().unwrap();
    let rest = api.get(&format!("{PATH}?continue={token}")).await.ok();
    assert_eq!(names(&rest), ["b"], "it continues at the latest state");
    create(&sim, "d");
    assert_eq!(up_to_date.next().await.unwrap().short(), "ADDED d");
}

async fn a_watcher_behind_the_event_window_is_disconnected() {
    let (sim, api) = simulated_with(SimOptions { window_events_max: 10, ..SimOptions::default() }).await;
    let start = create(&sim, "a");
    let big = "x".repeat(250_000);
    let mut events = api.watch(&format!("{PATH}?resourceVersion={start}")).await;
    // The client reads nothing while the server writes far more than the sockets buffer.
    for round in 0..80 {
        let object = json!({"metadata": {"name": "a", "namespace": "default"}, "data": {"k": format!("{round}{big}")}});
        sim.update(&config_maps(), object).unwrap();
        if round % 20 == 0 {
            tokio::task::yield_now().await;
        }
    }
    let mut last = start;
    while let Some(event) = events.next().await {
        assert!(event.version() > last);
        last = event.version();
    }
    assert!(last < sim.revision());
    assert_eq!(sim.stats().watches_cut, 1);
}

async fn faults_are_answered_like_a_real_apiserver() {
    let (sim, api) = simulated().await;
    fault(&sim, Fault::TooManyRequests { retry_after_seconds: 7 }, Verb::List);
    let answer = api.get(PATH).await;
    assert_eq!((answer.code, answer.retry_after.as_deref()), (429, Some("7")));
    assert_eq!(answer.json()["details"]["retryAfterSeconds"], 7);
    fault(&sim, Fault::TooManyRequestsText { retry_after_seconds: 1 }, Verb::List);
    let answer = api.get(PATH).await;
    assert_eq!((answer.code, answer.retry_after.as_deref()), (429, Some("1")));
    assert_eq!(answer.text, "Too many requests, please try again later.\n");
    fault(&sim, Fault::Forbidden, Verb::List);
    let message = "configmaps is forbidden: User \"system:anonymous\" cannot list resource \"configmaps\" in API group \"\" in the \
                   namespace \"default\"";
    api.get(PATH).await.fails(403, "Forbidden", message);
    for (one, verb, path, code) in [
        (Fault::InternalError, Verb::List, PATH, 500),
        (Fault::ServiceUnavailable, Verb::List, PATH, 503),
        (Fault::Unauthorized, Verb::Discovery, "/api", 401),
    ] {
        fault(&sim, one, verb);
        assert_eq!((api.get(path).await.code, api.get(path).await.code), (code, 200), "a fault is for one request");
    }
    fault(&sim, Fault::Disconnect, Verb::Get);
    assert!(api.client.get(format!("{}{PATH}/a", api.base_url)).send().await.is_err());
}

async fn raw(api: &Api, query: &str) -> reqwest::Response {
    api.client.get(format!("{}{PATH}?watch=1&{query}", api.base_url)).send().await.unwrap()
}

async fn a_watch_can_be_corrupted_midway() {
    let (sim, api) = simulated().await;
    create(&sim, "a");
    fault(&sim, Fault::TruncatedLine, Verb::Watch);
    let text = raw(&api, "").await.text().await.unwrap();
    assert!(text.starts_with("{\"type\":\"ADDED\"") && !text.contains('\n'), "{text}");
    fault(&sim, Fault::OverlongLine { bytes: 1_000_000 }, Verb::Watch);
    let text = raw(&api, "timeoutSeconds=1").await.text().await.unwrap();
    assert_eq!(text.find('\n'), Some(1_000_000));
    fault(&sim, Fault::OneByteWrites, Verb::Watch);
    let mut events = api.watch(PATH).await;
    assert_eq!(events.next().await.unwrap().short(), "ADDED a");
    fault(&sim, Fault::Silence, Verb::Watch);
    let mut response = raw(&api, "timeoutSeconds=1").await;
    assert_eq!(response.status(), 200);
    assert!(
        tokio::time::timeout(Duration::from_millis(1500), response.chunk()).await.is_err(),
        "half-open: the stream does not even end"
    );
}

async fn large_lists_and_watches_are_compressed_on_request() {
    let (sim, api) = simulated_with(SimOptions { gzip_watches: true, ..SimOptions::default() }).await;
    for number in 0..40 {
        let metadata = json!({"name": format!("m{number}"), "namespace": "default"});
        sim.create(&config_maps(), json!({"metadata": metadata, "data": {"k": "x".repeat(8000)}})).unwrap();
    }
    for query in ["", "?watch=1&timeoutSeconds=1"] {
        let get = || api.client.get(format!("{}{PATH}{query}", api.base_url));
        let plain = get().send().await.unwrap();
        assert!(plain.headers().get("content-encoding").is_none(), "only for clients that accept gzip");
        let response = get().header("accept-encoding", "gzip").send().await.unwrap();
        assert_eq!(response.headers()["content-encoding"], "gzip");
        let bytes = response.bytes().await.unwrap();
        let mut first = String::new();
        let mut all = String::new();
        flate2::read::GzDecoder::new(&bytes[..]).read_to_string(&mut first).unwrap();
        flate2::read::MultiGzDecoder::new(&bytes[..]).read_to_string(&mut all).unwrap();
        assert_eq!(first.lines().count(), 1, "a watch has one member per event");
        assert_eq!(all, plain.text().await.unwrap());
    }
}

async fn an_older_server_has_no_watch_list() {
    let (sim, api) = simulated_with(SimOptions { watch_list: false, ..SimOptions::default() }).await;
    create(&sim, "a");
    let query = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
    let message = "ListOptions.meta.k8s.io \"\" is invalid: sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch \
                   unless the WatchList feature gate is enabled";
    api.get(&format!("{PATH}?{query}")).await.fails(422, "Invalid", message);
    let events = api.watch(&format!("{PATH}?allowWatchBookmarks=true&timeoutSeconds=1")).await.rest().await;
    assert_eq!(events.len(), 1, "the state, without a final bookmark");
}

/// A bookmark is sent only for versions after the last event that the start of the watch examined,
/// selected or not.
async fn a_watch_that_starts_at_the_last_event_gets_no_bookmark() {
    let (sim, api) = simulated().await;
    let start = create(&sim, "a");
    create(&sim, "b");
    let query =
        format!("fieldSelector=metadata.name%3Da&resourceVersion={start}&allowWatchBookmarks=true&timeoutSeconds=3");
    api.get(PATH).await.ok();
    assert_eq!(api.watch(&format!("{PATH}?{query}")).await.rest().await, []);
}

async fn statistics_count_requests_and_events() {
    let (sim, api) = simulated().await;
    let start = create(&sim, "a");
    let mut all = api.watch(&format!("{PATH}?resourceVersion={start}")).await;
    let mut same = api.watch(&format!("{PATH}?resourceVersion={start}")).await;
    let mut other =
        api.watch(&format!("{PATH}?resourceVersion={start}&labelSelector=no%3Dsuch&timeoutSeconds=5")).await;
    let before = sim.stats();
    assert_eq!((before.open_watches[&config_maps()], before.watches_started), (3, 3));
    create(&sim, "b");
    for events in [&mut all, &mut same] {
        events.next().await.unwrap();
    }
    assert_eq!(other.next().await, None);
    let after = sim.stats();
    assert_eq!(after.events_encoded - before.events_encoded, 2, "each watcher frames the event for itself");
    assert_eq!(after.objects_encoded - before.objects_encoded, 1, "live watchers share the object's encoding");
    assert_eq!(after.selector_tests - before.selector_tests, 3);
    assert_eq!(after.open_watches[&config_maps()], 2);
    assert!(after.bytes_sent > before.bytes_sent && after.writes == before.writes + 1);
    api.get(PATH).await.ok();
    assert_eq!((sim.stats().lists, sim.stats().list_items), (1, 2));
}
