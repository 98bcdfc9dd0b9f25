//! The examples in Rust, each against kubefan and a real apiserver, and each across a broken
//! connection.

use std::{
    net::SocketAddr,
    process::{Command, Stdio},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{ChildStdin, ChildStdout},
};

use super::printed;
use crate::harness::{
    apiserver::ApiServer,
    kubefan::Kubefan,
    link::Link,
    objects::pod,
    process::{Process, closed_port},
    tests,
    tools::rust_example,
    wait,
};

tests! {
    apiserver slow_release: the_smallest_example_prints_each_pod_once, the_node_agent_gets_every_state_of_its_node,
        the_address_index_follows_the_pods, the_controller_reconciles_both_resources_and_drains;
    local slow_release: the_examples_say_that_kubefan_is_not_there;
}

/// A running example, and the connection to its kubefan.
struct Example {
    process: Process,
    link: Link,
    _kubefan: Kubefan,
    _dir: tempfile::TempDir,
}

impl Example {
    async fn start(api: &ApiServer, name: &str, args: impl FnOnce(SocketAddr) -> Vec<String>) -> Example {
        let program = rust_example(name);
        let kubefan = Kubefan::start(api, &["--resource", "pods", "--resource", "nodes"]).await;
        let link = Link::to(kubefan.grpc_addr).await;
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let process = Process::spawn_apart("the example", Command::new(program).args(args(link.addr)), dir.path());
        Example { process, link, _kubefan: kubefan, _dir: dir }
    }

    async fn prints(&mut self, start: &str) {
        printed(&mut self.process, start).await;
    }
}

fn pod_on(node: &str, name: &str) -> Value {
    let mut pod = pod(name);
    pod["spec"]["nodeName"] = node.into();
    pod
}

async fn the_smallest_example_prints_each_pod_once() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("example").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    api.create(&pods, &pod("before")).await;
    let mut example = Example::start(&api, "smallest", |server| vec![server.to_string()]).await;
    example.prints(&format!("{namespace}/before")).await;
    api.create(&pods, &pod("during")).await;
    example.prints(&format!("{namespace}/during")).await;
    example.link.cut();
    example.prints("cannot reach kubefan at ").await;
    api.create(&pods, &pod("between")).await;
    example.link.mend();
    example.prints(&format!("{namespace}/between")).await;

    let log = example.process.log();
    for name in ["before", "during", "between"] {
        let key = format!("{namespace}/{name}");
        assert_eq!(log.lines().filter(|line| *line == key).count(), 1, "{log}");
    }
}

async fn the_node_agent_gets_every_state_of_its_node() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("example").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    let node = format!("node-of-{namespace}");
    api.create(&pods, &pod_on(&node, "a")).await;
    api.create(&pods, &pod_on("elsewhere", "x")).await;
    let mut example = Example::start(&api, "node_agent", |server| vec![node.clone(), server.to_string()]).await;
    example.prints(&format!("SET 1 pods, 0 running: {namespace}/a")).await;
    api.create(&pods, &pod_on(&node, "b")).await;
    example.prints(&format!("SET 2 pods, 0 running: {namespace}/a {namespace}/b")).await;
    example.link.cut();
    example.prints("retrying: ").await;
    api.delete(&format!("{pods}/a")).await;
    api.patch(&format!("{pods}/b/status"), &json!({ "status": { "phase": "Running" } })).await;
    example.link.mend();
    example.prints(&format!("SET 1 pods, 1 running: {namespace}/b")).await;
    assert!(!example.process.log().contains(&format!("{namespace}/x")), "{}", example.process.log());
}

/// Asks the example for an address until it gives this answer.
async fn answers(input: &mut ChildStdin, output: &mut Lines<BufReader<ChildStdout>>, ip: &str, expected: &str) {
    let asked = async {
        loop {
            input.write_all(format!("{ip}\n").as_bytes()).await.unwrap();
            let answer = output.next_line().await.unwrap().expect("the example answers");
            if answer == format!("{ip} {expected}") {
                return;
            }
        }
    };
    let answered = tokio::time::timeout(wait::SOON, asked).await;
    answered.unwrap_or_else(|_| panic!("the example does not answer \"{ip} {expected}\""));
}

