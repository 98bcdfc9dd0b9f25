//! Every way in which upstream can fail, and its effect on a subscriber: nothing is lost, nothing
//! is repeated, and inexact spans are marked. The failures must not hurt the apiserver either: each
//! costs it one request, and the next request comes after a wait.

use std::time::Duration;

use kubefan_sim::apiserver::{Fault, FaultRule, Status, Verb};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tonic::Code;
use tonic_types::StatusExt;

use crate::{
    freshness::write_configmap,
    harness::{
        network::{RecordedRequest, answer, waits},
        record::Watch,
        rig::{PODS, Rig, Setup, pod, pods, target, versions},
        tests,
    },
};

tests! {
    paused: a_failed_watch_resumes_at_its_version, a_failed_first_list_is_retried_and_reported_to_readers,
        retry_after_is_the_minimum_wait, a_line_that_is_no_event_restarts_the_watch, bookmarks_advance_the_version,
        no_failure_makes_a_tight_loop, watches_that_end_at_once_make_no_tight_loop, a_429_stops_discovery_too,
        no_watch_is_opened_while_the_version_is_not_answered,
        cached_resources_are_found_while_upstream_is_silent;
}

pub(crate) const LEAST_WAIT: Duration = Duration::from_millis(800);

/// A synced kubefan with one pod, a subscriber that has its snapshot, and the number of requests
/// for pods so far.
pub(crate) async fn synced(setup: Setup) -> (Rig, Watch, usize) {
    let sim = setup.sim();
    sim.create(&pods(), pod("a", "first")).unwrap();
    let rig = Rig::synced(sim, setup).await;
    let watch = rig.watch_all("pods").await;
    let asked = rig.asked(PODS).len();
    (rig, watch, asked)
}

/// Creates, changes and deletes a pod. Returns the versions of the three writes.
pub(crate) fn write(rig: &Rig, name: &str) -> [u64; 3] {
    let created = rig.sim.create(&pods(), pod(name, "new")).unwrap();
    let changed = rig.sim.update(&pods(), pod(name, "changed")).unwrap();
    [created, changed, rig.sim.delete(&pods(), "default", name).unwrap()]
}

pub(crate) fn at_least(asked: &[RecordedRequest], least: Duration, what: &str) {
    let waits = waits(asked);
    assert!(waits.iter().all(|wait| *wait >= least), "{what}: requests came after {waits:?}");
}

/// Checks a break that upstream's history bridges.
async fn assert_bridged(what: &str, rig: &Rig, watch: &mut Watch, expected: &[u64]) {
    watch.until(*expected.last().unwrap()).await;
    assert_eq!(versions(&watch.events), expected, "{what}: the events");
    assert_eq!(watch.gaps, [], "{what}: no gap");
    assert_eq!(watch.state, rig.truth(PODS).await, "{what}: the state");
    assert_eq!(relists(rig), 1.0, "{what}: listed once, at the start");
    assert_eq!(open_watches(rig), 1.0, "{what}: one watch upstream");
}

pub(crate) fn relists(rig: &Rig) -> f64 {
    rig.of_pods("kubefan_relists_total", "")
}

pub(crate) fn relists_for(rig: &Rig, reason: &str) -> f64 {
    rig.of_pods("kubefan_relists_total", &format!("reason=\"{reason}\""))
}

pub(crate) fn restarts(rig: &Rig, reason: &str) -> f64 {
    rig.of_pods("kubefan_upstream_watch_restarts_total", &format!("reason=\"{reason}\""))
}

pub(crate) fn open_watches(rig: &Rig) -> f64 {
    rig.of_pods("kubefan_upstream_watches", "purpose=\"standing\"")
}

/// The failure of a watch whose version upstream has forgotten.
pub(crate) fn expired() -> Fault {
    Fault::Status(Box::new(Status::expired("too old resource version")))
}

pub(crate) fn status(code: u16, reason: &'static str, message: &str) -> Fault {
    Fault::Status(Box::new(Status::failure(code, reason, message)))
}

/// Temporary failures of upstream, each with its reason in the metrics.
fn passing_faults() -> Vec<(Fault, &'static str)> {
    vec![
        (Fault::TooManyRequests { retry_after_seconds: 1 }, "too_many_requests"),
        (Fault::TooManyRequestsText { retry_after_seconds: 1 }, "too_many_requests"),
        (Fault::Unauthorized, "unauthorized"),
        (Fault::InternalError, "server_error"),
        (Fault::ServiceUnavailable, "server_error"),
        (status(504, "Timeout", "Timeout: request did not complete within the allotted timeout"), "timeout"),
        (Fault::Disconnect, "reset"),
    ]
}

