//! Every way upstream can fail, and what a subscriber sees of it: nothing lost, nothing repeated, and what is not exact is marked.
//! The apiserver must not suffer either: each failure costs it one request, and the next comes after a wait.

use std::time::Duration;

use kubefan::sim::apiserver::{Fault, FaultRule, SimResource, Status, Verb};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tonic::Code;
use tonic_types::StatusExt;

use crate::harness::{
    Test,
    network::{Asked, Network, answer, waits},
    record::Watch,
    rig::{PODS, Rig, Setup, pod, pods, target, versions},
    tests,
};

pub(crate) const TESTS: &[Test] = tests! {
    paused: a_failed_watch_goes_on_where_it_was, a_failed_first_list_is_tried_again_and_readers_are_told,
        retry_after_is_the_least_wait, a_refused_connection_and_a_reset_lose_nothing,
        a_silent_connection_is_given_up_and_the_watch_goes_on, a_quiet_resource_is_no_failure, compression_and_fragments_change_nothing,
        an_expired_version_leaves_a_marked_gap, an_expired_status_leaves_a_marked_gap,
        a_line_that_is_too_long_is_listed_instead, an_object_too_long_for_a_watch_comes_by_list,
        a_short_403_is_bridged, a_long_403_ends_the_streams_until_it_is_lifted,
        a_403_from_the_start_is_told_until_it_is_lifted, a_404_that_discovery_denies_is_bridged,
        a_resource_that_goes_ends_its_streams_and_comes_back, a_list_that_expires_midway_is_asked_for_in_one_piece,
        an_apiserver_without_watch_list_is_listed, an_interrupted_watch_list_shows_nobody_half_a_state,
        a_watch_list_that_always_fails_is_listed, a_list_that_fails_midway_keeps_its_reason,
        a_watch_that_ignores_the_wish_for_the_initial_state_is_listed, an_old_event_is_never_passed_on,
        a_broken_event_is_listed_over, a_line_that_is_no_event_is_asked_for_again, bookmarks_move_the_version,
        no_failure_makes_a_tight_loop, watches_that_end_at_once_make_no_tight_loop, an_empty_page_is_no_restart,
        a_429_stops_discovery_too, what_is_cached_is_found_while_upstream_is_silent;
};

const LEAST_WAIT: Duration = Duration::from_millis(800);

/// A synced kubefan with one pod, a subscriber that has its snapshot, and the number of requests for pods so far.
async fn synced(setup: Setup) -> (Rig, Watch, usize) {
    let sim = setup.sim();
    sim.create(&pods(), pod("a", "first")).unwrap();
    let rig = Rig::synced(sim, setup).await;
    let watch = rig.watch_all("pods").await;
    let asked = rig.network.asked(PODS).len();
    (rig, watch, asked)
}

/// Creates, changes and deletes pods; the versions of the three writes.
fn write(rig: &Rig, name: &str) -> [u64; 3] {
    let created = rig.sim.create(&pods(), pod(name, "new")).unwrap();
    let changed = rig.sim.update(&pods(), pod(name, "changed")).unwrap();
    [created, changed, rig.sim.delete(&pods(), "default", name).unwrap()]
}

fn at_least(asked: &[Asked], least: Duration, what: &str) {
    let waits = waits(asked);
    assert!(waits.iter().all(|wait| *wait >= least), "{what}: requests came after {waits:?}");
}

/// What must hold after a break that upstream's history bridges.
async fn assert_bridged(what: &str, rig: &Rig, watch: &mut Watch, expected: &[u64]) {
    watch.until(*expected.last().unwrap()).await;
    assert_eq!(versions(&watch.events), expected, "{what}: the events");
    assert_eq!(watch.gaps, [], "{what}: no gap");
    assert_eq!(watch.state, rig.truth(PODS).await, "{what}: the state");
    assert_eq!(relists(rig), 1.0, "{what}: listed once, at the start");
    assert_eq!(open_watches(rig), 1.0, "{what}: one watch upstream");
}