async fn the_address_index_follows_the_pods() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("example").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    let mut owned = pod("web-5d4f8-x");
    owned["metadata"]["labels"]["pod-template-hash"] = "5d4f8".into();
    owned["metadata"]["ownerReferences"] =
        json!([{ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-5d4f8", "uid": "u" }]);
    api.create(&pods, &owned).await;
    api.create(&pods, &pod("single")).await;
    let address = |name: &str, ip: &str| {
        let status = json!({ "status": { "phase": "Running", "podIP": ip, "podIPs": [{ "ip": ip }] } });
        let path = format!("{pods}/{name}/status");
        let api = &api;
        async move { api.patch(&path, &status).await }
    };
    address("web-5d4f8-x", "198.51.100.7").await;

    let program = rust_example("ip_to_workload");
    let kubefan = Kubefan::start(&api, &["--resource", "pods"]).await;
    let link = Link::to(kubefan.grpc_addr).await;
    let mut command = tokio::process::Command::new(program);
    command
        .args(["--server", &link.addr.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut example = command.kill_on_drop(true).spawn().unwrap();
    let mut input = example.stdin.take().unwrap();
    let mut output = BufReader::new(example.stdout.take().unwrap()).lines();

    let web = format!("Deployment {namespace}/web (pod web-5d4f8-x)");
    let single = format!("Pod {namespace}/single (pod single)");
    answers(&mut input, &mut output, "198.51.100.7", &web).await;
    answers(&mut input, &mut output, "198.51.100.8", "no pod").await;
    address("single", "198.51.100.8").await;
    answers(&mut input, &mut output, "198.51.100.8", &single).await;
    link.cut();
    answers(&mut input, &mut output, "198.51.100.7", &web).await;
    api.delete(&format!("{pods}/web-5d4f8-x")).await;
    link.mend();
    answers(&mut input, &mut output, "198.51.100.7", "no pod").await;
    drop(input);
    let status = tokio::time::timeout(wait::SOON, example.wait()).await.expect("the example ends with its input");
    assert!(status.unwrap().success());

    let mut once = Command::new(rust_example("ip_to_workload"));
    let once = once.args(["--ip", "198.51.100.8", "--server", &kubefan.grpc_addr.to_string()]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&once.stdout), format!("198.51.100.8 {single}\n"));
}

async fn the_controller_reconciles_both_resources_and_drains() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("example").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    let node = format!("node-of-{namespace}");
    api.create(&pods, &pod_on(&node, "a")).await;
    let mut example = Example::start(&api, "controller", |server| vec![server.to_string()]).await;
    example.prints(&format!("retrying {node:?}: 1 pods run on an unknown node")).await;
    api.create("/api/v1/nodes", &json!({ "metadata": { "name": node } })).await;
    example.prints(&format!("{node}: 1 pods")).await;
    api.create(&pods, &pod_on(&node, "b")).await;
    example.prints(&format!("{node}: 2 pods")).await;
    example.link.cut();
    example.prints("pods: cannot reach kubefan at ").await;
    api.delete(&format!("{pods}/a")).await;
    api.patch(&format!("/api/v1/nodes/{node}"), &json!({ "spec": { "unschedulable": true } })).await;
    example.link.mend();
    example.prints(&format!("{node}: 1 pods, cordoned")).await;
    api.delete(&format!("{pods}/b")).await;
    api.delete(&format!("/api/v1/nodes/{node}")).await;
    example.prints(&format!("{node}: gone")).await;

    example.process.terminate();
    let status = example.process.ended(wait::SOON).await;
    let log = example.process.log();
    assert!(status.success() && log.contains("\nstopped\n"), "{status}:\n{log}");
}

async fn the_examples_say_that_kubefan_is_not_there() {
    let (_socket, address) = closed_port();
    let address = address.to_string();
    let expected = format!("cannot reach kubefan at {address}: Connection refused");
    for (name, args) in [
        ("smallest", vec![address.as_str()]),
        ("node_agent", vec!["node", address.as_str()]),
        ("ip_to_workload", vec!["--server", address.as_str()]),
        ("controller", vec![address.as_str()]),
    ] {
        let ended = Command::new(rust_example(name)).args(args).output().unwrap();
        let printed = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(!ended.status.success() && printed.contains(&expected), "{name}: {printed}");
    }
}