async fn a_failed_watch_resumes_at_its_version() {
    // A silent connection is closed after 90 seconds.
    let in_stream =
        [(Fault::TruncatedLine, "truncated", 3, LEAST_WAIT), (Fault::Silence, "idle", 1, Duration::from_secs(90))];
    let before_stream = passing_faults().into_iter().map(|(fault, reason)| (fault, reason, 3, LEAST_WAIT));
    for (fault, reason, times, least) in before_stream.chain(in_stream) {
        let what = format!("{fault:?}");
        let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
        let mut expected = write(&rig, "b").to_vec();
        watch.until(expected[2]).await;
        rig.fault(Verb::Watch, fault, times);
        rig.cut().await;
        expected.extend(write(&rig, "c"));
        assert_bridged(&what, &rig, &mut watch, &expected).await;
        let asked = &rig.asked(PODS)[before..];
        assert_eq!(asked.len(), times + 1, "{what}: each failure is one request: {asked:?}");
        at_least(asked, least, &what);
        assert!(reason != "idle" || waits(asked)[0] < Duration::from_secs(95), "{what}: {asked:?}");
        let cuts = usize::from(reason == "reset");
        assert_eq!(restarts(&rig, reason), (times + cuts) as f64, "{what}: counted under its own reason");
        expected.extend(write(&rig, "d"));
        assert_bridged(&what, &rig, &mut watch, &expected).await;
    }
}

async fn a_failed_first_list_is_retried_and_reported_to_readers() {
    for watch_list in [true, false] {
        for (fault, _) in passing_faults() {
            let what = format!("{fault:?}, watch list: {watch_list}");
            let setup = Setup::of(&["pods"]).with_watch_list(watch_list);
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
            let asked = rig.asked(PODS);
            let successes = if watch_list { 1 } else { 2 };
            assert_eq!(asked.len(), 3 + successes, "{what}: {asked:?}");
            at_least(&asked[..4], LEAST_WAIT, &what);
        }
    }
}

async fn retry_after_is_the_minimum_wait() {
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
                for _ in 0..2 {
                    rig.network.answer_once(|path| path.starts_with(PODS), answer(200, vec![event.to_string()], false));
                }
            }
        }
        rig.cut().await;
        let expected = write(&rig, "b");
        assert_bridged(form, &rig, &mut watch, &expected).await;
        let asked = &rig.asked(PODS)[before..];
        assert_eq!(asked.len(), 3, "{form}");
        at_least(asked, least, form);
    }
}

/// A line of a watch: the bookmark of this version.
pub(crate) fn bookmark(version: u64) -> String {
    line(
        "BOOKMARK",
        &json!({ "kind": "Pod", "apiVersion": "v1", "metadata": { "resourceVersion": version.to_string() } }),
    )
}

pub(crate) fn line(kind: &str, object: &Value) -> String {
    json!({ "type": kind, "object": object }).to_string()
}

async fn a_line_that_is_no_event_restarts_the_watch() {
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
        rig.network.answer_once(RecordedRequest::is_watch_path, answer(200, vec![text], true));
        rig.cut().await;
        let expected = write(&rig, "b");
        assert_bridged(&what, &rig, &mut watch, &expected).await;
        at_least(&rig.asked(PODS)[before..], LEAST_WAIT, &what);
    }
}

async fn bookmarks_advance_the_version() {
    let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
    let moved = write_configmap(&rig.sim);
    // As in a real apiserver, a consistent read advances the watch cache to the cluster's version.
    rig.truth(PODS).await;
    watch.until(moved).await;
    assert_eq!((watch.events.len(), watch.gaps.len()), (0, 0), "by a bookmark alone");
    rig.cut().await;
    // Without the bookmark this version would be too old.
    rig.sim.compact();
    let expected = write(&rig, "b");
    assert_bridged("bookmark", &rig, &mut watch, &expected).await;
    let asked = rig.asked(PODS).split_off(before);
    assert!(asked[0].path.contains(&format!("resourceVersion={moved}&")), "{asked:?}");
}

