//! The self-check: a cache that has lost an event is found and repaired. Data that is only late,
//! expired or unreadable does not count as a difference, and the apiserver never gets a burst of
//! requests.

use std::time::Duration;

use kubefan_sim::apiserver::{Fault, FaultRule, Verb};
use serde_json::json;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::{
    harness::{
        apiserver::ApiServer,
        kubefan::{Kubefan, value_of},
        network::{Network, RecordedRequest, answer, answer_until, waits},
        record::Watch,
        rig::{PODS, Rig, Setup, pod, pods, versions},
        simulated::Simulated,
        tests, wait,
    },
    one_version::{delete_line, delete_together},
    upstream_faults::{line, relists_for, synced, write},
};

tests! {
    apiserver: checks_against_a_real_apiserver_pass_under_writes;
    local: a_check_without_the_right_to_list_is_reported_once;
    paused: a_lost_event_is_found_and_sent_in_a_marked_gap, a_difference_at_the_same_version_ends_the_streams,
        an_answer_from_another_cache_is_not_compared, a_failed_check_is_no_difference,
        a_version_of_which_the_cache_has_a_part_is_no_difference,
        what_comes_with_the_rest_of_a_version_and_goes_is_no_difference,
        a_check_reads_one_version_at_a_limited_pace, a_relist_during_a_check_is_not_repeated;
}

fn checked() -> Setup {
    let mut setup = Setup::of(&["pods"]);
    setup.registry.self_check_interval = Some(Duration::from_secs(60));
    setup
}

