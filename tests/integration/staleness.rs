//! An unreachable apiserver: cached objects are still served and streams stay open, and clients and
//! operators can see how old the data is.

use std::time::Duration;

use kubefan_cache::Phase;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::{
    freshness::write_configmap,
    harness::{
        network::{Network, RecordedRequest, answer},
        record::Watch,
        rig::{PODS, Rig, Setup, churn, pod, pods, target, versions},
        tests,
    },
    peers::{Peer, small_ring, warm_starts, with_peers},
    upstream_faults::{synced, write},
};

tests! {
    paused: a_warm_start_is_as_old_as_its_proof, a_warm_start_that_is_behind_is_refused_until_its_watch_catches_up,
        bookmarks_stop_at_the_last_proven_version_and_lists_continue,
        beyond_max_staleness_reads_are_refused_and_streams_stay_open, a_quiet_resource_does_not_look_stale;
}

/// The time since the last proof, in seconds, before which reads are served.
const MAX: Duration = Duration::from_secs(180);

/// A setup that refuses reads of a state that is too old.
fn limited(mut setup: Setup) -> Setup {
    setup.registry.staleness_max = Some(MAX);
    setup
}

fn assert_stale(status: &Status) {
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert_eq!(status.get_details_error_info().unwrap().reason, "STALE");
}

/// Checks that a stream stays open and sends nothing new, not even a higher bookmark.
async fn assert_silent(watch: &mut Watch, span: Duration) {
    let before = watch.resume_version.clone();
    let end = Instant::now() + span;
    while let Ok(step) = timeout_at(end, watch.step()).await {
        let response = step.unwrap().expect("the stream has ended");
        assert_eq!(response.resume_version, before, "{response:?}");
    }
}

async fn bookmarks_stop_at_the_last_proven_version_and_lists_continue() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let before = write(&rig, "b");
    watch.until(before[2]).await;
    rig.network.refuse(true);
    rig.cut().await;
    let missed = rig.sim.create(&pods(), pod("missed", "new")).unwrap();

    assert_silent(&mut watch, Duration::from_secs(600)).await;
    assert_eq!(watch.resume_version, before[2].to_string(), "no bookmark is above the proven version");
    assert!(rig.age() >= 590.0, "{}", rig.age());
    let readyz = rig.readyz();
    assert!(readyz.starts_with("pods stale: watch: cannot reach the apiserver"), "{readyz}");
    let proven_seconds = readyz.split("; proven ").nth(1).and_then(|rest| rest.strip_suffix("s ago")).unwrap();
    assert!(proven_seconds.parse::<u64>().unwrap() >= 590, "{readyz}");
    assert!(rig.registry.readiness().0, "an outage does not end readiness");
    let list = rig.list(target("pods")).await.unwrap();
    assert_eq!(list[0].resource_version, before[2].to_string());
    rig.watch(target("pods"), &before[0].to_string()).await.unwrap().until(before[2]).await;

    rig.network.refuse(false);
    watch.until(missed).await;
    assert_eq!((versions(&watch.events), watch.gaps.len()), ([&before[..], &[missed]].concat(), 0));
    assert_eq!(watch.state, rig.truth(PODS).await);
    assert!(rig.age() < 5.0, "{}", rig.age());
}

async fn beyond_max_staleness_reads_are_refused_and_streams_stay_open() {
    let (rig, mut watch, _) = synced(limited(Setup::of(&["pods"]))).await;
    let before = write(&rig, "b");
    watch.until(before[2]).await;
    rig.network.refuse(true);
    rig.cut().await;
    sleep(Duration::from_secs(170)).await;
    assert!(rig.list(target("pods")).await.is_ok(), "not yet");

    sleep(Duration::from_secs(15)).await;
    let refused = [
        rig.list(target("pods")).await.err(),
        rig.watch(target("pods"), "").await.err(),
        rig.watch(target("pods"), &before[0].to_string()).await.err(),
    ];
    for status in refused.map(|status| status.expect("it is served")) {
        assert_stale(&status);
        assert!(status.get_details_retry_info().unwrap().retry_delay.is_some());
        let message = status.message();
        assert!(message.contains("pods was last proved") && message.contains("cannot reach"), "{message}");
    }
    assert!(!rig.registry.readiness().0, "another replica may be fresher");
    assert_silent(&mut watch, Duration::from_secs(60)).await;

    // The operator prefers old reads, and then not.
    rig.registry.limit_staleness(None);
    assert!(rig.list(target("pods")).await.is_ok() && rig.registry.readiness().0);
    rig.registry.limit_staleness(Some(MAX));
    assert!(rig.list(target("pods")).await.is_err() && !rig.registry.readiness().0);

    rig.network.refuse(false);
    let after = write(&rig, "c");
    watch.until(after[2]).await;
    assert!(rig.list(target("pods")).await.is_ok());
    assert!(rig.registry.readiness().0);
}

