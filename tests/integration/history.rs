//! Rewritten history: etcd restored from a backup, or another cluster at the same address. Old and
//! new objects are never mixed. A lagging apiserver or a broken connection alone ends no stream.

use std::time::Duration;

use kubefan_common::proto::v1alpha1::{OnExpired, WatchRequest};
use kubefan_sim::apiserver::{Fault, FaultRule, SimApiserver, SimOptions, Verb};
use tokio::time::{sleep, timeout};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::{
    freshness::write_configmap,
    harness::{
        network::answer,
        rig::{PODS, Rig, Setup, core, pod, pods, target, versions},
        tests,
    },
    upstream_faults::{relists, relists_for, restarts, synced, write},
};

tests! {
    paused: an_etcd_restore_ends_every_stream_with_the_reason, an_etcd_restore_is_found_after_the_cluster_caught_up,
        a_version_beyond_the_cluster_is_refused_as_another_history, a_lagging_replica_restarts_no_stream,
        a_version_of_another_cluster_is_refused, an_etcd_restore_behind_an_open_watch_is_found,
        an_etcd_restore_between_a_list_and_its_watch_is_found, a_lagging_apiserver_ends_no_stream,
        a_watch_resumes_if_the_version_lookup_is_forbidden,
        a_different_cluster_is_refused_until_the_first_is_back_and_never_mixed_in,
        an_etcd_restore_is_not_forgotten_while_another_cluster_answers,
        one_identity_check_serves_all_resources, nothing_is_requested_while_the_identity_is_not_answered,
        without_access_to_kube_system_the_ca_is_the_identity;
}

fn assert_rewritten(status: &Status, because: &str) {
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    assert_eq!(status.get_details_error_info().unwrap().reason, "HISTORY_REWRITTEN", "{status}");
    assert!(status.message().contains(because), "{status}");
}

async fn assert_starts_over(rig: &Rig) {
    rig.readyz_has("pods synced").await;
    let mut watch = rig.watch_all("pods").await;
    assert_eq!(watch.state, rig.truth(PODS).await);
    let after = write(rig, "after");
    watch.until(after[2]).await;
    assert_eq!(versions(&watch.events), after);
}

async fn an_etcd_restore_ends_every_stream_with_the_reason() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let backup = rig.sim.backup();
    let version = rig.sim.revision();
    let written = write(&rig, "b");
    watch.until(written[2]).await;
    rig.sim.restore(&backup);
    let status = watch.end().await;
    assert_rewritten(&status, &format!("version {} was followed by a list at {version}", written[2]));
    assert_eq!(versions(&watch.events), written, "no later event is mixed in");
    assert_eq!(relists_for(&rig, "rewritten"), 1.0);
    let ahead = rig.watch(target("pods"), &written[2].to_string()).await.err().unwrap();
    assert_rewritten(&ahead, "the cluster has reached");
    assert_starts_over(&rig).await;
}

/// kubefan was restarted meanwhile and has never seen the client's version.
async fn a_version_beyond_the_cluster_is_refused_as_another_history() {
    let setup = Setup::of(&["pods"]);
    let rig = Rig::synced(setup.sim(), setup).await;
    let written = write(&rig, "b");
    let beyond = (written[2] + 100).to_string();
    let asks = || rig.asked("/api/v1/namespaces/default/pods").len();
    let before = asks();
    let (first, second) = tokio::join!(rig.watch(target("pods"), &beyond), rig.watch(target("pods"), &beyond));
    for status in [first.err().unwrap(), second.err().unwrap()] {
        assert_rewritten(&status, &format!("version {beyond} belongs to another history: the cluster has reached"));
    }
    assert_eq!(asks() - before, 1, "one lookup serves all that wait");

    let mut watch = rig.watch_or_restart(target("pods"), &beyond).await.unwrap();
    watch.step().await.unwrap();
    watch.until_resumable().await;
    assert_eq!(*watch.restarted_from, *std::slice::from_ref(&beyond));
    assert_eq!(watch.state, rig.truth(PODS).await);

    // If upstream neither proves the cache nor confirms it, no subscriber is set back.
    rig.fault(Verb::List, Fault::Forbidden, 2);
    let status = rig.watch(target("pods"), &beyond).await.err().unwrap();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    rig.network.connect_to(other_cluster());
    let status = rig.watch(target("pods"), &beyond).await.err().unwrap();
    assert_eq!(status.code(), Code::Unavailable, "the version of another cluster does not count: {status}");
}