fn relists(rig: &Rig) -> f64 {
    let reasons = [
        "initial",
        "expired",
        "interrupted",
        "list_failed",
        "continue_expired",
        "line_too_long",
        "not_found",
        "forbidden",
        "out_of_order",
        "broken_object",
    ];
    reasons.iter().map(|reason| relists_for(rig, reason)).sum()
}

fn relists_for(rig: &Rig, reason: &str) -> f64 {
    rig.metric(&format!(r#"kubefan_relists_total{{group="",namespace="",reason="{reason}",resource="pods"}}"#))
}

fn open_watches(rig: &Rig) -> f64 {
    rig.metric(r#"kubefan_upstream_watches{group="",namespace="",purpose="standing",resource="pods"}"#)
}

fn status(code: u16, reason: &'static str, message: &str) -> Fault {
    Fault::Status(Box::new(Status::failure(code, reason, message)))
}

/// What upstream may answer or do instead of serving, and passes.
fn passing_faults() -> Vec<Fault> {
    vec![
        Fault::TooManyRequests { retry_after_seconds: 1 },
        Fault::TooManyRequestsText { retry_after_seconds: 1 },
        Fault::Unauthorized,
        Fault::InternalError,
        Fault::ServiceUnavailable,
        status(504, "Timeout", "Timeout: request did not complete within the allotted timeout"),
        Fault::Disconnect,
    ]
}

async fn a_failed_watch_goes_on_where_it_was() {
    let in_stream = [Fault::TruncatedLine];
    for fault in passing_faults().into_iter().chain(in_stream) {
        let what = format!("{fault:?}");
        let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
        let mut expected = write(&rig, "b").to_vec();
        watch.until(expected[2]).await;
        rig.fault(Verb::Watch, fault, 3);
        rig.cut().await;
        expected.extend(write(&rig, "c"));
        assert_bridged(&what, &rig, &mut watch, &expected).await;
        let asked = &rig.network.asked(PODS)[before..];
        assert_eq!(asked.len(), 4, "{what}: each failure is one request: {asked:?}");
        at_least(asked, LEAST_WAIT, &what);
        expected.extend(write(&rig, "d"));
        assert_bridged(&what, &rig, &mut watch, &expected).await;
    }
}

async fn a_failed_first_list_is_tried_again_and_readers_are_told() {
    for watch_list in [true, false] {
        for fault in passing_faults() {
            let what = format!("{fault:?}, watch list: {watch_list}");
            let mut setup = Setup::of(&["pods"]);
            setup.reflector.watch_list = watch_list;
            let sim = setup.sim();
            sim.create(&pods(), pod("a", "first")).unwrap();
            let rig = Rig::start(sim, setup);
            rig.fault(if watch_list { Verb::Watch } else { Verb::List }, fault, 3);
            rig.readyz_has("pods syncing: list: ").await;
            let status = rig.watch(target("pods"), "").await.err().unwrap();
            assert_eq!(status.code(), Code::Unavailable, "{what}: {status}");
            assert_eq!(status.get_details_error_info().unwrap().reason, "NOT_SYNCED", "{what}");
            assert!(status.get_details_retry_info().unwrap().retry_delay.is_some(), "{what}");
            assert!(!rig.readyz().contains('\n'), "{what}: one line");

            rig.ready().await;
            let watch = rig.watch_all("pods").await;
            assert_eq!(watch.state, rig.truth(PODS).await, "{what}");
            let asked = rig.network.asked(PODS);
            let successes = if watch_list { 1 } else { 2 };
            assert_eq!(asked.len(), 3 + successes, "{what}: {asked:?}");
            at_least(&asked[..4], LEAST_WAIT, &what);
        }
    }
}

async fn retry_after_is_the_least_wait() {
    let least = Duration::from_secs(20);
    let event = json!({ "type": "ERROR", "object": {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 429, "reason": "TooManyRequests",
        "message": "storage is (re)initializing", "details": { "retryAfterSeconds": 20 },
    }});
    for form in ["status", "text", "event"] {
        let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
        match form {
            "status" => rig.fault(Verb::Watch, Fault::TooManyRequests { retry_after_seconds: 20 }, 2),
            "text" => rig.fault(Verb::Watch, Fault::TooManyRequestsText { retry_after_seconds: 20 }, 2),
            _ => {
                rig.network.answer_once(|path| path.starts_with(PODS), answer(200, vec![event.to_string()], false));
                rig.network.answer_once(|path| path.starts_with(PODS), answer(200, vec![event.to_string()], false));
            }
        }
        rig.cut().await;
        let expected = write(&rig, "b");
        assert_bridged(form, &rig, &mut watch, &expected).await;
        let asked = &rig.network.asked(PODS)[before..];
        assert_eq!(asked.len(), 3, "{form}");
        at_least(asked, least, form);
    }
}

async fn a_refused_connection_and_a_reset_lose_nothing() {
    let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
    rig.network.refuse(true);
    rig.cut().await;
    rig.readyz_has("pods stale: watch: cannot reach the apiserver").await;
    assert!(rig.registry.readiness().0, "what is cached is served");
    let mut expected = write(&rig, "b").to_vec();
    sleep(Duration::from_secs(60)).await;
    rig.network.refuse(false);
    assert_bridged("refused", &rig, &mut watch, &expected).await;
    at_least(&rig.network.asked(PODS)[before..], LEAST_WAIT, "refused");
    rig.readyz_has("pods synced").await;
    for name in ["c", "d", "e"] {
        rig.cut().await;
        expected.extend(write(&rig, name));
        assert_bridged("reset", &rig, &mut watch, &expected).await;
    }
}

async fn a_silent_connection_is_given_up_and_the_watch_goes_on() {
    let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
    rig.fault(Verb::Watch, Fault::Silence, 1);
    rig.cut().await;
    let expected = write(&rig, "b");
    assert_bridged("silence", &rig, &mut watch, &expected).await;
    let asked = &rig.network.asked(PODS)[before..];
    assert_eq!(asked.len(), 2, "{asked:?}");
    let silence = waits(asked)[0];
    assert!(silence >= Duration::from_secs(90) && silence < Duration::from_secs(95), "{silence:?}");
    let restarts = r#"kubefan_upstream_watch_restarts_total{group="",namespace="",reason="idle",resource="pods"}"#;
    assert_eq!(rig.metric(restarts), 1.0);
}

async fn a_quiet_resource_is_no_failure() {
    // No bookmark comes before the version has moved.
    let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
    let mut phase = rig.registry.hubs().remove(0).1.phase();
    let half_an_hour = Duration::from_secs(1800);
    let stale = phase.wait_for(|phase| *phase != kubefan::fanout::Phase::Synced);
    assert!(tokio::time::timeout(half_an_hour, stale).await.is_err(), "it stays synced");
    let asked = &rig.network.asked(PODS)[before..];
    assert!(asked.len() <= 20, "{} watches in half an hour", asked.len());
    let expected = write(&rig, "b");
    assert_bridged("quiet", &rig, &mut watch, &expected).await;
}

async fn compression_and_fragments_change_nothing() {
    for fault in [Fault::GzipMembers, Fault::OneByteWrites] {
        let what = format!("{fault:?}");
        let setup = Setup::of(&["pods"]);
        let sim = setup.sim();
        sim.create(&pods(), pod("a", "first")).unwrap();
        let rig = Rig::start(sim, setup);
        // The initial state and all that follows on the same stream.
        rig.fault(Verb::Watch, fault, 100);
        rig.ready().await;
        let mut watch = rig.watch_all("pods").await;
        let mut expected = write(&rig, "b").to_vec();
        assert_bridged(&what, &rig, &mut watch, &expected).await;
        rig.cut().await;
        expected.extend(write(&rig, "c"));
        expected.extend(write(&rig, "d"));
        assert_bridged(&what, &rig, &mut watch, &expected).await;
        assert_eq!(rig.network.asked(PODS).len(), 2, "{what}");
    }
}

/// What must hold after a break that upstream's history does not bridge: exact before, one marked gap, exact after.
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
    for watch_list in [true, false] {
        let mut setup = Setup::of(&["pods"]);
        setup.reflector.watch_list = watch_list;
        let (rig, mut watch, asked) = synced(setup).await;
        let before = write(&rig, "b");
        watch.until(before[2]).await;
        rig.sim.delete(&pods(), "default", "a").unwrap();
        watch.until(rig.sim.revision()).await;
        let before = [&before[..], &[rig.sim.revision()]].concat();
        let kept = rig.sim.create(&pods(), pod("kept", "new")).unwrap();
        watch.until(kept).await;
        let before = [&before[..], &[kept]].concat();
        rig.cut().await;
        let during = write(&rig, "c");
        // The watch comes back to an apiserver that has forgotten: HTTP 200 with one ERROR event.
        rig.sim.compact();
        assert_gap(&rig, &mut watch, "expired", &before, during).await;
        let requests = if watch_list { 2 } else { 3 };
        assert_eq!(rig.network.asked(PODS).len() - asked, requests, "the try, and what a list takes");
    }
}

async fn an_expired_status_leaves_a_marked_gap() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    rig.fault(Verb::Watch, status(410, "Expired", "The provided continue parameter is too old"), 1);
    rig.cut().await;
    let during = write(&rig, "c");
    assert_gap(&rig, &mut watch, "expired", &[], during).await;
}

async fn a_line_that_is_too_long_is_listed_instead() {
    let mut setup = Setup::of(&["pods"]);
    setup.reflector.line_bytes_max = 64 << 10;
    let (rig, mut watch, _) = synced(setup).await;
    rig.fault(Verb::Watch, Fault::OverlongLine { bytes: 100 << 10 }, 1);
    rig.cut().await;
    let during = write(&rig, "c");
    assert_gap(&rig, &mut watch, "line_too_long", &[], during).await;
}

async fn an_object_too_long_for_a_watch_comes_by_list() {
    let mut setup = Setup::of(&["pods"]);
    setup.reflector.line_bytes_max = 8 << 10;
    let (rig, mut watch, before) = synced(setup).await;
    let mut long = pod("long", "new");
    long["metadata"]["annotations"] = json!({ "note": "x".repeat(20 << 10) });
    let created = rig.sim.create(&pods(), long).unwrap();
    watch.until(created).await;
    assert_eq!(watch.state, rig.truth(PODS).await);
    assert_eq!(watch.gap_reasons.len(), 1);
    let asked = &rig.network.asked(PODS)[before..];
    assert!(asked.len() <= 4, "a watch list, which meets the same line, then a list and a watch: {asked:?}");
}

async fn a_short_403_is_bridged() {
    // An apiserver that has just started denies everything until its authorizer knows its rules.
    let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
    rig.fault(Verb::Watch, Fault::Forbidden, 3);
    rig.cut().await;
    let during = write(&rig, "c");
    rig.readyz_has("pods stale: the apiserver denies kubefan pods").await;
    assert_gap(&rig, &mut watch, "forbidden", &[], during).await;
    let asked = &rig.network.asked(PODS)[before..];
    at_least(&asked[..4], LEAST_WAIT, "forbidden");
}

async fn a_long_403_ends_the_streams_until_it_is_lifted() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    rig.fault(Verb::Watch, Fault::Forbidden, 1000);
    rig.cut().await;
    let started = Instant::now();
    let status = loop {
        match watch.step().await {
            Ok(step) => assert!(step.is_some(), "it says why"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    assert!(started.elapsed() >= Duration::from_secs(30), "not before the grace is over");
    let status = rig.watch(target("pods"), "").await.err().unwrap();
    assert_eq!(status.code(), Code::PermissionDenied, "what may not be read is not served from memory: {status}");
    assert_eq!(rig.list(target("pods")).await.unwrap_err().code(), Code::PermissionDenied);
    assert!(!rig.registry.readiness().0);
    rig.sim.clear_faults();
    write(&rig, "b");
    rig.ready().await;
    assert_eq!(rig.watch_all("pods").await.state, rig.truth(PODS).await);
}

async fn a_403_from_the_start_is_told_until_it_is_lifted() {
    let setup = Setup::of(&["pods"]);
    let rig = Rig::start(setup.sim(), setup);
    rig.fault(Verb::Watch, Fault::Forbidden, 3);
    rig.readyz_has("pods forbidden: ").await;
    let status = rig.watch(target("pods"), "").await.err().unwrap();
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    assert_eq!(status.get_details_error_info().unwrap().reason, "UPSTREAM_FORBIDDEN");
    assert!(status.message().contains("cannot watch resource \"pods\""), "{status}");
    rig.ready().await;
    at_least(&rig.network.asked(PODS), LEAST_WAIT, "forbidden");
    rig.watch_all("pods").await;
}

async fn a_404_that_discovery_denies_is_bridged() {
    let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
    rig.fault(Verb::Watch, status(404, "NotFound", "the server could not find the requested resource"), 3);
    rig.cut().await;
    let during = write(&rig, "c");
    assert_gap(&rig, &mut watch, "not_found", &[], during).await;
    at_least(&rig.network.asked(PODS)[before..before + 4], LEAST_WAIT, "not found");
}

async fn a_resource_that_goes_ends_its_streams_and_comes_back() {
    const WIDGETS: &str = "/apis/example.com/v1/widgets";
    let setup = Setup::of(&["widgets.example.com"]);
    let sim = setup.sim();
    let widgets = SimResource::custom("example.com", "v1", "widgets", "Widget");
    let widget = |name: &str| json!({ "metadata": { "namespace": "default", "name": name } });
    let rig = Rig::start(sim, setup);
    rig.readyz_has("widgets.example.com not found").await;
    assert!(rig.registry.readiness().0, "that a resource is not there is an answer");
    assert_eq!(rig.watch(target("widgets.example.com"), "").await.err().unwrap().code(), Code::NotFound);
    for _ in 0..3 {
        rig.sim.add_resource(widgets.clone());
        rig.sim.create(&widgets.gvr, widget("a")).unwrap();
        rig.readyz_has("widgets.example.com synced").await;
        let mut watch = rig.watch_all("widgets.example.com").await;
        assert_eq!(watch.state.len(), 1);
        rig.sim.remove_resource(&widgets.gvr);
        let status = loop {
            match watch.step().await {
                Ok(step) => assert!(step.is_some(), "it says why"),
                Err(status) => break status,
            }
        };
        assert_eq!(status.code(), Code::NotFound, "{status}");
        assert!(status.message().contains("widgets.example.com"), "{status}");
        rig.readyz_has("widgets.example.com not found").await;
        let asked = rig.network.asked(WIDGETS).len();
        sleep(Duration::from_secs(60)).await;
        assert_eq!(rig.network.asked(WIDGETS).len(), asked, "what is not served is not asked for");
    }
}

async fn a_list_that_expires_midway_is_asked_for_in_one_piece() {
    let mut setup = Setup::of(&["pods"]).by_list();
    setup.reflector.page_size = 2;
    let sim = setup.sim();
    for name in ["a", "b", "c", "d", "e"] {
        sim.create(&pods(), pod(name, "first")).unwrap();
    }
    let network = Network::to(sim.clone());
    let (late, mut pages) = (sim.clone(), 0);
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
    let lists: Vec<String> =
        rig.network.asked(PODS).into_iter().filter(|asked| !asked.is_watch()).map(|asked| asked.path).collect();
    assert_eq!(lists.len(), 4, "two pages, one that has expired, and all in one piece: {lists:?}");
    assert!(!lists[3].contains("limit="), "{lists:?}");
    assert_eq!(relists_for(&rig, "continue_expired"), 1.0);

    // The next list is paged again.
    rig.cut().await;
    let last = write(&rig, "f");
    rig.sim.compact();
    watch.until(last[2]).await;
    let lists = rig.network.asked(PODS).into_iter().filter(|asked| !asked.is_watch()).count();
    assert_eq!(lists, 4 + 3);
    assert_eq!(watch.state, rig.truth(PODS).await);
}

async fn an_apiserver_without_watch_list_is_listed() {
    let mut setup = Setup::of(&["pods"]);
    setup.sim.watch_list = false;
    let (rig, mut watch, _) = synced(setup).await;
    let initial: Vec<bool> =
        rig.network.asked(PODS).iter().map(|asked| asked.path.contains("sendInitialEvents")).collect();
    assert_eq!(initial, [true, false, false], "asked for once; then a list and a watch");
    rig.cut().await;
    let during = write(&rig, "b");
    rig.sim.compact();
    assert_gap(&rig, &mut watch, "expired", &[], during).await;
    let wishes = rig.network.asked(PODS).iter().filter(|asked| asked.path.contains("sendInitialEvents")).count();
    assert_eq!(wishes, 1, "an answer is remembered");
}

fn line(kind: &str, object: &Value) -> String {
    json!({ "type": kind, "object": object }).to_string()
}

fn object(name: &str, version: u64) -> Value {
    json!({
        "kind": "Pod", "apiVersion": "v1",
        "metadata": { "namespace": "default", "name": name, "uid": format!("uid-of-{name}"), "resourceVersion": version.to_string() },
    })
}

async fn an_interrupted_watch_list_shows_nobody_half_a_state() {
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
        assert_eq!(watch.gap_reasons, ["expired"], "{form}: one gap, and why it began");
        assert_eq!(watch.events, [], "{form}: nothing outside of it");
        let asked = rig.network.asked(PODS);
        // Each time what fails is a watch list, and what follows a list and a watch.
        assert_eq!(asked.len(), 3 + (1 + 3), "{form}: {asked:?}");
    }
}

async fn a_watch_list_that_always_fails_is_listed() {
    let error = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 500,
        "reason": "InternalError", "message": "etcd cannot tell its progress" });
    for form in ["error event", "silence"] {
        let setup = Setup::of(&["pods"]);
        let sim = setup.sim();
        sim.create(&pods(), pod("a", "first")).unwrap();
        let network = Network::to(sim.clone());
        let error = line("ERROR", &error);
        network.rule(move |path| {
            path.contains("sendInitialEvents").then(|| match form {
                "silence" => answer(200, vec![], true),
                _ => answer(200, vec![error.clone()], false),
            })
        });
        let rig = Rig::over(network, sim, setup);
        rig.ready().await;
        let mut watch = rig.watch_all("pods").await;
        assert_eq!(watch.state, rig.truth(PODS).await, "{form}");
        let initial: Vec<bool> =
            rig.network.asked(PODS).iter().map(|asked| asked.path.contains("sendInitialEvents")).collect();
        assert_eq!(initial, [true, false, false], "{form}: a list and a watch follow");
        rig.cut().await;
        let during = write(&rig, "b");
        rig.sim.compact();
        assert_gap_begins(&rig, &mut watch, "expired", during).await;
    }
}

