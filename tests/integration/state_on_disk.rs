//! A kubefan that is killed at random moments under writes, and starts in an outage from the state
//! that it has saved. It serves a state that the apiserver had, says that it is stale, and its
//! watches continue from there when the apiserver is back.
//!
//! `KUBEFAN_TEST_SCALE=full` kills it more often. The seed of the writes and kills is printed, and
//! read from `KUBEFAN_SOAK_SEED`.

use std::{
    collections::BTreeMap,
    env, fs,
    hash::{BuildHasher, RandomState},
    path::Path,
    time::Duration,
};

use kubefan_sim::{
    apiserver::SimOptions,
    workload::{Workload, WorkloadOptions},
};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use reqwest::{Response, StatusCode, header};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::harness::{
    is_full_scale,
    kubefan::Kubefan,
    objects::version_of,
    rig::pods,
    simulated::{Simulated, json},
    tests, wait,
};

tests! {
    local slow_faults: a_kubefan_killed_at_any_moment_serves_only_states_that_were;
    local slow_faults alone: ten_thousand_pods_are_served_from_disk_in_an_outage;
}

/// Names of the pods that are written.
const NAMES: u32 = 20;
/// The longest time from a start to a kill under writes, in milliseconds.
const LIFE_MILLIS_MAX: u64 = 3_000;
/// The longest time from the return of the apiserver to a kill, in milliseconds.
const RETURN_MILLIS_MAX: u64 = 300;

/// The versions of pods by name.
type State = BTreeMap<String, u64>;

/// The states that the apiserver had.
struct States {
    at: BTreeMap<u64, State>,
    random: Pcg64Mcg,
}

impl States {
    fn seeded() -> States {
        let given = env::var("KUBEFAN_SOAK_SEED").ok();
        let seed = given.map_or_else(|| RandomState::new().hash_one(()), |text| text.parse().expect("a number"));
        println!("KUBEFAN_SOAK_SEED={seed}");
        States { at: BTreeMap::from([(0, State::new())]), random: Pcg64Mcg::seed_from_u64(seed) }
    }

    fn newest(&self) -> (u64, &State) {
        let (version, state) = self.at.last_key_value().expect("a state");
        (*version, state)
    }

    /// Creates, changes or deletes a pod.
    fn write(&mut self, simulated: &Simulated) {
        let name = format!("p{}", self.random.random_range(0..NAMES));
        let (last, state) = self.newest();
        // The same object again would be no change.
        let stage = format!("after-{last}");
        let mut state = state.clone();
        let version = if !state.contains_key(&name) {
            simulated.create(&name)
        } else if self.random.random_range(0..4) == 0 {
            simulated.sim.delete(&pods(), "default", &name).expect("the pod exists")
        } else {
            simulated.stage(&name, &stage)
        };
        if simulated.sim.object(&pods(), "default", &name).is_some() {
            state.insert(name, version);
        } else {
            state.remove(&name);
        }
        self.at.insert(version, state);
    }

    /// Writes until a random moment before `millis_max`.
    async fn write_for(&mut self, simulated: &Simulated, millis_max: u64) {
        let end = Instant::now() + Duration::from_millis(self.random.random_range(0..millis_max));
        while Instant::now() < end {
            self.write(simulated);
            sleep(Duration::from_millis(self.random.random_range(0..20))).await;
        }
    }
}

/// The answer to a list from the cache.
struct Listed {
    version: u64,
    state: State,
    /// Whether it is said to be a saved state that is not confirmed.
    is_saved: bool,
    count: usize,
}

/// Lists all pods as the cache has them. `None` if they are not served.
async fn list(kubefan: &Kubefan) -> Option<Listed> {
    let response = get(kubefan, "resourceVersion=0").await?;
    let headers = response.headers().clone();
    let status = headers.get("cache-status").and_then(|status| status.to_str().ok()).unwrap_or_default();
    let is_saved = status.contains("detail=saved-state");
    assert_eq!(is_saved, headers.contains_key(header::AGE), "{headers:?}");
    let list = json(&response.text().await.ok()?);
    let items = list["items"].as_array().expect("items");
    let state = items.iter().map(|pod| (pod["metadata"]["name"].as_str().expect("a name").to_owned(), version_of(pod)));
    Some(Listed { version: version_of(&list), state: state.collect(), is_saved, count: items.len() })
}

/// Reads pods. `None` if the answer is an error.
async fn get(kubefan: &Kubefan, query: &str) -> Option<Response> {
    let url = format!("http://{}/api/v1/pods?{query}", kubefan.grpc_addr);
    let response = reqwest::Client::new().get(url).header(header::USER_AGENT, "test").send().await.ok()?;
    (response.status() == StatusCode::OK).then_some(response)
}

