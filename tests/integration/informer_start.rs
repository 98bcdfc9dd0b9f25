//! Reads that begin on a quiet resource: an informer's first state, and a stream that moves to
//! another replica. They start soon, cost upstream no more than without kubefan, and show no state
//! that was over before they began.

use std::time::Duration;

use futures::future::join_all;
use http_body_util::BodyExt;
use kubefan_cache::Refusal;
use kubefan_common::proto::v1alpha1::ListRequest;
use kubefan_fanout::{Catalog, Patience, ProvedState, ReadSource, Served};
use kubefan_model::{
    selection::Selection,
    selector::{FieldSelector, LabelSelector},
};
use kubefan_sim::apiserver::{Fault, SimApiserver, Verb};
use serde_json::Value;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use crate::{
    freshness::{head, lookups, probes, proofs, served, write_configmap},
    harness::{
        network::{Network, RecordedRequest, answer},
        objects::version_of,
        record::place,
        rig::{PODS, Rig, Setup, churn, on_demand, pod, pods, target, versions},
        tests,
    },
    upstream_faults::{relists, synced},
};

tests! {
    paused: the_watch_that_starts_a_cache_needs_no_proof, the_state_of_a_quiet_cache_is_proved_by_one_list,
        one_list_serves_all_earlier_reads, a_read_during_a_list_gets_a_new_list,
        a_short_informer_costs_upstream_at_most_one_request,
        a_cache_that_is_behind_is_compared_again_after_its_next_event,
        a_cache_that_stays_behind_is_not_listed_again, an_object_that_came_and_went_unseen_is_not_shown,
        a_large_cache_is_proved_by_a_bookmark, an_informer_starts_while_another_reader_waits_for_a_bookmark,
        a_list_that_fails_proves_nothing, a_read_moves_to_a_replica_that_is_behind_on_a_quiet_resource;
}

/// The metadata lists of pods so far.
fn metadata_lists(network: &Network) -> usize {
    network.recorded_requests(PODS).iter().filter(|asked| asked.is_metadata_only).count()
}

/// A synced kubefan whose pods have been quiet for too long for a bookmark to be due.
pub(crate) async fn quiet() -> Rig {
    let (rig, _watch, _) = synced(Setup::of(&["pods"])).await;
    sleep(Duration::from_secs(20)).await;
    rig
}

/// Serves a consistent read of pods.
async fn prove(rig: &Rig) -> Result<ReadSource, Refusal> {
    let served = served(rig).await;
    rig.catalog.prove(&served, Some(&everything(&served)), Patience::Bookmark).await
}

/// Begins a consistent read of pods whose state is proved.
async fn proving(rig: &Rig) -> JoinHandle<ProvedState> {
    let catalog = rig.catalog.clone();
    let served = served(rig).await;
    tokio::spawn(
        async move { state(catalog.prove(&served, Some(&everything(&served)), Patience::Bookmark).await.unwrap()) },
    )
}

fn everything(served: &Served) -> Selection {
    let labels = LabelSelector::default();
    let fields = FieldSelector::default();
    Selection::bind("", "", labels, &fields, &served.fields, served.parser.clone(), &served.gvr).unwrap()
}

fn state(source: ReadSource) -> ProvedState {
    match source {
        ReadSource::Proved(proved) => proved,
        ReadSource::Cache | ReadSource::CacheAtLeast(_) => panic!("the cache itself was proved"),
    }
}

/// A watch over HTTP.
pub(crate) struct HttpWatch {
    body: hyper::body::Incoming,
    read: Vec<u8>,
}

impl HttpWatch {
    /// Starts with the state, as client-go's informers do.
    async fn informer(rig: &Rig) -> Self {
        Self::informer_of(rig, PODS, "").await
    }

    /// Starts with the state of a path, with more parameters.
    pub(crate) async fn informer_of(rig: &Rig, path: &str, parameters: &str) -> Self {
        let query = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
        let response = rig.get(&format!("{path}?{query}{parameters}")).await;
        assert_eq!(response.status(), 200);
        Self { body: response.into_body(), read: Vec::new() }
    }

