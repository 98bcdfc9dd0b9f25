//! What a cache costs in memory, next to the JSON that it holds: after churn, and at the peak of a relist.
//!
//! `KUBEFAN_TEST_SCALE=full` measures it with 10,000 pods; the figures are printed. Only a release build tells the truth.

use std::{fs, path::Path};

use kubefan::sim::workload::{Workload, WorkloadOptions};

use crate::{
    equivalence::scale,
    harness::{
        Test,
        apiserver::{ApiServer, Options},
        kubefan::Kubefan,
        link::Link,
        load,
        objects::{pod, version_of},
        record::{Query, Watch, connect},
        tests, wait,
    },
};

pub(crate) const TESTS: &[Test] = tests! {
    apiserver: a_cache_costs_little_more_than_its_json;
};

/// What a kubefan without objects takes, runtime, TLS and allocator included: allowed on top of the objects' share.
const BASE_BYTES: usize = 48 << 20;

async fn a_cache_costs_little_more_than_its_json() {
    let scale = scale();
    let api = ApiServer::start(Options::default()).await;
    let mut workload = Workload::new(11, WorkloadOptions { objects: scale.pods, ..WorkloadOptions::default() });
    load::populate(&api, &mut workload).await;
    let link = Link::to(api.url().trim_start_matches("https://").parse().unwrap()).await;
    let text = fs::read_to_string(api.kubeconfig()).unwrap().replace(api.url(), &format!("https://{}", link.addr));
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = directory.path().join("kubeconfig");
    fs::write(&kubeconfig, text).unwrap();
    let kubefan = Kubefan::spawn(&kubeconfig, &["--resource", "pods"]).await;
    kubefan.ready().await;
    let json = gauge(&kubefan, "kubefan_cached_object_bytes").await;
    let synced = memory(&kubefan, "VmRSS");

    let mut watch =
        Watch::start(&mut connect(kubefan.grpc_addr).await, Query::default().target("pods"), "").await.unwrap();
    for _ in 0..scale.updates {
        load::apply(&api, workload.next_change()).await;
    }
    let last = version_of(&api.create("/api/v1/namespaces/team-0/pods", &pod("the-last")).await);
    watch.until(last).await;
    let churned = memory(&kubefan, "VmRSS");
    let ring = gauge(&kubefan, "kubefan_ring_bytes").await;

    // A relist: what happens while the link is cut is gone for good.
    link.cut();
    wait::until("kubefan to notice", wait::SOON, || async {
        kubefan.admin("/readyz?verbose").await?.1.contains("stale").then_some(())
    })
    .await;
    let missed = version_of(&api.create("/api/v1/namespaces/team-0/pods", &pod("missed")).await);
    api.compact_etcd(missed).await;
    api.kill9();
    api.restart().await;
    // Linux: writing 5 sets the peak back to the present.
    fs::write(Path::new("/proc").join(kubefan.process.pid().to_string()).join("clear_refs"), "5").unwrap();
    link.mend();
    watch.until(missed).await;
    assert_eq!(watch.gaps.len(), 1);
    let peak = memory(&kubefan, "VmHWM");

    let share = |bytes: usize| bytes as f64 / json as f64;
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    for (what, bytes) in [("synced", synced), ("after churn", churned), ("peak of a relist", peak)] {
        println!("{what:>16}: {:>6.1} MiB resident, {:.2} x the JSON ({:.1} MiB)", mib(bytes), share(bytes), mib(json));
    }
    println!("{:>16}: {:>6.1} MiB", "ring", mib(ring));
    assert!(churned < json * 3 / 2 + BASE_BYTES, "{churned} bytes after churn for {json} bytes of JSON");
    assert!(peak < json * 2 + BASE_BYTES, "{peak} bytes at the peak of a relist for {json} bytes of JSON");
}

/// A figure of /proc/pid/status, in bytes.
fn memory(kubefan: &Kubefan, name: &str) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", kubefan.process.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    let kib: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib << 10
}

async fn gauge(kubefan: &Kubefan, name: &str) -> usize {
    let (_, metrics) = kubefan.admin("/metrics").await.unwrap();
    let line = metrics.lines().find(|line| line.starts_with(name)).unwrap();
    line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as usize
}
