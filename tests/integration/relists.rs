//! Relists: upstream's history does not bridge a break, or the resource is removed. Subscribers get
//! exact events before, one marked gap, and exact events after it, or an end with a reason. Also
//! covers the read of the initial state, with all its disturbances.

use std::time::Duration;

use kubefan_common::proto::v1alpha1::ResourceState;
use kubefan_sim::apiserver::{Fault, SimResource, Verb};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tonic::Code;
use tonic_types::StatusExt;

use crate::{
    harness::{
        network::{Network, RecordedRequest, answer},
        record::Watch,
        rig::{PODS, Rig, Setup, pod, pods, stage, target, versions},
        tests,
    },
    peers::{Peer, with_peers},
    upstream_faults::{
        LEAST_WAIT, at_least, expired, line, open_watches, relists, relists_for, restarts, status, synced, write,
    },
};

tests! {
    paused: an_expired_version_leaves_a_marked_gap, a_break_that_history_does_not_bridge_leaves_one_marked_gap,
        an_object_too_long_for_a_watch_is_read_by_a_list, a_long_403_ends_the_streams_until_it_is_lifted,
        a_403_from_the_start_is_reported_until_it_is_lifted, a_removed_resource_ends_its_streams_and_can_return,
        a_list_whose_token_expires_is_repeated_without_pages, large_objects_are_listed_in_small_pages,
        an_apiserver_that_serves_no_watch_list_is_read_by_lists,
        an_interrupted_watch_list_publishes_no_partial_state, an_empty_page_does_not_restart_a_list,
        a_list_that_fails_midway_keeps_its_reason;
}

pub(crate) fn object(name: &str, version: u64) -> Value {
    let uid = format!("uid-of-{name}");
    let metadata = json!({ "namespace": "default", "name": name, "uid": uid, "resourceVersion": version.to_string() });
    json!({ "kind": "Pod", "apiVersion": "v1", "metadata": metadata })
}

/// The requests for lists and pages of pods.
fn lists(rig: &Rig) -> Vec<String> {
    rig.asked(PODS).into_iter().filter(|asked| !asked.is_watch()).map(|asked| asked.path).collect()
}

/// For each request for pods, whether it wishes for the state as initial events.
fn wishes(rig: &Rig) -> Vec<bool> {
    rig.asked(PODS).iter().map(|asked| asked.path.contains("sendInitialEvents")).collect()
}

/// Checks a break that upstream's history does not bridge: exact before, one marked gap, exact
/// after.
async fn assert_gap(rig: &Rig, watch: &mut Watch, reason: &str, before: &[u64], during: [u64; 3]) {
    watch.until(during[2]).await;
    assert_eq!(versions(&watch.events), before, "{reason}: exact up to the gap");
    assert_eq!(watch.gap_reasons, [reason]);
    assert_eq!(watch.state, rig.truth(PODS).await, "{reason}: the state after the gap");
    assert_eq!(relists_for(rig, reason), 1.0, "{reason}");
    let after = write(rig, "after");
    watch.until(after[2]).await;
    assert_eq!(versions(&watch.events), [before, &after].concat(), "{reason}: exact after the gap");
    assert_eq!(open_watches(rig), 1.0, "{reason}");
}

async fn an_expired_version_leaves_a_marked_gap() {
    for (watch_list, requests) in [(true, 2), (false, 3)] {
        let (rig, mut watch, asked) = synced(Setup::of(&["pods"]).with_watch_list(watch_list)).await;
        let mut selected = rig.watch(stage("new"), "").await.unwrap();
        selected.until_resumable().await;
        let mut before = write(&rig, "b").to_vec();
        rig.sim.delete(&pods(), "default", "a").unwrap();
        before.push(rig.sim.revision());
        before.push(rig.sim.create(&pods(), pod("kept", "new")).unwrap());
        watch.until(before[4]).await;
        rig.cut().await;
        let during = write(&rig, "c");
        // The watch resumes at an apiserver that has compacted the version: HTTP 200 with one ERROR
        // event.
        rig.sim.compact();
        assert_gap(&rig, &mut watch, "expired", &before, during).await;
        assert_eq!(rig.asked(PODS).len() - asked, requests, "one failed watch and the requests of a list");
        selected.until(during[2]).await;
        assert_eq!(selected.gap_reasons, ["expired"]);
        assert_eq!(selected.state.keys().collect::<Vec<_>>(), ["default/kept"]);
    }
}