    /// The next event: its type, its object's name and version. `None` if none comes in a minute.
    pub(crate) async fn next(&mut self) -> Option<(String, String, u64)> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                let event: Value = serde_json::from_slice(&line).unwrap();
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let name = text(&event["object"]["metadata"]["name"]);
                return Some((text(&event["type"]), name, version_of(&event["object"])));
            }
            let frame = timeout(Duration::from_secs(50), self.body.frame()).await.ok()?;
            self.read.extend_from_slice(&frame?.unwrap().into_data().unwrap());
        }
    }

    /// The names of the initial state, and the version of the bookmark that ends it.
    pub(crate) async fn initial(&mut self) -> (Vec<String>, u64) {
        let mut names = Vec::new();
        loop {
            match self.next().await.expect("the state does not end") {
                (kind, _, version) if kind == "BOOKMARK" => return (names, version),
                (_, name, _) => names.push(name),
            }
        }
    }
}

async fn the_state_of_a_quiet_cache_is_proved_by_one_list() {
    let rig = quiet().await;
    let version = write_configmap(&rig.sim);
    let cache = served(&rig).await;
    let start_time = Instant::now();
    let before = head(&cache);
    let age = cache.hub.status().age;
    let proved = state(prove(&rig).await.unwrap());
    assert!(start_time.elapsed() < Duration::from_millis(100), "{:?}", start_time.elapsed());
    assert_eq!((proved.version.get(), proved.store.len()), (version, rig.truth(PODS).await.len()));
    assert_eq!((metadata_lists(&rig.network), lookups(&rig.network), probes(&rig)), (1, 0, 0.0));
    assert_eq!(proofs(&rig, "equal"), 1.0);
    assert_eq!(head(&cache), before, "equal states do not prove the history in between");
    assert!(cache.hub.status().age >= age, "nor the freshness of other streams");
}

async fn one_list_serves_all_earlier_reads() {
    let rig = quiet().await;
    let version = write_configmap(&rig.sim);
    for source in join_all((0..1000).map(|_| prove(&rig))).await {
        assert_eq!(state(source.unwrap()).version.get(), version);
    }
    assert_eq!(metadata_lists(&rig.network), 1);
    // And lists over HTTP.
    sleep(Duration::from_secs(2)).await;
    let version = write_configmap(&rig.sim);
    for answer in join_all((0..50).map(|_| rig.get(PODS))).await {
        assert_eq!(answer.status(), 200);
        let list: Value = serde_json::from_slice(&answer.into_body().collect().await.unwrap().to_bytes()).unwrap();
        assert!(version_of(&list) >= version);
    }
    assert_eq!((metadata_lists(&rig.network), lookups(&rig.network)), (2, 0));
}

async fn a_read_during_a_list_gets_a_new_list() {
    let rig = quiet().await;
    let mut reads = Vec::new();
    for _ in 0..10 {
        reads.push((write_configmap(&rig.sim), proving(&rig).await));
        sleep(Duration::from_millis(1)).await;
    }
    for (version, read) in reads {
        assert!(read.await.unwrap().version.get() >= version, "the state is older than the read");
    }
    assert!(metadata_lists(&rig.network) <= 3, "{}", metadata_lists(&rig.network));
}

/// An apiserver counts one watch for an informer that starts with the state.
async fn a_short_informer_costs_upstream_at_most_one_request() {
    let rig = quiet().await;
    for is_busy in [false, true] {
        for round in 0..8 {
            let written = if is_busy {
                let written = churn(&rig.sim, round, 1);
                sleep(Duration::from_millis(10)).await;
                written
            } else {
                write_configmap(&rig.sim)
            };
            let asked = || [rig.asked(PODS).len(), lookups(&rig.network)];
            let before = asked();
            let (_, version) = HttpWatch::informer(&rig).await.initial().await;
            assert!(version >= written, "{version} is older than {written}");
            let [of_pods, lookups] = [0, 1].map(|at| asked()[at] - before[at]);
            if is_busy {
                assert_eq!((of_pods, lookups), (0, 1), "a look-up proves a busy cache");
            } else {
                assert!(of_pods + lookups <= 1, "{of_pods} requests and {lookups} look-ups of a quiet cache");
            }
            sleep(Duration::from_millis(100)).await;
        }
    }
    assert_eq!((probes(&rig), proofs(&rig, "behind")), (0.0, 0.0));
}

