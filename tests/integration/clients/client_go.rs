//! client-go: informers of every kind (typed, dynamic, metadata) with handlers that record each
//! call, and a leader election.
//!
//! Informers that start from the same state must see the same changes in the same order, through
//! any server and in any encoding. The order of the initial objects is not guaranteed. Informers
//! that start while objects change may start at different versions; from the later version on, each
//! object must have the same history.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
    time::Duration,
};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Both, Server, assert_equal};
use crate::harness::{
    apiserver::{ApiServer, Options},
    audit::{Audit, is_consistent},
    objects::{pod, version_of},
    process::{Process, free_port},
    tests, tools, wait,
};

tests! {
    apiserver slow_programs: informers_see_the_same_events_through_kubefan, informers_recover_after_kubefan_restarts,
        leader_election_works_through_kubefan, the_version_of_a_store_follows_bookmarks_through_kubefan;
}

const DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients");
const GROUP: &str = "clients.example.com";
/// The name of the last object created in each collection.
const LAST: &str = "last";
const COLLECTIONS: [&str; 5] = [
    "/api/v1/namespaces/default/pods",
    "/api/v1/namespaces/default/configmaps",
    "/api/v1/nodes",
    "/api/v1/namespaces/default/events",
    "/apis/clients.example.com/v1/namespaces/default/widgets",
];
const JSON: &[&str] = &["--content-type", "application/json"];
/// The start of informers, and the encoding that typed clients request. The default is to start
/// with a watch-list and to prefer protobuf.
const SETTINGS: [(&str, &[&str]); 4] = [
    ("default", &[]),
    ("listing", &["--watch-list=false"]),
    ("json", JSON),
    ("listing-json", &["--content-type", "application/json", "--watch-list=false"]),
];
/// Number of watches of these informers that kubefan serves from the cache: per setting four typed,
/// two dynamic, and the metadata of pods. Metadata of custom resources is not cached as protobuf.
/// In the two settings that start with a watch-list, the watch of events is not served from the
/// cache, because the freshness of events cannot be proved.
const CACHED: f64 = 4.0 * (4.0 + 2.0 + 1.0) - 2.0;

/// Number of all watches of these informers.
const ALL: f64 = 4.0 * 8.0;

/// Both servers send a bookmark about every minute.
const BOOKMARK_AT_MOST: Duration = Duration::from_secs(150);

/// Number of watches that kubefan serves now.
const WATCHES: &str = "kubefan_subscribers";
/// Number of requests that kubefan passes on now, with their watches.
const PASSED_ON: &str = "kubefan_passthrough_requests";

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| tools::go_program("clients", Path::new(DIR)));

/// Starts the program against a server. Its log is a file of this name.
fn start(server: &Server, name: &str, flags: &[&str], dir: &Path) -> Process {
    let mut command = Command::new(&*PROGRAM);
    command.arg("--kubeconfig").arg(&server.kubeconfig).args(["--agent", name]).args(flags);
    Process::spawn("client-go", &mut command, &dir.join(name))
}

/// Starts informers against both servers.
fn start_informers(both: &Both, setting: &str, flags: &[&str], dir: &Path) -> [Process; 2] {
    let flags = [flags, &["--group", GROUP, "--until", LAST]].concat();
    both.servers.each_ref().map(|server| start(server, &format!("{}-{setting}", server.name), &flags, dir))
}