/// The failure of the watch of pods after a connection breaks.
enum Break {
    /// A number of requests fail.
    Fault(Fault, usize),
    /// The next watch has one event: its type and its object. Then it is silent.
    Event(&'static str, fn(u64) -> Value),
}

async fn a_break_that_history_does_not_bridge_leaves_one_marked_gap() {
    let not_found = status(404, "NotFound", "the server could not find the requested resource");
    let nameless = |_| json!({ "kind": "Pod", "apiVersion": "v1", "metadata": { "resourceVersion": "999" } });
    for (cause, reason, least) in [
        (Break::Fault(expired(), 1), "expired", Duration::ZERO),
        (Break::Fault(Fault::OverlongLine { bytes: 100 << 10 }, 1), "line_too_long", Duration::ZERO),
        // An apiserver that has just started denies everything until its authorizer has read its
        // rules.
        (Break::Fault(Fault::Forbidden, 3), "forbidden", LEAST_WAIT),
        // Discovery contradicts it.
        (Break::Fault(not_found, 3), "not_found", LEAST_WAIT),
        (Break::Event("MODIFIED", |old| object("a", old)), "out_of_order", LEAST_WAIT),
        (Break::Event("ADDED", nameless), "broken_object", LEAST_WAIT),
    ] {
        let mut setup = Setup::of(&["pods"]);
        setup.reflector.line_bytes_max = 64 << 10;
        let (rig, mut watch, asked) = synced(setup).await;
        let before = write(&rig, "b");
        watch.until(before[2]).await;
        match cause {
            Break::Fault(fault, times) => rig.fault(Verb::Watch, fault, times),
            Break::Event(kind, object) => {
                let event = line(kind, &object(before[0]));
                rig.network.answer_once(RecordedRequest::is_watch_path, answer(200, vec![event], true));
            }
        }
        rig.cut().await;
        let during = write(&rig, "c");
        if reason == "forbidden" {
            rig.readyz_has("pods stale: the apiserver denies kubefan pods").await;
        }
        assert_gap(&rig, &mut watch, reason, &before, during).await;
        at_least(&rig.asked(PODS)[asked..], least, reason);
    }
}

async fn an_object_too_long_for_a_watch_is_read_by_a_list() {
    let mut setup = Setup::of(&["pods"]);
    setup.reflector.line_bytes_max = 8 << 10;
    let (rig, mut watch, before) = synced(setup).await;
    let mut long = pod("long", "new");
    long["metadata"]["annotations"] = json!({ "note": "x".repeat(20 << 10) });
    let created = rig.sim.create(&pods(), long).unwrap();
    watch.until(created).await;
    assert_eq!(watch.state, rig.truth(PODS).await);
    assert_eq!(watch.gap_reasons.len(), 1);
    let asked = &rig.asked(PODS)[before..];
    assert!(asked.len() <= 4, "a watch list, which meets the same line, then a list and a watch: {asked:?}");
}

async fn a_long_403_ends_the_streams_until_it_is_lifted() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    rig.fault(Verb::Watch, Fault::Forbidden, 1000);
    rig.cut().await;
    let started = Instant::now();
    let status = watch.end().await;
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    assert!(started.elapsed() >= Duration::from_secs(30), "not before the grace period ends");
    let status = rig.watch(target("pods"), "").await.err().unwrap();
    assert_eq!(status.code(), Code::PermissionDenied, "forbidden objects are not served from the cache: {status}");
    assert_eq!(rig.list(target("pods")).await.unwrap_err().code(), Code::PermissionDenied);
    assert!(!rig.registry.readiness().0);
    rig.sim.clear_faults();
    write(&rig, "b");
    rig.ready().await;
    assert_eq!(rig.watch_all("pods").await.state, rig.truth(PODS).await);
}

