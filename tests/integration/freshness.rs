//! Consistent reads from the cache. They are never older than a write that finished before them,
//! however upstream behaves, and cost upstream little however many there are. On a quiet resource
//! this needs a proof by a bookmark, which advances the cache; without a bookmark the read goes
//! upstream. `informer_start` has the proof of a small cache's state by a list.

use std::{collections::BTreeMap, time::Duration};

use futures::future::join_all;
use kubefan_cache::Refusal;
use kubefan_fanout::{Catalog, Patience, Served};
use kubefan_model::Media;
use kubefan_sim::apiserver::{Fault, SimApiserver, Verb};
use serde_json::{Value, json};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};

use crate::{
    harness::{
        apiserver::ApiServer,
        kubefan::{Kubefan, value_of},
        network::{Network, answer},
        objects::version_of,
        rig::{PODS, Rig, Setup, cache_of, churn, core, pod, pods, versions},
        tests, wait,
    },
    upstream_faults::{bookmark, relists, status, synced},
};

tests! {
    apiserver: consistent_reads_include_the_last_write, consistent_lists_of_events_go_upstream;
    paused: a_bookmark_proves_a_quiet_cache_and_advances_it, an_up_to_date_cache_is_proved_by_a_lookup,
        one_proof_serves_all_earlier_reads, a_read_during_a_proof_gets_a_new_proof,
        upstream_is_asked_at_most_once_a_second, upstream_is_asked_more_often_if_lookups_are_enough,
        an_impatient_read_goes_upstream_without_a_lookup, a_bookmark_of_a_lagging_apiserver_is_no_proof,
        an_answer_of_another_cluster_is_no_proof, an_answer_of_a_restored_etcd_is_no_proof,
        an_upstream_failure_is_reported_soon, after_a_missing_bookmark_reads_do_not_wait_for_a_while,
        a_read_without_fallback_waits_again, proofs_that_advance_the_cache_lose_no_event,
        the_next_watch_starts_at_the_proved_version, a_proof_without_the_right_to_list_is_reported;
}

/// Writes a configmap, which does not touch pods. Returns the cluster's new version.
pub(crate) fn write_configmap(sim: &SimApiserver) -> u64 {
    let name = format!("other-{}", sim.revision());
    sim.create(&core("configmaps"), json!({ "metadata": { "namespace": "default", "name": name } })).unwrap()
}

pub(crate) async fn served(rig: &Rig) -> Served {
    rig.catalog.find(cache_of("pods", Media::Json)).await.unwrap()
}

pub(crate) fn head(served: &Served) -> u64 {
    served.hub.head().expect("the cache is not synced").get()
}

async fn prove(rig: &Rig, patience: Patience) -> Result<(), Refusal> {
    let served = served(rig).await;
    rig.catalog.advance(&served, patience).await
}

fn proving(rig: &Rig, patience: Patience) -> JoinHandle<Result<(), Refusal>> {
    let catalog = rig.catalog.clone();
    tokio::spawn(async move {
        let served = catalog.find(cache_of("pods", Media::Json)).await?;
        catalog.advance(&served, patience).await
    })
}

pub(crate) fn proofs(rig: &Rig, result: &str) -> f64 {
    rig.of_pods("kubefan_proofs_total", &format!("result=\"{result}\""))
}

