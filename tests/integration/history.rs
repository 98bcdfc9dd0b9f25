//! History that is not what it was: etcd restored from a backup, and another cluster behind the same address. What was told before and
//! what is true now are never mixed; and an apiserver that merely lags, or a connection that merely breaks, resets nobody.

use std::time::Duration;

use kubefan_common::proto::v1alpha1::{OnExpired, WatchRequest};
use kubefan_sim::apiserver::{Fault, FaultRule, SimApiserver, SimOptions, Verb};
use tokio::time::sleep;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::{
    harness::{
        Test,
        network::answer,
        record::Watch,
        rig::{PODS, Rig, Setup, pod, pods, target, versions},
        tests,
    },
    upstream_faults::{relists, relists_for, restarts, synced, write},
};

pub(crate) const TESTS: &[Test] = tests! {
    paused: a_restored_state_resets_every_stream_with_the_reason, a_restored_state_that_caught_up_resets_them_too,
        a_version_beyond_the_cluster_is_of_another_history, a_replica_that_lags_starts_nobody_over,
        a_version_of_another_cluster_leads_nowhere, a_restored_state_behind_a_watch_that_never_broke_is_found, an_apiserver_that_lags_resets_nobody,
        where_the_version_may_not_be_asked_for_the_watch_goes_on, a_different_cluster_is_refused_until_the_first_is_back,
        a_different_cluster_that_never_listed_is_never_mixed_in, one_question_tells_all_resources_who_answers,
        where_kube_system_may_not_be_read_the_ca_is_used_and_that_is_said;
};

/// Takes messages until the stream ends with an error.
async fn end_of(watch: &mut Watch) -> Status {
    loop {
        match watch.step().await {
            Ok(step) => assert!(step.is_some(), "it says why"),
            Err(status) => return status,
        }
    }
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

async fn a_restored_state_resets_every_stream_with_the_reason() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let (backup, version) = (rig.sim.backup(), rig.sim.revision());
    let told = write(&rig, "b");
    watch.until(told[2]).await;
    rig.sim.restore(&backup);
    let status = end_of(&mut watch).await;
    assert_rewritten(&status, &format!("version {} was followed by a list at {version}", told[2]));
    assert_eq!(versions(&watch.events), told, "nothing of what came after is mixed in");
    assert_eq!(relists_for(&rig, "rewritten"), 1.0);
    let ahead = rig.watch(target("pods"), &told[2].to_string()).await.err().unwrap();
    assert_rewritten(&ahead, "the cluster has reached");
    assert_starts_over(&rig).await;
}

/// kubefan has been restarted meanwhile, and has never seen the version that its client comes back with.
async fn a_version_beyond_the_cluster_is_of_another_history() {
    let setup = Setup::of(&["pods"]);
    let rig = Rig::synced(setup.sim(), setup).await;
    let told = write(&rig, "b");
    let beyond = (told[2] + 100).to_string();
    let asks = || rig.network.asked("/api/v1/namespaces/default/pods").len();
    let before = asks();
    let (first, second) = tokio::join!(rig.watch(target("pods"), &beyond), rig.watch(target("pods"), &beyond));
    for status in [first.err().unwrap(), second.err().unwrap()] {
        assert_rewritten(&status, &format!("version {beyond} belongs to another history: the cluster has reached"));
    }
    assert_eq!(asks() - before, 1, "one question serves all who wait");

    let restarts = WatchRequest { on_expired: OnExpired::Restart.into(), ..rig.request(target("pods"), &beyond) };
    let mut watch = rig.send(restarts).await.unwrap();
    watch.step().await.unwrap();
    watch.until_resumable().await;
    assert_eq!(*watch.restarted_from, *std::slice::from_ref(&beyond));
    assert_eq!(watch.state, rig.truth(PODS).await);

    // Where upstream does not say so, nobody is put back.
    rig.fault(Verb::List, Fault::Forbidden, 1);
    let status = rig.watch(target("pods"), &beyond).await.err().unwrap();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    rig.network.lead_to(other_cluster());
    let status = rig.watch(target("pods"), &beyond).await.err().unwrap();
    assert_eq!(status.code(), Code::Unavailable, "how far another cluster is says nothing: {status}");
}

async fn a_replica_that_lags_starts_nobody_over() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    // The watch of this replica is silent; others have told what comes now.
    rig.network.answer_once(|path| path.contains("watch=1"), answer(200, vec![], true));
    rig.cut().await;
    rig.readyz_has("pods synced").await;
    let told = write(&rig, "b");
    let request = rig.request(target("pods"), &told[2].to_string());
    let request = WatchRequest { on_expired: OnExpired::Restart.into(), ..request };
    let status = rig.send(request).await.err().unwrap();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.get_details_retry_info().is_some(), "{status}");
    watch.until(told[2]).await;
}

