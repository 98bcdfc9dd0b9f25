//! Whether kubefan is there: it is killed, not ready, restarted, of two versions, or misconfigured.

use std::{fs, path::Path, process::Command};

use kubefan_sim::apiserver::{Fault, FaultRule};

use super::scene::{Scene, lively};
use crate::harness::kubefan::{Kubefan, binary};

/// Prometheus scrapes no other kubefan meanwhile.
pub(super) async fn absent(scene: Scene) {
    let (simulated, kubefan, _writing) = scene.begin(&[]).await;
    scene.sees("up{JOB, instance=\"a\"}", |up| up == 1.0).await;
    drop(kubefan);
    let firing = scene.fired("the only kubefan killed", &["KubefanAbsent", "KubefanDown"]).await;
    let [again, beside] =
        [simulated.kubefan(&["--resource=pods"]).await, simulated.kubefan(&["--resource=pods"]).await];
    // The second instance of this job was down as well.
    firing.scene().scrape(&again);
    firing.scene().scrape_as(1, &beside);
    firing.resolved("it is started again").await;
}

pub(super) async fn not_ready(scene: Scene) {
    let (simulated, _writing) = lively().await;
    simulated.sim.set_fault(FaultRule {
        fault: Fault::Forbidden,
        verb: None,
        resource: Some(crate::harness::rig::pods()),
        requests: usize::MAX,
    });
    let kubefan = Kubefan::spawn(&simulated.kubeconfig(), &["--resource=pods"]).await;
    scene.scrape(&kubefan);
    let alerts = ["KubefanNoneReady", "KubefanNotReady", "KubefanCachesNotSynced"];
    let firing = scene.fired("kubefan's account lost the right to `list` and `watch`", &alerts).await;
    let (_, readyz) = kubefan.admin("/readyz?verbose").await.unwrap();
    assert!(readyz.lines().any(|line| line.starts_with("[-]") && line.contains("forbidden")), "{readyz}");
    assert!(kubefan.process.log().contains("forbidden"), "{}", kubefan.process.log());
    simulated.sim.clear_faults();
    firing.resolved("the right given back").await;
}

pub(super) async fn restarts(scene: Scene) {
    let (simulated, _writing) = lively().await;
    let mut last = 0.0;
    let mut start = async || {
        let kubefan = simulated.kubefan(&["--resource=pods"]).await;
        scene.scrape(&kubefan);
        scene.sees("process_start_time_seconds{JOB}", |started| started > last).await;
        last = kubefan.metric("process_start_time_seconds").await.unwrap();
        kubefan
    };
    for _ in 0..3 {
        let mut kubefan = start().await;
        kubefan.process.kill9();
    }
    let _kubefan = start().await;
    let firing = scene.fired("kubefan killed three times", &["KubefanRestarting"]).await;
    firing.resolved("it stays up").await;
}

pub(super) async fn versions(scene: Scene) {
    let (simulated, _writing) = lively().await;
    let newer = simulated.dir.path().join("kubefan");
    with_version(Path::new(&binary()), &newer);
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let other = Kubefan::spawn_by(Command::new(&newer), &simulated.kubeconfig(), &["--resource=pods"]).await;
    scene.scrape(&kubefan);
    scene.scrape_as(1, &other);
    let firing = scene.fired("a rollout that stopped in the middle", &["KubefanVersionsDiffer"]).await;
    let same = simulated.kubefan(&["--resource=pods"]).await;
    firing.scene().scrape_as(1, &same);
    drop(other);
    firing.resolved("the rollout is undone").await;
}

/// Copies the binary, with another version in place of its own. There is only one to build here.
fn with_version(from: &Path, to: &Path) {
    let mut bytes = fs::read(from).unwrap();
    let own = env!("CARGO_PKG_VERSION").as_bytes();
    let other = "9.9.9".as_bytes();
    assert_eq!(own.len(), other.len(), "a version of the same length");
    let places: Vec<_> = memchr_all(&bytes, own).collect();
    for at in places {
        bytes[at..at + own.len()].copy_from_slice(other);
    }
    fs::write(to, bytes).unwrap();
    fs::set_permissions(to, fs::metadata(from).unwrap().permissions()).unwrap();
}

fn memchr_all<'a>(bytes: &'a [u8], part: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    bytes.windows(part.len()).enumerate().filter_map(move |(at, window)| (window == part).then_some(at))
}

pub(super) async fn wrong_file(scene: Scene) {
    let (simulated, _writing) = lively().await;
    let path = simulated.dir.path().join("kubefan.yaml");
    let write = |resources: &str| {
        let head = "apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\n";
        fs::write(&path, format!("{head}{resources}\n")).unwrap();
    };
    write("resources: [pods]");
    let kubefan = simulated.kubefan(&[&*format!("--config={}", path.display())]).await;
    scene.scrape(&kubefan);
    write("resuorces: [pods]");
    let firing = scene.fired("a misspelt key in the configuration file", &["KubefanConfigReloadFailed"]).await;
    assert!(kubefan.process.log().contains("resuorces"), "the log names the key: {}", kubefan.process.log());
    write("resources: [pods]");
    firing.resolved("the file mended").await;
}