async fn a_lagging_replica_restarts_no_stream() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    // This replica's watch is silent, while other replicas have sent the events that follow.
    rig.network.answer_once(|path| path.contains("watch=1"), answer(200, vec![], true));
    rig.cut().await;
    rig.readyz_has("pods synced").await;
    let written = write(&rig, "b");
    let status = rig.watch_or_restart(target("pods"), &written[2].to_string()).await.err().unwrap();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.get_details_retry_info().is_some(), "{status}");
    watch.until(written[2]).await;
}

/// The other cluster has a higher version, so the number alone cannot reveal it.
async fn a_version_of_another_cluster_is_refused() {
    let first = Setup::of(&["pods"]);
    let first = Rig::synced(first.sim(), first).await;
    let last = write(&first, "b")[2].to_string();
    let list = first.list(target("pods")).await.unwrap();
    let cluster = list[0].cluster.clone();
    assert!(first.identity().ends_with(&cluster) && !cluster.is_empty(), "{cluster}");
    let watch = first.watch_all("pods").await;
    assert_eq!(watch.cluster, cluster, "a snapshot names the cluster too");

    let second = Rig::synced(other_cluster(), Setup::of(&["pods"])).await;
    for name in ["x", "y", "z"] {
        write(&second, name);
    }
    let claims = |cluster: &str, on_expired: OnExpired| WatchRequest {
        cluster: cluster.to_owned(),
        on_expired: on_expired.into(),
        ..second.request(target("pods"), &last)
    };
    let status = second.send(claims(&cluster, OnExpired::Fail)).await.err().unwrap();
    assert_rewritten(&status, &format!("version {last} belongs to another cluster ({cluster})"));
    let mut watch = second.send(claims(&cluster, OnExpired::Restart)).await.unwrap();
    watch.step().await.unwrap();
    watch.until_resumable().await;
    assert_eq!(*watch.restarted_from, *std::slice::from_ref(&last));
    assert_eq!((&watch.state, watch.cluster != cluster), (&second.truth(PODS).await, true));
    for known in ["", &watch.cluster] {
        second.send(claims(known, OnExpired::Fail)).await.expect("an unknown or equal cluster was refused");
    }
}

/// The cluster passes the old version before kubefan reconnects, so only the list can reveal the
/// restore. The tests of the cache's writer have the other contradictions.
async fn an_etcd_restore_is_found_after_the_cluster_caught_up() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    rig.sim.create(&pods(), pod("kept", "new")).unwrap();
    let backup = rig.sim.backup();
    let written = rig.sim.update(&pods(), pod("kept", "changed")).unwrap();
    watch.until(written).await;
    // Keeps kubefan away until the cluster has caught up.
    rig.network.refuse(true);
    rig.cut().await;
    rig.sim.restore(&backup);
    // A write that takes the version of the earlier event.
    rig.sim.update(&pods(), pod("a", "restored")).unwrap();
    for name in ["x", "y"] {
        rig.sim.create(&pods(), pod(name, "new")).unwrap();
    }
    rig.sim.compact();
    rig.network.refuse(false);
    assert_rewritten(&watch.end().await, "default/kept was at version");
    assert!(rig.sim.revision() > written, "only the list can reveal it");
    assert_eq!(relists_for(&rig, "expired"), 1.0);
    assert_starts_over(&rig).await;
}

async fn an_etcd_restore_behind_an_open_watch_is_found() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let backup = rig.sim.revision();
    let written = write(&rig, "b");
    watch.until(written[2]).await;
    // A proxy that keeps client connections open while the apiserver behind it is replaced.
    let restored = SimApiserver::new(SimOptions::default());
    restored.create(&pods(), pod("a", "first")).unwrap();
    assert_eq!(restored.revision(), backup, "the same history up to the backup");
    rig.network.connect_to(restored.clone());
    assert_rewritten(&watch.end().await, &format!("was followed by a list at {backup}"));
    assert_eq!(restarts(&rig, "timeout"), 1.0, "found by an ordinary restart of the watch");
}

