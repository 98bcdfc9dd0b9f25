//! The informers of all languages at the same time, while pods change steadily and kubefan and the
//! apiserver are killed at random. Whenever the writers pause, and at the end, every store must
//! equal the apiserver's list, and the memory of no client may grow.
//!
//! Two minutes, and 30 with `KUBEFAN_TEST_SCALE=full`. `KUBEFAN_SOAK_SEED` repeats the choices of a
//! run. `-- --nocapture` shows the memory at each pause, and the table at the end.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use futures::future::join_all;
use serde_json::{Value, json};
use tokio::{sync::watch, time::Instant};

use super::runner::{self, Runner};
use crate::harness::{
    apiserver::{ApiServer, Options},
    is_full_scale,
    kills::Kills,
    kubefan::Kubefan,
    objects::{pod, version_of},
    process::free_port,
    tests,
    writes::Writes,
};

tests! {
    apiserver slow_soaks alone: the_stores_of_all_languages_equal_the_apiservers_list_after_random_kills;
}

const NAMESPACE: &str = "team-0";
/// Half of the pods or fewer, and changes move pods in and out.
const SELECTOR: &str = "canary=true";
/// The source that is a watch with all marks, not an informer.
const WATCH: &str = "watch";
/// Memory that a client may add after the start: garbage that its runtime has not collected yet. It
/// is far below the size of all events of a run.
const GROWTH_MAX: usize = 24 << 20;
/// Waits of up to a minute each, until an informer has a version.
const WAITS_MAX: usize = 3;

struct Scale {
    pods: usize,
    changes_per_second: u32,
    /// Between two pauses of the writers.
    part: Duration,
    parts: usize,
}

fn scale() -> Scale {
    let [ci, full] = [(300, 24, 5), (1_000, 120, 15)].map(|(pods, seconds, parts)| Scale {
        pods,
        changes_per_second: 50,
        part: Duration::from_secs(seconds),
        parts,
    });
    if is_full_scale() { full } else { ci }
}

/// The objects of a list or a store, by key: version and uid.
type Objects = BTreeMap<String, [String; 2]>;

/// The informers that each language runs, by name, with their options.
fn informers(runner: &Runner) -> Vec<(&'static str, Value)> {
    let fields = ["metadata.labels", "spec.nodeName", "status.phase"];
    let mut informers = vec![
        ("whole", json!({})),
        ("fields", json!({ "fields": fields, "only_changes": false })),
        ("selected", json!({ "label_selector": SELECTOR })),
    ];
    if !runner.lacks.iter().any(|lacked| lacked == "zstd-delta") {
        informers.push(("deltas", json!({ "encoding": "zstd-delta" })));
    }
    if runner.language == "python" {
        informers.push(("asyncio", json!({ "asyncio": true })));
    }
    informers
}

