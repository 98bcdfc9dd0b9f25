//! The configuration file while kubefan runs: reads are switched to the apiserver and back, one
//! caller is denied, and a wrong file changes nothing.

use std::{fs, path::PathBuf};

use kubefan_access::Identity;
use reqwest::{Response, StatusCode};
use serde_json::Value;
use tonic::Code;
use tonic_types::StatusExt;

use crate::{
    authorization::{
        Who::{Lister, Own},
        World,
    },
    harness::{
        apiserver::ApiServer,
        kubefan::Kubefan,
        record::{Watch, connect},
        rig::target,
        servers::is_cached,
        simulated::Simulated,
        tests, wait,
    },
};

tests! {
    apiserver: one_caller_is_denied_and_no_other;
    local: watches_follow_a_resource_to_the_apiserver_and_back_and_lose_nothing,
        a_file_that_is_wrong_changes_nothing_and_says_why, resources_and_limits_change_while_kubefan_runs;
}

const HEAD: &str = "apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\n";
const SUCCESSFUL: &str = "kubefan_config_last_reload_successful";
const PASSTHROUGH: &str = "modes: [{resources: [pods], mode: Passthrough}]\n";

/// A configuration file.
struct File {
    path: PathBuf,
    base: &'static str,
}

impl File {
    fn new(dir: &tempfile::TempDir, base: &'static str) -> File {
        let file = File { path: dir.path().join("kubefan.yaml"), base };
        file.write("");
        file
    }

    fn write(&self, rest: &str) {
        fs::write(&self.path, format!("{HEAD}{}{rest}", self.base)).unwrap();
    }

    fn flag(&self) -> String {
        format!("--config={}", self.path.display())
    }

    /// Changes the file, and waits until the change is in force.
    async fn apply(&self, kubefan: &Kubefan, rest: &str) {
        let line = "kubefan_config_reloads_total{result=\"success\"}";
        let before = kubefan.metric(line).await.unwrap();
        self.write(rest);
        kubefan.metric_becomes(line, before + 1.0).await;
        assert_eq!(kubefan.metric(SUCCESSFUL).await, Some(1.0));
    }
}

/// An informer without bookmarks over HTTP: it watches from its last version on, again and again,
/// and counts the watches.
struct Informer {
    url: String,
    version: u64,
    names: Vec<String>,
    open: Option<(Response, Vec<u8>)>,
    /// Whether the watches were answered from the cache.
    from_cache: Vec<bool>,
}

impl Informer {
    async fn start(kubefan: &Kubefan) -> Informer {
        let url = format!("http://{}/api/v1/pods", kubefan.grpc_addr);
        let list = reqwest::get(format!("{url}?resourceVersion=0")).await.unwrap().bytes().await.unwrap();
        let list: Value = serde_json::from_slice(&list).unwrap();
        let version = list["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
        Informer { url, version, names: Vec::new(), open: None, from_cache: Vec::new() }
    }

    /// Reads until the object with this name has come.
    async fn until(&mut self, name: &str) {
        while self.names.last().is_none_or(|last| last != name) {
            let (response, rest) = match &mut self.open {
                Some(open) => open,
                None => {
                    let url = format!("{}?watch=true&resourceVersion={}", self.url, self.version);
                    let response = reqwest::get(url).await.unwrap();
                    assert_eq!(response.status(), StatusCode::OK);
                    self.from_cache.push(is_cached(&response));
                    self.open.insert((response, Vec::new()))
                }
            };
            let Some(chunk) = response.chunk().await.expect("a watch ends cleanly") else {
                assert!(rest.is_empty(), "an event is whole");
                self.open = None;
                continue;
            };
            rest.extend_from_slice(&chunk);
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                let event: Value = serde_json::from_slice(&line).unwrap();
                assert_ne!(event["type"], "ERROR", "{event}");
                let metadata = &event["object"]["metadata"];
                self.version = metadata["resourceVersion"].as_str().unwrap().parse().unwrap();
                if event["type"] != "BOOKMARK" {
                    self.names.push(metadata["name"].as_str().unwrap().to_owned());
                }
            }
        }
    }
}

/// The reason that a status carries.
fn reason(status: &tonic::Status) -> String {
    status.get_details_error_info().unwrap_or_else(|| panic!("{status}")).reason
}

