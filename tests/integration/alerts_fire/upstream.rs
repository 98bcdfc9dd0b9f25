//! The apiserver: away, throttling, or breaking watches.

use std::time::Duration;

use kubefan_sim::apiserver::{Fault, FaultRule};

use super::scene::{OFTEN, Scene, asks, every, lively};
use crate::harness::{kubefan::Kubefan, link::Link, simulated::kubeconfig};

pub(super) async fn outage(scene: Scene) {
    let (simulated, _writing) = lively().await;
    let link = Link::to(simulated.addr).await;
    let config = kubeconfig(&simulated.dir, &format!("http://{}", link.addr), "{}");
    let kubefan = Kubefan::spawn(&config, &["--resource=pods", "--passthrough=self", "--on-demand=false"]).await;
    kubefan.ready().await;
    scene.scrape(&kubefan);
    let url = format!("http://{}/api/v1/configmaps", kubefan.grpc_addr);
    let _forwarded = asks(OFTEN, reqwest::Client::new(), url);
    scene.sees("kubefan_passthrough_requests_total{JOB, code=\"200\"}", |count| count > 0.0).await;
    link.cut();
    let alerts = ["KubefanUpstreamErrors", "KubefanForwardedRequestsFail", "KubefanStale", "KubefanVeryStale"];
    let firing = scene.fired("the apiserver cut off", &alerts).await;
    let (_, readyz) = kubefan.admin("/readyz?verbose").await.unwrap();
    assert!(readyz.contains("stale"), "{readyz}");
    link.mend();
    firing.resolved("the apiserver is back").await;
}

pub(super) async fn throttled(scene: Scene) {
    let (simulated, _writing) = lively().await;
    // Checks of the cache are requests too, and more regular than those that wait longer each time.
    let kubefan = simulated.kubefan(&["--resource=pods", "--self-check-interval=2s"]).await;
    scene.scrape(&kubefan);
    let fault = Fault::TooManyRequests { retry_after_seconds: 1 };
    simulated.sim.set_fault(FaultRule { fault, verb: None, resource: None, requests: usize::MAX });
    simulated.sim.drop_connections();
    let firing = scene.fired("the apiserver answers all requests with 429", &["KubefanUpstreamThrottled"]).await;
    simulated.sim.clear_faults();
    firing.resolved("the apiserver answers").await;
}

pub(super) async fn breaks(scene: Scene) {
    let (simulated, _writing) = lively().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    scene.scrape(&kubefan);
    let sim = simulated.sim.clone();
    let breaking = every(Duration::from_secs(1), move || {
        sim.drop_connections();
        std::future::ready(())
    });
    let firing = scene.fired("connections to the apiserver broken each second", &["KubefanWatchesBreak"]).await;
    drop(breaking);
    firing.resolved("connections last").await;
}
