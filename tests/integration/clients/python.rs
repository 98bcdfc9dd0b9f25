//! The Python client: lists, pages, errors, and its `Watch` from a version, by field and by label.

use std::{path::Path, process::Command};

use serde_json::{Value, json};

use super::{Both, SMALL_LISTS, Server};
use crate::harness::{apiserver::ApiServer, objects::pod, process::Process, tests, tools, wait};

tests! {
    python slow_programs: the_python_client_sees_the_same_through_kubefan;
}

const DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients");

async fn the_python_client_sees_the_same_through_kubefan() {
    let python = tools::python("clients-python", &Path::new(DIR).join("requirements.txt"));
    let both = Both::start(ApiServer::shared().await, &["--resource", "pods", SMALL_LISTS]).await;
    let api = &both.api;
    let namespace = api.namespace("python").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    let on_node = |name: &str, node: &str, stage: &str| {
        let mut pod = pod(name);
        pod["spec"]["nodeName"] = json!(node);
        pod["metadata"]["labels"]["stage"] = json!(stage);
        pod
    };
    for (name, node, stage) in [("first", "node-1", "on"), ("other", "node-2", "off"), ("third", "node-1", "off")] {
        api.create(&pods, &on_node(name, node, stage)).await;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let spawn = |server: &Server| {
        let mut command = Command::new(&python);
        command.arg(Path::new(DIR).join("watch.py"));
        match server.name {
            "direct" => command.arg(&server.kubeconfig),
            // As docs/attach.md describes for a pod: two variables, the token, and kubefan's CA.
            _ => {
                let account = dir.path().join("serviceaccount");
                std::fs::create_dir(&account).unwrap();
                std::fs::copy(api.ca_pem_path(), account.join("ca.crt")).unwrap();
                std::fs::write(account.join("token"), api.admin_token()).unwrap();
                let address = both.kubefan.grpc_addr;
                command.env("KUBERNETES_SERVICE_HOST", address.ip().to_string());
                command.env("KUBERNETES_SERVICE_PORT", address.port().to_string()).arg(account)
            }
        };
        command.args([&namespace, "last"]);
        Process::spawn("the Python client", &mut command, &dir.path().join(server.name))
    };
    let mut processes = both.servers.each_ref().map(spawn);
    for process in &mut processes {
        wait::until("the Python client to list", wait::SOON * 2, || {
            let log = process.log();
            let ended = process.exited();
            assert!(ended.is_none(), "{ended:?}: {log}");
            async move { log.contains("listed").then_some(()) }
        })
        .await;
    }
    let label = |stage: Value| json!({ "metadata": { "labels": { "stage": stage } } });
    api.create(&pods, &on_node("new", "node-1", "on")).await;
    api.patch(&format!("{pods}/third"), &label(json!("on"))).await;
    api.patch(&format!("{pods}/first"), &label(Value::Null)).await;
    api.patch(&format!("{pods}/other/status"), &json!({ "status": { "phase": "Running" } })).await;
    api.delete(&format!("{pods}/new")).await;
    api.create(&pods, &on_node("new", "node-2", "off")).await;
    api.create(&pods, &on_node("last", "node-1", "on")).await;
    let mut seen = Vec::new();
    for process in &mut processes {
        let ended = process.ended(wait::SOON * 4).await;
        assert!(ended.success(), "{ended}: {}", process.log());
        let log = process.log();
        let json = log.lines().find(|line| line.starts_with('{')).expect("the report is printed");
        seen.push(serde_json::from_str::<Value>(json).unwrap());
    }
    both.assert_lists_were_cached().await;
    for part in ["lists", "watches", "errors"] {
        let names: Vec<_> = seen[0][part].as_object().unwrap().keys().collect();
        for name in names {
            assert_eq!(seen[0][part][name], seen[1][part][name], "{part}: {name}");
        }
    }
    let kinds = |name: &str| {
        let events = seen[1]["watches"][name].as_array().unwrap().iter();
        events.map(|event| event[0].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    // The deletion of a pod on a node first sets a deletion timestamp.
    assert_eq!(kinds("all"), ["ADDED", "MODIFIED", "MODIFIED", "MODIFIED", "MODIFIED", "DELETED", "ADDED", "ADDED"]);
    assert_eq!(kinds("labels"), ["ADDED", "ADDED", "DELETED", "MODIFIED", "DELETED", "ADDED"]);
}