/// The other cluster is further on, so that the number alone tells nothing.
async fn a_version_of_another_cluster_leads_nowhere() {
    let first = Setup::of(&["pods"]);
    let first = Rig::synced(first.sim(), first).await;
    let last = write(&first, "b")[2].to_string();
    let list = first.list(target("pods")).await.unwrap();
    let cluster = list[0].cluster.clone();
    assert!(first.identity().ends_with(&cluster) && !cluster.is_empty(), "{cluster}");
    let watch = first.watch_all("pods").await;
    assert_eq!(watch.cluster, cluster, "a snapshot says it too");

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
        second.send(claims(known, OnExpired::Fail)).await.expect("nothing speaks against it");
    }
}

/// The cluster passes the version reached before kubefan comes back, so only what is listed can tell.
async fn a_restored_state_that_caught_up_resets_them_too() {
    for (what, because) in [
        ("made again", "default/b at version"),
        ("older", "default/kept was at version"),
        ("deleted before", "default/gone is listed at version"),
    ] {
        let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
        for name in ["kept", "gone"] {
            rig.sim.create(&pods(), pod(name, "new")).unwrap();
        }
        let backup = rig.sim.backup();
        match what {
            "made again" => drop(rig.sim.create(&pods(), pod("b", "new"))),
            "older" => drop(rig.sim.update(&pods(), pod("kept", "changed"))),
            _ => drop(rig.sim.delete(&pods(), "default", "gone")),
        }
        let told = rig.sim.revision();
        watch.until(told).await;
        // Nobody gets through before the cluster has caught up.
        rig.network.refuse(true);
        rig.cut().await;
        rig.sim.restore(&backup);
        // What takes the version that was told before.
        match what {
            "made again" => drop(rig.sim.create(&pods(), pod("b", "new"))),
            _ => drop(rig.sim.update(&pods(), pod("a", "restored"))),
        }
        for name in ["x", "y"] {
            rig.sim.create(&pods(), pod(name, "new")).unwrap();
        }
        rig.sim.compact();
        rig.network.refuse(false);
        let status = end_of(&mut watch).await;
        assert_rewritten(&status, because);
        assert!(rig.sim.revision() > told, "{what}: only the list could tell");
        assert_eq!(relists_for(&rig, "expired"), 1.0, "{what}");
        assert_starts_over(&rig).await;
    }
}

async fn a_restored_state_behind_a_watch_that_never_broke_is_found() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let backup = rig.sim.revision();
    let told = write(&rig, "b");
    watch.until(told[2]).await;
    // A way that keeps the connection to the apiserver's clients open; what is behind it is another state now.
    let restored = SimApiserver::new(SimOptions::default());
    restored.create(&pods(), pod("a", "first")).unwrap();
    assert_eq!(restored.revision(), backup, "the same history up to the backup");
    rig.network.lead_to(restored.clone());
    assert_rewritten(&end_of(&mut watch).await, &format!("was followed by a list at {backup}"));
    assert_eq!(restarts(&rig, "timeout"), 1.0, "asked about in the ordinary course");
}

async fn an_apiserver_that_lags_resets_nobody() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let told = write(&rig, "b");
    watch.until(told[2]).await;
    // Its watch cache has not reached what another one has told: a watch from there is silent for now, and no list is asked for.
    rig.network.answer_once(|path| path.contains("watch=1"), answer(200, vec![], true));
    rig.cut().await;
    rig.readyz_has("pods synced").await;
    sleep(Duration::from_secs(80)).await;
    let after = write(&rig, "c");
    watch.until(after[2]).await;
    assert_eq!(versions(&watch.events), [told, after].concat());
    assert_eq!((relists(&rig), relists_for(&rig, "rewritten")), (1.0, 0.0));
}

async fn where_the_version_may_not_be_asked_for_the_watch_goes_on() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    rig.fault(Verb::List, Fault::Forbidden, 1000);
    rig.cut().await;
    let after = write(&rig, "b");
    watch.until(after[2]).await;
    assert_eq!(versions(&watch.events), after);
    assert_eq!(relists(&rig), 1.0);
}

fn other_cluster() -> SimApiserver {
    SimApiserver::new(SimOptions { seed: 7, ..SimOptions::default() })
}