/// The maximum of requests in ten minutes of one failure: waits start at 0.8 s and double up to 30
/// s, and an attempt is a watch and the question about the cluster's version.
const REQUESTS_MAX: usize = 40;

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
    for fault in passing_faults().into_iter().map(|(fault, _)| fault).chain(others) {
        let what = format!("{fault:?}");
        let (rig, _watch, _) = synced(Setup::of(&["pods"])).await;
        // After a break, kubefan also asks for the cluster's version.
        let asked = || [PODS, "/api/v1/namespaces/default/pods"].map(|path| rig.asked(path).len()).iter().sum();
        let before: usize = asked();
        for verb in [Verb::Watch, Verb::List] {
            rig.fault(verb, fault.clone(), 1000);
        }
        rig.cut().await;
        rig.sim.create(&pods(), pod("b", "new")).unwrap();
        sleep(ten_minutes).await;
        let asked = asked() - before;
        assert!((5..=REQUESTS_MAX).contains(&asked), "{what}: {asked} requests in ten minutes");
        rig.sim.clear_faults();
        rig.readyz_has("pods synced").await;
        let mut watch = rig.watch_all("pods").await;
        let expected = write(&rig, "c");
        watch.until(expected[2]).await;
        assert_eq!(watch.state, rig.truth(PODS).await, "{what}: the state is right again");
    }
}

async fn watches_that_end_at_once_make_no_tight_loop() {
    for form in ["empty", "the same bookmark", "an html page", "a redirect"] {
        let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
        let version = rig.sim.revision();
        // The rule stops by itself, so that a tight loop fails instead of hanging.
        let mut left = 500;
        rig.network.rule(move |path| {
            left -= usize::from(left > 0);
            (left > 0 && RecordedRequest::is_watch_path(path)).then(|| match form {
                "empty" => answer(200, vec![], false),
                "the same bookmark" => answer(200, vec![bookmark(version)], false),
                "an html page" => answer(200, vec!["<!doctype html><p>log in</p>".to_owned()], false),
                _ => answer(302, vec![], false),
            })
        });
        rig.cut().await;
        let expected = write(&rig, "b");
        sleep(Duration::from_secs(600)).await;
        let asked = rig.asked(PODS).len() - before;
        assert!((5..=REQUESTS_MAX).contains(&asked), "{form}: {asked} requests in ten minutes");
        rig.network.clear_rules();
        assert_bridged(form, &rig, &mut watch, &expected).await;
    }
}

async fn no_watch_is_opened_while_the_version_is_not_answered() {
    let (rig, mut watch, before) = synced(Setup::of(&["pods"])).await;
    rig.fault(Verb::List, Fault::InternalError, usize::MAX);
    rig.cut().await;
    sleep(Duration::from_secs(600)).await;
    let opened = &rig.asked(PODS)[before..];
    // Without an answer about the cluster's version, nothing that a watch sends may be used.
    assert_eq!(opened.len(), 1, "watches in ten minutes of failing lists: {opened:?}");
    rig.sim.clear_faults();
    let expected = write(&rig, "b");
    assert_bridged("look-ups of the version that failed", &rig, &mut watch, &expected).await;
    assert_eq!(rig.asked(PODS).len(), before + 2, "one watch when the version is answered again");
}

async fn a_429_stops_discovery_too() {
    let setup = Setup::of(&["pods"]);
    let rig = Rig::start(setup.sim(), setup);
    let busy = Fault::TooManyRequests { retry_after_seconds: 25 };
    rig.sim.set_fault(FaultRule { fault: busy, verb: Some(Verb::Discovery), resource: None, requests: 2 });
    rig.ready().await;
    let asked = rig.asked("/api");
    assert_eq!(asked.len(), 3, "{asked:?}");
    at_least(&asked, Duration::from_secs(25), "discovery");
}

async fn cached_resources_are_found_while_upstream_is_silent() {
    let (rig, _watch, _) = synced(Setup::of(&["pods"])).await;
    for name in ["pods", "po", "Pod"] {
        rig.watch_all(name).await;
    }
    // Long enough that discovery would be asked again.
    sleep(Duration::from_secs(3600)).await;
    let silence = |verb| FaultRule { fault: Fault::Silence, verb: Some(verb), resource: None, requests: 1000 };
    rig.sim.set_fault(silence(Verb::Discovery));
    rig.sim.set_fault(silence(Verb::Watch));
    rig.sim.drop_connections();
    for name in ["pods", "po", "Pod", "pods"] {
        let start_time = Instant::now();
        rig.watch_all(name).await;
        assert!(start_time.elapsed() < Duration::from_secs(1), "{name} is found after {:?}", start_time.elapsed());
    }
}
