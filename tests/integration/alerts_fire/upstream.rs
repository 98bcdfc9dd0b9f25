//! The apiserver: away, throttling, or breaking watches.

use std::time::Duration;

use kubefan_sim::apiserver::Fault;

use super::{
    FACTOR,
    scene::{OFTEN, Scene, asks, every, fails},
};

/// The apiserver is down, and its machine refuses connections: then kubefan probes each second, in
/// the shortened windows too. If something in between accepts connections and closes them, each
/// cache asks only every 30 to 60 seconds. That is often enough for the true windows of minutes,
/// but not for seconds.
pub(super) async fn outage(scene: Scene) {
    let (mut simulated, kubefan, _writing) = scene.begin(&["--access=local-self", "--on-demand=false"]).await;
    let url = format!("http://{}/api/v1/configmaps", kubefan.grpc_addr);
    let _forwarded = asks(OFTEN, reqwest::Client::new(), url);
    scene.sees("kubefan_passthrough_requests_total{JOB, code=\"200\"}", |count| count > 0.0).await;
    simulated.stop().await;
    let alerts = ["KubefanUpstreamErrors", "KubefanForwardedRequestsFail", "KubefanStale", "KubefanVeryStale"];
    let firing = scene.fired("the apiserver down", &alerts).await;
    let (_, readyz) = kubefan.admin("/readyz?verbose").await.unwrap();
    assert!(readyz.contains("stale"), "{readyz}");
    simulated.resume().await;
    firing.resolved("the apiserver is back").await;
}

/// All requests get 429. In the end a cache asks every 30 to 60 seconds, so with true durations one
/// cache makes the alert fire: it gets at least ten of these answers in ten minutes. The waits are
/// not shortened with the rules, so here are as many more caches as the rules are faster.
pub(super) async fn throttled(scene: Scene) {
    let namespaces: Vec<_> = (0..FACTOR).map(|number| format!("n{number}")).collect();
    let (simulated, _kubefan, _writing) = scene.begin(&["--namespace", &namespaces.join(",")]).await;
    fails(&simulated, Fault::TooManyRequests { retry_after_seconds: 1 }, None);
    simulated.sim.drop_connections();
    let firing = scene.fired("the apiserver answers all requests with 429", &["KubefanUpstreamThrottled"]).await;
    simulated.sim.clear_faults();
    firing.resolved("the apiserver answers").await;
}

pub(super) async fn breaks(scene: Scene) {
    let (simulated, _kubefan, _writing) = scene.begin(&[]).await;
    let sim = simulated.sim.clone();
    let breaking = every(Duration::from_secs(1), move || {
        sim.drop_connections();
        std::future::ready(())
    });
    let firing = scene.fired("connections to the apiserver broken each second", &["KubefanWatchesBreak"]).await;
    drop(breaking);
    firing.resolved("connections last").await;
}