async fn informers_see_the_same_events_through_kubefan() {
    let audit = Audit::new();
    let api = ApiServer::start(audit.options()).await;
    api.create_crd(GROUP, "widgets", "Widget").await;
    write(&api, 0..6).await;
    let resources = format!("pods,configmaps,nodes,events,widgets.{GROUP}");
    let both = Both::start(api, &["--on-demand=false", "--resource", &resources]).await;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // Start these while nothing changes.
    let mut still = SETTINGS.map(|(setting, flags)| (setting, start_informers(&both, setting, flags, dir.path())));
    for (setting, processes) in &mut still {
        let [direct, kubefan] = [synced(&mut processes[0]).await, synced(&mut processes[1]).await];
        println!("{setting}: all informers synced after {direct:.2} s directly, {kubefan:.2} s through kubefan");
    }
    let all = || async {
        let served = both.metric(WATCHES).await.0;
        let passed_on = both.metric(PASSED_ON).await.0;
        // A start that a busy apiserver does not prove in time is passed on.
        let is_unproved = !both.kubefan.unproved_resources().await.is_empty();
        (served >= CACHED || (is_unproved && served + passed_on >= ALL)).then_some(())
    };
    let served = wait::try_until(wait::SOON, all).await;
    if served.is_none() {
        let upstream = SETTINGS.map(|(setting, _)| audit.requests(&format!("kubefan-{setting}")));
        panic!("{}\nrequests for pods that were forwarded: {upstream:#?}", both.metric(WATCHES).await.1);
    }
    let unproved_starts = both.kubefan.unproved_resources().await;
    write(&both.api, 6..12).await;
    let mut moving = start_informers(&both, "moving", JSON, dir.path());
    tokio::join!(write(&both.api, 12..30), async {
        for process in &mut moving {
            synced(process).await;
        }
    });
    write(&both.api, 30..34).await;
    finish(&both.api).await;

    let mut reports = Vec::new();
    for (setting, processes) in still {
        let [direct, kubefan] = reports_of(processes).await;
        for (informer, direct) in &direct {
            let kubefan = &kubefan[informer];
            let what = format!("{informer}, {setting}");
            assert_equal(&what, &direct.ordered(), &kubefan.ordered());
            assert_eq!(direct.store, kubefan.store, "{what}");
            assert!(direct.store.keys().any(|key| key.ends_with(LAST)), "{what}");
        }
        reports.push(direct);
    }
    for other in &reports[1..] {
        for (informer, report) in other {
            assert_equal(informer, &reports[0][informer].ordered(), &report.ordered());
        }
    }
    let [direct, kubefan] = reports_of(moving).await;
    for (informer, direct) in &direct {
        let kubefan = &kubefan[informer];
        assert_eq!(direct.store, kubefan.store, "{informer}, started while objects change");
        direct.assert_same_tail(kubefan, informer);
    }
    // kubefan answered everything from its caches. The log has only requests for pods.
    let unproved = both.kubefan.unproved_resources().await;
    let settings = SETTINGS.map(|(setting, _)| (setting, &unproved_starts));
    for (setting, unproved) in settings.into_iter().chain([("moving", &unproved)]) {
        let mut forwarded = audit.requests(&format!("kubefan-{setting}"));
        if unproved.contains("pods") {
            forwarded.retain(|request| !is_consistent(&request.uri));
        }
        assert_eq!(forwarded, [], "{setting}");
    }
}

async fn informers_recover_after_kubefan_restarts() {
    let api = ApiServer::start(Options::default()).await;
    api.create_crd(GROUP, "widgets", "Widget").await;
    write(&api, 0..3).await;
    let address = format!("127.0.0.1:{}", free_port());
    let resources = format!("pods,configmaps,nodes,events,widgets.{GROUP}");
    let args = ["--on-demand=false", "--resource", &resources];
    let mut both = Both::start_at(api, &address, &args).await;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut processes = start_informers(&both, "restart", JSON, dir.path());
    for process in &mut processes {
        synced(process).await;
    }
    write(&both.api, 3..6).await;
    both.kubefan.process.kill9();
    write(&both.api, 6..9).await;
    both = Both::start_at(both.api, &address, &args).await;
    write(&both.api, 9..12).await;
    finish(&both.api).await;
    let [direct, kubefan] = reports_of(processes).await;
    for (informer, direct) in &direct {
        let kubefan = &kubefan[informer];
        assert_eq!(direct.store, kubefan.store, "{informer}");
        // After a relist an informer skips intermediate states, but it must not go back and must
        // not see a change twice.
        let all = direct.by_key();
        for (key, calls) in kubefan.by_key() {
            let mut versions = all[key].iter().map(|call| &call[2]);
            let known =
                calls.iter().all(|call| call[0].ends_with("(unseen)") || versions.any(|version| *version == call[2]));
            assert!(known, "{informer}: {key}: {calls:?} does not follow the order of {:?}", all[key]);
        }
        let seen = kubefan.calls.len();
        let total = direct.calls.len();
        println!("{informer}: {seen} handler calls through a restarted kubefan, {total} directly");
    }
}