async fn a_403_from_the_start_is_reported_until_it_is_lifted() {
    let setup = Setup::of(&["pods"]);
    let rig = Rig::start(setup.sim(), setup);
    rig.fault(Verb::Watch, Fault::Forbidden, 3);
    rig.readyz_has("pods forbidden: ").await;
    let status = rig.watch(target("pods"), "").await.err().unwrap();
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    assert_eq!(status.get_details_error_info().unwrap().reason, "UPSTREAM_FORBIDDEN");
    assert!(status.message().contains("cannot watch resource \"pods\""), "{status}");
    // Readers must not see the name of kubefan's account.
    assert!(!status.message().contains("system:anonymous"), "{status}");
    assert_eq!(rig.resources().await[0].state(), ResourceState::Forbidden);
    rig.ready().await;
    at_least(&rig.asked(PODS), LEAST_WAIT, "forbidden");
    rig.watch_all("pods").await;
}

async fn a_removed_resource_ends_its_streams_and_can_return() {
    const WIDGETS: &str = "/apis/example.com/v1/widgets";
    let setup = Setup { peers: with_peers(vec![Peer::Silent]).peers, ..Setup::of(&["widgets.example.com"]) };
    let sim = setup.sim();
    let widgets = SimResource::custom("example.com", "v1", "widgets", "Widget");
    let widget = |name: &str| json!({ "metadata": { "namespace": "default", "name": name } });
    let rig = Rig::start(sim, setup);
    rig.readyz_has("widgets.example.com not found").await;
    assert!(rig.registry.readiness().0, "a missing resource does not prevent readiness");
    assert_eq!(rig.watch(target("widgets.example.com"), "").await.err().unwrap().code(), Code::NotFound);
    for _ in 0..3 {
        rig.sim.add_resource(widgets.clone());
        rig.sim.create(&widgets.gvr, widget("a")).unwrap();
        rig.readyz_has("widgets.example.com synced").await;
        let mut watch = rig.watch_all("widgets.example.com").await;
        assert_eq!(watch.state.len(), 1);
        rig.sim.remove_resource(&widgets.gvr);
        let status = watch.end().await;
        assert_eq!(status.code(), Code::NotFound, "{status}");
        assert!(status.message().contains("widgets.example.com"), "{status}");
        rig.readyz_has("widgets.example.com not found").await;
        let asked = rig.asked(WIDGETS).len();
        sleep(Duration::from_secs(60)).await;
        assert_eq!(rig.asked(WIDGETS).len(), asked, "a missing resource is not requested");
    }
    let labels = r#"group="example.com",media="json",namespace="",resource="widgets""#;
    let tried = |result: &str| rig.metric(&format!(r#"kubefan_warm_starts_total{{{labels},result="{result}"}}"#));
    assert_eq!(tried("failed") + tried("timeout"), 1.0, "only a starting replica asks peers");
}

async fn a_list_whose_token_expires_is_repeated_without_pages() {
    let mut setup = Setup::of(&["pods"]).by_list();
    setup.reflector.page_size = 2;
    let sim = setup.sim();
    for name in ["a", "b", "c", "d", "e"] {
        sim.create(&pods(), pod(name, "first")).unwrap();
    }
    let network = Network::to(sim.clone());
    let late = sim.clone();
    let mut pages = 0;
    network.rule(move |path| {
        pages += usize::from(path.contains("continue="));
        if path.contains("continue=") && pages == 2 {
            late.create(&pods(), pod("late", "first")).unwrap();
            late.compact();
        }
        None
    });
    let rig = Rig::over(network, sim, setup);
    rig.ready().await;
    let mut watch = rig.watch_all("pods").await;
    assert_eq!(watch.state, rig.truth(PODS).await, "no mixture of two versions");
    let first = lists(&rig);
    assert_eq!(first.len(), 4, "two pages, an expired one, and one list without pages: {first:?}");
    assert!(!first[3].contains("limit="), "{first:?}");
    assert_eq!(relists_for(&rig, "continue_expired"), 1.0);

    // The next list uses pages again.
    rig.cut().await;
    let last = write(&rig, "f");
    rig.sim.compact();
    watch.until(last[2]).await;
    assert_eq!(lists(&rig).len(), 4 + 3);
    assert_eq!(watch.state, rig.truth(PODS).await);
}

async fn large_objects_are_listed_in_small_pages() {
    let setup = Setup::of(&["pods"]).by_list();
    let sim = setup.sim();
    for number in 0..35 {
        let mut large = pod(&format!("p-{number}"), "first");
        large["metadata"]["annotations"] = json!({ "text": "x".repeat(2_000_000) });
        sim.create(&pods(), large).unwrap();
    }
    let rig = Rig::over(Network::to(sim.clone()), sim, setup);
    rig.ready().await;
    // 70 MB, and 62 objects are more, are too long; 7 of 14 MB are more than wanted.
    let few = ["limit=4"; 7];
    let limits = [&["limit=500", "limit=62", "limit=7"][..], &few].concat();
    let asked = lists(&rig);
    let is_as_wanted =
        asked.len() == limits.len() && asked.iter().zip(limits).all(|(path, limit)| path.contains(limit));
    assert!(is_as_wanted, "{asked:?}");
}

async fn an_apiserver_that_serves_no_watch_list_is_read_by_lists() {
    let error = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 500,
        "reason": "InternalError", "message": "etcd cannot tell its progress" });
    for form in ["unknown", "ignored once", "error event", "silence"] {
        let mut setup = Setup::of(&["pods"]);
        setup.sim.watch_list = form != "unknown";
        let sim = setup.sim();
        sim.create(&pods(), pod("a", "first")).unwrap();
        let network = Network::to(sim.clone());
        let mut answers_left = if form == "ignored once" { 1 } else { usize::MAX };
        let error = line("ERROR", &error);
        network.rule(move |path| {
            let lines = match form {
                _ if !path.contains("sendInitialEvents") || answers_left == 0 => return None,
                "unknown" => return None,
                "ignored once" => vec![line("ADDED", &object("a", 3)), line("MODIFIED", &object("a", 4))],
                "error event" => vec![error.clone()],
                _ => vec![],
            };
            answers_left -= 1;
            Some(answer(200, lines, form != "error event"))
        });
        let rig = Rig::over(network, sim, setup);
        rig.ready().await;
        let mut watch = rig.watch_all("pods").await;
        assert_eq!(watch.state, rig.truth(PODS).await, "{form}");
        assert_eq!(wishes(&rig), [true, false, false], "{form}: requested once, then a list and a watch");
        rig.cut().await;
        let during = write(&rig, "b");
        rig.sim.compact();
        assert_one_gap(&rig, &mut watch, "expired", during).await;
        let again = wishes(&rig).iter().filter(|wish| **wish).count() - 1;
        let is_failure = matches!(form, "error event" | "silence");
        assert_eq!(again, usize::from(is_failure), "{form}: an answer is remembered, and a failure is not");
    }
}