/// A kubefan that receives no event of pods until its watch is opened again.
pub(crate) async fn with_a_silent_watch() -> Rig {
    let setup = Setup::of(&["pods"]).by_list();
    let sim = setup.sim();
    sim.create(&pods(), pod("stays", "on")).unwrap();
    let network = Network::to(sim.clone());
    network.rule(|path| {
        let own = path.starts_with(PODS) && RecordedRequest::is_watch_path(path);
        own.then(|| answer(200, Vec::new(), true))
    });
    let rig = Rig::over(network, sim, setup);
    rig.ready().await;
    sleep(Duration::from_secs(5)).await;
    rig
}

async fn a_cache_that_is_behind_is_compared_again_after_its_next_event() {
    let rig = quiet().await;
    let version = rig.sim.create(&pods(), pod("just-now", "new")).unwrap();
    let version = version.max(write_configmap(&rig.sim));
    let (names, bookmark) = HttpWatch::informer(&rig).await.initial().await;
    assert!(names.contains(&"just-now".to_owned()) && bookmark >= version, "{names:?} at {bookmark}");
    assert_eq!((metadata_lists(&rig.network), probes(&rig)), (1, 0.0));
}

async fn a_cache_that_stays_behind_is_not_listed_again() {
    let rig = with_a_silent_watch().await;
    rig.sim.create(&pods(), pod("missed", "new")).unwrap();
    write_configmap(&rig.sim);
    let cache = served(&rig).await;
    let before = head(&cache);
    let looked_up = lookups(&rig.network);
    let start_time = Instant::now();
    assert!(prove(&rig).await.is_err());
    assert!(start_time.elapsed() < Duration::from_secs(5), "{:?}", start_time.elapsed());
    assert_eq!((metadata_lists(&rig.network), lookups(&rig.network) - looked_up, relists(&rig)), (1, 1, 1.0));
    assert_eq!((head(&cache), proofs(&rig, "equal"), proofs(&rig, "behind")), (before, 0.0, 2.0));
}

/// The events of the object are still on their way to the cache when the informer starts.
async fn an_object_that_came_and_went_unseen_is_not_shown() {
    let rig = with_a_silent_watch().await;
    rig.sim.create(&pods(), pod("transient", "new")).unwrap();
    let version = rig.sim.delete(&pods(), "default", "transient").unwrap();
    let version = version.max(write_configmap(&rig.sim));
    let mut watch = HttpWatch::informer(&rig).await;
    assert_eq!(watch.initial().await, (vec!["stays".to_owned()], version));
    assert!(head(&served(&rig).await) < version && proofs(&rig, "equal") == 1.0);
    // The silent watch ends after a while, and the next one receives them.
    rig.network.clear_rules();
    sleep(Duration::from_secs(120)).await;
    let later = rig.sim.create(&pods(), pod("later", "new")).unwrap();
    let mut next = watch.next().await;
    while next.as_ref().is_some_and(|(kind, ..)| kind == "BOOKMARK") {
        next = watch.next().await;
    }
    assert_eq!(next, Some(("ADDED".to_owned(), "later".to_owned(), later)));
    assert_eq!(relists(&rig), 1.0);
}

async fn a_large_cache_is_proved_by_a_bookmark() {
    let setup = Setup::of(&["pods"]);
    let sim = setup.sim();
    for number in 0..1001 {
        sim.create(&pods(), pod(&format!("pod-{number}"), "on")).unwrap();
    }
    let rig = Rig::synced(sim, setup).await;
    sleep(Duration::from_secs(20)).await;
    let version = write_configmap(&rig.sim);
    assert!(matches!(prove(&rig).await.unwrap(), ReadSource::Cache));
    assert_eq!(head(&served(&rig).await), version);
    assert_eq!((metadata_lists(&rig.network), lookups(&rig.network), probes(&rig)), (0, 1, 1.0));
}