/// What must hold after a gap whose list took more than one try.
async fn assert_gap_begins(rig: &Rig, watch: &mut Watch, reason: &str, during: [u64; 3]) {
    watch.until(during[2]).await;
    assert_eq!(watch.gap_reasons, [reason], "the reason is what began it");
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
    assert_gap_begins(&rig, &mut watch, "expired", during).await;
}

async fn a_watch_that_ignores_the_wish_for_the_initial_state_is_listed() {
    let setup = Setup::of(&["pods"]);
    let sim = setup.sim();
    sim.create(&pods(), pod("a", "first")).unwrap();
    let network = Network::to(sim.clone());
    let plain = vec![line("ADDED", &object("a", 3)), line("MODIFIED", &object("a", 4))];
    network.answer_once(|path| path.contains("sendInitialEvents"), answer(200, plain, true));
    let rig = Rig::over(network, sim, setup);
    rig.ready().await;
    assert_eq!(rig.watch_all("pods").await.state, rig.truth(PODS).await);
    let asked: Vec<bool> =
        rig.network.asked(PODS).iter().map(|asked| asked.path.contains("sendInitialEvents")).collect();
    assert_eq!(asked, [true, false, false]);
}

async fn an_old_event_is_never_passed_on() {
    let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
    let first = write(&rig, "b");
    watch.until(first[2]).await;
    let old = vec![line("MODIFIED", &object("a", first[0]))];
    rig.network.answer_once(Asked::is_watch_path, answer(200, old, true));
    rig.cut().await;
    let during = write(&rig, "c");
    assert_gap(&rig, &mut watch, "out_of_order", &first, during).await;
    at_least(&rig.network.asked(PODS)[before..], LEAST_WAIT, "out of order");
}

