//! Resuming at a kubefan that has just started. Events from before its cache are read again from
//! upstream, once for all that ask.

use std::time::Duration;

use futures::future::join_all;
use kubefan_common::proto::v1alpha1::{Projection, ProjectionType, Target, WatchRequest};
use kubefan_sim::apiserver::{SimApiserver, Verb};
use serde_json::json;
use tokio::time::sleep;
use tonic::Code;
use tonic_types::StatusExt;

use crate::{
    harness::{
        record::{Watch, assert_equal, place},
        rig::{PODS, Rig, Setup, churn, core, stage, target, versions},
        tests,
    },
    peers::{Peer, warm_starts, with_peers},
    upstream_faults::expired,
};

tests! {
    paused: after_a_restart_every_selection_gets_exactly_the_missed_events,
        one_backfill_serves_all_returning_subscribers, a_version_compacted_upstream_is_refused_or_restarted,
        a_refusal_names_the_oldest_version_that_upstream_has, an_upstream_outage_causes_no_restart_of_a_stream,
        an_only_changes_watch_gets_exactly_the_missed_changes, a_quiet_resource_is_backfilled_up_to_a_bookmark,
        many_versions_that_are_too_old_do_not_fail_others,
        a_resume_that_needs_a_compacted_state_does_not_fail_others, a_closed_gate_prevents_backfills,
        subscribers_that_come_while_a_backfill_waits_for_the_gate_share_the_next_one,
        a_resume_inside_a_gap_gets_the_events_from_upstream;
}

/// An apiserver whose pods have changed ten times since the version, and this version.
fn changed() -> (SimApiserver, u64) {
    let sim = Setup::of(&["pods"]).sim();
    let old = churn(&sim, 0, 10);
    churn(&sim, 10, 10);
    (sim, old)
}

/// A kubefan that has just started and is synced.
async fn started(sim: &SimApiserver) -> Rig {
    Rig::synced(sim.clone(), Setup::of(&["pods"])).await
}

