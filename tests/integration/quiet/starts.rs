//! How long an informer takes to start, and what its starts cost the apiserver. A program that
//! starts many short-lived informers, such as a suite of tests, waits for each of them.

use std::{path::Path, process::Command};

use super::{
    Table, client_go,
    cluster::{self, Background, Kind, kind},
    counted, directory, json_lines, through,
    upstream_requests::{KUBEFAN, UpstreamRequests, objects_sent},
};
use crate::{
    clients::{Both, Server},
    harness::{
        apiserver::ApiServer,
        audit::{Audit, Request},
        is_full_scale,
        process::Process,
        tests, wait,
    },
};

tests! {
    apiserver full: an_informer_starts_with_all_objects_of_a_quiet_and_of_a_busy_resource;
}

/// Writes per second to leases always, and to the resource itself if it is busy.
const WRITES_PER_SECOND: u32 = 10;
const DEFAULT: &[&str] = &[];
const JSON: &[&str] = &["--content-type", "application/json"];

struct Scale {
    small: usize,
    large: usize,
    starts: usize,
    encodings: &'static [(&'static str, &'static [&'static str])],
}

fn scale() -> Scale {
    match is_full_scale() {
        true => Scale { small: 10, large: 1_000, starts: 8, encodings: &[("default", DEFAULT), ("JSON", JSON)] },
        false => Scale { small: 10, large: 100, starts: 2, encodings: &[("default", DEFAULT)] },
    }
}

async fn an_informer_starts_with_all_objects_of_a_quiet_and_of_a_busy_resource() {
    let scale = scale();
    let program = client_go();
    let audit = Audit::of_reads();
    let api = ApiServer::start(audit.options()).await;
    let sizes = [("small", kind("services"), scale.small), ("large", kind("configmaps"), scale.large)];
    for (_, kind, count) in &sizes {
        // The apiserver has objects of its own.
        let existing = objects(&api, kind).await;
        cluster::create(&api, kind, 0..count.saturating_sub(existing)).await;
    }
    let _leases = cluster::write_leases(&api, WRITES_PER_SECOND).await;
    let kinds = sizes.map(|(_, kind, _)| kind);
    let both = Both::start(api, &["--resource", &cluster::resource_flag(&kinds)]).await;
    let directory = directory();
    let mut table = Table::new(
        format!("Informer starts (client-go, {} each; leases written {WRITES_PER_SECOND}/s)", scale.starts),
        &[
            "resource",
            "encoding",
            "through",
            "first s",
            "median s",
            "slowest s",
            "LIST",
            "of them versions only",
            "WATCH",
            "objects sent by the apiserver",
        ],
    );
    for (size, kind, _) in &sizes {
        for busy in [false, true] {
            let written = kind.path_in("default");
            let _writes: Option<Background> = busy
                .then(|| cluster::write(&both.api, WRITES_PER_SECOND, move |tick| format!("{written}/o-{}", tick % 5)));
            let resource = format!("{size}, {}, {}", kind.resource, if busy { "busy" } else { "quiet" });
            for (encoding, flags) in scale.encodings {
                for server in &both.servers {
                    let at = audit.requests("").len();
                    let sent = objects_sent(&both.api, Some(kind.resource)).await;
                    let agent = format!("{}-starts", server.name);
                    let log = directory.path().join(format!("{agent} {resource} {encoding}"));
                    let starts = run(&program, server, &agent, kind, scale.starts, flags, &log).await;
                    let sent = objects_sent(&both.api, Some(kind.resource)).await - sent;
                    assert_eq!(starts.seconds.len(), scale.starts);
                    assert!(starts.objects.iter().all(|count| *count == objects_now(&starts)), "{:?}", starts.objects);
                    assert_eq!(objects_now(&starts), objects(&both.api, kind).await, "{resource}");
                    let own =
                        |request: &&Request| request.uri.starts_with(&kind.path()) || is_version_lookup(request, kind);
                    let requests: Vec<Request> = audit.requests("").split_off(at).iter().filter(own).cloned().collect();
                    let agents: &[&str] = if server.name == "kubefan" { &[KUBEFAN, &agent] } else { &[&agent] };
                    let upstream = UpstreamRequests::of(&requests, agents);
                    table.row(&[
                        &resource,
                        encoding,
                        &through(server),
                        &format!("{:.3}", starts.seconds[0]),
                        &format!("{:.3}", starts.median()),
                        &format!("{:.3}", starts.seconds.iter().fold(0.0_f64, |a, b| a.max(*b))),
                        &upstream.lists,
                        &upstream.version_lookups,
                        &upstream.watches,
                        &sent,
                    ]);
                }
            }
        }
    }
    println!("{table}");
    println!("{}", counted(&both, "kubefan_subscriptions_started_total").await);
    println!("{}", counted(&both, "kubefan_proofs_total").await);
}

/// Whether kubefan asks for the cluster's version in the namespace `default`.
fn is_version_lookup(request: &Request, kind: &Kind) -> bool {
    request.uri.starts_with(&kind.path_in("default")) && request.verb == "list"
}

async fn objects(api: &ApiServer, kind: &Kind) -> usize {
    api.get_json(&kind.path()).await["items"].as_array().map_or(0, Vec::len)
}

struct Starts {
    seconds: Vec<f64>,
    objects: Vec<usize>,
}

impl Starts {
    fn median(&self) -> f64 {
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        if sorted.len().is_multiple_of(2) { (sorted[middle - 1] + sorted[middle]) / 2.0 } else { sorted[middle] }
    }
}

fn objects_now(starts: &Starts) -> usize {
    starts.objects.last().copied().unwrap_or_default()
}

/// Runs the program until it has started its informers.
async fn run(
    program: &Path,
    server: &Server,
    agent: &str,
    kind: &Kind,
    count: usize,
    flags: &[&str],
    log: &Path,
) -> Starts {
    let mut command = Command::new(program);
    command.arg("--kubeconfig").arg(&server.kubeconfig).args(["--agent", agent, "--starts", &count.to_string()]);
    command.args(["--resources", &kind.full_name()]).args(flags);
    let mut process = Process::spawn("client-go", &mut command, log);
    let ended = process.ended(wait::SOON * 4).await;
    assert!(ended.success(), "{}: {ended}: {}", server.name, process.log());
    let lines = json_lines(&process);
    Starts {
        seconds: lines.iter().filter_map(|line| line["start_seconds"].as_f64()).collect(),
        objects: lines.iter().filter_map(|line| line["objects"].as_u64()).map(|count| count as usize).collect(),
    }
}
