//! Outages, restarts and upgrades of the apiserver, as load and as delay: caches are live again as
//! soon as upstream is, their reads from it are bounded, and a page that fails costs one page.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use http_body_util::BodyExt;
use kubefan_model::GroupVersionResource;
use kubefan_sim::apiserver::{Fault, FaultRule, SimApiserver, SimResource, Verb};
use serde_json::json;
use tokio::time::{Instant, sleep};
use tonic::Code;
use tonic_types::StatusExt;

use crate::{
    harness::{
        network::{Network, RecordedRequest, answer},
        rig::{PODS, Rig, Setup, churn, core, pod, pods, stage, versions},
        tests,
    },
    upstream_faults::{expired, relists, relists_for, synced, write},
};

tests! {
    paused: an_outage_ends_for_all_caches_when_upstream_is_back, an_apiserver_that_starts_slowly_is_asked_in_time,
        an_outage_behind_a_gateway_ends_when_upstream_is_back, one_failing_resource_is_not_an_outage,
        a_kubefan_that_starts_during_an_outage_is_ready_when_upstream_is,
        an_outage_does_not_make_a_resource_wanted_that_was_not_found,
        an_apiserver_whose_readiness_stays_unknown_is_used_all_the_same,
        http_watches_end_with_410_soon_after_an_apiserver_restart,
        a_failed_page_is_requested_again_and_the_others_are_kept, a_failed_page_of_a_backfill_is_requested_again,
        a_list_that_fails_without_pages_has_pages_again, a_list_that_hangs_gives_its_permit_to_others,
        relists_after_an_upgrade_are_spread_and_lose_no_event, ever_older_versions_are_refused_after_a_few_reads,
        expired_watches_are_delayed_only_while_no_list_succeeds;
}

/// The resources of a program with many informers.
const RESOURCES: usize = 28;
/// An outage ends for readers this long after it ended upstream.
const LIVE_WITHIN: Duration = Duration::from_secs(5);

fn widgets(number: usize) -> GroupVersionResource {
    GroupVersionResource::new("example.com", "v1", format!("widgets{number}"))
}

fn collection(number: usize) -> String {
    format!("/apis/example.com/v1/widgets{number}")
}

