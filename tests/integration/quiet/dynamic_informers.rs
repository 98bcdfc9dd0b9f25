//! A program with a dynamic informer for each of many custom resources, behind a kubefan with its
//! default settings. It asks for more resources than are cached on demand.

use std::{process::Command, time::Duration};

use futures::future::join_all;
use serde_json::json;

use super::{
    Table, client_go, counted, directory, json_lines, last_lines, reached, seconds, through,
    upstream_requests::{KUBEFAN, UpstreamRequests},
};
use crate::{
    clients::Both,
    harness::{apiserver::ApiServer, audit::Audit, process::Process, tests, wait},
};

tests! {
    apiserver full: dynamic_informers_of_more_resources_than_are_cached_sync;
}

const GROUP: &str = "quiet.example.com";
const RESOURCES: usize = 20;
const OBJECTS: usize = 3;
/// Seconds on an idle machine.
const SYNCED_AT_MOST: Duration = Duration::from_secs(120);

async fn dynamic_informers_of_more_resources_than_are_cached_sync() {
    let program = client_go();
    let audit = Audit::of_reads();
    let api = ApiServer::start(audit.options()).await;
    let plurals: Vec<String> = (0..RESOURCES).map(|number| format!("gadget{number}s")).collect();
    let create = |number: usize| {
        let (api, plural) = (&api, &plurals[number]);
        async move { api.create_crd(GROUP, plural, &format!("Gadget{number}")).await }
    };
    join_all((0..RESOURCES).map(create)).await;
    for (number, plural) in plurals.iter().enumerate() {
        for name in 0..OBJECTS {
            let object = json!({
                "apiVersion": format!("{GROUP}/v1"), "kind": format!("Gadget{number}"), "metadata": { "name": format!("o-{name}") },
            });
            api.create(&path(plural), &object).await;
        }
    }
    let both = Both::start(api, &[]).await;
    let directory = directory();
    let names: Vec<String> = plurals.iter().map(|plural| format!("{plural}.v1.{GROUP}")).collect();
    let mut table = Table::new(
        format!("{RESOURCES} dynamic informers (JSON) of custom resources"),
        &["through", "synced", "all synced after s", "a change has reached all after s", "LIST", "WATCH"],
    );
    let mut synced = Vec::new();
    for server in &both.servers {
        let at = audit.requests("").len();
        let agent = format!("{}-dynamic", server.name);
        let mut command = Command::new(&program);
        command.arg("--kubeconfig").arg(&server.kubeconfig).args(["--agent", &agent, "--marks"]);
        command.args(["--resources", &names.join(",")]);
        let process = Process::spawn("client-go", &mut command, &directory.path().join(&agent));
        let all = wait::try_until(SYNCED_AT_MOST, || {
            let all = json_lines(&process).iter().find(|line| line["synced"] == json!(RESOURCES)).cloned();
            async move { all?["seconds"].as_f64() }
        })
        .await;
        let count = json_lines(&process).iter().filter_map(|line| line["synced"].as_u64()).max().unwrap_or_default();
        let mark = synced.len() as u64 + 1;
        let start = tokio::time::Instant::now();
        for plural in &plurals {
            let patch = json!({ "metadata": { "labels": { "mark": mark.to_string() } } });
            both.api.patch(&format!("{}/o-0", path(plural)), &patch).await;
        }
        let changed = match all {
            Some(_) => reached(&process, mark, SYNCED_AT_MOST).await,
            None => None,
        };
        let agents: &[&str] = if server.name == "kubefan" { &[KUBEFAN, &agent] } else { &[&agent] };
        let upstream = UpstreamRequests::of(&audit.requests("")[at..], agents);
        table.row(&[
            &through(server),
            &format!("{count} of {RESOURCES}"),
            &seconds(all, SYNCED_AT_MOST),
            &seconds(changed.map(|at| (at - start).as_secs_f64()), SYNCED_AT_MOST),
            &upstream.lists,
            &upstream.watches,
        ]);
        synced.push((server.name, count, changed.is_some(), last_lines(&process)));
    }
    println!("{table}");
    println!("{}", counted(&both, "kubefan_requests_total").await);
    for (server, count, changed, log) in synced {
        assert!(count == RESOURCES as u64 && changed, "{server}: {count} informers have synced: {log}");
    }
}

fn path(plural: &str) -> String {
    format!("/apis/{GROUP}/v1/namespaces/default/{plural}")
}