fn backfilled(rig: &Rig) -> f64 {
    rig.of_pods("kubefan_resumes_total", r#"result="backfill""#)
}

async fn after_a_restart_every_selection_gets_exactly_the_missed_events() {
    for watch_list in [true, false] {
        let setup = Setup::of(&["pods"]).with_watch_list(watch_list);
        let sim = setup.sim();
        churn(&sim, 0, 20);
        let rig = Rig::synced(sim.clone(), setup).await;
        let witness = started(&sim).await;
        for target in [target("pods"), stage("on"), stage("off"), Target { name: "pod-3".into(), ..target("pods") }] {
            let mut unbroken = witness.watch(target.clone(), "").await.unwrap();
            unbroken.until_resumable().await;
            let mut leaver = rig.watch(target.clone(), "").await.unwrap();
            leaver.until_resumable().await;
            let left_at = leaver.resume_version.clone();
            drop(leaver);
            churn(&sim, 20, 30);
            // A new kubefan that knows nothing of the earlier events.
            let again = Rig::start(sim.clone(), Setup::of(&["pods"]));
            let mut back = again.watch(target.clone(), &left_at).await.unwrap();
            let last = churn(&sim, 50, 30);
            let bookmark = sim.revision().max(last);
            unbroken.until(bookmark).await;
            back.until(bookmark).await;
            back.assert_exact("back");
            let (left_at, _) = place(&left_at);
            let seen = unbroken.events.iter().zip(versions(&unbroken.events)).filter(|(_, version)| *version > left_at);
            let expected: Vec<_> = seen.map(|(event, _)| event.clone()).collect();
            assert_equal(&format!("{target:?}"), &back.events, &expected);
            assert_eq!(backfilled(&again), 1.0);
        }
    }
}

async fn an_only_changes_watch_gets_exactly_the_missed_changes() {
    let sim = Setup::of(&["pods"]).sim();
    churn(&sim, 0, 20);
    let rig = Rig::synced(sim.clone(), Setup::of(&["pods"])).await;
    let paths = vec!["metadata.labels".to_owned()];
    let projection =
        Projection { r#type: ProjectionType::FieldMask.into(), paths, only_changes: true, ..Projection::default() };
    let asked = |rig: &Rig, version: &str| WatchRequest {
        projection: Some(projection.clone()),
        ..rig.request(target("pods"), version)
    };
    let mut unbroken = rig.send(asked(&rig, "")).await.unwrap();
    unbroken.until_resumable().await;
    let left_at = unbroken.resume_version.clone();
    churn(&sim, 20, 30);
    let again = Rig::start(sim.clone(), Setup::of(&["pods"]));
    let mut back = again.send(asked(&again, &left_at)).await.unwrap();
    churn(&sim, 50, 30);
    let bookmark = sim.revision();
    unbroken.until(bookmark).await;
    back.until(bookmark).await;
    back.assert_exact("back");
    assert!(back.events.iter().any(|event| event.kind == "MODIFIED"), "{:?}", back.events);
    assert_equal("only changes", &back.events, &unbroken.events);
    assert_eq!(backfilled(&again), 1.0);
}

/// The lists of pods that were sent upstream: those of an exact version, and those of the current
/// state.
fn lists(rig: &Rig) -> (usize, usize) {
    let lists = rig.asked(PODS);
    let exact = lists.iter().filter(|asked| asked.path.contains("resourceVersionMatch=Exact")).count();
    let first =
        lists.iter().filter(|asked| asked.path.contains("sendInitialEvents") || asked.path.ends_with("?limit=500"));
    (exact, first.count())
}

async fn one_backfill_serves_all_returning_subscribers() {
    let sim = Setup::of(&["pods"]).sim();
    let mut versions = vec![churn(&sim, 0, 20)];
    for round in 0..20 {
        versions.push(churn(&sim, 20 + round, 1));
    }
    let again = Rig::start(sim.clone(), Setup::of(&["pods"]));
    let starts = versions.iter().enumerate().map(|(i, version)| {
        let target = if i % 2 == 0 { stage("on") } else { target("pods") };
        let again = &again;
        async move { again.watch(target, &version.to_string()).await.unwrap() }
    });
    let mut watches = join_all(starts).await;
    let last = churn(&sim, 60, 10);
    for watch in &mut watches {
        watch.until(last).await;
        watch.assert_exact("a returning subscriber");
    }
    assert_eq!(lists(&again), (1, 1), "one list of an exact version, one of the current state");
    // A later subscriber is served by the same backfill.
    let mut late = again.watch(stage("on"), &versions[3].to_string()).await.unwrap();
    late.until(last).await;
    assert_eq!(lists(&again), (1, 1));
}

async fn a_version_compacted_upstream_is_refused_or_restarted() {
    let (sim, old) = changed();
    sim.compact();
    let rig = started(&sim).await;
    let old = old.to_string();
    for target in [target("pods"), stage("on")] {
        let refused = rig.watch(target.clone(), &old).await.err().unwrap();
        let info = refused.get_details_error_info().unwrap();
        assert_eq!((refused.code(), info.reason.as_str()), (Code::OutOfRange, "RESOURCE_VERSION_TOO_OLD"));
        let oldest = &info.metadata["oldest_resource_version"];
        assert_eq!(refused.message(), format!("too old resource version: {old} ({oldest})"));
        assert!(rig.watch(target.clone(), oldest).await.is_ok());
        let mut over = rig.watch_or_restart(target, &old).await.unwrap();
        over.until(sim.revision()).await;
        assert_eq!(*over.restarted_from, *std::slice::from_ref(&old));
    }
    let asked = rig.asked(PODS).len();
    rig.watch(target("pods"), &old).await.err().unwrap();
    assert_eq!(rig.asked(PODS).len(), asked, "a version that upstream refused is not requested again");
}

async fn an_upstream_outage_causes_no_restart_of_a_stream() {
    let (sim, old) = changed();
    let again = started(&sim).await;
    let old = old.to_string();
    again.network.refuse(true);
    let refused = again.watch_or_restart(target("pods"), &old).await.err().unwrap();
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    again.network.refuse(false);
    let mut back = again.watch_or_restart(target("pods"), &old).await.unwrap();
    back.until(churn(&sim, 20, 1)).await;
    back.assert_exact("after the outage");
}

async fn a_quiet_resource_is_backfilled_up_to_a_bookmark() {
    let sim = Setup::of(&["pods"]).sim();
    let old = churn(&sim, 0, 10);
    sim.create(&core("nodes"), json!({ "metadata": { "name": "n1" } })).unwrap();
    let again = started(&sim).await;
    let mut back = again.watch(stage("on"), &old.to_string()).await.unwrap();
    back.until(churn(&sim, 10, 6)).await;
    back.assert_exact("a quiet resource");
}

async fn a_resume_inside_a_gap_gets_the_events_from_upstream() {
    let sim = Setup::of(&["pods"]).sim();
    let ancient = churn(&sim, 0, 10).to_string();
    churn(&sim, 10, 5);
    let rig = started(&sim).await;
    let mut watch = rig.watch_all("pods").await;
    rig.network.refuse(true);
    rig.cut().await;
    let inside = churn(&sim, 15, 5).to_string();
    churn(&sim, 20, 5);
    rig.fault(Verb::Watch, expired(), 1);
    rig.network.refuse(false);
    watch.until(churn(&sim, 25, 1)).await;
    assert_eq!(watch.gaps.len(), 1, "{:?}", watch.gap_reasons);
    // Together with a resume from before the cache, whose events the cache can only continue from
    // the start of the gap. The resume inside the gap must not go back before it.
    let (older, back) = futures::join!(rig.watch(stage("on"), &ancient), rig.watch(stage("on"), &inside));
    let alone = rig.watch(stage("on"), &inside).await.unwrap();
    let mut watches = [older.unwrap(), back.unwrap(), alone];
    let another = started(&sim).await;
    let mut witness = another.watch(stage("on"), &inside).await.unwrap();
    let last = churn(&sim, 30, 10);
    witness.until(last).await;
    for watch in &mut watches {
        watch.until(last).await;
        watch.assert_exact("inside the gap");
    }
    assert_equal("together with an older one", &watches[1].events, &witness.events);
    assert_equal("alone", &watches[2].events, &witness.events);
}

async fn a_refusal_names_the_oldest_version_that_upstream_has() {
    let sim = Setup::of(&["pods"]).sim();
    let ancient = churn(&sim, 0, 10);
    churn(&sim, 10, 10);
    sim.compact();
    // Upstream no longer has all events of its oldest version, so a client may lack one.
    let oldest = sim.revision() + 1;
    churn(&sim, 20, 10);
    // This cache starts after the oldest version that upstream still has.
    let rig = started(&sim).await;
    for _ in 0..2 {
        let refused = rig.watch(target("pods"), &ancient.to_string()).await.err().unwrap();
        assert_eq!(refused.message(), format!("too old resource version: {ancient} ({oldest})"));
    }
    let mut back = rig.watch(target("pods"), &oldest.to_string()).await.unwrap();
    back.until(sim.revision()).await;
    back.assert_exact("the oldest version");
}

async fn many_versions_that_are_too_old_do_not_fail_others() {
    // The first target is refused by the watch, the second by a list, which does not name the
    // oldest version.
    for target in [target("pods"), stage("on")] {
        let sim = Setup::of(&["pods"]).sim();
        let ancient: Vec<_> = (0..20).map(|round| churn(&sim, round, 1)).collect();
        sim.compact();
        let recent: Vec<_> = (20..23).map(|round| churn(&sim, round, 1)).collect();
        churn(&sim, 23, 10);
        let again = started(&sim).await;
        let before = again.asked(PODS).len();
        let open = |version: &u64| {
            let again = &again;
            let target = target.clone();
            let version = version.to_string();
            async move { again.watch(target, &version).await }
        };
        let (old, recent) = futures::join!(join_all(ancient[..19].iter().map(open)), join_all(recent.iter().map(open)));
        assert!(old.into_iter().all(|old| old.err().unwrap().code() == Code::OutOfRange));
        let last = churn(&sim, 40, 4);
        for watch in recent {
            let mut watch = watch.unwrap();
            watch.until(last).await;
            watch.assert_exact("a recent version");
        }
        let asked = again.asked(PODS).len() - before;
        assert!(asked <= 10, "the versions are searched by halving: {asked} requests");
    }
}

async fn a_closed_gate_prevents_backfills() {
    let (sim, old) = changed();
    let again = started(&sim).await;
    again.registry.gate().narrow(0);
    let asked = again.asked(PODS).len();
    let refused = again.watch(target("pods"), &old.to_string()).await.err().unwrap();
    assert_eq!((refused.code(), again.asked(PODS).len()), (Code::ResourceExhausted, asked));
    // Peers get nothing either.
    let setup = Setup { peers: with_peers(vec![Peer::Healthy(again.registry.clone())]).peers, ..Setup::of(&["pods"]) };
    let cold = Rig::synced(sim.clone(), setup).await;
    assert_eq!(warm_starts(&cold, "failed"), 1.0);
    again.registry.gate().narrow(256);
    again.watch(target("pods"), &old.to_string()).await.unwrap().until(churn(&sim, 20, 1)).await;
}

async fn subscribers_that_come_while_a_backfill_waits_for_the_gate_share_the_next_one() {
    let (sim, old) = changed();
    let again = started(&sim).await;
    again.registry.gate().narrow(1);
    let occupied = again.registry.gate().try_acquire(None).unwrap();
    let asked = again.asked(PODS).len();
    // Each asks for an older version than the one before, so no read that has begun serves it.
    let open = async |number: u32| {
        sleep(number * Duration::from_millis(400)).await;
        again.watch(target("pods"), &(old - u64::from(number)).to_string()).await
    };
    let release = async {
        sleep(Duration::from_secs(4)).await;
        drop(occupied);
        again.registry.gate().narrow(256);
    };
    let (opened, ()) = futures::join!(join_all((0..8).map(open)), release);
    let last = churn(&sim, 20, 1);
    for watch in opened {
        let mut watch = watch.unwrap();
        watch.until(last).await;
        watch.assert_exact("a resume");
    }
    assert_eq!(again.asked(PODS).len() - asked, 2, "one read for the first, and one for all others");
}

async fn a_resume_that_needs_a_compacted_state_does_not_fail_others() {
    let sim = Setup::of(&["pods"]).sim();
    let old = churn(&sim, 0, 10);
    let later = churn(&sim, 10, 10);
    sim.compact_etcd();
    let recent = churn(&sim, 20, 1);
    churn(&sim, 21, 10);
    let again = started(&sim).await;
    let open = |target: Target, version: u64| {
        let again = &again;
        async move { again.watch(target, &version.to_string()).await }
    };
    let (refused, one, other, filtered) = futures::join!(
        open(stage("on"), old),
        open(target("pods"), old),
        open(target("pods"), later - 1),
        open(stage("on"), recent)
    );
    assert_eq!(refused.err().unwrap().code(), Code::OutOfRange);
    let late = open(target("pods"), old).await;
    let last = churn(&sim, 40, 4);
    for watch in [one, other, filtered, late] {
        let mut watch: Watch = watch.unwrap();
        watch.until(last).await;
        watch.assert_exact("another resume");
    }
    let asked = again.asked(PODS).len();
    assert_eq!(open(stage("on"), old).await.err().unwrap().code(), Code::OutOfRange);
    assert_eq!(again.asked(PODS).len(), asked, "a version that upstream refused is not requested again");
}