async fn the_stores_of_all_languages_equal_the_apiservers_list_after_random_kills() {
    let scale = scale();
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut runners = runner::start_all(dir.path()).await;
    let mut kills = Kills::from_seed();
    let api = ApiServer::start(Options::default()).await;
    let mut writes = Writes::populate(&api, scale.pods).await;
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let mut kubefan = Some(serve(&api, address).await);
    join_all(runners.iter_mut().map(|runner| start(runner, address))).await;

    let mut changes = 0;
    let mut resident = Vec::new();
    for part in 1..=scale.parts {
        let (stop, stopped) = watch::channel(false);
        let end = Instant::now() + scale.part;
        let killing = async {
            kills.until(end, &api, &mut kubefan, async || serve(&api, address).await).await;
            stop.send_replace(true);
        };
        tokio::join!(killing, writes.at_rate(scale.changes_per_second, stopped));
        changes = writes.flush().await;
        compare(&api, &mut runners, part).await;
        resident.push(runners.iter().map(Runner::resident).collect::<Vec<_>>());
        let mib: Vec<String> = runners.iter().map(|it| format!("{} {}", it.language, it.resident() >> 20)).collect();
        println!("pause {part}: {changes} changes, all stores are equal; MiB: {}", mib.join(", "));
    }
    println!("{changes} changes, {} kills of kubefan and {} of the apiserver", kills.kubefan, kills.apiserver);
    kills.assert_some(scale.part);
    // A garbage collector may be late once: the higher of two early pauses, the lower of the last
    // two.
    let [.., before, last] = &resident[..] else { panic!("at least two pauses") };
    let early = resident[scale.parts / 5 - 1].iter().zip(&resident[scale.parts / 5]).map(|(one, other)| one.max(other));
    let late = before.iter().zip(last).map(|(one, other)| one.min(other));
    let mut failures = Vec::new();
    println!(
        "| client | calls of handlers | events | reconnects | new snapshots | errors | MiB early | MiB at the end |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for ((runner, early), late) in runners.iter_mut().zip(early).zip(late) {
        let counts = counts(runner).await;
        let of = |item: &str| counts.get(item).copied().unwrap_or_default();
        let language = runner.language;
        let calls = of("add") + of("update") + of("delete");
        println!(
            "| {language} | {calls} | {} | {} | {} | {} | {} | {} |",
            of("event"),
            of("reconnected"),
            of("snapshot_begin"),
            of("error"),
            early >> 20,
            late >> 20
        );
        if *late > early + GROWTH_MAX {
            failures.push(format!("{language}: the memory grew from {early} to {late} bytes"));
        }
        if of("failed") + of("end") > 0 {
            failures.push(format!("{language}: the watch has ended"));
        }
        if kills.kubefan > 0 && of("reconnected") + of("restarted") == 0 {
            failures.push(format!("{language}: the watch did not notice that kubefan was killed"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

async fn serve(api: &ApiServer, address: SocketAddr) -> Kubefan {
    let kubefan = Kubefan::spawn_at(&api.kubeconfig(), &address.to_string(), &["--resource", "pods"]).await;
    kubefan.ready().await;
    kubefan
}

/// Starts the informers of a language, and a watch.
async fn start(runner: &mut Runner, address: SocketAddr) {
    run(runner, json!({ "op": "connect", "as": "client", "address": address.to_string() })).await;
    let mut sources = informers(runner);
    sources.push((WATCH, json!({})));
    for (name, mut command) in sources {
        command["op"] = json!(if name == WATCH { "watch" } else { "informer" });
        command["as"] = json!(name);
        command["client"] = json!("client");
        command["resource"] = json!("pods");
        command["quiet"] = json!(true);
        command["bookmark_interval_ms"] = json!(1_000);
        run(runner, command).await;
    }
}

async fn run(runner: &mut Runner, command: Value) -> Value {
    let answer = runner.run(command.clone()).await.and_then(|answer| answer.map_err(|error| error.to_string()));
    answer.unwrap_or_else(|why| panic!("{}: {command}: {why}", runner.language))
}

/// Every store must equal the apiserver's list. Nothing is written meanwhile.
async fn compare(api: &ApiServer, runners: &mut [Runner], part: usize) {
    let pods = format!("/api/v1/namespaces/{NAMESPACE}/pods");
    let version = version_of(&api.create(&pods, &pod(&format!("pause-{part}"))).await).to_string();
    let all = listed(api, "/api/v1/pods").await;
    let selected = listed(api, &format!("/api/v1/pods?labelSelector={}", SELECTOR.replace('=', "%3D"))).await;
    let all = &all;
    let selected = &selected;
    let version = &version;
    join_all(runners.iter_mut().map(async |runner| {
        for (name, _) in informers(runner) {
            let mut waits = 0..WAITS_MAX;
            let wait = json!({ "op": "wait_until", "as": name, "resource_version": version });
            while run(runner, wait.clone()).await["reached"] != true {
                assert!(waits.next().is_some(), "{}: {name} is not at {version}", runner.language);
            }
            let given = run(runner, json!({ "op": "store", "as": name })).await["objects"].take();
            let stored: Objects = serde_json::from_value(given).expect("a version and a uid by key");
            let truth = if name == "selected" { selected } else { all };
            assert!(stored == *truth, "{}: {name} at {version}: {}", runner.language, difference(&stored, truth));
        }
    }))
    .await;
}

async fn listed(api: &ApiServer, path: &str) -> Objects {
    let list = api.get_json(path).await;
    let text = |pod: &Value, field: &str| pod["metadata"][field].as_str().expect("it is set").to_owned();
    let entry = |pod: &Value| {
        let key = format!("{}/{}", text(pod, "namespace"), text(pod, "name"));
        (key, [text(pod, "resourceVersion"), text(pod, "uid")])
    };
    list["items"].as_array().expect("a list has items").iter().map(entry).collect()
}

/// The first key that differs.
fn difference(stored: &Objects, truth: &Objects) -> String {
    let key = stored.keys().chain(truth.keys()).find(|key| stored.get(*key) != truth.get(*key));
    let key = key.expect("they differ");
    let counts = format!("{} objects, the apiserver has {}", stored.len(), truth.len());
    format!("{counts}; {key} is {:?}, at the apiserver {:?}", stored.get(key), truth.get(key))
}

/// Reports of all sources of a language: their number, by item.
async fn counts(runner: &mut Runner) -> BTreeMap<String, u64> {
    let mut total = BTreeMap::new();
    let names = informers(runner).into_iter().map(|(name, _)| name).chain([WATCH]);
    for name in names {
        let given = run(runner, json!({ "op": "counts", "as": name })).await["counts"].take();
        let counts: BTreeMap<String, u64> = serde_json::from_value(given).expect("numbers by item");
        for (item, count) in counts {
            *total.entry(item).or_default() += count;
        }
    }
    total
}