/// Applies the events of a watch to `state` until its version is reached.
async fn watch_until(mut watch: Response, mut state: State, version: u64) -> State {
    let mut text = String::new();
    let mut reached = 0;
    while reached < version {
        let chunk = watch.chunk().await.expect("the watch is open").expect("the watch goes on");
        text.push_str(&String::from_utf8_lossy(&chunk));
        while let Some((line, rest)) = text.split_once('\n') {
            let event: Value = json(line);
            let object = &event["object"];
            let at = version_of(object);
            assert!(at > reached, "each version comes once and in order: {line}");
            reached = at;
            let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
            match event["type"].as_str() {
                Some("ADDED") => assert!(state.insert(name, at).is_none(), "it was there: {line}"),
                Some("MODIFIED") => assert!(state.insert(name, at).is_some(), "it was not there: {line}"),
                Some("DELETED") => assert!(state.remove(&name).is_some(), "it was not there: {line}"),
                _ => panic!("no change of a pod: {line}"),
            }
            text = rest.to_owned();
        }
    }
    state
}

fn state_dir(dir: &Path) -> String {
    format!("--state-dir={}", dir.display())
}

/// The files of states that are complete.
fn has_file(dir: &Path) -> bool {
    let Ok(files) = fs::read_dir(dir.join("kubefan")) else { return false };
    files.flatten().any(|file| file.file_name().to_string_lossy().ends_with(".state"))
}

async fn a_kubefan_killed_at_any_moment_serves_only_states_that_were() {
    let rounds = if is_full_scale() { 500 } else { 10 };
    let mut simulated = Simulated::with(SimOptions::default()).await;
    let mut states = States::seeded();
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let state_dir = state_dir(dir.path());
    let args = ["--resource=pods", &state_dir, "tuning.stateInterval=1s", "limits.stateBytesPerMinute=1Gi"];
    let kubeconfig = simulated.kubeconfig();
    let mut served = 0;
    let mut lost_max = 0;
    for round in 0..rounds {
        let mut first = simulated.kubefan(&args).await;
        states.write_for(&simulated, LIFE_MILLIS_MAX).await;
        first.process.kill9();
        drop(first);
        let (at_kill, _) = states.newest();
        simulated.stop().await;
        states.write_for(&simulated, 200).await;

        let mut second = Kubefan::spawn(&kubeconfig, &args).await;
        if !has_file(dir.path()) {
            assert!(list(&second).await.is_none(), "there is nothing to serve");
            simulated.resume().await;
            continue;
        }
        let old = wait::until("the saved state", wait::SOON, || list(&second)).await;
        served += 1;
        let (_, expected) = states.at.range(..=old.version).next_back().expect("a state");
        assert_eq!(&old.state, expected, "round {round}: the state at {}", old.version);
        assert!(old.is_saved && old.version <= at_kill, "round {round}: {} after {at_kill}", old.version);
        lost_max = lost_max.max(states.at.range(old.version + 1..=at_kill).count());
        let query = format!("watch=1&resourceVersion={}", old.version);
        let watch = get(&second, &query).await.expect("a watch of a saved state is opened");

        states.write(&simulated);
        let (version, newest) = states.newest();
        let newest = newest.clone();
        simulated.resume().await;
        if states.random.random_range(0..3) == 0 {
            // At any moment of the comparison.
            sleep(Duration::from_millis(states.random.random_range(0..RETURN_MILLIS_MAX))).await;
            second.process.kill9();
            continue;
        }
        assert_eq!(watch_until(watch, old.state, version).await, newest, "round {round}: the watch continues");
        let fresh = wait::until("the present state", wait::SOON, || async {
            list(&second).await.filter(|listed| listed.version >= version && !listed.is_saved)
        });
        assert_eq!(fresh.await.state, newest, "round {round}");
        second.process.kill9();
    }
    println!("{rounds} kills, {served} starts from a saved state, at most {lost_max} writes lost of the saved history");
    assert!(served > rounds / 2, "only {served} starts had a saved state");
}

async fn ten_thousand_pods_are_served_from_disk_in_an_outage() {
    let mut workload = Workload::new(5, WorkloadOptions::default());
    let mut simulated = Simulated::with(SimOptions::default()).await;
    while let Some(change) = workload.next_setup() {
        change.apply(&simulated.sim).expect("a new object");
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let state_dir = state_dir(dir.path());
    let args = ["--resource=pods", &state_dir];
    let mut first = simulated.kubefan(&args).await;
    let before = list(&first).await.expect("a list");
    first.process.terminate();
    first.process.ended(wait::SOON).await;
    drop(first);
    simulated.stop().await;
    let started = Instant::now();
    let second = Kubefan::spawn(&simulated.kubeconfig(), &args).await;
    let after = wait::until("the saved state", wait::SOON, || list(&second)).await;
    let took = started.elapsed();
    assert_eq!((after.version, after.count, &after.state), (before.version, before.count, &before.state));
    assert!(after.is_saved && after.count >= 10_000, "{} pods", after.count);
    let bytes: u64 = fs::read_dir(dir.path().join("kubefan"))
        .expect("the directory of the states")
        .map(|file| file.and_then(|file| file.metadata()).expect("a file").len())
        .sum();
    println!(
        "{} pods, a file of {bytes} bytes, complete list {:.2} s after the start",
        after.count,
        took.as_secs_f64()
    );
}
