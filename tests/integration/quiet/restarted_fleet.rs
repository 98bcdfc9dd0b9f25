//! An apiserver that restarts in front of many HTTP informers of client-go: how soon all of them
//! have what was written after the restart, and what they cost the apiserver.

use std::{path::Path, process::Command, time::Duration};

use kubefan_sim::workload::{Workload, WorkloadOptions};
use serde_json::json;
use tokio::time::Instant;

use super::{
    Table, cluster, counted, directory, last_lines, seconds, through,
    upstream_requests::{KUBEFAN, UpstreamRequests},
};
use crate::{
    clients::Both,
    harness::{
        apiserver::ApiServer, audit::Audit, is_full_scale, load, objects::pod, process::Process, tests, tools, wait,
    },
};

tests! {
    apiserver full: informers_settle_after_a_restart_of_the_apiserver;
}

const DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fleet");
const MARKER: &str = "/api/v1/namespaces/default/pods/marker";
/// The program's name, with which its `User-Agent` starts.
const AGENT: &str = "fleet/";
/// Each informer gets its own copy of all pods from the apiserver.
const SYNCED_AT_MOST: Duration = Duration::from_secs(600);
const SETTLED_AT_MOST: Duration = Duration::from_secs(240);

struct Scale {
    pods: usize,
    informers: usize,
}

async fn informers_settle_after_a_restart_of_the_apiserver() {
    let scale = match is_full_scale() {
        true => Scale { pods: 100, informers: 1_000 },
        false => Scale { pods: 30, informers: 20 },
    };
    let program = tools::go_program("fleet", Path::new(DIR));
    let audit = Audit::of_reads();
    let api = ApiServer::start(audit.options()).await;
    let mut workload = Workload::new(7, WorkloadOptions { objects: scale.pods, ..WorkloadOptions::default() });
    load::populate(&api, &mut workload).await;
    api.create("/api/v1/namespaces/default/pods", &pod("marker")).await;
    // Without writes elsewhere, the pods' last version would be the cluster's, and every watch
    // could resume from it after the restart.
    let _leases = cluster::write_leases(&api, 10).await;
    let both = Both::start(api, &["--resource", "pods"]).await;
    let directory = directory();
    let mut table = Table::new(
        format!("The apiserver restarts in front of {} informers of {} pods", scale.informers, scale.pods),
        &[
            "through",
            "first sync s",
            "apiserver away s",
            "settled s after the kill",
            "s after readiness",
            "LIST",
            "WATCH",
            "whole states",
        ],
    );
    let mut unsettled = Vec::new();
    for (number, server) in both.servers.iter().enumerate() {
        let (before, after) = (2 * number as u64 + 1, 2 * number as u64 + 2);
        let mut command = Command::new(&program);
        command.arg("--kubeconfig").arg(&server.kubeconfig).args(["--informers", &scale.informers.to_string()]);
        let start = Instant::now();
        let process = Process::spawn("the fleet", &mut command, &directory.path().join(server.name));
        mark(&both, before).await;
        let synced = have(&process, before, SYNCED_AT_MOST).await;
        let synced = synced.unwrap_or_else(|| panic!("{} has not synced: {}", server.name, last_lines(&process)));
        let at = audit.requests("").len();
        let killed = Instant::now();
        both.api.kill9();
        both.api.restart().await;
        let ready = Instant::now();
        mark(&both, after).await;
        let settled = have(&process, after, SETTLED_AT_MOST).await;
        let agents: &[&str] = if server.name == "kubefan" { &[KUBEFAN, AGENT] } else { &[AGENT] };
        let upstream = UpstreamRequests::of(&audit.requests("")[at..], agents);
        table.row(&[
            &through(server),
            &format!("{:.2}", (synced - start).as_secs_f64()),
            &format!("{:.2}", (ready - killed).as_secs_f64()),
            &seconds(settled.map(|at| (at - killed).as_secs_f64()), SETTLED_AT_MOST),
            &seconds(settled.map(|at| (at - ready).as_secs_f64()), SETTLED_AT_MOST),
            &upstream.lists,
            &upstream.watches,
            &upstream.states,
        ]);
        if settled.is_none() {
            unsettled.push(format!("{}: {}", server.name, last_lines(&process)));
        }
    }
    println!("{table}");
    println!("{}", counted(&both, "kubefan_subscriptions_finished_total").await);
    println!("{}", counted(&both, "kubefan_relists_total").await);
    assert!(unsettled.is_empty(), "{unsettled:?}");
}

async fn mark(both: &Both, mark: u64) {
    both.api.patch(MARKER, &json!({ "metadata": { "labels": { "mark": mark.to_string() } } })).await;
}

/// Waits until all informers have a mark. Returns when; `None` if they do not get it.
async fn have(process: &Process, mark: u64, at_most: Duration) -> Option<Instant> {
    wait::try_until(at_most, || {
        let log = process.log();
        async move {
            let mut reached = log.lines().filter_map(|line| line.strip_prefix("reached ")?.parse::<u64>().ok());
            reached.any(|reached| reached >= mark).then(Instant::now)
        }
    })
    .await
}