async fn a_quiet_resource_does_not_look_stale() {
    // With and without writes in the rest of the cluster, which cause upstream's bookmarks.
    for others_move in [false, true] {
        let (rig, mut watch, before) = synced(limited(Setup::of(&["pods"]))).await;
        let mut phase = rig.registry.hubs().remove(0).1.phase();
        let stale = tokio::spawn(async move { phase.wait_for(|phase| *phase != Phase::Synced).await.map(drop) });
        for i in 0..120 {
            if others_move {
                write_configmap(&rig.sim);
            }
            sleep(Duration::from_secs(30)).await;
            assert!(rig.age() < 180.0, "others move: {others_move}; after {i}: {}", rig.age());
            assert!(rig.list(target("pods")).await.is_ok());
        }
        assert!(!stale.is_finished(), "others move: {others_move}: it does not stay synced");
        let watches = rig.asked(PODS).len() - before;
        assert!(watches <= 40, "others move: {others_move}: {watches} watches in an hour");
        let written = write(&rig, "b");
        watch.until(written[2]).await;
        assert_eq!((versions(&watch.events), watch.gaps.len()), (written.to_vec(), 0));
    }
}

/// A replica that starts warm from a peer, and whose upstream watches all fail.
async fn warm_without_watch(first: &Rig, rule: impl Fn(&str) + Send + 'static) -> Rig {
    let setup = limited(with_peers(vec![Peer::Healthy(first.registry.clone())]));
    let network = Network::to(first.sim.clone());
    network.rule(move |path| {
        rule(path);
        let of_watch = RecordedRequest::is_watch_path(path) || path.contains("fieldSelector");
        of_watch.then(|| answer(503, vec![serde_json::json!({ "kind": "Status", "code": 503 }).to_string()], false))
    });
    let rig = Rig::over(network, first.sim.clone(), setup);
    rig.readyz_has("stale: ").await;
    assert_eq!(warm_starts(&rig, "warm"), 1.0);
    rig
}

async fn a_warm_start_is_as_old_as_its_proof() {
    let sim = small_ring().sim();
    churn(&sim, 0, 20);
    let first = Rig::synced(sim, small_ring()).await;
    sleep(Duration::from_secs(100)).await;
    let rig = warm_without_watch(&first, |_| {}).await;
    assert!(
        rig.list(target("pods")).await.is_ok() && rig.registry.readiness().0,
        "upstream has just confirmed the state"
    );
    sleep(Duration::from_secs(120)).await;
    assert!(rig.age() >= 120.0, "{}", rig.age());
    sleep(Duration::from_secs(70)).await;
    assert_stale(&rig.list(target("pods")).await.expect_err("it is served"));
    assert!(!rig.registry.readiness().0);
}

async fn a_warm_start_that_is_behind_is_refused_until_its_watch_catches_up() {
    let sim = small_ring().sim();
    churn(&sim, 0, 20);
    let first = Rig::synced(sim.clone(), small_ring()).await;
    let writer = sim.clone();
    let from = sim.revision();
    // Writes after the transfer and before upstream is asked to confirm it.
    let rig = warm_without_watch(&first, move |path| {
        if path.starts_with(PODS) && writer.revision() == from {
            churn(&writer, 20, 2);
        }
    })
    .await;
    assert_eq!(rig.age(), f64::INFINITY, "it is unknown since when it is behind");
    assert_stale(&rig.list(target("pods")).await.expect_err("it is served"));
    assert!(!rig.registry.readiness().0);
    let rig = Rig::synced(sim.clone(), limited(with_peers(vec![Peer::Healthy(first.registry.clone())]))).await;
    assert!(rig.list(target("pods")).await.is_ok());
}