pub(crate) fn probes(rig: &Rig) -> f64 {
    rig.of_pods("kubefan_upstream_watches_started_total", r#"purpose="probe""#)
}

/// The number of lookups of the cluster's version.
pub(crate) fn lookups(network: &Network) -> usize {
    let asked = network.recorded_requests("/api/v1/namespaces/default/pods");
    asked.iter().filter(|asked| asked.path.contains("metadata.name")).count()
}

fn is_probe(path: &str) -> bool {
    path.starts_with(PODS) && path.contains("timeoutSeconds=3&") || path.ends_with("timeoutSeconds=3")
}

async fn a_bookmark_proves_a_quiet_cache_and_advances_it() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let cache = served(&rig).await;
    sleep(Duration::from_secs(20)).await;
    let version = write_configmap(&rig.sim);
    assert!(head(&cache) < version);

    let start_time = Instant::now();
    prove(&rig, Patience::Bookmark).await.unwrap();
    assert!(start_time.elapsed() < Duration::from_secs(3), "{:?}", start_time.elapsed());
    assert_eq!(head(&cache), version);
    assert_eq!((proofs(&rig, "bookmark"), probes(&rig), lookups(&rig.network)), (1.0, 1.0, 1));
    assert!(rig.age() < 3.0, "{}", rig.age());
    watch.until(version).await;
    assert_eq!(rig.of_pods("kubefan_upstream_watches", r#"purpose="probe""#), 0.0);
}

async fn an_up_to_date_cache_is_proved_by_a_lookup() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let last = churn(&rig.sim, 0, 10);
    watch.until(last).await;
    prove(&rig, Patience::AtOnce).await.unwrap();
    assert_eq!((proofs(&rig, "held"), probes(&rig), lookups(&rig.network)), (1.0, 0.0, 1));
    // An event of the cache's own watch is proof.
    let version = rig.sim.create(&pods(), pod("just-now", "new")).unwrap();
    prove(&rig, Patience::AtOnce).await.unwrap();
    let (store, held) = served(&rig).await.hub.snapshot().unwrap();
    assert!(store.get("default/just-now").is_some() && held.get() >= version);
    assert_eq!(probes(&rig), 0.0);
}

async fn one_proof_serves_all_earlier_reads() {
    let (rig, _watch, _) = synced(Setup::of(&["pods"])).await;
    let version = write_configmap(&rig.sim);
    let proved = join_all((0..1000).map(|_| prove(&rig, Patience::Bookmark))).await;
    assert!(proved.iter().all(Result::is_ok), "{:?}", proved.iter().find(|proved| proved.is_err()));
    assert_eq!(head(&served(&rig).await), version);
    assert_eq!((probes(&rig), lookups(&rig.network)), (1.0, 1));
}

async fn a_read_during_a_proof_gets_a_new_proof() {
    let (rig, _watch, _) = synced(Setup::of(&["pods"])).await;
    write_configmap(&rig.sim);
    let first = proving(&rig, Patience::Bookmark);
    while probes(&rig) == 0.0 {
        sleep(Duration::from_millis(1)).await;
    }
    // The bookmark of the open probe may be above this version, but its lookup came before the
    // write.
    let version = write_configmap(&rig.sim);
    let second = proving(&rig, Patience::Bookmark);
    first.await.unwrap().unwrap();
    assert!(!second.is_finished());
    second.await.unwrap().unwrap();
    assert!(head(&served(&rig).await) >= version);
    assert_eq!(lookups(&rig.network), 2);
}

async fn upstream_is_asked_at_most_once_a_second() {
    let (rig, _watch, _) = synced(Setup::of(&["pods"])).await;
    let start_time = Instant::now();
    while start_time.elapsed() < Duration::from_secs(30) {
        write_configmap(&rig.sim);
        for patience in [Patience::Bookmark, Patience::AtOnce, Patience::AtOnce] {
            drop(proving(&rig, patience));
        }
        sleep(Duration::from_millis(10)).await;
    }
    assert!(lookups(&rig.network) <= 31 && probes(&rig) <= 31.0, "{}, {}", lookups(&rig.network), probes(&rig));
    assert!(proofs(&rig, "bookmark") >= 10.0);
}

async fn upstream_is_asked_more_often_if_lookups_are_enough() {
    let (rig, _watch, _) = synced(Setup::of(&["pods"])).await;
    let start_time = Instant::now();
    let mut round = 0;
    let mut asking = Vec::new();
    while start_time.elapsed() < Duration::from_secs(2) {
        churn(&rig.sim, round, 1);
        asking.push(proving(&rig, Patience::AtOnce));
        sleep(Duration::from_millis(5)).await;
        round += 1;
    }
    let answers = join_all(asking).await;
    let proved = answers.iter().filter(|answer| matches!(answer, Ok(Ok(())))).count();
    assert!(proved * 4 >= answers.len() * 3, "{proved} of {} did not go upstream", answers.len());
    assert!(lookups(&rig.network) <= 82, "{}", lookups(&rig.network));
    assert_eq!(probes(&rig), 0.0);
}

async fn an_impatient_read_goes_upstream_without_a_lookup() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    // A new watch may get a bookmark soon; after that the next one comes in a minute.
    sleep(Duration::from_secs(5)).await;
    for _ in 0..20 {
        write_configmap(&rig.sim);
        let start_time = Instant::now();
        assert!(matches!(prove(&rig, Patience::AtOnce).await, Err(Refusal::Unavailable(_))));
        assert!(start_time.elapsed() < Duration::from_millis(50), "{:?}", start_time.elapsed());
        sleep(Duration::from_secs(2)).await;
    }
    assert_eq!((probes(&rig), lookups(&rig.network)), (0.0, 0), "upstream is not asked");
    let version = rig.sim.create(&pods(), pod("moved", "new")).unwrap();
    watch.until(version).await;
    prove(&rig, Patience::AtOnce).await.unwrap();
}