/// A setup with this many resources of some objects each, and its apiserver.
fn with_widgets(count: usize) -> (Setup, SimApiserver) {
    let names: Vec<String> = (0..count).map(|number| format!("widgets{number}.example.com")).collect();
    let setup = Setup::of(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let sim = setup.sim();
    for number in 0..count {
        sim.add_resource(SimResource::custom("example.com", "v1", &format!("widgets{number}"), "Widget"));
        for object in 0..3 {
            let object = json!({ "metadata": { "namespace": "default", "name": format!("w{object}") } });
            sim.create(&widgets(number), object).unwrap();
        }
    }
    (setup, sim)
}

/// The requests of a collection that read its whole state.
fn lists(rig: &Rig, collection: &str) -> Vec<RecordedRequest> {
    let reads_state = |asked: &RecordedRequest| {
        let is_look_up = asked.path.contains("metadata.name");
        asked.path.contains("sendInitialEvents") || !asked.is_watch() && !is_look_up && !asked.is_metadata_only
    };
    rig.asked(collection).into_iter().filter(reads_state).collect()
}

/// The number of requests for all widgets.
fn asked_for_widgets(rig: &Rig) -> usize {
    (0..RESOURCES).map(|number| rig.asked(&collection(number)).len()).sum()
}

/// Checks that `count` caches are live soon after upstream is back.
async fn assert_live(what: &str, rig: &Rig, count: usize, within: Duration) {
    let back = Instant::now();
    let live = || rig.readyz().lines().filter(|line| line.contains(" synced")).count() >= count;
    rig.until(live, || format!("{what}: not live: {}", rig.readyz())).await;
    assert!(back.elapsed() <= within, "{what}: live after {:?}", back.elapsed());
}

/// Checks that few probes were sent during an outage, whatever the number of caches.
fn assert_few_probes(what: &str, rig: &Rig, outage: Duration) {
    let probes = rig.asked("/readyz").len();
    assert!(probes <= outage.as_secs() as usize + 1, "{what}: {probes} probes for all caches");
}

/// Takes the apiserver away for `outage`, with all that it knew of the past.
async fn restart_upstream(rig: &Rig, outage: Duration) {
    rig.network.refuse(true);
    rig.sim.restart();
    sleep(outage).await;
    rig.network.refuse(false);
}

async fn an_outage_ends_for_all_caches_when_upstream_is_back() {
    for outage in [8, 40, 300].map(Duration::from_secs) {
        let what = format!("{outage:?}");
        let (setup, sim) = with_widgets(RESOURCES);
        let rig = Rig::synced(sim, setup).await;
        let counts = || (0..RESOURCES).map(|number| lists(&rig, &collection(number)).len()).collect::<Vec<_>>();
        let lists_before = counts();
        let asked_before = asked_for_widgets(&rig);
        rig.network.refuse(true);
        for number in 0..RESOURCES {
            rig.sim.delete(&widgets(number), "default", "w0").unwrap();
        }
        restart_upstream(&rig, outage).await;
        let asked_meanwhile = asked_for_widgets(&rig) - asked_before;
        assert!(asked_meanwhile <= 3 * RESOURCES, "{what}: {asked_meanwhile} requests without a hope");
        assert_few_probes(&what, &rig, outage);
        assert_live(&what, &rig, RESOURCES, LIVE_WITHIN).await;
        for (number, (before, after)) in lists_before.into_iter().zip(counts()).enumerate() {
            assert_eq!(after - before, 1, "{what}: one list of widgets{number}");
        }
    }
}

async fn an_apiserver_that_starts_slowly_is_asked_in_time() {
    let (setup, sim) = with_widgets(RESOURCES);
    let rig = Rig::synced(sim, setup).await;
    restart_upstream(&rig, Duration::from_secs(60)).await;
    // It accepts connections, but has not read its rules; then its watch caches are empty.
    let start = Instant::now();
    let ready_after = Duration::from_secs(6);
    rig.network.rule(move |path| {
        let is_ready = start.elapsed() >= ready_after;
        let filled = start.elapsed() >= ready_after + Duration::from_secs(2);
        match path {
            "/readyz" => (!is_ready).then(|| answer(500, vec!["[-]poststarthook/rbac failed".to_owned()], false)),
            _ if path.contains("/widgets") => (!filled).then(|| answer(429, vec!["{}".to_owned()], false)),
            _ => None,
        }
    });
    sleep(ready_after - Duration::from_millis(1)).await;
    let asked = asked_for_widgets(&rig);
    assert!(asked <= 7 * RESOURCES, "nothing is requested before it is ready: {asked}");
    assert_live("a slow start", &rig, RESOURCES, 2 * LIVE_WITHIN).await;
}

async fn an_outage_behind_a_gateway_ends_when_upstream_is_back() {
    for code in [502, 503, 504] {
        let what = code.to_string();
        let outage = Duration::from_secs(300);
        let (setup, sim) = with_widgets(RESOURCES);
        let rig = Rig::synced(sim, setup).await;
        let back = Instant::now() + outage;
        rig.network.rule(move |_| {
            let text = vec!["<html>no backend</html>".to_owned()];
            (Instant::now() < back).then(|| answer(code, text, false))
        });
        rig.sim.restart();
        sleep(outage).await;
        assert_few_probes(&what, &rig, outage);
        assert_live(&what, &rig, RESOURCES, LIVE_WITHIN).await;
    }
}

async fn one_failing_resource_is_not_an_outage() {
    let (setup, sim) = with_widgets(2);
    let rig = Rig::synced(sim, setup).await;
    let asked = || rig.asked(&collection(0)).len();
    rig.network.rule(|path| path.starts_with(&collection(0)).then(|| answer(503, vec!["{}".to_owned()], false)));
    rig.sim.restart();
    sleep(Duration::from_secs(300)).await;
    let probes = rig.asked("/readyz").len();
    assert!(probes <= asked(), "{probes} probes for {} requests", asked());
    assert!(asked() <= 30, "{} requests in five minutes", asked());
}

async fn a_kubefan_that_starts_during_an_outage_is_ready_when_upstream_is() {
    let (setup, sim) = with_widgets(RESOURCES);
    let network = Network::to(sim.clone());
    network.refuse(true);
    let rig = Rig::over(network, sim, setup);
    sleep(Duration::from_secs(120)).await;
    rig.network.refuse(false);
    assert_live("a start", &rig, RESOURCES, LIVE_WITHIN).await;
}

async fn an_outage_does_not_make_a_resource_wanted_that_was_not_found() {
    let setup = Setup::of(&["pods", "podz"]);
    let rig = Rig::synced(setup.sim(), setup).await;
    rig.readyz_has("podz not found").await;
    rig.network.refuse(true);
    sleep(Duration::from_secs(300)).await;
    let (is_ready, _) = rig.registry.readiness();
    assert!(is_ready, "in an outage: {}", rig.readyz());
    rig.readyz_has("podz not found").await;
}

async fn an_apiserver_whose_readiness_stays_unknown_is_used_all_the_same() {
    // A probe that is denied delays nothing.
    let denied = [401, 403, 404].map(|code| (code, LIVE_WITHIN));
    for (code, within) in denied.into_iter().chain([(500, Duration::from_secs(20))]) {
        let (setup, sim) = with_widgets(2);
        let rig = Rig::synced(sim, setup).await;
        rig.network.rule(move |path| (path == "/readyz").then(|| answer(code, vec!["{}".to_owned()], false)));
        restart_upstream(&rig, Duration::from_secs(40)).await;
        assert_live(&code.to_string(), &rig, 2, within).await;
    }
}

/// Reads a watch over HTTP until it has this text.
async fn http_watch_until(rig: &Rig, version: u64, text: &str) {
    let mut response = rig.get(&format!("{PODS}?watch=1&allowWatchBookmarks=true&resourceVersion={version}")).await;
    assert_eq!(response.status(), 200);
    let mut body = String::new();
    while !body.contains(text) {
        let frame = response.frame().await.unwrap_or_else(|| panic!("no {text} in {body}")).unwrap();
        body += &String::from_utf8_lossy(frame.data_ref().unwrap());
    }
}

async fn http_watches_end_with_410_soon_after_an_apiserver_restart() {
    for outage in [8, 60].map(Duration::from_secs) {
        let (rig, _watch, _) = synced(Setup::of(&["pods"])).await;
        let rig = Arc::new(rig);
        let watched = rig.clone();
        let version = rig.sim.revision();
        let watch = tokio::spawn(async move { http_watch_until(&watched, version, r#""code":410"#).await });
        sleep(Duration::from_secs(1)).await;
        rig.network.refuse(true);
        rig.sim.create(&pods(), pod("during", "new")).unwrap();
        restart_upstream(&rig, outage).await;
        let back = Instant::now();
        watch.await.unwrap();
        assert!(back.elapsed() <= LIVE_WITHIN, "{outage:?}: ended after {:?}", back.elapsed());
    }
}

/// A setup that lists pages of two pods, and its apiserver with ten.
fn in_pages() -> (Setup, SimApiserver) {
    let mut setup = Setup::of(&["pods"]).by_list();
    setup.reflector.page_size = 2;
    let sim = setup.sim();
    for number in 0..10 {
        sim.create(&pods(), pod(&format!("p{number}"), "first")).unwrap();
    }
    (setup, sim)
}

async fn a_failed_page_is_requested_again_and_the_others_are_kept() {
    let busy = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 429,
        "reason": "TooManyRequests", "message": "wait", "details": { "retryAfterSeconds": 7 } });
    for (code, body, least) in [(429, busy, 7), (503, json!({}), 0), (504, json!({}), 0)] {
        let (setup, sim) = in_pages();
        let network = Network::to(sim.clone());
        let mut failed = BTreeMap::new();
        network.rule(move |path| {
            // Each page after the first fails twice.
            let failures: &mut usize = failed.entry(path.to_owned()).or_default();
            let fails = path.contains("continue=") && *failures < 2;
            *failures += 1;
            fails.then(|| answer(code, vec![body.to_string()], false))
        });
        let rig = Rig::over(network, sim, setup);
        rig.ready().await;
        let watch = rig.watch_all("pods").await;
        assert_eq!(watch.state, rig.truth(PODS).await, "{code}");
        let pages = lists(&rig, PODS);
        assert_eq!(pages.len(), 1 + 4 * 3, "{code}: {pages:?}");
        assert_eq!(relists(&rig), 1.0, "{code}: one list");
        let again = pages.windows(2).filter(|pair| pair[0].path == pair[1].path);
        let waits: Vec<_> = again.map(|pair| pair[1].at - pair[0].at).collect();
        let most = Duration::from_secs(least.max(5));
        let least = Duration::from_secs(least);
        assert!(waits.iter().all(|wait| *wait >= least), "{code}: Retry-After: {waits:?}");
        // Pages arrive in between.
        assert!(waits.iter().all(|wait| *wait <= 2 * most), "{code}: the waits grow: {waits:?}");
    }
}

async fn a_failed_page_of_a_backfill_is_requested_again() {
    let (setup, sim) = in_pages();
    let version = sim.revision();
    churn(&sim, 0, 20);
    let rig = Rig::synced(sim, setup).await;
    let mut left = 2;
    rig.network.rule(move |path| {
        let fails = path.contains("continue=") && left > 0;
        left -= usize::from(fails);
        fails.then(|| answer(503, vec!["{}".to_owned()], false))
    });
    let mut watch = rig.watch(stage("on"), &version.to_string()).await.unwrap();
    watch.until(rig.sim.revision()).await;
    assert!(watch.snapshot.is_empty() && !watch.events.is_empty());
    let exact = lists(&rig, PODS).into_iter().filter(|asked| asked.path.contains("resourceVersionMatch=Exact"));
    assert_eq!(exact.count(), 1, "one list");
}

async fn a_list_that_fails_without_pages_has_pages_again() {
    let (setup, sim) = in_pages();
    let network = Network::to(sim.clone());
    let late = sim.clone();
    let mut expired = false;
    network.rule(move |path| {
        if path.contains("continue=") && !std::mem::replace(&mut expired, true) {
            late.create(&pods(), pod("late", "first")).unwrap();
            late.compact();
        }
        // An answer with all objects takes too long.
        let is_unpaged = path.starts_with(PODS) && !path.contains("watch=1") && !path.contains("limit=");
        is_unpaged.then(|| answer(504, vec!["{}".to_owned()], false))
    });
    let rig = Rig::over(network, sim, setup);
    rig.ready().await;
    let unpaged: Vec<bool> = lists(&rig, PODS).iter().map(|asked| !asked.path.contains("limit=")).collect();
    assert_eq!(unpaged.iter().filter(|unpaged| **unpaged).count(), 1, "{unpaged:?}");
    assert_eq!(unpaged.len(), 2 + 1 + 6, "an expired list, one without pages, and one with six: {unpaged:?}");
    assert_eq!(rig.watch_all("pods").await.state, rig.truth(PODS).await);
}

async fn a_list_that_hangs_gives_its_permit_to_others() {
    let mut setup = Setup::of(&["configmaps", "nodes", "pods"]).by_list();
    setup.lists_max = 1;
    let sim = setup.sim();
    let resource = Some(core("configmaps"));
    sim.set_fault(FaultRule { fault: Fault::Silence, verb: Some(Verb::List), resource, requests: 1 });
    let rig = Rig::start(sim, setup);
    let start = Instant::now();
    rig.metric_becomes("kubefan_upstream_lists_waiting", 2.0).await;
    assert_eq!(rig.metric("kubefan_upstream_lists"), 1.0);
    rig.readyz_has("pods synced").await;
    rig.readyz_has("nodes synced").await;
    assert!(start.elapsed() < Duration::from_secs(32), "after {:?}", start.elapsed());
    rig.ready().await;
    assert_eq!((rig.metric("kubefan_upstream_lists"), rig.metric("kubefan_upstream_lists_waiting")), (0.0, 0.0));
}

async fn relists_after_an_upgrade_are_spread_and_lose_no_event() {
    const COUNT: usize = 12;
    let (mut setup, sim) = with_widgets(COUNT);
    setup.schema_check_interval = Duration::from_secs(30);
    setup.registry.resources.push("pods".into());
    let rig = Rig::synced(sim, setup).await;
    let mut watch = rig.watch_all("pods").await;
    let before = lists(&rig, &collection(0)).len();
    let version = json!({ "major": "1", "minor": "36", "gitVersion": "v1.36.0" });
    rig.network.rule(move |path| (path == "/version").then(|| answer(200, vec![version.to_string()], false)));
    let upgraded = Instant::now();
    let mut expected = Vec::new();
    while upgraded.elapsed() < Duration::from_secs(400) {
        expected.extend(write(&rig, "w"));
        sleep(Duration::from_secs(1)).await;
    }
    watch.until(*expected.last().unwrap()).await;
    assert_eq!(versions(&watch.events), expected, "every event, once");
    assert_eq!((watch.gaps.len(), relists_for(&rig, "schema_changed")), (0, 1.0));
    let mut times = Vec::new();
    for number in 0..COUNT {
        let again = lists(&rig, &collection(number)).split_off(before);
        assert_eq!(again.len(), 1, "{again:?}");
        assert!(again[0].path.contains("resourceVersionMatch=Exact"), "{again:?}");
        times.push(again[0].at - upgraded);
        let watches = rig.asked(&collection(number));
        assert!(watches.iter().filter(|asked| asked.is_watch()).count() <= 8, "the watch stays open");
    }
    times.sort();
    let spread = times[COUNT - 1] - times[0];
    assert!(spread > Duration::from_secs(60) && times[COUNT - 1] < Duration::from_secs(370), "{times:?}");
}

async fn expired_watches_are_delayed_only_while_no_list_succeeds() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"]).by_list()).await;
    for round in 0..6 {
        rig.fault(Verb::Watch, expired(), 1);
        rig.cut().await;
        let cut_at = Instant::now();
        watch.until(churn(&rig.sim, 10 * round, 3)).await;
        // A broken connection is opened again after 0.8 to 1.6 s.
        assert!(cut_at.elapsed() < Duration::from_secs(2), "{round}: after {:?}", cut_at.elapsed());
        watch.until(churn(&rig.sim, 10 * round + 3, 3)).await;
    }
    assert_eq!(relists_for(&rig, "expired"), 6.0);

    let before = lists(&rig, PODS).len();
    rig.fault(Verb::Watch, expired(), 1_000_000);
    rig.cut().await;
    sleep(Duration::from_secs(120)).await;
    let lists = lists(&rig, PODS).len() - before;
    assert!((4..=10).contains(&lists), "{lists} lists in two minutes");
}

async fn ever_older_versions_are_refused_after_a_few_reads() {
    let sim = Setup::of(&["pods"]).sim();
    let oldest = churn(&sim, 0, 20);
    let newest = churn(&sim, 20, 60);
    let rig = Rig::synced(sim, Setup::of(&["pods"])).await;
    let before = lists(&rig, PODS).len();
    let start = Instant::now();
    let mut refused = Vec::new();
    for version in (oldest..newest).rev().step_by(3).take(12) {
        match rig.watch(stage("on"), &version.to_string()).await {
            Ok(mut watch) => drop(watch.step().await),
            Err(status) => refused.push((version, status)),
        }
    }
    let reads = lists(&rig, PODS).len() - before;
    assert!(reads >= 2 && reads <= 4 + start.elapsed().as_secs() as usize / 15, "{reads} in {:?}", start.elapsed());
    let (version, status) = refused.first().expect("the others are refused");
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert!(status.get_details_retry_info().unwrap().retry_delay.is_some(), "{status}");

    // Over HTTP the refusal says for how long no read may start.
    let path = format!("{PODS}?watch=1&labelSelector=stage%3Don&resourceVersion={version}");
    let response = rig.get(&path).await;
    assert_eq!(response.status(), 429);
    let seconds: u64 = response.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((2..=15).contains(&seconds), "{seconds} s");
    sleep(Duration::from_secs(seconds)).await;
    assert_eq!(rig.get(&path).await.status(), 200, "after this delay it is served");
    sleep(Duration::from_secs(120)).await;
    rig.watch(stage("on"), &oldest.to_string()).await.expect("later there is a read for it");
}