/// Otherwise the watch would be silent until the cluster has passed the version of the list, and
/// miss the writes before.
async fn an_etcd_restore_between_a_list_and_its_watch_is_found() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"]).by_list()).await;
    let backup = rig.sim.backup();
    let version = rig.sim.revision();
    rig.network.refuse(true);
    rig.cut().await;
    let written = write(&rig, "b")[2];
    rig.sim.compact();
    let sim = rig.sim.clone();
    let mut is_listed = false;
    let mut is_restored = false;
    rig.network.rule(move |path| {
        let is_list = path.contains("/pods") && !path.contains("watch=1") && !path.contains("metadata.name");
        if is_listed && !is_restored && path.contains("/pods") {
            sim.restore(&backup);
            is_restored = true;
        }
        is_listed |= is_list;
        None
    });
    rig.network.refuse(false);
    let status = timeout(Duration::from_secs(60), watch.end()).await.expect("it is found before the watch ends");
    assert_rewritten(&status, &format!("version {written} was followed by a list at {version}"));
}

async fn a_lagging_apiserver_ends_no_stream() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let written = write(&rig, "b");
    watch.until(written[2]).await;
    // This apiserver's watch cache is behind another one's: a watch is silent for now, and no list
    // is needed.
    rig.network.answer_once(|path| path.contains("watch=1"), answer(200, vec![], true));
    rig.cut().await;
    rig.readyz_has("pods synced").await;
    sleep(Duration::from_secs(80)).await;
    let after = write(&rig, "c");
    watch.until(after[2]).await;
    assert_eq!(versions(&watch.events), [written, after].concat());
    assert_eq!((relists(&rig), relists_for(&rig, "rewritten")), (1.0, 0.0));
}

async fn a_watch_resumes_if_the_version_lookup_is_forbidden() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    rig.fault(Verb::List, Fault::Forbidden, 1000);
    rig.cut().await;
    let after = write(&rig, "b");
    watch.until(after[2]).await;
    assert_eq!(versions(&watch.events), after);
    assert_eq!(relists(&rig), 1.0);
}

pub(crate) fn other_cluster() -> SimApiserver {
    SimApiserver::new(SimOptions { seed: 7, ..SimOptions::default() })
}

async fn a_different_cluster_is_refused_until_the_first_is_back_and_never_mixed_in() {
    for watch_list in [true, false] {
        let (rig, mut watch, _) = synced(Setup::of(&["pods"]).with_watch_list(watch_list)).await;
        let first = rig.identity();
        assert!(first.starts_with("kube-system uid "), "readyz names the identity: {first}");
        let written = write(&rig, "b");
        watch.until(written[2]).await;
        // Its versions are far ahead. Its history is compacted, so a list would come next.
        let other = other_cluster();
        for i in 0..50 {
            other.create(&pods(), pod(&format!("other-{i}"), "new")).unwrap();
        }
        other.compact();
        rig.network.connect_to(other.clone());
        rig.cut().await;
        rig.readyz_has(&format!("but this cache belongs to {first}")).await;
        let readyz = rig.readyz();
        let stale = "pods stale: another cluster answers at http://apiserver.test: kube-system uid ";
        assert!(readyz.contains(stale) && readyz.contains("restart kubefan"), "{readyz}");
        other.create(&pods(), pod("other-later", "new")).unwrap();
        let requested = rig.asked(PODS).len();
        sleep(Duration::from_secs(600)).await;
        // The right cluster could be back when the answer is confirmed.
        assert_eq!(rig.asked(PODS).len(), requested, "nothing is requested from it");
        assert_eq!(versions(&watch.events), written, "nothing of the other cluster");
        assert_eq!(watch.resume_version, written[2].to_string());
        let list = rig.list(target("pods")).await.unwrap();
        assert_eq!(list[0].objects.len(), 1, "the cache is still served");
        assert_eq!(relists(&rig), 1.0);
        let asked = rig.asked("/api/v1/namespaces/kube-system").len();
        assert!(asked < 40, "{asked} identity checks in ten minutes");

        rig.network.connect_to(rig.sim.clone());
        other.drop_connections();
        let after = write(&rig, "c");
        watch.until(after[2]).await;
        assert_eq!(versions(&watch.events), [written, after].concat(), "the watch continues where it was");
        assert_eq!((watch.gaps.len(), watch.state), (0, rig.truth(PODS).await));
    }
}

