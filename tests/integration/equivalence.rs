//! Subscribers of kubefan get exactly the events of the apiserver's own watch, byte for byte, for
//! every selector and for each way of reading the initial state.
//!
//! `KUBEFAN_TEST_SCALE=full` runs it with 10,000 pods, 200 subscribers and 2,000 updates; the
//! default is smaller.

use std::{collections::HashMap, env};

use kubefan_common::proto::v1alpha1::Target;
use kubefan_sim::{
    apiserver::{Fault, Verb},
    workload::{Workload, WorkloadOptions},
};
use tokio::{sync::watch, task::JoinSet};

use crate::harness::{
    apiserver::{ApiServer, Options},
    kubefan::Kubefan,
    load,
    objects::{pod, version_of},
    record::{Query, Recorded, Versions, Watch, assert_equal, connect, query, upstream_initial, upstream_watch},
    rig::{PODS, Rig, Setup, target},
    tests, wait,
};

tests! {
    apiserver slow_programs: subscribers_get_the_apiservers_events_after_a_list,
        subscribers_get_the_apiservers_events_after_a_watch_list,
        subscribers_behind_two_kubefans_get_the_apiservers_events,
        subscribers_behind_three_kubefans_over_grpc_get_the_apiservers_events;
    paused: subscribers_of_a_compressed_cache_get_the_same_bytes;
}

/// The size of the larger tests.
pub(crate) struct Scale {
    pub(crate) pods: usize,
    pub(crate) subscribers: usize,
    pub(crate) updates: usize,
    /// The length of a watch of the apiserver's own, in seconds.
    pub(crate) seconds: u32,
}

pub(crate) fn scale() -> Scale {
    match env::var("KUBEFAN_TEST_SCALE").as_deref() {
        Ok("full") => Scale { pods: 10_000, subscribers: 200, updates: 2_000, seconds: 60 },
        _ => Scale { pods: 600, subscribers: 48, updates: 400, seconds: 10 },
    }
}

/// Two thirds of the subscribers use the plain queries. The others have selectors that objects
/// enter and leave.
const PLAIN: [Query; 4] = [
    query("", "", ""),
    query("team-0", "", ""),
    query("", "", "metadata.namespace!=team-1"),
    query("team-2", "", "spec.nodeName!=node-0"),
];
const CHANGING: [Query; 8] = [
    query("", "app=web-1", ""),
    query("", "app in (web-2,web-3),tier", ""),
    query("", "tier!=front", ""),
    query("", "canary", ""),
    query("team-1", "!canary", ""),
    query("", "app notin (web-1,web-2)", "status.phase=Running"),
    query("", "", "status.phase!=Running"),
    query("", "tier=front", "spec.restartPolicy=Always"),
];

async fn subscribers_get_the_apiservers_events_after_a_list() {
    compare_with_the_apiserver("never", &[]).await;
}

async fn subscribers_get_the_apiservers_events_after_a_watch_list() {
    compare_with_the_apiserver("auto", &[]).await;
}

async fn subscribers_behind_two_kubefans_get_the_apiservers_events() {
    compare_with_the_apiserver("auto", &[Hop::Http]).await;
}

async fn subscribers_behind_three_kubefans_over_grpc_get_the_apiservers_events() {
    compare_with_the_apiserver("auto", &[Hop::Grpc, Hop::Grpc]).await;
}

/// The protocol between two kubefans.
#[derive(Clone, Copy)]
enum Hop {
    Http,
    Grpc,
}

