//! Subscribers: too slow, too late, too many, or served by a kubefan that has too little CPU.

use std::time::Duration;

use futures::future::join_all;
use kubefan_common::proto::v1alpha1::{
    Projection, ProjectionType, Target, WatchRequest, WatchResponse, watch_service_client::WatchServiceClient,
};
use tonic::{Streaming, transport::Endpoint};

use super::scene::{OFTEN, Scene, asks, every, large, lively, rewritten};
use crate::{
    harness::{
        cpu_cgroup::CpuCgroup,
        kubefan::Kubefan,
        record::connect,
        rig::{pods, target},
    },
    memory_limit::unread,
};

const LARGE_BYTES: usize = 32 << 10;

fn watch(target: Target, resource_version: &str) -> WatchRequest {
    WatchRequest { target: Some(target), resource_version: resource_version.to_owned(), ..WatchRequest::default() }
}

/// The window of a client that pauses: two events.
const WINDOW_BYTES: u32 = 64 << 10;
/// Events that a client misses in its pause: more than its window, kubefan's buffer for it and the
/// ring hold.
const MISSED: usize = 100;
/// Messages that it reads after the pause: more than its window and the buffer hold.
const READ_AFTER_PAUSE: usize = 20;

/// Clients that pause while large events come.
pub(super) async fn lag(scene: Scene) {
    let (simulated, kubefan, _writing) = scene.begin(&["limits.ringEventsMax=20"]).await;
    let (_events, updates) = rewritten(&simulated.sim, LARGE_BYTES, Duration::from_millis(20));
    let endpoint = Endpoint::from_shared(format!("http://{}", kubefan.grpc_addr)).unwrap();
    let endpoint = endpoint.initial_stream_window_size(WINDOW_BYTES);
    let sim = simulated.sim.clone();
    let pausing = every(OFTEN, move || {
        let endpoint = endpoint.clone();
        let mut updates = updates.clone();
        let version = sim.revision().to_string();
        async move {
            let mut client = WatchServiceClient::new(endpoint.connect().await.unwrap());
            let Ok(stream) = client.watch(watch(target("pods"), &version)).await else { return };
            tokio::spawn(async move {
                let mut stream = stream.into_inner();
                // In events, not in seconds: on a busy machine fewer of them come in a second.
                let until = *updates.borrow() + MISSED;
                let _ = updates.wait_for(|number| *number > until).await;
                for _ in 0..READ_AFTER_PAUSE {
                    if !matches!(stream.message().await, Ok(Some(_))) {
                        break;
                    }
                }
            });
        }
    });
    let firing = scene.fired("clients that pause while events of 32 KiB come", &["KubefanSubscribersLag"]).await;
    drop(pausing);
    firing.resolved("the clients switched off").await;
}

/// Clients that come back with a version from before history begins.
pub(super) async fn late(scene: Scene) {
    let (simulated, _writing) = lively().await;
    simulated.sim.compact();
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    scene.scrape(&kubefan);
    let client = connect(kubefan.grpc_addr).await;
    let late = every(OFTEN, move || {
        let mut client = client.clone();
        async move {
            let _refused = client.watch(watch(target("pods"), "1")).await;
        }
    });
    let firing = scene.fired("clients that resume from a version that is gone", &["KubefanResumesExpire"]).await;
    drop(late);
    firing.resolved("they list again").await;
}

/// One list that is not read holds the only permit.
pub(super) async fn snapshots(scene: Scene) {
    let (simulated, _writing) = lively().await;
    for number in 0..128 {
        simulated.sim.create(&pods(), large(&format!("large-{number}"), LARGE_BYTES)).unwrap();
    }
    let limits = [
        "--resource=pods",
        "limits.snapshotsMax=1",
        "tuning.snapshotQueueTimeout=1s",
        "tuning.snapshotStallTimeout=10m",
    ];
    let kubefan = simulated.kubefan(&limits).await;
    scene.scrape(&kubefan);
    let path = "/api/v1/pods?resourceVersion=0";
    let held = unread(kubefan.grpc_addr.port(), path).await;
    let _others = asks(OFTEN, reqwest::Client::new(), format!("http://{}{path}", kubefan.grpc_addr));
    let firing = scene.fired("a list that is not read holds the only permit", &["KubefanSnapshotsRefused"]).await;
    assert!(kubefan.metric("kubefan_snapshots").await == Some(1.0));
    drop(held);
    firing.resolved("its client ended").await;
}

/// One client has the only place for a watch.
pub(super) async fn requests(scene: Scene) {
    let (_simulated, kubefan, _writing) = scene.begin(&["limits.subscribersMax=1", "--access=local-cache-only"]).await;
    let held = connect(kubefan.grpc_addr).await.watch(watch(target("pods"), "")).await.unwrap();
    let url = format!("http://{}/api/v1/pods?watch=1&resourceVersion=0&timeoutSeconds=1", kubefan.grpc_addr);
    let text = reqwest::get(&url).await.unwrap().text().await.unwrap();
    assert!(text.contains("limits.subscribersMax"), "the answer names the limit: {text}");
    let _asking = asks(OFTEN, reqwest::Client::new(), url);
    let firing = scene.fired("more watches than limits.subscribersMax", &["KubefanRequestsRefused"]).await;
    drop(held);
    firing.resolved("the client that had them ended").await;
}

/// Watches with projections of their own, so that they share no work.
const WATCHES: usize = 200;

/// kubefan is at its CPU limit, and its watches share no work.
pub(super) async fn slow(scene: Scene) {
    let group = CpuCgroup::with_percent(10).expect("a control group for CPU");
    let (simulated, _writing) = lively().await;
    let kubefan = Kubefan::spawn_after(&simulated.kubeconfig(), &group.enter(), &["--resource=pods"]).await;
    kubefan.ready().await;
    scene.scrape(&kubefan);
    let mut client = connect(kubefan.grpc_addr).await;
    let mut streams = Vec::new();
    for number in 0..WATCHES {
        let paths = format!("metadata.annotations.filling,metadata.labels.l{number}");
        let projection = Projection {
            r#type: ProjectionType::FieldMask.into(),
            paths: paths.split(',').map(str::to_owned).collect(),
            ..Projection::default()
        };
        let request = WatchRequest { projection: Some(projection), ..watch(target("pods"), "") };
        streams.push(client.watch(request).await.unwrap().into_inner());
    }
    async fn read(mut stream: Streaming<WatchResponse>) {
        while let Ok(Some(_)) = stream.message().await {}
    }
    let _reading = tokio::spawn(async move { join_all(streams.into_iter().map(read)).await });
    let (_events, _) = rewritten(&simulated.sim, LARGE_BYTES, Duration::from_millis(50));
    let firing = scene.fired("a tenth of a CPU for 200 watches that share no work", &["KubefanSlowDispatch"]).await;
    group.unlimited();
    firing.resolved("more CPU").await;
}