async fn a_bookmark_of_a_lagging_apiserver_is_no_proof() {
    let (rig, _watch, _) = synced(Setup::of(&["pods"])).await;
    let before = head(&served(&rig).await);
    let between = write_configmap(&rig.sim);
    let version = write_configmap(&rig.sim);
    assert!(before < between && between < version);
    rig.network.answer_once(is_probe, answer(200, vec![bookmark(between)], false));
    assert!(prove(&rig, Patience::Bookmark).await.is_err());
    assert_eq!((proofs(&rig, "behind"), head(&served(&rig).await)), (1.0, before));
    prove(&rig, Patience::Bookmark).await.unwrap();
    assert_eq!(head(&served(&rig).await), version);
}

async fn an_answer_of_another_cluster_is_no_proof() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let last = churn(&rig.sim, 0, 10);
    watch.until(last).await;
    // The other cluster has a lower version and another kube-system.
    let mut other = Setup::of(&["pods"]);
    other.sim.seed = 7;
    rig.network.connect_to(other.sim());
    for patience in [Patience::AtOnce, Patience::Bookmark] {
        assert!(prove(&rig, patience).await.is_err());
    }
    assert_eq!(proofs(&rig, "held"), 0.0);
}

async fn an_answer_of_a_restored_etcd_is_no_proof() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let backup = rig.sim.backup();
    let last = churn(&rig.sim, 0, 10);
    watch.until(last).await;
    rig.sim.restore(&backup);
    assert!(prove(&rig, Patience::Bookmark).await.is_err(), "the cached state is not the state of the cluster");
    rig.ready().await;
    let version = write_configmap(&rig.sim);
    let truth = rig.truth(PODS).await;
    while prove(&rig, Patience::Bookmark).await.is_err() {
        sleep(Duration::from_secs(1)).await;
    }
    let (store, held) = served(&rig).await.hub.snapshot().unwrap();
    assert!(held.get() >= version && held.get() < last, "{held}");
    assert_eq!(store.len(), truth.len());
}

async fn an_upstream_failure_is_reported_soon() {
    let (rig, _watch, _) = synced(Setup::of(&["pods"])).await;
    write_configmap(&rig.sim);
    for (verb, fault) in [(Verb::List, Fault::InternalError), (Verb::Watch, Fault::Disconnect)] {
        rig.fault(verb, fault, 1);
        sleep(Duration::from_secs(2)).await;
        let start_time = Instant::now();
        assert!(matches!(prove(&rig, Patience::Bookmark).await, Err(Refusal::Unavailable(_))));
        assert!(start_time.elapsed() < Duration::from_secs(1), "{:?}", start_time.elapsed());
    }
    assert_eq!(proofs(&rig, "failed"), 2.0);
    // A silent upstream costs only the timeout. It says nothing about bookmarks.
    rig.fault(Verb::List, Fault::Silence, 1);
    let start_time = Instant::now();
    assert!(prove(&rig, Patience::Bookmark).await.is_err());
    assert!(start_time.elapsed() < Duration::from_secs(6), "{:?}", start_time.elapsed());
    assert_eq!(proofs(&rig, "failed"), 3.0);
    prove(&rig, Patience::Bookmark).await.unwrap();
}

/// A rig whose upstream sends no bookmark to probes. The wait skips the early bookmark of a new
/// watch; the next one comes after a minute.
async fn without_bookmarks() -> Rig {
    let (rig, _watch, _) = synced(Setup::of(&["pods"])).await;
    sleep(Duration::from_secs(5)).await;
    rig.network.rule(|path| is_probe(path).then(|| answer(200, Vec::new(), true)));
    rig
}