fn line_of(result: &str) -> String {
    format!(r#"kubefan_self_checks_total{{group="",media="json",namespace="",resource="pods",result="{result}"}}"#)
}

fn checks(rig: &Rig, result: &str) -> f64 {
    rig.metric(&line_of(result))
}

/// Makes kubefan believe that it is up to date, although it missed these writes while it was cut
/// off.
async fn lose(rig: &Rig, watch: &mut Watch, writes: impl FnOnce()) {
    rig.network.refuse(true);
    rig.cut().await;
    writes();
    let seen =
        json!({ "kind": "Pod", "apiVersion": "v1", "metadata": { "resourceVersion": rig.sim.revision().to_string() } });
    rig.network.answer_once(RecordedRequest::is_watch_path, answer(200, vec![line("BOOKMARK", &seen)], true));
    rig.network.refuse(false);
    watch.until(rig.sim.revision()).await;
    assert_eq!(watch.events, [], "the event was missed");
}

/// A write to another resource advances the cluster's version.
fn move_on(rig: &Rig) {
    let configmaps = kubefan_model::GroupVersionResource::new("", "v1", "configmaps");
    rig.sim.create(&configmaps, json!({ "metadata": { "namespace": "default", "generateName": "other-" } })).unwrap();
}

async fn a_lost_event_is_found_and_sent_in_a_marked_gap() {
    type Write = fn(&Rig);
    let writes: [(&str, Write); 2] = [
        ("a creation", |rig| drop(rig.sim.create(&pods(), pod("lost", "new")))),
        ("a deletion", |rig| drop(rig.sim.delete(&pods(), "default", "a"))),
    ];
    for (what, write) in writes {
        let (rig, mut watch, _) = synced(checked()).await;
        lose(&rig, &mut watch, || write(&rig)).await;
        move_on(&rig);
        watch.until(rig.sim.revision()).await;
        assert_eq!(watch.gap_reasons, ["self_check"], "{what}");
        assert_eq!(watch.state, rig.truth(PODS).await, "{what}");
        assert_eq!((checks(&rig, "different"), relists_for(&rig, "self_check")), (1.0, 1.0), "{what}");
        let equal = checks(&rig, "equal");
        sleep(Duration::from_secs(150)).await;
        assert!(checks(&rig, "equal") >= equal + 2.0, "{what}: the cache is equal again");
        assert_eq!(checks(&rig, "different"), 1.0, "{what}");
    }
}

async fn a_version_of_which_the_cache_has_a_part_is_no_difference() {
    let (rig, mut watch, _) = synced(checked()).await;
    for name in ["b", "c"] {
        rig.sim.create(&pods(), pod(name, "new")).unwrap();
    }
    watch.until(rig.sim.revision()).await;
    let b = rig.sim.object(&pods(), "default", "b").unwrap();
    rig.network.refuse(true);
    rig.cut().await;
    let deleted = delete_together(&rig.sim, &["b", "c"]);
    // The watch has brought one of the two deletes, and is silent.
    rig.network.answer_once(RecordedRequest::is_watch_path, answer(200, vec![delete_line(&b, deleted)], true));
    rig.network.refuse(false);
    watch.until(deleted).await;
    sleep(Duration::from_secs(80)).await;
    assert!(
        rig.asked(PODS)
            .iter()
            .any(|request| request.is_metadata_only && request.path.contains(&format!("resourceVersion={deleted}"))),
        "it was compared"
    );
    assert_eq!((checks(&rig, "different"), relists_for(&rig, "self_check")), (0.0, 0.0));
    // A watch that stays silent is opened anew.
    sleep(Duration::from_secs(60)).await;
    rig.sim.create(&pods(), pod("d", "new")).unwrap();
    watch.until(rig.sim.revision()).await;
    assert_eq!(versions(&watch.events)[2..], [deleted, deleted, rig.sim.revision()]);
}

async fn what_comes_with_the_rest_of_a_version_and_goes_is_no_difference() {
    let (rig, mut watch, _) = synced(checked()).await;
    rig.network.refuse(true);
    rig.cut().await;
    rig.sim.at_one_version(|| {
        for name in ["b", "c"] {
            rig.sim.create(&pods(), pod(name, "new")).unwrap();
        }
    });
    let both = rig.sim.revision();
    let b = serde_json::from_slice(&rig.sim.object(&pods(), "default", "b").unwrap()).unwrap();
    // The watch has brought one of the two, and is silent.
    let end = CancellationToken::new();
    let first = answer_until(200, vec![line("ADDED", &b)], end.clone());
    rig.network.answer_once(RecordedRequest::is_watch_path, first);
    rig.network.refuse(false);
    watch.until(both).await;
    let version = format!("resourceVersion={both}");
    while !rig.asked(PODS).iter().any(|request| request.is_metadata_only && request.path.contains(&version)) {
        sleep(Duration::from_secs(1)).await;
    }
    rig.sim.delete(&pods(), "default", "c").unwrap();
    end.cancel();
    watch.until(rig.sim.revision()).await;
    rig.until(|| checks(&rig, "equal") + checks(&rig, "different") > 0.0, || "no check".to_owned()).await;
    assert_eq!((checks(&rig, "different"), relists_for(&rig, "self_check")), (0.0, 0.0));
}

async fn a_difference_at_the_same_version_ends_the_streams() {
    let (rig, mut watch, _) = synced(checked()).await;
    lose(&rig, &mut watch, || drop(rig.sim.create(&pods(), pod("lost", "new")))).await;
    let status = loop {
        match watch.step().await {
            Ok(step) => assert!(step.is_some(), "the end has a reason"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    assert_eq!(rig.watch_all("pods").await.state, rig.truth(PODS).await);
}

async fn a_failed_check_is_no_difference() {
    let (rig, mut watch, _) = synced(checked()).await;
    rig.fault(Verb::List, Fault::InternalError, 1000);
    rig.metric_becomes(&line_of("failed"), 1.0).await;
    rig.sim.clear_faults();
    let last = write(&rig, "b");
    watch.until(last[2]).await;
    // The cache's version is compacted, and no bookmark has arrived yet.
    rig.network.rule(|path| {
        let gone = json!({ "kind": "Status", "code": 410, "reason": "Expired", "message": "too old" });
        path.contains("resourceVersionMatch=Exact").then(|| answer(410, vec![gone.to_string()], false))
    });
    rig.metric_becomes(&line_of("expired"), 2.0).await;
    assert_eq!((checks(&rig, "different"), relists_for(&rig, "self_check")), (0.0, 0.0));
}

async fn an_answer_from_another_cache_is_not_compared() {
    let setup = checked();
    let sim = setup.sim();
    let network = Network::to(sim.clone());
    network.rule(|path| {
        let version = path.strip_prefix(PODS)?.contains("resourceVersionMatch=Exact").then_some(path)?;
        let version = version.split_once("resourceVersion=")?.1.split('&').next()?;
        let page = json!({ "metadata": { "resourceVersion": version }, "items": [] });
        let mut page = answer(200, vec![page.to_string()], false);
        page.headers_mut().insert("cache-status", "kubefan; hit".parse().unwrap());
        Some(page)
    });
    let rig = Rig::over(network, sim, setup);
    rig.metric_becomes(&line_of("failed"), 1.0).await;
    assert_eq!(checks(&rig, "equal"), 0.0);
}

async fn a_check_reads_one_version_at_a_limited_pace() {
    let setup = checked();
    let sim = setup.sim();
    for i in 0..1600 {
        sim.create(&pods(), pod(&format!("pod-{i}"), "first")).unwrap();
    }
    let rig = Rig::synced(sim, setup).await;
    let version = rig.sim.revision();
    let writer = rig.sim.clone();
    // Writes during the check: the pages must stay at their version.
    let writes = tokio::spawn(async move {
        for i in 0..1000 {
            sleep(Duration::from_millis(100)).await;
            writer.update(&pods(), pod("pod-7", &format!("stage-{i}"))).unwrap();
        }
    });
    rig.metric_becomes(&line_of("equal"), 1.0).await;
    writes.abort();
    let pages: Vec<_> =
        rig.network.recorded_requests(PODS).into_iter().filter(|asked| asked.path.contains("limit=500")).collect();
    assert_eq!(pages.len(), 4, "{pages:?}");
    assert!(pages[0].path.contains("resourceVersionMatch=Exact") && !pages[0].path.contains(&format!("={version}&")));
    assert!(waits(&pages).iter().all(|wait| *wait >= Duration::from_millis(250)), "{:?}", waits(&pages));
    assert_eq!(checks(&rig, "different"), 0.0);
}

async fn a_relist_during_a_check_is_not_repeated() {
    let (rig, mut watch, _) = synced(checked()).await;
    // Pages without the cached objects. There are so many that the check takes longer than two
    // reconnects.
    let mut version = String::new();
    rig.network.rule(move |path| {
        let page = if path.contains("resourceVersionMatch=Exact") {
            let after = path.split_once("resourceVersion=")?.1;
            version = after.split('&').next()?.to_owned();
            0
        } else {
            path.split_once("continue=")?.1.parse::<usize>().ok()?
        };
        let next = if page < 40 { (page + 1).to_string() } else { String::new() };
        let page = json!({ "metadata": { "resourceVersion": version, "continue": next }, "items": [] });
        Some(answer(200, vec![page.to_string()], false))
    });
    let pages = || rig.network.recorded_requests(PODS).into_iter().filter(|asked| asked.is_metadata_only).count();
    while pages() == 0 {
        sleep(Duration::from_millis(10)).await;
    }
    let expired = kubefan_sim::apiserver::Status::expired("too old");
    rig.fault(Verb::Watch, Fault::Status(Box::new(expired)), 1);
    rig.sim.drop_connections();
    rig.metric_becomes(
        r#"kubefan_relists_total{group="",media="json",namespace="",reason="expired",resource="pods"}"#,
        1.0,
    )
    .await;
    assert!(pages() < 41, "the check is still running");
    watch.until(rig.sim.create(&pods(), pod("after", "new")).unwrap()).await;
    while pages() < 41 {
        sleep(Duration::from_millis(10)).await;
    }
    sleep(Duration::from_secs(20)).await;
    assert_eq!((checks(&rig, "different"), relists_for(&rig, "self_check")), (0.0, 0.0));
    assert_eq!(watch.state, rig.truth(PODS).await);
}

async fn a_check_without_the_right_to_list_is_reported_once() {
    let simulated = Simulated::start().await;
    let forbidden =
        FaultRule { fault: Fault::Forbidden, verb: Some(Verb::List), resource: Some(pods()), requests: usize::MAX };
    simulated.sim.set_fault(forbidden);
    let kubefan = simulated.kubefan(&["--resource=pods", "tuning.selfCheckInterval=1s"]).await;
    let missing = "kubefan may not list pods in all namespaces; grant it the verb list";
    wait::until("failed checks", wait::SOON, || async {
        kubefan.metric_sum("kubefan_self_checks_total", "failed").await.filter(|count| *count >= 3.0)
    })
    .await;
    let (code, ready) = kubefan.admin("/readyz?verbose").await.unwrap();
    let line = ready.lines().find(|line| line.contains(missing));
    assert!(code.is_success() && line.is_some_and(|line| line.starts_with("[+]pods synced")), "{ready}");
    let log = kubefan.process.log();
    assert_eq!(log.matches(missing).count(), 1, "{log}");
    simulated.sim.clear_faults();
    wait::until("the right to be noticed", wait::SOON, || async {
        kubefan.admin("/readyz?verbose").await.filter(|(_, ready)| !ready.contains(missing))
    })
    .await;
}

async fn checks_against_a_real_apiserver_pass_under_writes() {
    let api = ApiServer::shared().await;
    let kubefan = Kubefan::spawn(
        &api.kubeconfig(),
        &["--resource=configmaps,namespaces,clusterroles", "tuning.selfCheckInterval=1s", "--log-level=debug"],
    )
    .await;
    kubefan.ready().await;
    let mut written = 0;
    wait::until("three checks of each", wait::SOON * 3, || {
        written += 1;
        let name = format!("self-check-{written}");
        let api = &api;
        let kubefan = &kubefan;
        async move {
            let object = json!({ "metadata": { "name": name }, "data": { "key": "value" } });
            api.create("/api/v1/namespaces/default/configmaps", &object).await;
            let lines = kubefan.metric_lines("kubefan_self_checks_total").await?;
            let equal = lines.iter().filter(|line| line.contains("\"equal\"")).map(|line| value_of(line));
            (equal.clone().count() == 3 && equal.fold(f64::MAX, f64::min) >= 3.0).then_some(())
        }
    })
    .await;
    assert_eq!(kubefan.metric_sum("kubefan_self_checks_total", "\"different\"").await, Some(0.0));
}