async fn a_broken_event_is_listed_over() {
    let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
    let nameless = json!({ "kind": "Pod", "apiVersion": "v1", "metadata": { "resourceVersion": "999" } });
    rig.network.answer_once(Asked::is_watch_path, answer(200, vec![line("ADDED", &nameless)], true));
    rig.cut().await;
    let during = write(&rig, "c");
    assert_gap(&rig, &mut watch, "broken_object", &[], during).await;
    at_least(&rig.network.asked(PODS)[before..], LEAST_WAIT, "broken object");
}

async fn a_line_that_is_no_event_is_asked_for_again() {
    let lines = [
        "no json at all".to_owned(),
        r#"{"type":"SURPRISE","object":{}}"#.to_owned(),
        r#"{"type":"ADDED"}"#.to_owned(),
        r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"x"}}}"#.to_owned(),
        r#"{"type":"ERROR","object":{"kind":"Pod"}}"#.to_owned(),
        format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000)),
    ];
    for text in lines {
        let what: String = text.chars().take(60).collect();
        let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
        rig.network.answer_once(Asked::is_watch_path, answer(200, vec![text], true));
        rig.cut().await;
        let expected = write(&rig, "b");
        assert_bridged(&what, &rig, &mut watch, &expected).await;
        at_least(&rig.network.asked(PODS)[before..], LEAST_WAIT, &what);
    }
}