async fn after_a_missing_bookmark_reads_do_not_wait_for_a_while() {
    let rig = without_bookmarks().await;
    let mut refused = 0;
    let mut waited = 0;
    let start_time = Instant::now();
    while start_time.elapsed() < Duration::from_secs(600) {
        write_configmap(&rig.sim);
        let came = Instant::now();
        refused += usize::from(prove(&rig, Patience::Bookmark).await.is_err());
        waited += usize::from(came.elapsed() > Duration::from_millis(50));
        sleep(Duration::from_millis(500)).await;
    }
    // Tries after 5, 10, 20 and 40 s, and then once a minute.
    assert!((9..=14).contains(&waited) && probes(&rig) == waited as f64, "{waited} waited, {} probes", probes(&rig));
    assert!(refused > 1000, "{refused} went upstream");
    // Meanwhile a read that needs no bookmark is proved.
    rig.sim.create(&pods(), pod("moved", "new")).unwrap();
    sleep(Duration::from_millis(10)).await;
    prove(&rig, Patience::Bookmark).await.unwrap();

    rig.network.clear_rules();
    sleep(Duration::from_secs(61)).await;
    for _ in 0..3 {
        write_configmap(&rig.sim);
        prove(&rig, Patience::Bookmark).await.unwrap();
    }
}

async fn a_read_without_fallback_waits_again() {
    let rig = without_bookmarks().await;
    write_configmap(&rig.sim);
    for failures in 1..=2 {
        let refused = prove(&rig, Patience::NoFallback).await.unwrap_err().to_string();
        assert!(refused.contains("no bookmark up to version"), "{refused}");
        assert_eq!((proofs(&rig, "behind"), probes(&rig)), (f64::from(failures), f64::from(failures)));
    }
    rig.network.clear_rules();
    // Reads that can go upstream do so.
    let refused = prove(&rig, Patience::Bookmark).await.unwrap_err().to_string();
    assert!(refused.contains("upstream sent no bookmark in the last attempt; the next attempt is in "), "{refused}");
    prove(&rig, Patience::NoFallback).await.unwrap();
    write_configmap(&rig.sim);
    prove(&rig, Patience::Bookmark).await.expect("no bookmark arrived");
}

async fn proofs_that_advance_the_cache_lose_no_event() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let catalog = rig.catalog.clone();
    let cache = served(&rig).await;
    let proving = tokio::spawn(async move {
        let mut proved = 0;
        while proved < 50 {
            proved += usize::from(catalog.advance(&cache, Patience::Bookmark).await.is_ok());
        }
    });
    let mut round = 0;
    let mut written = Vec::new();
    while !proving.is_finished() {
        // A pod is written now and then, between writes to configmaps.
        write_configmap(&rig.sim);
        if round % 20 == 0 {
            written.push(churn(&rig.sim, round, 1));
        }
        round += 1;
        sleep(Duration::from_millis(100)).await;
    }
    proving.await.unwrap();
    watch.until(*written.last().unwrap()).await;
    written.dedup();
    assert_eq!(versions(&watch.events), written);
    assert_eq!((relists(&rig), watch.gaps.len()), (1.0, 0));
    assert_eq!(watch.state, rig.truth(PODS).await);
    assert!(proofs(&rig, "bookmark") > 5.0, "{}", proofs(&rig, "bookmark"));
}

async fn the_next_watch_starts_at_the_proved_version() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let version = write_configmap(&rig.sim);
    prove(&rig, Patience::Bookmark).await.unwrap();
    // All earlier versions are too old now.
    rig.sim.restart();
    let last = rig.sim.create(&pods(), pod("later", "new")).unwrap();
    watch.until(last).await;
    assert_eq!((relists(&rig), watch.gaps.len()), (1.0, 0), "nothing is missing at {version}");
}

/// A resource without other writers, and a kubefan in front of it. Every consistent list needs a
/// proof.
async fn quiet(api: &ApiServer) -> (String, Kubefan) {
    let plural = api.unique("proofs");
    let group = format!("{plural}.example.com");
    api.create_crd(&group, &plural, "Proof").await;
    let resource = format!("--resource={plural}.{group}");
    let kubefan = Kubefan::start(api, &[&resource, "tuning.consistentListBytesMin=0"]).await;
    (format!("/apis/{group}/v1/namespaces/default/{plural}"), kubefan)
}

fn names(list: &Value) -> Vec<&str> {
    list["items"].as_array().unwrap().iter().filter_map(|item| item["metadata"]["name"].as_str()).collect()
}

async fn get(kubefan: &Kubefan, path: &str) -> (u16, Value) {
    let response = reqwest::get(format!("http://{}{path}", kubefan.grpc_addr)).await.unwrap();
    let status = response.status().as_u16();
    (status, serde_json::from_slice(&response.bytes().await.unwrap()).unwrap_or_default())
}

