//! The memory of a cache relative to the JSON that it caches: after churn, and at the peak of a
//! relist.
//!
//! `KUBEFAN_TEST_SCALE=full` measures it with 100,000 pods of the simulated apiserver, and prints
//! the values. Only a release build of kubefan gives meaningful values.
//! `KUBEFAN_TEST_BINARY` names one, so that the tests themselves can be a debug build.

use std::{fs, path::Path};

use kubefan_sim::{
    apiserver::SimOptions,
    workload::{Workload, WorkloadOptions},
};

use crate::harness::{is_full_scale, kubefan::Kubefan, process::memory_of, simulated::Simulated, tests, wait};

tests! {
    local slow_faults alone: a_cache_costs_little_more_than_its_json_and_less_than_half_if_compressed;
}

/// The memory of a kubefan without objects, apart from the pages of its program. It is added to the
/// limit if there are too few objects for it to be negligible.
const BASE_BYTES: usize = 24 << 20;

async fn a_cache_costs_little_more_than_its_json_and_less_than_half_if_compressed() {
    for (setting, churned, peak) in [
        ("tuning.watchList=never", 1.3, 2.0),
        ("tuning.watchList=auto", 1.3, 2.0),
        ("tuning.cacheCompression=zstd", 0.4, 0.6),
    ] {
        measure(setting).await.assert_at_most(setting, churned, peak);
    }
}

/// All values are in bytes.
struct Figures {
    json: usize,
    churned: usize,
    peak: usize,
}

impl Figures {
    fn assert_at_most(&self, setting: &str, churned: f64, peak: f64) {
        let base = if self.json < 4 * BASE_BYTES { BASE_BYTES } else { 0 };
        for (when, bytes, share) in
            [("after churn", self.churned, churned), ("at the peak of a relist", self.peak, peak)]
        {
            let most = (self.json as f64 * share) as usize + base;
            assert!(bytes < most, "{setting}: {bytes} bytes {when} for {} bytes of JSON", self.json);
        }
    }
}

/// Measures a cache of the simulated apiserver's pods: a fifth of them change, and during the
/// outage before a relist a twentieth of that. There are no subscribers, so this is the cache's own
/// memory.
async fn measure(setting: &str) -> Figures {
    let (objects, changes) = if is_full_scale() { (100_000, 20_000) } else { (2_000, 400) };
    let mut simulated = Simulated::with(SimOptions { window_events_max: changes, ..SimOptions::default() }).await;
    let sim = simulated.sim.clone();
    let mut workload = Workload::new(12, WorkloadOptions { objects, nodes: 1_000, ..WorkloadOptions::default() });
    workload.populate(&sim).unwrap();
    let kubefan = simulated.kubefan(&["--resource=pods", setting]).await;
    let json = gauge(&kubefan, "kubefan_cached_object_bytes").await;
    println!("{setting}, {objects} pods, {:.1} MiB of JSON", mib(json));
    let print = async |what: &str, bytes: usize| {
        let share = bytes as f64 / json as f64;
        let cached = gauge(&kubefan, "kubefan_cached_object_memory_bytes").await;
        let ring = gauge(&kubefan, "kubefan_ring_bytes").await;
        println!(
            "{what:>16}: {:>6.1} MiB resident, {share:.3} x the JSON; objects {:.1} MiB, ring {:.1} MiB",
            mib(bytes),
            mib(cached),
            mib(ring),
        );
    };
    print("synced", memory(&kubefan, "RssAnon")).await;
    for step in 0..changes {
        workload.step(&sim).unwrap();
        if step % 100 == 0 {
            // kubefan must keep up: events that leave the apiserver's window would cause a relist.
            tokio::task::yield_now().await;
        }
    }
    reached(&kubefan, sim.revision()).await;
    let churned = memory(&kubefan, "RssAnon");
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
    // The peak is recorded with the pages of the program's file, most of which are those of a debug
    // build.
    let peak = memory(&kubefan, "VmHWM") - memory(&kubefan, "RssFile");
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
    kubefan.metric_sum(name, "").await.expect("metrics are served") as usize
}