async fn bookmarks_move_the_version() {
    let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
    let configmaps = kubefan::model::GroupVersionResource::new("", "v1", "configmaps");
    let other = json!({ "metadata": { "namespace": "default", "name": "other" } });
    let moved = rig.sim.create(&configmaps, other).unwrap();
    // As in an apiserver, somebody's consistent read tells the watch cache how far the cluster is.
    rig.truth(PODS).await;
    watch.until(moved).await;
    assert_eq!((watch.events.len(), watch.gaps.len()), (0, 0), "by a bookmark alone");
    rig.cut().await;
    // Without it this would be too old.
    rig.sim.compact();
    let expected = write(&rig, "b");
    assert_bridged("bookmark", &rig, &mut watch, &expected).await;
    let asked = rig.network.asked(PODS).split_off(before);
    assert!(asked[0].path.contains(&format!("resourceVersion={moved}&")), "{asked:?}");
}

/// Ten minutes of one failure cost at most so many requests: 0.8 s doubled up to 30 s.
const REQUESTS_MAX: usize = 30;

async fn no_failure_makes_a_tight_loop() {
    let ten_minutes = Duration::from_secs(600);
    let others = [
        Fault::Forbidden,
        Fault::TruncatedLine,
        Fault::OverlongLine { bytes: 17 << 20 },
        status(410, "Expired", "too old resource version: 1 (2)"),
        status(404, "NotFound", "the server could not find the requested resource"),
        status(400, "BadRequest", "no"),
        status(422, "Invalid", "no"),
    ];
    for fault in passing_faults().into_iter().chain(others) {
        let what = format!("{fault:?}");
        let (rig, _watch, before) = synced(Setup::of(&["pods"])).await;
        for verb in [Verb::Watch, Verb::List] {
            rig.fault(verb, fault.clone(), 1000);
        }
        rig.cut().await;
        rig.sim.create(&pods(), pod("b", "new")).unwrap();
        sleep(ten_minutes).await;
        let asked = rig.network.asked(PODS).len() - before;
        assert!((5..=REQUESTS_MAX).contains(&asked), "{what}: {asked} requests in ten minutes");
        rig.sim.clear_faults();
        rig.readyz_has("pods synced").await;
        let mut watch = rig.watch_all("pods").await;
        let expected = write(&rig, "c");
        watch.until(expected[2]).await;
        assert_eq!(watch.state, rig.truth(PODS).await, "{what}: all is well again");
    }
}

