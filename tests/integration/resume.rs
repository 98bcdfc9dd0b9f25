//! Resuming: a subscriber that returns with a resume version gets exactly the events that it
//! missed, or a refusal if the version cannot be served.

use crate::harness::{
    record::assert_equal,
    rig::{Rig, Setup, churn, pod, pods, stage, target, versions},
    tests,
};

tests! {
    paused: a_returning_subscriber_gets_exactly_the_missed_events, a_resume_below_the_ring_gets_each_change_once,
        a_watch_can_start_at_the_version_of_a_list;
}

async fn a_returning_subscriber_gets_exactly_the_missed_events() {
    let rig = Rig::synced(Setup::of(&["pods"]).sim(), Setup::of(&["pods"])).await;
    rig.sim.create(&pods(), pod("stays", "on")).unwrap();
    let mut unbroken = rig.watch(stage("on"), "").await.unwrap();
    unbroken.until(churn(&rig.sim, 0, 20)).await;
    let left_at = unbroken.resume_version.clone();
    let seen = unbroken.events.len();
    let last = churn(&rig.sim, 20, 40);
    unbroken.until(last).await;

    let mut returned = rig.watch(stage("on"), &left_at).await.unwrap();
    returned.until(last).await;
    returned.assert_exact("after the return");
    assert_equal("after the return", &returned.events, &unbroken.events[seen..]);
    assert!(returned.events.len() >= 4 && returned.left > 0, "{:?}", returned.events);
}

async fn a_resume_below_the_ring_gets_each_change_once() {
    let mut setup = Setup::of(&["pods"]);
    setup.registry.ring.ring_events_max = 3;
    let rig = Rig::synced(setup.sim(), setup).await;
    let created = rig.sim.create(&pods(), pod("a", "0")).unwrap();
    let mut watch = rig.watch_all("pods").await;
    watch.until(created).await;
    let old = watch.resume_version.clone();
    let mut changed = Vec::new();
    for stage in ["1", "2", "3", "4", "5"] {
        changed.push(rig.sim.update(&pods(), pod("a", stage)).unwrap());
        watch.until(changed[changed.len() - 1]).await;
    }

    let mut caught_up = rig.watch(target("pods"), &old).await.unwrap();
    caught_up.until(changed[4]).await;
    assert_eq!(caught_up.catch_ups, [(old, changed[4].to_string())], "each change once, and marked");
    assert!(caught_up.events.is_empty() && caught_up.snapshot.is_empty());
    assert_eq!(caught_up.state, watch.state);

    let mut in_ring = rig.watch(target("pods"), &changed[1].to_string()).await.unwrap();
    in_ring.until(changed[4]).await;
    in_ring.assert_exact("inside the ring");
    assert_eq!(versions(&in_ring.events), changed[2..]);
}

async fn a_watch_can_start_at_the_version_of_a_list() {
    let rig = Rig::synced(Setup::of(&["pods"]).sim(), Setup::of(&["pods"])).await;
    rig.sim.create(&pods(), pod("a", "off")).unwrap();
    let created = rig.sim.create(&pods(), pod("b", "on")).unwrap();
    rig.watch_all("pods").await.until(created).await;
    let list = rig.list(stage("on")).await.unwrap();
    assert_eq!(list[0].objects.len(), 1);
    assert_eq!(list[0].objects[0].object, rig.truth(crate::harness::rig::PODS).await["default/b"]);
    let mut changed = pod("b", "on");
    changed["metadata"]["annotations"] = serde_json::json!({ "changed": "yes" });
    let changed = rig.sim.update(&pods(), changed).unwrap();
    let mut watch = rig.watch(stage("on"), &list[0].resource_version).await.unwrap();
    watch.until(changed).await;
    assert_eq!((versions(&watch.events), watch.events[0].kind), (vec![changed], "MODIFIED"));
}