async fn an_informer_starts_while_another_reader_waits_for_a_bookmark() {
    let rig = quiet().await;
    write_configmap(&rig.sim);
    let catalog = rig.catalog.clone();
    let cache = served(&rig).await;
    let waiting = tokio::spawn(async move { catalog.advance(&cache, Patience::Bookmark).await });
    while probes(&rig) == 0.0 {
        sleep(Duration::from_millis(1)).await;
    }
    let start_time = Instant::now();
    HttpWatch::informer(&rig).await.initial().await;
    assert!(start_time.elapsed() < Duration::from_millis(100), "{:?}", start_time.elapsed());
    assert!(!waiting.is_finished());
    waiting.await.unwrap().unwrap();
}

async fn a_list_that_fails_proves_nothing() {
    let rig = quiet().await;
    let version = write_configmap(&rig.sim);
    rig.fault(Verb::List, Fault::InternalError, 1);
    assert!(matches!(prove(&rig).await.unwrap(), ReadSource::Cache), "a bookmark proves the cache");
    assert!(head(&served(&rig).await) >= version);
    // Another cluster, with the same versions.
    let mut other = Setup::of(&["pods"]);
    other.sim.seed = 7;
    let other: SimApiserver = other.sim();
    while other.revision() < version {
        write_configmap(&other);
    }
    rig.network.connect_to(other);
    sleep(Duration::from_secs(2)).await;
    assert!(prove(&rig).await.is_err());
    assert_eq!(proofs(&rig, "equal"), 0.0);
}

/// A bookmark has moved another replica past the last change of pods.
async fn a_read_moves_to_a_replica_that_is_behind_on_a_quiet_resource() {
    let setup = || Setup::of(&["pods"]);
    let sim = setup().sim();
    sim.create(&pods(), pod("stays", "on")).unwrap();
    let first = Rig::synced(sim.clone(), setup()).await;
    let second = Rig::synced(sim.clone(), setup()).await;
    sleep(Duration::from_secs(20)).await;
    let version = write_configmap(&sim);
    let mut watch = first.watch_all("pods").await;
    let cache = served(&first).await;
    first.catalog.advance(&cache, Patience::Bookmark).await.unwrap();
    watch.until(version).await;
    assert!(watch.resume_version == format!("{version}.end") && head(&served(&second).await) < version);

    let start_time = Instant::now();
    let version_text = watch.resume_version.clone();
    let list =
        ListRequest { target: Some(target("pods")), resource_version: version_text.clone(), ..Default::default() };
    let streams = join_all((0..100).map(|_| second.watch(target("pods"), &version_text)));
    let (streams, list) = tokio::join!(streams, second.list_request(list));
    assert!(start_time.elapsed() < Duration::from_secs(3), "{:?}", start_time.elapsed());
    assert_eq!((lookups(&second.network), probes(&second)), (1, 1.0), "one proof serves all that wait");
    assert!(place(&list.unwrap()[0].resource_version).0 >= version);
    let written = second.sim.create(&pods(), pod("later", "new")).unwrap();
    for stream in streams {
        let mut stream = stream.expect("the replica has caught up");
        stream.until(written).await;
        assert_eq!((versions(&stream.events), stream.snapshots), (vec![written], 0));
    }
}

async fn the_watch_that_starts_a_cache_needs_no_proof() {
    let setup = Setup::of(&[]).on_demand(on_demand());
    let rig = Rig::synced(setup.sim(), setup).await;
    rig.sim.create(&pods(), pod("a", "on")).unwrap();
    let (names, version) = HttpWatch::informer(&rig).await.initial().await;
    let asked = rig.asked(PODS);
    assert!(names == ["a"] && asked.len() == 1 && asked[0].is_watch(), "{names:?}: {asked:?}");
    let written = rig.sim.create(&pods(), pod("later", "on")).unwrap();
    let (names, later) = HttpWatch::informer(&rig).await.initial().await;
    assert!(version < written && later >= written && names.len() == 2, "a later reader needs another proof: {names:?}");
}