async fn watches_that_end_at_once_make_no_tight_loop() {
    let bookmark = |version: u64| {
        let bookmark =
            json!({ "kind": "Pod", "apiVersion": "v1", "metadata": { "resourceVersion": version.to_string() } });
        line("BOOKMARK", &bookmark)
    };
    for form in ["empty", "the same bookmark", "an html page", "a redirect"] {
        let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
        let version = rig.sim.revision();
        // It stops by itself, so that a tight loop fails instead of hanging.
        let mut left = 500;
        rig.network.rule(move |path| {
            left -= usize::from(left > 0);
            (left > 0 && Asked::is_watch_path(path)).then(|| match form {
                "empty" => answer(200, vec![], false),
                "the same bookmark" => answer(200, vec![bookmark(version)], false),
                "an html page" => answer(200, vec!["<!doctype html><p>log in</p>".to_owned()], false),
                _ => answer(302, vec![], false),
            })
        });
        rig.cut().await;
        let expected = write(&rig, "b");
        sleep(Duration::from_secs(600)).await;
        let asked = rig.network.asked(PODS).len() - before;
        assert!((5..=REQUESTS_MAX).contains(&asked), "{form}: {asked} requests in ten minutes");
        rig.network.clear_rules();
        assert_bridged(form, &rig, &mut watch, &expected).await;
    }
}

