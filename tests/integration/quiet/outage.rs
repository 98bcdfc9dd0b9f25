//! How an outage of the apiserver ends: the time from its readiness until every cache is live
//! again, and what the caches ask for. Informers that watch the apiserver directly and others
//! behind kubefan go through the same outage.

use std::{path::Path, process::Command, time::Duration};

use tokio::time::{Instant, sleep};

use super::{
    Table, client_go,
    cluster::{self, KINDS, Kind},
    counted, directory, last_lines, reached, seconds,
    upstream_requests::{KUBEFAN, UpstreamRequests, states_by_path},
};
use crate::{
    clients::{Both, Server},
    harness::{apiserver::ApiServer, audit::Audit, is_full_scale, objects::version_of, process::Process, tests, wait},
};

tests! {
    apiserver full: caches_are_live_after_an_outage;
    apiserver large: caches_are_live_after_an_outage_of_minutes;
}

/// Informers back off for up to 30 s, and may do so several times.
const LIVE_AT_MOST: Duration = Duration::from_secs(150);
/// The first mark; the second one is written after the outage.
const BEFORE: u64 = 1;
const AFTER: u64 = 2;

async fn caches_are_live_after_an_outage() {
    match is_full_scale() {
        true => outage(10_000, Duration::from_secs(40)).await,
        false => outage(300, Duration::from_secs(1)).await,
    }
}

async fn caches_are_live_after_an_outage_of_minutes() {
    outage(10_000, Duration::from_secs(300)).await;
}

async fn outage(objects: usize, length: Duration) {
    let program = client_go();
    let audit = Audit::of_reads();
    let api = ApiServer::start(audit.options()).await;
    let created = cluster::populate(&api, objects).await;
    // Other resources change, so the apiserver starts again at a later version than the caches'.
    let _leases = cluster::write_leases(&api, 10).await;
    let both = Both::start(api, &["--resource", &cluster::resource_flag(&KINDS)]).await;
    let directory = directory();
    let informers = both.servers.each_ref().map(|server| follow(&program, server, directory.path()));
    cluster::mark(&both.api, &KINDS, BEFORE).await;
    for (process, server) in informers.iter().zip(&both.servers) {
        let reached = reached(process, BEFORE, wait::SOON * 4).await;
        assert!(reached.is_some(), "{} has not synced: {}", server.name, last_lines(process));
    }
    let at = audit.requests("").len();
    both.api.kill9();
    let down = Instant::now();
    sleep(length).await;
    both.api.restart().await;
    let ready = Instant::now();
    let away = (ready - down).as_secs_f64();
    let versions = cluster::mark(&both.api, &KINDS, AFTER).await;
    let since = |at: Option<Instant>| at.map(|at| at.duration_since(ready).as_secs_f64());
    let (caches, direct, through) = tokio::join!(
        caches_live(&both, &versions),
        reached(&informers[0], AFTER, LIVE_AT_MOST),
        reached(&informers[1], AFTER, LIVE_AT_MOST)
    );
    let requests = audit.requests("").split_off(at);
    let mut table = Table::new(
        format!("Outage of {away:.0} s (the apiserver's start included), {} resources, {created} objects", KINDS.len()),
        &["what", "all live s after readiness", "LIST", "WATCH", "whole states", "most for one resource"],
    );
    let rows: [(&str, Option<Instant>, &[&str]); 3] = [
        ("kubefan's caches", caches, &[KUBEFAN]),
        ("28 informers through kubefan (passed on)", through, &["kubefan-marks"]),
        ("28 informers straight", direct, &["direct-marks"]),
    ];
    for (what, live, agents) in rows {
        let counts = UpstreamRequests::of(&requests, agents);
        let most = states_by_path(&requests, agents).into_values().max().unwrap_or_default();
        let live = seconds(since(live), LIVE_AT_MOST);
        table.row(&[&what, &live, &counts.lists, &counts.watches, &counts.states, &most]);
    }
    println!("{table}");
    println!("{}", counted(&both, "kubefan_relists_total").await);
    for (what, live) in [("kubefan's caches", caches), ("informers through kubefan", through), ("informers", direct)] {
        assert!(live.is_some(), "{what} are not live after {} s", LIVE_AT_MOST.as_secs());
    }
    for kind in &KINDS {
        assert_same(&both, kind).await;
    }
}

/// Starts informers of all kinds.
fn follow(program: &Path, server: &Server, directory: &Path) -> Process {
    let agent = format!("{}-marks", server.name);
    let names: Vec<String> = KINDS.iter().map(Kind::versioned_name).collect();
    let mut command = Command::new(program);
    command.arg("--kubeconfig").arg(&server.kubeconfig).args(["--agent", &agent, "--marks", "--seconds", "1800"]);
    command.args(["--resources", &names.join(",")]);
    Process::spawn("client-go", &mut command, &directory.join(&agent))
}

/// Waits until the cache of each kind has reached its version. Returns when.
async fn caches_live(both: &Both, versions: &[u64]) -> Option<Instant> {
    wait::try_until(LIVE_AT_MOST, || async {
        let (_, lines) = both.metric("kubefan_resource_version").await;
        let reached = |(kind, version): (&Kind, &u64)| {
            let labels = [
                format!(r#"group="{}""#, kind.group),
                format!(r#"resource="{}""#, kind.resource),
                r#"media="json""#.to_owned(),
            ];
            let line = lines.lines().find(|line| labels.iter().all(|label| line.contains(label.as_str())));
            let value = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
            value.is_some_and(|value| value >= *version as f64)
        };
        KINDS.iter().zip(versions).all(reached).then(Instant::now)
    })
    .await
}

/// Waits until a cache has the apiserver's objects.
async fn assert_same(both: &Both, kind: &Kind) {
    let names = |list: &serde_json::Value| {
        let items = list["items"].as_array().cloned().unwrap_or_default();
        let name = |item: &serde_json::Value| {
            (item["metadata"]["namespace"].to_string(), item["metadata"]["name"].to_string(), version_of(item))
        };
        items.iter().map(name).collect::<Vec<_>>()
    };
    let path = format!("{}?resourceVersion=0", kind.path());
    // Leases change all the time, so the two lists are of different moments.
    if kind.resource == "leases" {
        return;
    }
    let lists = async || {
        let expected = names(&both.api.get_json(&kind.path()).await);
        let response = both.api.client().get(format!("https://{}{path}", both.kubefan.grpc_addr)).send().await;
        let text = response.expect("kubefan answers").text().await.expect("a list is text");
        (names(&serde_json::from_str(&text).expect("a list is JSON")), expected)
    };
    // The apiserver writes objects of its own after its start.
    let equal = async || {
        let (cached, expected) = lists().await;
        (cached == expected).then_some(())
    };
    if wait::try_until(wait::SOON, equal).await.is_none() {
        let (cached, expected) = lists().await;
        assert_eq!(cached, expected, "{}", kind.resource);
    }
}