/// The status with which a watch ends.
async fn end_of(watch: &mut Watch) -> tonic::Status {
    loop {
        match watch.step().await {
            Ok(message) => assert!(message.is_some(), "a stream ends with a reason"),
            Err(ended) => return ended,
        }
    }
}

async fn watches_follow_a_resource_to_the_apiserver_and_back_and_lose_nothing() {
    let simulated = Simulated::start().await;
    let file = File::new(&simulated.dir, "resources: [pods]\n");
    let kubefan = simulated.kubefan(&[&file.flag()]).await;
    let mut informer = Informer::start(&kubefan).await;
    let mut grpc = connect(kubefan.grpc_addr).await;
    let mut watch = Watch::start(&mut grpc, target("pods"), "").await.unwrap();
    watch.until(simulated.create("one")).await;
    informer.until("one").await;

    file.apply(&kubefan, PASSTHROUGH).await;
    let ended = end_of(&mut watch).await;
    assert_eq!((ended.code(), reason(&ended).as_str()), (Code::Unavailable, "SWITCHED"), "{ended}");
    let refused = Watch::start(&mut grpc, target("pods"), &watch.resume_version).await.err().unwrap();
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::Unavailable, "PASSTHROUGH"), "{refused}");
    assert!(refused.message().contains("mode Passthrough, under modes") && refused.get_details_retry_info().is_some());
    simulated.create("two");
    informer.until("two").await;
    assert_eq!(informer.from_cache, [true, false], "the same informer, straight on");
    let list = reqwest::get(format!("http://{}/api/v1/pods?resourceVersion=0", kubefan.grpc_addr)).await.unwrap();
    assert!(!is_cached(&list), "lists are forwarded too");

    file.apply(&kubefan, "").await;
    let last = simulated.create("three");
    informer.until("three").await;
    // The forwarded watch may have brought it before it ended.
    simulated.create("four");
    informer.until("four").await;
    assert_eq!(informer.names, ["one", "two", "three", "four"], "nothing is lost, and nothing comes twice");
    let mut resumed = Watch::start(&mut grpc, target("pods"), &watch.resume_version).await.unwrap();
    resumed.until(last).await;
    let cached = || async { (kubefan.metric("kubefan_passthrough_requests").await == Some(0.0)).then_some(()) };
    wait::until("the forwarded watch to end", wait::SOON, cached).await;
}

async fn a_file_that_is_wrong_changes_nothing_and_says_why() {
    let simulated = Simulated::start().await;
    let file = File::new(&simulated.dir, "resources: [pods]\n");
    let kubefan = simulated.kubefan(&[&file.flag(), "--max-staleness=9m"]).await;
    assert_eq!(kubefan.metric(SUCCESSFUL).await, Some(1.0));
    let started = kubefan.metric("kubefan_config_last_reload_success_timestamp_seconds").await.unwrap();
    assert!(started > 1.7e9, "{started}");
    let mut failures = 0.0;
    for (rest, expected) in [
        ("mods: []\n", "kubefan.yaml: line 4: unknown key \"mods\"; did you mean \"modes\"?"),
        (
            &format!("{PASSTHROUGH}context: other\n"),
            "context cannot be changed without a restart; nothing of the file is applied",
        ),
    ] {
        file.write(rest);
        kubefan.process.hang_up();
        failures += 1.0;
        wait::until(expected, wait::SOON, || async { kubefan.process.log().contains(expected).then_some(()) }).await;
        kubefan.metric_becomes(SUCCESSFUL, 0.0).await;
        let list = reqwest::get(format!("http://{}/api/v1/pods?resourceVersion=0", kubefan.grpc_addr)).await.unwrap();
        assert!(is_cached(&list), "{rest}");
    }
    assert!(kubefan.metric("kubefan_config_reloads_total{result=\"failure\"}").await >= Some(failures));
    // A flag wins over the file, so this is no change.
    file.apply(&kubefan, "maxStaleness: 7m\n").await;
    kubefan.process.hang_up();
    let same = || async { kubefan.process.log().contains("read again; it has not changed").then_some(()) };
    wait::until("an answer to SIGHUP", wait::SOON, same).await;
    file.apply(&kubefan, PASSTHROUGH).await;
    assert!(kubefan.process.log().contains("modes"), "the log names what has changed");
}

