//! The memory of a cache relative to the JSON that it caches: after churn, and at the peak of a
//! relist.
//!
//! `KUBEFAN_TEST_SCALE=full` measures it with 10,000 pods of a real apiserver and 100,000 of the
//! simulated one, and prints the values. Only a release build of kubefan gives meaningful values.
//! `KUBEFAN_TEST_BINARY` names one, so that the tests themselves can be a debug build.

use std::{fs, path::Path};

use kubefan_sim::{
    apiserver::SimOptions,
    workload::{Workload, WorkloadOptions},
};

use crate::{
    equivalence::scale,
    harness::{
        apiserver::{ApiServer, Options},
        kubefan::Kubefan,
        link::Link,
        load,
        objects::{pod, version_of},
        process::memory_of,
        record::{Query, Watch, connect},
        simulated::Simulated,
        tests, wait,
    },
};

tests! {
    apiserver full: a_cache_costs_little_more_than_its_json;
    local full: a_large_cache_costs_little_more_than_its_json, a_compressed_cache_costs_less_than_half_of_its_json;
}

/// The memory of a kubefan without objects, with the pages of a debug build's binary. It is added
/// to the limit if there are too few objects for it to be negligible.
const BASE_BYTES: usize = 64 << 20;

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

    // A relist: kubefan cannot get the events that happen while the link is cut.
    link.cut();
    wait::until("kubefan to notice", wait::SOON, || async {
        kubefan.admin("/readyz?verbose").await?.1.contains("stale").then_some(())
    })
    .await;
    let missed = version_of(&api.create("/api/v1/namespaces/team-0/pods", &pod("missed")).await);
    api.compact_etcd(missed).await;
    api.kill9();
    api.restart().await;
    // On Linux, writing 5 resets the recorded peak.
    fs::write(Path::new("/proc").join(kubefan.process.pid().to_string()).join("clear_refs"), "5").unwrap();
    link.mend();
    watch.until(missed).await;
    assert_eq!(watch.gaps.len(), 1);
    let peak = memory(&kubefan, "VmHWM");

    let share = |bytes: usize| bytes as f64 / json as f64;
    for (what, bytes) in [("synced", synced), ("after churn", churned), ("peak of a relist", peak)] {
        println!("{what:>16}: {:>6.1} MiB resident, {:.2} x the JSON ({:.1} MiB)", mib(bytes), share(bytes), mib(json));
    }
    println!("{:>16}: {:>6.1} MiB", "ring", mib(ring));
    assert!(churned < json * 13 / 10 + BASE_BYTES, "{churned} bytes after churn for {json} bytes of JSON");
    assert!(peak < json * 2 + BASE_BYTES, "{peak} bytes at the peak of a relist for {json} bytes of JSON");
}

async fn a_large_cache_costs_little_more_than_its_json() {
    for watch_list in ["never", "auto"] {
        let figures = measure(&["--watch-list", watch_list]).await;
        figures.at_most(1.3, 2.0);
    }
}

async fn a_compressed_cache_costs_less_than_half_of_its_json() {
    measure(&["--cache-compression", "zstd"]).await.at_most(0.4, 0.6);
}

/// All values are in bytes.
struct Figures {
    json: usize,
    churned: usize,
    peak: usize,
}

impl Figures {
    fn at_most(&self, churned: f64, peak: f64) {
        let base = if self.json < 4 * BASE_BYTES { BASE_BYTES } else { 0 };
        let bound = |share: f64| (self.json as f64 * share) as usize + base;
        let Figures { json, .. } = self;
        assert!(self.churned < bound(churned), "{} bytes after churn for {json} bytes of JSON", self.churned);
        assert!(self.peak < bound(peak), "{} bytes at the peak of a relist for {json} bytes of JSON", self.peak);
    }
}

/// Measures a cache of the simulated apiserver's pods: a fifth of them change, and during the
/// outage before a relist a twentieth of that. There are no subscribers, so this is the cache's own
/// memory.
async fn measure(args: &[&str]) -> Figures {
    let (objects, changes) = match std::env::var("KUBEFAN_TEST_SCALE").as_deref() {
        Ok("full") => (100_000, 20_000),
        _ => (2_000, 400),
    };
    let mut simulated = Simulated::with(SimOptions { window_events_max: changes, ..SimOptions::default() }).await;
    let sim = simulated.sim.clone();
    let mut workload = Workload::new(12, WorkloadOptions { objects, nodes: 1_000, ..WorkloadOptions::default() });
    workload.populate(&sim).unwrap();
    let kubefan = simulated.kubefan(&[&["--resource", "pods"], args].concat()).await;
    let json = gauge(&kubefan, "kubefan_cached_object_bytes").await;
    println!("{args:?}, {objects} pods, {:.1} MiB of JSON", mib(json));
    let print = async |what: &str, bytes: usize| {
        let cached = gauge(&kubefan, "kubefan_cached_object_memory_bytes").await;
        let (ring, events) =
            (gauge(&kubefan, "kubefan_ring_bytes").await, gauge(&kubefan, "kubefan_ring_events").await);
        println!(
            "{what:>16}: {:>6.1} MiB resident, {:.3} x the JSON; objects {:.1} MiB, ring {:.1} MiB in {events} records",
            mib(bytes),
            bytes as f64 / json as f64,
            mib(cached),
            mib(ring),
        );
    };
    print("synced", memory(&kubefan, "VmRSS")).await;
    for step in 0..changes {
        workload.step(&sim).unwrap();
        if step % 100 == 0 {
            // kubefan must keep up: events that leave the apiserver's window would cause a relist.
            tokio::task::yield_now().await;
        }
    }
    reached(&kubefan, sim.revision()).await;
    let churned = memory(&kubefan, "VmRSS");
    print("after churn", churned).await;

    simulated.stop().await;
    for _ in 0..changes / 20 {
        workload.step(&sim).unwrap();
    }
    sim.compact();
    // On Linux, writing 5 resets the recorded peak.
    fs::write(Path::new("/proc").join(kubefan.process.pid().to_string()).join("clear_refs"), "5").unwrap();
    simulated.resume().await;
    reached(&kubefan, sim.revision()).await;
    let peak = memory(&kubefan, "VmHWM");
    print("peak of a relist", peak).await;
    Figures { json, churned, peak }
}

/// Waits until the cache has reached a version.
async fn reached(kubefan: &Kubefan, version: u64) {
    wait::until("kubefan to keep up", std::time::Duration::from_secs(300), || async {
        (gauge(kubefan, "kubefan_resource_version").await as u64 >= version).then_some(())
    })
    .await;
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// A value of /proc/pid/status, in bytes.
pub(crate) fn memory(kubefan: &Kubefan, name: &str) -> usize {
    memory_of(kubefan.process.pid(), name)
}

async fn gauge(kubefan: &Kubefan, name: &str) -> usize {
    let (_, metrics) = kubefan.admin("/metrics").await.unwrap();
    let line = metrics.lines().find(|line| line.starts_with(name)).unwrap();
    line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as usize
}