/// The names of the initial state of a watch-list, and the version of the bookmark that ends it.
async fn initial_state(kubefan: &Kubefan, path: &str) -> (Vec<String>, u64) {
    let query = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let mut response = reqwest::get(format!("http://{}{path}?{query}", kubefan.grpc_addr)).await.unwrap();
    let mut read = String::new();
    while !(read.contains("k8s.io/initial-events-end") && read.ends_with('\n')) {
        read += std::str::from_utf8(&response.chunk().await.unwrap().expect("the stream has ended")).unwrap();
    }
    let mut objects: Vec<Value> =
        read.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["object"].take()).collect();
    let bookmark = objects.pop().unwrap();
    let name = |object: &Value| object["metadata"]["name"].as_str().unwrap().to_owned();
    (objects.iter().map(name).collect(), version_of(&bookmark))
}

/// The proofs so far, by result.
async fn proofs_of(kubefan: &Kubefan) -> BTreeMap<String, u64> {
    let lines = kubefan.metric_lines("kubefan_proofs_total").await.unwrap();
    let mut counts = BTreeMap::new();
    for line in &lines {
        let result = line.split("result=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
        *counts.entry(result.to_owned()).or_default() += value_of(line) as u64;
    }
    counts
}

async fn consistent_reads_include_the_last_write() {
    let api = ApiServer::shared().await;
    let (path, kubefan) = quiet(&api).await;
    let namespace = api.namespace("freshness").await;
    let others = format!("/api/v1/namespaces/{namespace}/configmaps");
    let label = format!("resource=\"{}\"", path.rsplit('/').next().unwrap());
    let mut expected = Vec::new();
    for round in 0..6 {
        let name = format!("proof-{round}");
        let metadata = json!({ "name": name });
        let is_quiet = round % 2 == 0;
        // A look-up comes first where the last update is not old enough.
        let staleness = "kubefan_staleness_seconds";
        wait::until("the resource to be quiet", wait::SOON, async || {
            (!is_quiet || kubefan.metric_sum(staleness, &label).await? > 0.2).then_some(())
        })
        .await;
        let before = proofs_of(&kubefan).await;
        let written = if is_quiet {
            api.create(&others, &json!({ "metadata": metadata })).await
        } else {
            expected.push(name);
            let api_version = path.split('/').skip(2).take(2).collect::<Vec<_>>().join("/");
            api.create(&path, &json!({ "apiVersion": api_version, "kind": "Proof", "metadata": metadata })).await
        };
        let (names_of_state, version) = initial_state(&kubefan, &path).await;
        assert!(version >= version_of(&written), "{version} < {written}");
        assert_eq!(names_of_state, expected);
        if is_quiet {
            let mut compared = before;
            *compared.entry("equal".to_owned()).or_default() += 1;
            assert_eq!(proofs_of(&kubefan).await, compared, "one comparison is the proof, and no bookmark");
        }
        let (status, list) = get(&kubefan, &path).await;
        assert_eq!(status, 200, "{list}");
        assert!(version_of(&list) >= version_of(&written), "{list} < {written}");
        assert_eq!(names(&list), expected);
    }
}

async fn consistent_lists_of_events_go_upstream() {
    let api = ApiServer::shared().await;
    let args = ["--resource=events,events.events.k8s.io", "tuning.consistentListBytesMin=0"];
    let kubefan = Kubefan::start(&api, &args).await;
    for path in ["/api/v1/events", "/apis/events.k8s.io/v1/events"] {
        assert_eq!(get(&kubefan, &format!("{path}?resourceVersion=0")).await.0, 200, "{path}: any state is served");
        let before = kubefan.metric_lines("kubefan_proofs_total").await;
        get(&kubefan, path).await;
        assert_eq!(kubefan.metric_lines("kubefan_proofs_total").await, before, "{path} goes upstream without a proof");
    }
}

/// A watch-list needs the verb watch only.
async fn a_proof_without_the_right_to_list_is_reported() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let missing = "kubefan may not list pods in all namespaces; grant it the verb list";
    assert!(!rig.readyz().contains(missing), "{}", rig.readyz());
    rig.fault(Verb::List, status(403, "Forbidden", "pods is forbidden"), 1);
    watch.until(churn(&rig.sim, 0, 1)).await;
    assert!(prove(&rig, Patience::NoFallback).await.is_err());
    assert!(rig.readyz().contains(missing), "{}", rig.readyz());
    sleep(Duration::from_secs(2)).await;
    prove(&rig, Patience::NoFallback).await.unwrap();
    assert!(!rig.readyz().contains(missing), "{}", rig.readyz());
}