async fn leader_election_works_through_kubefan() {
    let both = Both::start(ApiServer::shared().await, &["--resource", "leases.coordination.k8s.io"]).await;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let namespace = both.api.namespace("election").await;
    let mut processes = both
        .servers
        .each_ref()
        .map(|server| start(server, server.name, &["--elect", &format!("{namespace}/{}", server.name)], dir.path()));
    for (process, server) in processes.iter_mut().zip(&both.servers) {
        let ended = process.ended(wait::SOON * 4).await;
        let log = process.log();
        assert!(ended.success(), "{}: {ended}: {log}", server.name);
        let lines: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        println!("{}: {lines:?}", server.name);
        let [first, second] = &lines[..] else { panic!("{}: {log}", server.name) };
        assert_eq!(second["after"], first["leader"]);
        assert_ne!(second["leader"], first["leader"]);
    }
}

/// Writes rounds of changes to all collections in parallel, in order within each: objects are
/// created, changed, deleted and recreated.
async fn write(api: &ApiServer, rounds: std::ops::Range<usize>) {
    let write = |collection: &'static str| {
        let rounds = rounds.clone();
        async move {
            for round in rounds {
                let name = format!("o-{round}");
                let path = format!("{collection}/{name}");
                let label = |value: &str| json!({ "metadata": { "labels": { "stage": value } } });
                api.create(collection, &object(collection, &name)).await;
                api.patch(&path, &label("on")).await;
                api.patch(&path, &label("off")).await;
                if round % 3 == 0 {
                    api.delete(&path).await;
                }
                if round % 6 == 0 {
                    api.create(collection, &object(collection, &name)).await;
                }
            }
        }
    };
    futures::future::join_all(COLLECTIONS.map(write)).await;
}

/// Creates the objects that end the informers.
async fn finish(api: &ApiServer) {
    for collection in COLLECTIONS {
        api.create(collection, &object(collection, LAST)).await;
    }
}

fn object(collection: &str, name: &str) -> Value {
    let (_, resource) = collection.rsplit_once('/').expect("a path");
    let mut object = match resource {
        "pods" => pod(name),
        "configmaps" => json!({ "data": { "text": "<b>&\u{2028}ü\n\"", "empty": "" } }),
        "nodes" => json!({ "spec": { "unschedulable": true } }),
        "events" => json!({
            "involvedObject": { "kind": "Pod", "namespace": "default", "name": "p" }, "reason": "Seen", "message": "m",
        }),
        _ => {
            json!({ "apiVersion": format!("{GROUP}/v1"), "kind": "Widget", "spec": { "z": 1.5, "a": "<&>", "n": null } })
        }
    };
    object["metadata"]["name"] = json!(name);
    object
}

/// Waits until all informers of a process have synced. Returns the time they took, in seconds.
async fn synced(process: &mut Process) -> f64 {
    wait::until("all informers to sync", wait::SOON * 2, || {
        let log = process.log();
        let ended = process.exited();
        assert!(ended.is_none(), "{ended:?}: {log}");
        let seconds = log.lines().find_map(|line| serde_json::from_str::<Value>(line).ok()?["synced_seconds"].as_f64());
        async move { seconds }
    })
    .await
}