async fn resources_and_limits_change_while_kubefan_runs() {
    let simulated = Simulated::start().await;
    let file = File::new(&simulated.dir, "onDemand: false\naccess: local-cache-only\n");
    let pods = "resources: [pods]\n";
    file.write(pods);
    let kubefan = simulated.kubefan(&[&file.flag()]).await;
    let mut grpc = connect(kubefan.grpc_addr).await;
    let mut watch = Watch::start(&mut grpc, target("pods"), "").await.unwrap();
    watch.until(simulated.create("one")).await;
    let code = async |resource| {
        let mut grpc = connect(kubefan.grpc_addr).await;
        match Watch::start(&mut grpc, target(resource), "").await {
            Ok(_) => Code::Ok,
            Err(status) => status.code(),
        }
    };
    assert_eq!(code("nodes").await, Code::FailedPrecondition);

    file.apply(&kubefan, "resources: [pods, nodes]\n").await;
    let cached = || async { (code("nodes").await == Code::Ok).then_some(()) };
    wait::until("nodes to be cached", wait::SOON, cached).await;
    kubefan.ready().await;
    watch.until(simulated.create("two")).await;
    assert_eq!(simulated.sim.stats().watches_started, 2, "pods are watched as before");

    file.apply(&kubefan, "resources: [nodes]\n").await;
    let ended = end_of(&mut watch).await;
    assert_eq!((ended.code(), reason(&ended).as_str()), (Code::Unavailable, "STOPPED"), "{ended}");
    assert!(ended.message().contains("pods is no longer cached"), "{ended}");
    assert_eq!(code("pods").await, Code::FailedPrecondition);
    let (_, ready) = kubefan.admin("/readyz?verbose").await.unwrap();
    assert!(ready.contains("nodes synced") && !ready.contains("pods"), "{ready}");

    file.apply(&kubefan, "resources: [pods, nodes]\nlimits: {subscribersMax: 1}\n").await;
    let held = wait::until("pods to be cached again", wait::SOON, || {
        let mut grpc = grpc.clone();
        async move { Watch::start(&mut grpc, target("pods"), "").await.ok() }
    })
    .await;
    assert_eq!(code("nodes").await, Code::ResourceExhausted);
    file.apply(&kubefan, "resources: [pods, nodes]\nlimits: {subscribersMax: 9}\n").await;
    assert_eq!(code("nodes").await, Code::Ok);
    drop(held);
}

async fn one_caller_is_denied_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let file = File::new(&dir, "");
    let world = World::start(ApiServer::shared().await, &[&file.flag()]).await;
    let own = Identity::service_account_name(&world.own, "own");
    let path = format!("/api/v1/namespaces/{}/configmaps", world.own);
    let ask = async |who, query: &str| {
        let response = world.client(who).get(world.url(&format!("{path}{query}"))).send().await.unwrap();
        (response.status(), response.text().await.unwrap())
    };
    let url = world.url(&format!("{path}?watch=true&resourceVersion=0"));
    let mut open = world.client(Own).get(&url).send().await.unwrap();
    let mut other = world.client(Lister).get(&url).send().await.unwrap();
    assert!(open.chunk().await.unwrap().is_some() && other.chunk().await.unwrap().is_some());
    let rule = format!("modes:\n  - resources: [configmaps]\n    users: [\"{own}\"]\n    mode: Deny\n");
    file.apply(&world.kubefan, &rule).await;
    while open.chunk().await.expect("it ends cleanly").is_some() {}
    // From the cache, by a proof, one object, and requests that would be forwarded in any case.
    for query in ["?resourceVersion=0", "", "?limit=1", "/one", "?watch=true&timeoutSeconds=1", "?labelSelector=%3D%3D"]
    {
        let (status, text) = ask(Own, query).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{query}: {text}");
        assert!(text.contains("mode Deny, under modes"), "{query}: {text}");
        let (status, text) = ask(Lister, query.split('/').next().unwrap_or_default()).await;
        assert!(!text.contains("mode Deny"), "{query}: {status} {text}");
    }
    let pods = format!("/api/v1/namespaces/{}/pods?resourceVersion=0", world.own);
    let others = world.client(Own).get(world.url(&pods)).send().await.unwrap();
    assert_eq!(others.status(), StatusCode::OK, "another resource");
    file.apply(&world.kubefan, "").await;
    assert_eq!(ask(Own, "?resourceVersion=0").await.0, StatusCode::OK);
    drop(other);
}