async fn a_different_cluster_is_refused_until_the_first_is_back() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    let first = rig.identity();
    assert!(first.starts_with("kube-system uid "), "readyz says which identity is used: {first}");
    let told = write(&rig, "b");
    watch.until(told[2]).await;
    let other = other_cluster();
    for i in 0..20 {
        other.create(&pods(), pod(&format!("other-{i}"), "new")).unwrap();
    }
    rig.network.lead_to(other.clone());
    rig.cut().await;
    rig.readyz_has(&format!("and this cache is of {first}")).await;
    let readyz = rig.readyz();
    assert!(
        readyz.contains("pods stale: another cluster answers at http://apiserver.test: kube-system uid "),
        "{readyz}"
    );
    assert!(readyz.contains("restart kubefan"), "{readyz}");
    other.create(&pods(), pod("other-later", "new")).unwrap();
    sleep(Duration::from_secs(600)).await;
    assert_eq!(versions(&watch.events), told, "nothing of the other cluster");
    assert_eq!(watch.resume_version, told[2].to_string());
    let list = rig.list(target("pods")).await.unwrap();
    assert_eq!(list[0].objects.len(), 1, "served on as it was");
    assert_eq!(relists(&rig), 1.0);
    let asked = rig.network.asked("/api/v1/namespaces/kube-system").len();
    assert!(asked < 40, "{asked} questions in ten minutes");

    rig.network.lead_to(rig.sim.clone());
    other.drop_connections();
    let after = write(&rig, "c");
    watch.until(after[2]).await;
    assert_eq!(versions(&watch.events), [told, after].concat(), "and goes on where it was");
    assert_eq!(watch.gaps, []);
}

async fn a_different_cluster_that_never_listed_is_never_mixed_in() {
    // The other cluster answers in the middle of a list, and its versions are far ahead.
    for watch_list in [true, false] {
        let mut setup = Setup::of(&["pods"]);
        setup.reflector.watch_list = watch_list;
        let (rig, mut watch, _) = synced(setup).await;
        let told = write(&rig, "b");
        watch.until(told[2]).await;
        let other = other_cluster();
        for i in 0..50 {
            other.create(&pods(), pod(&format!("other-{i}"), "new")).unwrap();
        }
        other.compact();
        rig.network.lead_to(other.clone());
        // Its history does not reach back, so a list is what would come next.
        rig.cut().await;
        rig.readyz_has("another cluster answers").await;
        sleep(Duration::from_secs(300)).await;
        assert_eq!(rig.list(target("pods")).await.unwrap()[0].objects.len(), 1, "watch list: {watch_list}");
        rig.network.lead_to(rig.sim.clone());
        other.drop_connections();
        let after = write(&rig, "c");
        watch.until(after[2]).await;
        assert_eq!(watch.state, rig.truth(PODS).await, "watch list: {watch_list}");
        assert!(watch.state.keys().all(|key| !key.contains("other")), "watch list: {watch_list}");
    }
}

async fn one_question_tells_all_resources_who_answers() {
    let setup = Setup::of(&["pods", "configmaps", "services", "nodes"]);
    let rig = Rig::synced(setup.sim(), setup).await;
    let asked = || rig.network.asked("/api/v1/namespaces/kube-system").len();
    let before = asked();
    rig.network.refuse(true);
    rig.sim.drop_connections();
    rig.readyz_has("pods stale").await;
    // All of them come back at different moments, which their jitter decides.
    rig.network.refuse(false);
    for resource in ["pods", "configmaps", "services", "nodes"] {
        rig.readyz_has(&format!("{resource} synced")).await;
    }
    assert!((1..=4).contains(&(asked() - before)), "{}", asked() - before);
}

async fn where_kube_system_may_not_be_read_the_ca_is_used_and_that_is_said() {
    let setup = Setup::of(&["pods"]);
    let sim = setup.sim();
    let namespaces = kubefan_model::GroupVersionResource::new("", "v1", "namespaces");
    let denied = |requests| FaultRule {
        fault: Fault::Forbidden,
        verb: Some(Verb::Get),
        resource: Some(namespaces.clone()),
        requests,
    };
    sim.set_fault(denied(1000));
    let rig = Rig::synced(sim, setup).await;
    assert_eq!(rig.identity(), "no serving CA of its own (the namespace kube-system may not be read)");

    // Granted later: from the next break on the uid is used.
    rig.sim.clear_faults();
    let mut watch = rig.watch_all("pods").await;
    rig.cut().await;
    rig.readyz_has("pods synced").await;
    assert!(rig.identity().starts_with("kube-system uid "), "{}", rig.identity());

    // Denied for a while, as by an apiserver that has just started: nothing is believed until it can be told.
    rig.sim.set_fault(denied(3));
    rig.cut().await;
    rig.readyz_has("pods stale: which cluster answers cannot be told: the apiserver denies").await;
    let after = write(&rig, "b");
    watch.until(after[2]).await;
    assert_eq!(versions(&watch.events), after);
}