async fn an_empty_page_is_no_restart() {
    let setup = Setup::of(&["pods"]).by_list();
    let sim = setup.sim();
    sim.create(&pods(), pod("a", "first")).unwrap();
    let network = Network::to(sim.clone());
    // With a selector a page may be empty and not the last.
    let empty = json!({ "kind": "PodList", "apiVersion": "v1", "metadata": { "resourceVersion": "6", "continue": "next" }, "items": [] });
    network.answer_once(|path| path.starts_with(PODS), answer(200, vec![empty.to_string()], false));
    let all = json!({ "kind": "PodList", "apiVersion": "v1", "metadata": { "resourceVersion": "6" }, "items": null });
    network.answer_once(|path| path.contains("continue=next"), answer(200, vec![all.to_string()], false));
    let rig = Rig::over(network, sim, setup);
    rig.ready().await;
    rig.watch_all("pods").await;
    let restarts = r#"kubefan_upstream_watch_restarts_total{group="",namespace="",reason="timeout",resource="pods"}"#;
    assert_eq!(rig.metric(restarts), 0.0);
    assert_eq!(relists(&rig), 1.0);
}

async fn a_429_stops_discovery_too() {
    let setup = Setup::of(&["pods"]);
    let rig = Rig::start(setup.sim(), setup);
    let busy = Fault::TooManyRequests { retry_after_seconds: 25 };
    rig.sim.set_fault(FaultRule { fault: busy, verb: Some(Verb::Discovery), resource: None, requests: 2 });
    rig.ready().await;
    let asked = rig.network.asked("/api");
    assert_eq!(asked.len(), 3, "{asked:?}");
    at_least(&asked, Duration::from_secs(25), "discovery");
}

async fn what_is_cached_is_found_while_upstream_is_silent() {
    let (rig, _watch, _) = synced(Setup::of(&["pods"])).await;
    for name in ["pods", "po", "Pod"] {
        rig.watch_all(name).await;
    }
    // Long enough for discovery to be asked again.
    sleep(Duration::from_secs(3600)).await;
    let silence = |verb| FaultRule { fault: Fault::Silence, verb: Some(verb), resource: None, requests: 1000 };
    rig.sim.set_fault(silence(Verb::Discovery));
    rig.sim.set_fault(silence(Verb::Watch));
    rig.sim.drop_connections();
    for name in ["pods", "po", "Pod", "pods"] {
        let begun = Instant::now();
        rig.watch_all(name).await;
        assert!(begun.elapsed() < Duration::from_secs(1), "{name} is found after {:?}", begun.elapsed());
    }
}
