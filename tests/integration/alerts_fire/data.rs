//! Whether the data is right: a difference, checks that fail, another cluster, and relists.

use std::time::Duration;

use kubefan_sim::apiserver::{Fault, SimOptions, Verb};

use super::scene::{Scene, every, fails, lively};
use crate::harness::{
    kubefan::{Kubefan, run},
    link::Link,
    rig::{pod, pods},
    simulated::{Simulated, kubeconfig},
};

/// A restore of etcd reuses versions, so kubefan has another object at one of them.
pub(super) async fn difference(scene: Scene) {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "tuning.selfCheckInterval=2s"]).await;
    scene.scrape(&kubefan);
    let backup = simulated.sim.backup();
    let version = simulated.create("lost");
    let at = "kubefan_resource_version{group=\"\",media=\"json\",namespace=\"\",resource=\"pods\"}";
    kubefan.metric_becomes(at, version as f64).await;
    simulated.sim.restore(&backup);
    assert_eq!(simulated.sim.create(&pods(), pod("other", "new")).unwrap(), version);
    let firing = scene.fired("etcd restored from a backup", &["KubefanSelfCheckFoundDifference"]).await;
    assert!(kubefan.process.log().contains("default/other"), "the log names the keys: {}", kubefan.process.log());
    let verified = run(&[
        "verify",
        "pods",
        "--server",
        &kubefan.grpc_addr.to_string(),
        "--kubeconfig",
        simulated.kubeconfig().to_str().unwrap(),
    ])
    .await;
    assert_eq!(verified.code, Some(0), "the state is right again: {verified:?}");
    firing.resolved("kubefan has listed again").await;
}

pub(super) async fn failing_checks(scene: Scene) {
    let (simulated, _kubefan, _writing) = scene.begin(&["tuning.selfCheckInterval=2s"]).await;
    fails(&simulated, Fault::InternalError, Some(Verb::List));
    let firing = scene.fired("lists of the apiserver fail, its watches do not", &["KubefanSelfChecksFailing"]).await;
    simulated.sim.clear_faults();
    firing.resolved("the apiserver mended").await;
}

pub(super) async fn other_cluster(scene: Scene) {
    let (simulated, _writing) = lively().await;
    let other = Simulated::with(SimOptions { seed: 1, ..SimOptions::default() }).await;
    other.create("foreign");
    let link = Link::to(simulated.addr).await;
    let config = kubeconfig(&simulated.dir, &format!("http://{}", link.addr), "{}");
    let kubefan = Kubefan::spawn(&config, &["--resource=pods"]).await;
    kubefan.ready().await;
    scene.scrape(&kubefan);
    link.lead_to(other.addr);
    simulated.sim.drop_connections();
    let firing = scene.fired("the apiserver's address led to another cluster", &["KubefanOtherCluster"]).await;
    link.lead_to(simulated.addr);
    other.sim.drop_connections();
    firing.resolved("it leads to the first one again").await;
}

pub(super) async fn relists(scene: Scene) {
    let (simulated, _kubefan, writing) = scene.begin(&[]).await;
    let sim = simulated.sim.clone();
    let mut round = 0;
    let breaking = every(Duration::from_secs(3), move || {
        round += 1;
        sim.drop_connections();
        sim.create(&pods(), pod(&format!("unseen-{round}"), "new")).unwrap();
        sim.compact();
        std::future::ready(())
    });
    let firing =
        scene.fired("watches that break for longer than the apiserver has events", &["KubefanRelisting"]).await;
    drop(breaking);
    drop(writing);
    firing.resolved("watches last").await;
}
