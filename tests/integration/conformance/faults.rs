//! Behaviour that only the simulator can produce on demand: expiry, faults, restarts, limits. The
//! expected bytes were taken from a real server.

use std::{io::Read as _, time::Duration};

use kubefan_model::GroupVersionResource;
use kubefan_sim::apiserver::{Fault, FaultRule, SimApiserver, SimOptions, SimResource, Verb};
use serde_json::json;

use super::{
    Api,
    api::{names, version},
    simulated, simulated_with,
};
use crate::harness::tests;

tests! {
    local: compaction_expires_older_versions, etcd_compaction_keeps_the_events_of_the_watch_cache,
        a_watch_that_is_up_to_date_survives_compaction, a_watcher_behind_the_event_window_is_disconnected,
        faults_are_answered_like_a_real_apiserver, a_watch_can_be_corrupted_midway,
        compressed_watches_have_one_gzip_member_per_event, large_lists_are_compressed_on_request,
        a_restart_drops_connections_and_history, an_older_server_has_no_watch_list,
        a_watch_that_starts_at_the_last_event_gets_no_bookmark, a_configured_bearer_token_is_required,
        a_schema_change_changes_bytes_and_hash_but_no_version, statistics_count_requests_and_events;
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

async fn compaction_expires_older_versions() {
    let (sim, api) = simulated().await;
    let old = create(&sim, "a");
    for name in ["b", "c"] {
        create(&sim, name);
    }
    let page = api.get(&format!("{PATH}?limit=1")).await.ok();
    let token = page["metadata"]["continue"].as_str().unwrap().to_owned();
    sim.delete(&config_maps(), "default", "c").unwrap();
    sim.compact();
    let message = "The resourceVersion for the provided list is too old.";
    api.get(&format!("{PATH}?resourceVersion={old}&resourceVersionMatch=Exact")).await.fails(410, "Expired", message);
    let events = api.watch(&format!("{PATH}?resourceVersion={old}")).await.rest().await;
    let expected = format!("too old resource version: {old} ({})", sim.revision());
    assert_eq!(events[0].object["message"], expected);
    let expired = api.get(&format!("{PATH}?limit=1&continue={token}")).await;
    assert_eq!(expired.code, 410);
    let expired = expired.json();
    assert_eq!(expired["reason"], "Expired");
    assert!(expired["message"].as_str().unwrap().starts_with("The provided continue parameter is too old to display"));
    let token = expired["metadata"]["continue"].as_str().unwrap();
    assert_eq!(
        names(&api.get(&format!("{PATH}?continue={token}")).await.ok()),
        ["b"],
        "it continues at the latest state"
    );
}

async fn etcd_compaction_keeps_the_events_of_the_watch_cache() {
    let (sim, api) = simulated().await;
    let old = create(&sim, "a");
    create(&sim, "b");
    sim.compact_etcd();
    let message = "The resourceVersion for the provided list is too old.";
    api.get(&format!("{PATH}?resourceVersion={old}&resourceVersionMatch=Exact")).await.fails(410, "Expired", message);
    let mut events = api.watch(&format!("{PATH}?resourceVersion={old}")).await;
    assert_eq!(events.next().await.unwrap().short(), "ADDED b");
}

async fn a_watch_that_is_up_to_date_survives_compaction() {
    let (sim, api) = simulated().await;
    let start = create(&sim, "a");
    let mut events = api.watch(&format!("{PATH}?resourceVersion={start}")).await;
    sim.create(&GroupVersionResource::new("", "v1", "namespaces"), json!({"metadata": {"name": "other"}})).unwrap();
    sim.compact();
    create(&sim, "b");
    assert_eq!(events.next().await.unwrap().short(), "ADDED b");
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
    fault(&sim, Fault::InternalError, Verb::List);
    fault(&sim, Fault::ServiceUnavailable, Verb::List);
    fault(&sim, Fault::Unauthorized, Verb::Discovery);
    assert_eq!(api.get(PATH).await.code, 500);
    assert_eq!(api.get(PATH).await.code, 503);
    assert_eq!(api.get("/api").await.code, 401);
    assert_eq!(api.get(PATH).await.code, 200, "each fault is for one request");
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

async fn compressed_watches_have_one_gzip_member_per_event() {
    let (sim, api) = simulated_with(SimOptions { gzip_watches: true, ..SimOptions::default() }).await;
    create(&sim, "a");
    create(&sim, "b");
    let plain = raw(&api, "timeoutSeconds=1").await;
    assert!(plain.headers().get("content-encoding").is_none(), "only for clients that accept gzip");
    let url = format!("{}{PATH}?watch=1&timeoutSeconds=1", api.base_url);
    let response = api.client.get(url).header("accept-encoding", "gzip").send().await.unwrap();
    assert_eq!(response.headers()["content-encoding"], "gzip");
    let bytes = response.bytes().await.unwrap();
    let mut first = String::new();
    flate2::read::GzDecoder::new(&bytes[..]).read_to_string(&mut first).unwrap();
    assert_eq!(first.lines().count(), 1);
    let mut all = String::new();
    flate2::read::MultiGzDecoder::new(&bytes[..]).read_to_string(&mut all).unwrap();
    assert_eq!(all, plain.text().await.unwrap());
}

async fn large_lists_are_compressed_on_request() {
    let (sim, api) = simulated().await;
    for i in 0..40 {
        let object =
            json!({"metadata": {"name": format!("m{i}"), "namespace": "default"}, "data": {"k": "x".repeat(8000)}});
        sim.create(&config_maps(), object).unwrap();
    }
    let plain = api.get(PATH).await;
    let response =
        api.client.get(format!("{}{PATH}", api.base_url)).header("accept-encoding", "gzip").send().await.unwrap();
    assert_eq!(response.headers()["content-encoding"], "gzip");
    let mut text = String::new();
    flate2::read::GzDecoder::new(&response.bytes().await.unwrap()[..]).read_to_string(&mut text).unwrap();
    assert_eq!(text, plain.text);
}

async fn a_restart_drops_connections_and_history() {
    let (sim, api) = simulated().await;
    let start = create(&sim, "a");
    create(&sim, "b");
    let mut response = raw(&api, &format!("resourceVersion={start}")).await;
    assert!(response.chunk().await.unwrap().is_some());
    sim.restart();
    assert!(response.chunk().await.is_err(), "the stream breaks instead of ending");
    let events = api.watch(&format!("{PATH}?resourceVersion={start}")).await.rest().await;
    assert_eq!(events[0].object["reason"], "Expired");
    assert_eq!(names(&api.get(PATH).await.ok()), ["a", "b"]);
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

async fn a_configured_bearer_token_is_required() {
    let (_, mut api) =
        simulated_with(SimOptions { bearer_token: Some("secret".into()), ..SimOptions::default() }).await;
    api.get(PATH).await.fails(401, "Unauthorized", "Unauthorized");
    api.bearer = Some("secret".into());
    assert_eq!(api.get(PATH).await.code, 200);
}

async fn a_schema_change_changes_bytes_and_hash_but_no_version() {
    let (sim, api) = simulated().await;
    let widgets = SimResource::custom("example.com", "v1", "widgets", "Widget");
    let gvr = widgets.gvr.clone();
    sim.add_resource(widgets);
    sim.create(&gvr, json!({"metadata": {"name": "w", "namespace": "default"}, "spec": {"old": 1}})).unwrap();
    let path = "/apis/example.com/v1/widgets";
    let index = || async { api.get("/openapi/v3").await.ok()["paths"]["apis/example.com/v1"].clone() };
    let (before, hash) = (api.get(path).await.ok(), index().await);
    sim.change_schema(&gvr, |widget| widget["spec"] = json!({"new": 1})).unwrap();
    let after = api.get(path).await.ok();
    assert_eq!(version(&before["items"][0]), version(&after["items"][0]));
    assert_eq!((&after["items"][0]["spec"], index().await == hash), (&json!({"new": 1}), false));
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
