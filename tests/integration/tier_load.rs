//! The same subscribers behind one kubefan, and behind many that read from that one: the cost of
//! each delivery, and its additional delay. `docs/scale.md` has the figures.
//!
//! `KUBEFAN_TEST_SCALE=full` runs 2,000 subscribers and 10 kubefans below one; set
//! `KUBEFAN_TEST_BINARY` to a release build.

use std::{sync::Arc, time::Duration};

use futures::future::join_all;
use kubefan_common::proto::v1alpha1::{
    Encoding, Target, WatchRequest, WatchResponse, watch_response::Message, watch_service_client::WatchServiceClient,
};
use kubefan_sim::workload::{Workload, WorkloadOptions};
use tokio::{
    sync::Barrier,
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};
use tonic::{Streaming, transport::Channel};

use crate::{
    benchmarks::cpu_seconds,
    harness::{is_full_scale, kubefan::Kubefan, record::connect, simulated::Simulated, tests},
};

tests! {
    local slow_faults: every_subscriber_behind_many_kubefans_gets_every_change;
}

struct Scale {
    pods: usize,
    kubefans: usize,
    subscribers: usize,
    changes: usize,
    per_second: f64,
}

/// Streams of a connection.
const STREAMS: usize = 20;

async fn every_subscriber_behind_many_kubefans_gets_every_change() {
    let scale = if is_full_scale() {
        Scale { pods: 1_000, kubefans: 10, subscribers: 2_000, changes: 150, per_second: 5.0 }
    } else {
        Scale { pods: 50, kubefans: 3, subscribers: 60, changes: 40, per_second: 20.0 }
    };
    let mut workload = Workload::new(3, WorkloadOptions { objects: scale.pods, ..WorkloadOptions::default() });
    let simulated = Simulated::with(Default::default()).await;
    while let Some(change) = workload.next_setup() {
        change.apply(&simulated.sim).expect("a new object");
    }
    println!(
        "| | kubefans | deliveries | CPU of all, µs a delivery | of the upper one, µs a change and stream | bytes sent to subscribers, a delivery | latency p50, ms | p99, ms |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|---:|");
    let one = simulated.kubefan(&["--resource=pods"]).await;
    measure("one tier", &simulated, &mut workload, &scale, &[&one], None).await;
    drop(one);
    let upper = simulated.kubefan(&["--resource=pods"]).await;
    let upstream = format!("--upstream={}", upper.grpc_addr);
    let args = ["--resource=pods", &upstream, "tuning.selfCheckInterval=0s"];
    let lower = join_all((0..scale.kubefans).map(|_| simulated.kubefan(&args))).await;
    let lower: Vec<&Kubefan> = lower.iter().collect();
    measure("two tiers", &simulated, &mut workload, &scale, &lower, Some(&upper)).await;
}

async fn measure(
    name: &str,
    simulated: &Simulated,
    workload: &mut Workload,
    scale: &Scale,
    serving: &[&Kubefan],
    upper: Option<&Kubefan>,
) {
    let ready = Arc::new(Barrier::new(scale.subscribers + 1));
    let mut readers = JoinSet::new();
    let mut client = None;
    for number in 0..scale.subscribers {
        if number % STREAMS == 0 {
            client = Some(connect(serving[number / STREAMS % serving.len()].grpc_addr).await);
        }
        let client = client.clone().expect("a connection");
        let ready = ready.clone();
        let changes = scale.changes;
        readers.spawn(async move { read(client, &ready, changes).await });
    }
    ready.wait().await;
    // The rest of the snapshots' work.
    sleep(Duration::from_secs(2)).await;
    let all: Vec<&Kubefan> = serving.iter().copied().chain(upper).collect();
    let cpu = |of: &[&Kubefan]| of.iter().map(|kubefan| cpu_seconds(kubefan.process.pid())).sum::<f64>();
    let upper_only: Vec<&Kubefan> = upper.into_iter().collect();
    let before = cpu(&all);
    let upper_before = cpu(&upper_only);
    let sent_before = sent(serving).await;
    let mut at = Instant::now();
    let mut changed = Vec::new();
    for _ in 0..scale.changes {
        // Pods only, because nothing else is watched.
        let version = loop {
            let change = workload.next_change();
            let is_pod = change.resource.resource == "pods";
            let written = Instant::now();
            let version = change.apply(&simulated.sim).expect("a valid change");
            if is_pod {
                break (version, written);
            }
        };
        changed.push(version);
        at += Duration::from_secs_f64(1.0 / scale.per_second);
        sleep_until(at).await;
    }
    let received = readers.join_all().await;
    let used = cpu(&all) - before;
    let upper_used = cpu(&upper_only) - upper_before;
    let bytes = sent(serving).await - sent_before;
    let mut latencies = Vec::new();
    for events in &received {
        let versions: Vec<u64> = events.iter().map(|(version, _)| *version).collect();
        assert_eq!(versions, changed.iter().map(|(version, _)| *version).collect::<Vec<_>>(), "{name}");
        latencies.extend(events.iter().zip(&changed).map(|((_, at), (_, written))| at.duration_since(*written)));
    }
    latencies.sort();
    let deliveries = latencies.len();
    let percentile = |percent: usize| latencies[(deliveries * percent / 100).min(deliveries - 1)].as_secs_f64() * 1e3;
    let upper_cost =
        upper.map_or("-".to_owned(), |_| format!("{:.0}", upper_used * 1e6 / (scale.changes * serving.len()) as f64));
    println!(
        "| {name} | {} | {deliveries} | {:.1} | {upper_cost} | {:.0} | {:.1} | {:.1} |",
        all.len(),
        used * 1e6 / deliveries as f64,
        bytes / deliveries as f64,
        percentile(50),
        percentile(99),
    );
}

/// Bytes sent to subscribers.
async fn sent(kubefans: &[&Kubefan]) -> f64 {
    let each = kubefans.iter().map(|kubefan| kubefan.metric_sum("kubefan_sent_bytes_total", ""));
    join_all(each).await.into_iter().map(|bytes| bytes.expect("metrics are served")).sum()
}

/// Reads a snapshot, and then this many changes: their versions, and when they came.
async fn read(mut client: WatchServiceClient<Channel>, ready: &Barrier, changes: usize) -> Vec<(u64, Instant)> {
    let target = Some(Target { resource: "pods".to_owned(), ..Target::default() });
    let request = WatchRequest { target, encoding: Encoding::Zstd.into(), ..WatchRequest::default() };
    let mut stream: Streaming<WatchResponse> = client.watch(request).await.expect("a stream").into_inner();
    while !matches!(next(&mut stream).await, Message::SnapshotEnd(_)) {}
    ready.wait().await;
    let mut events = Vec::with_capacity(changes);
    while events.len() < changes {
        if let Message::Event(event) = next(&mut stream).await {
            events.push((event.resource_version.parse().expect("a version"), Instant::now()));
        }
    }
    events
}

async fn next(stream: &mut Streaming<WatchResponse>) -> Message {
    stream.message().await.expect("no error").expect("no end").message.expect("a message")
}