/// The report of one informer.
#[derive(Deserialize)]
struct Informer {
    /// Type, key and version of each call of the handler.
    calls: Vec<[String; 3]>,
    store: Map<String, Value>,
}

/// Waits for both programs and reads their final reports, by informer.
async fn reports_of(processes: [Process; 2]) -> [BTreeMap<String, Informer>; 2] {
    #[derive(Deserialize)]
    struct Report {
        informers: BTreeMap<String, Informer>,
    }
    let report = |mut process: Process| async move {
        let ended = process.ended(wait::SOON * 4).await;
        let log = process.log();
        let report = log.lines().find_map(|line| serde_json::from_str::<Report>(line).ok());
        report.unwrap_or_else(|| panic!("client-go: {ended}: {log}")).informers
    };
    let [direct, kubefan] = processes;
    [report(direct).await, report(kubefan).await]
}

impl Informer {
    /// The calls in order, except that the initial ones are sorted.
    fn ordered(&self) -> Vec<String> {
        let mut calls: Vec<_> = self.calls.iter().map(|call| call.join(" ")).collect();
        let initial = self.calls.iter().take_while(|call| call[0] == "initial").count();
        calls[..initial].sort();
        calls
    }

    fn by_key(&self) -> BTreeMap<&str, Vec<&[String; 3]>> {
        let mut calls: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for call in &self.calls {
            calls.entry(&*call[1]).or_default().push(call);
        }
        calls
    }

    /// For each object, asserts that the shorter history is the tail of the longer one. The type of
    /// its first entry depends on where the informer started.
    #[track_caller]
    fn assert_same_tail(&self, other: &Informer, what: &str) {
        let ours = self.by_key();
        let theirs = other.by_key();
        for key in ours.keys().chain(theirs.keys()) {
            let none = Vec::new();
            let mut short = ours.get(key).unwrap_or(&none);
            let mut long = theirs.get(key).unwrap_or(&none);
            if short.len() > long.len() {
                std::mem::swap(&mut short, &mut long);
            }
            let end = &long[long.len() - short.len()..];
            let versions = |calls: &[&[String; 3]]| calls.iter().map(|call| call[2].clone()).collect::<Vec<_>>();
            let types = |calls: &[&[String; 3]]| calls.iter().skip(1).map(|call| call[0].clone()).collect::<Vec<_>>();
            let same = versions(short) == versions(end) && types(short) == types(end);
            assert!(same, "{what}: {key}: {short:?} is not the tail of {long:?}");
        }
    }
}

async fn the_version_of_a_store_follows_bookmarks_through_kubefan() {
    let both = Both::start(ApiServer::shared().await, &["--resource=limitranges"]).await;
    let directory = tempfile::tempdir().expect("a directory can be created");
    let flags = ["--versions", "--resources", "limitranges.v1."];
    let informers: Vec<Process> =
        both.servers.iter().map(|server| start(server, server.name, &flags, directory.path())).collect();
    for informer in &informers {
        wait::until("the first state", wait::SOON, || async { newest_version(informer) }).await;
    }
    // No event of the informer's resource has this version or a later one.
    let path = format!("/api/v1/namespaces/{}/configmaps", both.api.namespace("versions").await);
    let written = version_of(&both.api.create(&path, &json!({ "metadata": { "name": "other" } })).await);
    for (informer, server) in informers.iter().zip(&both.servers) {
        let what = format!("a bookmark of version {written} ({})", server.name);
        wait::until(&what, BOOKMARK_AT_MOST, || async {
            newest_version(informer).filter(|version| *version >= written)
        })
        .await;
    }
}

/// The last version that a program of `-versions` has printed.
fn newest_version(informer: &Process) -> Option<u64> {
    let log = informer.log();
    let version = |line: &str| serde_json::from_str::<Value>(line).ok()?["version"].as_str()?.parse().ok();
    log.lines().rev().find_map(version)
}