/// The other cluster answers the list that follows from the restore. When the right one is back, it
/// has passed the old version, so nothing else shows the restore any more.
async fn an_etcd_restore_is_not_forgotten_while_another_cluster_answers() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let backup = rig.sim.backup();
    let written = write(&rig, "b");
    watch.until(written[2]).await;
    let network = rig.network.clone();
    let other = other_cluster();
    rig.network.rule(move |path| {
        if path.contains("sendInitialEvents") {
            network.connect_to(other.clone());
        }
        None
    });
    rig.sim.restore(&backup);
    rig.readyz_has("another cluster answers").await;
    sleep(Duration::from_secs(600)).await;
    rig.network.clear_rules();
    while rig.sim.revision() <= written[2] {
        write_configmap(&rig.sim);
    }
    rig.network.connect_to(rig.sim.clone());
    let status = timeout(Duration::from_secs(600), watch.end()).await.expect("the restore is found");
    assert_rewritten(&status, &format!("version {} was ", written[2]));
}

async fn one_identity_check_serves_all_resources() {
    let setup = Setup::of(&["pods", "configmaps", "services", "nodes"]);
    let rig = Rig::synced(setup.sim(), setup).await;
    let asked = || rig.asked("/api/v1/namespaces/kube-system").len();
    let before = asked();
    rig.network.refuse(true);
    rig.sim.drop_connections();
    rig.readyz_has("pods stale").await;
    // The resources reconnect at different moments because of their jitter.
    rig.network.refuse(false);
    for resource in ["pods", "configmaps", "services", "nodes"] {
        rig.readyz_has(&format!("{resource} synced")).await;
    }
    assert!((1..=4).contains(&(asked() - before)), "{}", asked() - before);
}

async fn nothing_is_requested_while_the_identity_is_not_answered() {
    let unanswered = || FaultRule {
        fault: Fault::InternalError,
        verb: Some(Verb::Get),
        resource: Some(core("namespaces")),
        requests: usize::MAX,
    };
    for watch_list in [true, false] {
        let setup = Setup::of(&["pods"]).with_watch_list(watch_list);
        let sim = setup.sim();
        sim.set_fault(unanswered());
        let rig = Rig::start(sim, setup);
        sleep(Duration::from_secs(600)).await;
        // A paged list is confirmed before its first page is requested.
        assert_eq!(rig.asked(PODS).len(), usize::from(watch_list), "states in ten minutes");
        rig.sim.clear_faults();
        rig.ready().await;

        let mut watch = rig.watch_all("pods").await;
        let before = rig.asked(PODS).len();
        rig.sim.set_fault(unanswered());
        rig.cut().await;
        sleep(Duration::from_secs(600)).await;
        assert_eq!(rig.asked(PODS).len() - before, 1, "watches in ten minutes");
        let asked = rig.asked("/api/v1/namespaces/kube-system").len();
        assert!(asked < 80, "{asked} identity checks in twenty minutes");
        rig.sim.clear_faults();
        let after = write(&rig, "b");
        watch.until(after[2]).await;
        assert_eq!((versions(&watch.events), watch.gaps.len()), (after.to_vec(), 0));
    }
}

async fn without_access_to_kube_system_the_ca_is_the_identity() {
    let setup = Setup::of(&["pods"]);
    let sim = setup.sim();
    let denied = |requests| {
        let resource = Some(core("namespaces"));
        FaultRule { fault: Fault::Forbidden, verb: Some(Verb::Get), resource, requests }
    };
    sim.set_fault(denied(1000));
    let rig = Rig::synced(sim, setup).await;
    assert_eq!(rig.identity(), "no serving CA of its own (the namespace kube-system may not be read)");

    // Access is granted later: from the next reconnect on, the uid is the identity.
    rig.sim.clear_faults();
    let mut watch = rig.watch_all("pods").await;
    rig.cut().await;
    rig.readyz_has("pods synced").await;
    assert!(rig.identity().starts_with("kube-system uid "), "{}", rig.identity());

    // Access is denied for a while, as by an apiserver that has just started. kubefan trusts no
    // answer until it can check the identity.
    rig.sim.set_fault(denied(3));
    rig.cut().await;
    rig.readyz_has("pods stale: cannot determine which cluster answers: the apiserver denies").await;
    let after = write(&rig, "b");
    watch.until(after[2]).await;
    assert_eq!(versions(&watch.events), after);
}