async fn compare_with_the_apiserver(watch_list: &str, hops: &[Hop]) {
    let Scale { pods, subscribers, updates, seconds } = scale();
    let api = ApiServer::start(Options::default()).await;
    let mut workload = Workload::new(7, WorkloadOptions { objects: pods, ..WorkloadOptions::default() });
    load::populate(&api, &mut workload).await;

    let before = pod_watches(&api).await;
    let watch_list = format!("tuning.watchList={watch_list}");
    let args = ["--resource=pods", &*watch_list];
    let mut kubefans = vec![Kubefan::start(&api, &args).await];
    for hop in hops {
        let address = kubefans[kubefans.len() - 1].grpc_addr;
        let source = match hop {
            Hop::Http => format!("--upstream={}", api.kubeconfig_to(&format!("http://{address}")).display()),
            Hop::Grpc => format!("--upstream={address}"),
        };
        kubefans.push(Kubefan::start(&api, &[&args[..], &[&source]].concat()).await);
    }
    let kubefan = &kubefans[hops.len()];
    let start = version_of(&api.get_json("/api/v1/pods?limit=1").await);

    let queries: Vec<&Query> =
        (0..subscribers).map(|n| if n % 3 == 0 { &CHANGING[n / 3 % 8] } else { &PLAIN[n % 4] }).collect();
    let mut initial: HashMap<&Query, Vec<Recorded>> = HashMap::new();
    for query in &queries {
        if !initial.contains_key(*query) {
            initial.insert(query, upstream_initial(&api, query).await);
        }
    }

    let mut watches = Vec::new();
    for query in &queries {
        let mut client = connect(kubefan.grpc_addr).await;
        let mut watch = Watch::start(&mut client, query.target("pods"), "").await.unwrap();
        // Reads the snapshot before the first update, so that all histories start at the same
        // state.
        watch.until_resumable().await;
        watches.push(watch);
    }
    one_pod_watch(&api, before, "one upstream watch for any number of subscribers").await;

    let (end_sender, end) = watch::channel(u64::MAX);
    let mut readers = JoinSet::new();
    for (query, mut watch) in queries.iter().copied().cloned().zip(watches) {
        let end = end.clone();
        readers.spawn(async move {
            watch.until_announced(end).await;
            (query, watch)
        });
    }
    for _ in 0..updates {
        load::apply(&api, workload.next_change()).await;
    }
    let last = version_of(&api.create("/api/v1/namespaces/team-0/pods", &pod("the-last")).await);
    end_sender.send_replace(last);
    let watches = readers.join_all().await;
    one_pod_watch(&api, before, "still one upstream watch").await;

    // All watches run at once: for a quiet selection only the bookmark before the end of the
    // apiserver's watch proves that nothing is missing.
    let range = Versions { start, end: last };
    let histories = initial.keys().map(|query| async { (*query, upstream_watch(&api, query, range, seconds).await) });
    let expected: HashMap<&Query, Vec<Recorded>> = futures::future::join_all(histories).await.into_iter().collect();
    let mut left = 0;
    for (query, watch) in &watches {
        let name = format!("{query:?}");
        assert_equal(&format!("{name}, snapshot"), &watch.snapshot, &initial[query]);
        assert_equal(&format!("{name}, events"), &watch.events, &expected[query]);
        assert!(watch.gaps.is_empty());
        left += watch.left;
    }
    assert!(left > 0, "no object left a selector");
    let events: usize = watches.iter().map(|(_, watch)| watch.events.len()).sum();
    println!(
        "{subscribers} subscribers, {updates} updates, {events} events compared, {left} of them objects that left"
    );
}

/// The number of pod watches in the apiserver's metrics.
async fn pod_watches(api: &ApiServer) -> i64 {
    let text = api.metric("apiserver_longrunning_requests").await;
    let pods = text.lines().filter(|line| line.contains(r#"resource="pods""#) && line.contains(r#"verb="WATCH""#));
    pods.map(|line| line.rsplit(' ').next().and_then(|count| count.parse::<f64>().ok()).expect("a count") as i64).sum()
}

/// Waits until there is one pod watch more than `before`: the test's own watches end a bit later,
/// and a watch that the apiserver has ended is followed by another.
async fn one_pod_watch(api: &ApiServer, before: i64, what: &str) {
    wait::until(what, wait::SOON, || async { (pod_watches(api).await - before == 1).then_some(()) }).await;
}

/// Compression changes only how bytes are stored. Snapshots, events, history and the difference
/// after a relist stay the same.
async fn subscribers_of_a_compressed_cache_get_the_same_bytes() {
    let mut setup = Setup::of(&["pods"]);
    setup.cache_compression = true;
    let sim = setup.sim();
    let mut workload = Workload::new(5, WorkloadOptions { objects: 200, ..WorkloadOptions::default() });
    workload.populate(&sim).unwrap();
    let rig = Rig::synced(sim, setup).await;
    let gauge = |name: &str| rig.metric(&format!(r#"{name}{{group="",media="json",namespace="",resource="pods"}}"#));
    assert!(gauge("kubefan_cached_object_memory_bytes") < gauge("kubefan_cached_object_bytes") / 2.0);

    let canaries = || Target { label_selector: "canary".to_owned(), ..target("pods") };
    let mut all = rig.watch_all("pods").await;
    let mut some = rig.watch(canaries(), "").await.unwrap();
    some.until_resumable().await;
    assert_eq!(all.state, rig.truth(PODS).await);
    let start = all.resume_version.clone();
    for _ in 0..300 {
        workload.step(&rig.sim).unwrap();
    }
    let end = rig.sim.revision();
    all.until(end).await;
    some.until(end).await;
    assert_eq!(all.state, rig.truth(PODS).await);
    let mut late = rig.watch(canaries(), "").await.unwrap();
    late.until_resumable().await;
    assert_eq!(some.state, late.state);
    for (mut resumed, unbroken) in [
        (rig.watch(target("pods"), &start).await.unwrap(), &all),
        (rig.watch(canaries(), &start).await.unwrap(), &some),
    ] {
        resumed.until(end).await;
        assert_equal("from packed history", &resumed.events, &unbroken.events);
    }

    rig.sim.drop_connections();
    rig.fault(Verb::Watch, Fault::ServiceUnavailable, 2);
    for _ in 0..100 {
        workload.step(&rig.sim).unwrap();
    }
    rig.sim.compact();
    all.until(rig.sim.revision()).await;
    assert_eq!(all.gaps.len(), 1);
    assert_eq!(all.state, rig.truth(PODS).await);
}