async fn an_interrupted_watch_list_publishes_no_partial_state() {
    for form in ["clean end", "truncated line", "error event", "silence"] {
        let setup = Setup::of(&["pods"]);
        let sim = setup.sim();
        for name in ["a", "b", "c"] {
            sim.create(&pods(), pod(name, "first")).unwrap();
        }
        let half = move |version: u64| {
            let mut lines = vec![line("ADDED", &object("a", version)), line("ADDED", &object("ghost", version))];
            match form {
                "truncated line" => lines.push(r#"{"type":"ADDED","object":{"kind":"Pod"}"#.to_owned()),
                "error event" => {
                    lines.push(line("ERROR", &json!({ "kind": "Status", "code": 410, "reason": "Expired" })))
                }
                _ => {}
            }
            answer(200, lines, form == "silence")
        };
        let network = Network::to(sim.clone());
        network.answer_once(|path| path.contains("sendInitialEvents"), half(2));
        let rig = Rig::over(network, sim, setup);
        rig.ready().await;
        let mut watch = rig.watch_all("pods").await;
        assert_eq!(watch.state, rig.truth(PODS).await, "{form}: the first state");

        rig.network.answer_once(|path| path.contains("sendInitialEvents"), half(rig.sim.revision()));
        rig.cut().await;
        let during = write(&rig, "d");
        rig.sim.compact();
        watch.until(during[2]).await;
        assert_eq!(watch.state, rig.truth(PODS).await, "{form}: the state after a relist");
        assert_eq!(watch.gap_reasons, ["expired"], "{form}: one gap with its reason");
        assert_eq!(watch.events, [], "{form}: no events outside the gap");
        let asked = rig.asked(PODS);
        // Each time one watch list fails, then a list and a watch follow.
        assert_eq!(asked.len(), 3 + (1 + 3), "{form}: {asked:?}");
    }
}

async fn an_empty_page_does_not_restart_a_list() {
    let setup = Setup::of(&["pods"]).by_list();
    let sim = setup.sim();
    sim.create(&pods(), pod("a", "first")).unwrap();
    let network = Network::to(sim.clone());
    // With a selector a page can be empty without being the last one.
    let empty = json!({ "kind": "PodList", "apiVersion": "v1", "metadata": { "resourceVersion": "6", "continue": "next" }, "items": [] });
    network.answer_once(|path| path.starts_with(PODS), answer(200, vec![empty.to_string()], false));
    let all = json!({ "kind": "PodList", "apiVersion": "v1", "metadata": { "resourceVersion": "6" }, "items": null });
    network.answer_once(|path| path.contains("continue=next"), answer(200, vec![all.to_string()], false));
    let rig = Rig::over(network, sim, setup);
    rig.ready().await;
    rig.watch_all("pods").await;
    assert_eq!(restarts(&rig, "timeout"), 0.0);
    assert_eq!(relists(&rig), 1.0);
}

/// Checks a gap whose list took more than one try.
async fn assert_one_gap(rig: &Rig, watch: &mut Watch, reason: &str, during: [u64; 3]) {
    watch.until(during[2]).await;
    assert_eq!(watch.gap_reasons, [reason], "the reason is the first one");
    assert_eq!(watch.state, rig.truth(PODS).await, "{reason}: the state after the gap");
    assert_eq!((relists_for(rig, "interrupted"), relists_for(rig, "list_failed")), (0.0, 0.0));
}

async fn a_list_that_fails_midway_keeps_its_reason() {
    let mut setup = Setup::of(&["pods"]).by_list();
    setup.reflector.page_size = 1;
    let (rig, mut watch, _) = synced(setup).await;
    rig.sim.create(&pods(), pod("kept", "first")).unwrap();
    watch.until(rig.sim.revision()).await;
    let mut fails = 2;
    rig.network.rule(move |path| {
        let fail = path.contains("continue=") && fails > 0;
        fails -= i32::from(fail);
        fail.then(|| answer(503, vec!["{}".to_owned()], false))
    });
    rig.cut().await;
    let during = write(&rig, "b");
    rig.sim.compact();
    assert_one_gap(&rig, &mut watch, "expired", during).await;
}
