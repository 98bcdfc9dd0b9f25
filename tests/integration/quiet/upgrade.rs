//! An upgrade of the control plane in front of many watches, while objects change: how many watches
//! end and why, and what is asked of the apiserver. At the end every client must have the
//! apiserver's state.
//!
//! At full scale kube-apiserver of the release before is replaced; in the short form the same
//! release is, which ends the same connections but changes no schema.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use tokio::{task::JoinSet, time::sleep};

use self::watchers::{Ends, Phase, Report, Start};
use super::{
    Table,
    cluster::{self, Kind, kind},
    upstream_requests::{APART, KUBEFAN, UpstreamRequests},
};
use crate::harness::{
    apiserver::{ADMIN, ApiServer, Beside},
    assets,
    audit::Audit,
    is_full_scale,
    kubefan::Kubefan,
    link::Link,
    objects::version_of,
    tests, wait,
};

mod watchers;
mod writers;

tests! {
    apiserver full: watches_survive_a_rolling_upgrade;
    apiserver large: watches_survive_an_upgrade_in_place;
}

/// How the old kube-apiserver is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Replacement {
    /// The new one starts beside the old one, gets the new connections, and the old one stops.
    Rolling,
    /// The old one stops before the new one starts.
    InPlace,
}

struct Scale {
    objects: usize,
    /// Watches of each kind of client.
    watches: usize,
    /// Between the switch and the end of the old one.
    drain: Duration,
    /// How long clients are observed after the upgrade. kubefan checks the schema every 30 s.
    observed: Duration,
}

fn scale() -> Scale {
    match is_full_scale() {
        true => Scale { objects: 200, watches: 200, drain: Duration::from_secs(5), observed: Duration::from_secs(240) },
        false => {
            Scale { objects: 20, watches: 20, drain: Duration::from_millis(200), observed: Duration::from_secs(2) }
        }
    }
}

/// The watched resources.
const RESOURCES: [&str; 4] = ["configmaps", "secrets", "services", "deployments"];
/// Writes per second to each of them.
const WRITES_PER_SECOND: u32 = 2;
/// HTTP watches that share a connection.
const WATCHES_PER_CONNECTION: usize = 20;
/// The object that is created last.
const LAST: &str = "last";
const FINISHED_AT_MOST: Duration = Duration::from_secs(120);

async fn watches_survive_a_rolling_upgrade() {
    upgrade(Replacement::Rolling).await;
}

async fn watches_survive_an_upgrade_in_place() {
    upgrade(Replacement::InPlace).await;
}

async fn upgrade(replacement: Replacement) {
    let (scale, kinds) = (scale(), RESOURCES.map(kind));
    let new = assets::get().expect("the programs were found before").kube_apiserver.clone();
    let old: PathBuf = if is_full_scale() { assets::kube_apiserver_before() } else { new.clone() };
    let audit = Audit::of_reads();
    let api = ApiServer::start(audit.options().program(old)).await;
    let before = server_version(&api, api.url()).await;
    for kind in &kinds {
        cluster::create(&api, kind, 0..scale.objects / kinds.len()).await;
    }
    let link = Link::to(api.url().trim_start_matches("https://").parse().expect("a URL with an address")).await;
    let url = format!("https://{}", link.addr);
    let kubefan = start_kubefan(&api, &url, &kinds).await;
    let writers = writers::begin(&api, &url, &kinds, scale.objects / kinds.len(), WRITES_PER_SECOND);

    let start = Start::new(scale.watches * 3);
    let (mut through, mut grpc, mut straight) = (JoinSet::new(), JoinSet::new(), JoinSet::new());
    let (mut to_kubefan, mut to_apiserver) = (api.client(), api.client());
    for number in 0..scale.watches {
        if number % WATCHES_PER_CONNECTION == 0 {
            // Each has connections of its own.
            (to_kubefan, to_apiserver) = (api.client_as(ADMIN), api.client_as(ADMIN));
        }
        let kind = kinds[number % kinds.len()];
        let kubefan_url = format!("https://{}", kubefan.grpc_addr);
        through.spawn(watchers::http(to_kubefan.clone(), "kubefan-http", kubefan_url, kind, start.clone()));
        grpc.spawn(watchers::grpc(api.ca_pem_path(), kubefan.grpc_addr, kind, start.clone()));
        straight.spawn(watchers::http(to_apiserver.clone(), "straight-http", url.clone(), kind, start.clone()));
    }
    start.all_open().await;
    let at = audit.requests("").len();
    start.enter(Phase::Switch);
    let beside = replace(replacement, &api, &link, &new, scale.drain).await;
    let after = server_version(&api, &url).await;
    sleep(scale.observed / 8).await;
    start.enter(Phase::Later);
    sleep(scale.observed / 8 * 7).await;
    let written = writers.end(&kinds).await;
    let reports = tokio::time::timeout(FINISHED_AT_MOST, async {
        (through.join_all().await, grpc.join_all().await, straight.join_all().await)
    });
    let Ok((through, grpc, straight)) = reports.await else {
        panic!("not all watches have the last object; kubefan's metrics: {}", metrics(&kubefan).await);
    };
    let requests = audit.requests("").split_off(at);

    let columns = [
        "clients",
        "ended at the switch",
        "ended later",
        "first lists again, or snapshots",
        "gaps",
        "LIST upstream",
        "WATCH upstream",
        "whole states upstream",
        APART,
    ];
    let mut table = Table::new(
        format!(
            "{replacement:?} upgrade {before} → {after}, {} watches of each kind of client, {written} writes",
            scale.watches
        ),
        &columns,
    );
    let own = UpstreamRequests::of(&requests, &[KUBEFAN, "kubefan-http"]);
    let direct = UpstreamRequests::of(&requests, &["straight-http"]);
    for (what, reports, upstream) in [
        ("HTTP through kubefan", &through, Some(own)),
        ("gRPC through kubefan", &grpc, None),
        ("HTTP straight", &straight, Some(direct)),
    ] {
        let sum = |value: fn(&Report) -> usize| reports.iter().map(value).sum::<usize>();
        let column = |value: fn(&UpstreamRequests) -> usize| {
            upstream.map_or("as above".to_owned(), |upstream| value(&upstream).to_string())
        };
        table.row(&[
            &what,
            &sum(|report| report.ends.in_phase(Phase::Switch)),
            &sum(|report| report.ends.in_phase(Phase::Later)),
            &sum(|report| report.restarts),
            &sum(|report| report.gaps),
            &column(|upstream| upstream.lists),
            &column(|upstream| upstream.watches),
            &column(|upstream| upstream.states),
            &upstream.map_or("as above".to_owned(), |upstream| upstream.apart()),
        ]);
    }
    println!("{table}");
    for (what, reports) in [("HTTP through kubefan", &through), ("gRPC", &grpc), ("HTTP straight", &straight)] {
        println!("{what}: {}", Ends::sum(reports.iter().map(|report| &report.ends)));
    }
    println!("{}", metrics(&kubefan).await);
    for kind in &kinds {
        let expected = state(&api, &url, kind).await;
        let ours = through.iter().chain(&grpc).chain(&straight).filter(|report| report.resource == kind.resource);
        for report in ours {
            assert_eq!(report.state, expected, "{} {}", report.client, kind.resource);
        }
    }
    drop(beside);
}

/// Replaces kube-apiserver. The returned one must live until the end.
async fn replace(
    replacement: Replacement,
    api: &ApiServer,
    link: &Link,
    new: &std::path::Path,
    drain: Duration,
) -> Option<Beside> {
    match replacement {
        Replacement::InPlace => {
            api.upgrade(new).await;
            None
        }
        Replacement::Rolling => {
            let beside = api.start_beside(new).await;
            link.lead_to(beside.addr);
            sleep(drain).await;
            api.terminate().await;
            Some(beside)
        }
    }
}

async fn start_kubefan(api: &ApiServer, url: &str, kinds: &[Kind]) -> Kubefan {
    let (certificate, key) = api.server_certificate();
    let [certificate, key] = [certificate, key].map(|path| path.to_str().expect("the path is text").to_owned());
    let resources = cluster::resource_flag(kinds);
    let args = ["--tls-cert-file", &certificate, "--tls-private-key-file", &key, "--resource", &resources];
    let kubefan = Kubefan::spawn(&api.kubeconfig_to(url), &args).await;
    kubefan.ready().await;
    kubefan
}

/// The version of the kube-apiserver at a URL. Retries while it is being replaced.
async fn server_version(api: &ApiServer, url: &str) -> String {
    let probe = || async {
        let text = api.client().get(format!("{url}/version")).send().await.ok()?.text().await.ok()?;
        let version: serde_json::Value = serde_json::from_str(&text).ok()?;
        version["gitVersion"].as_str().map(str::to_owned)
    };
    wait::until("the server's version", wait::SOON, probe).await
}

/// The apiserver's versions by key.
async fn state(api: &ApiServer, url: &str, kind: &Kind) -> BTreeMap<String, u64> {
    let response = api.client().get(format!("{url}{}", kind.path())).send().await.expect("the apiserver answers");
    let list: serde_json::Value =
        serde_json::from_str(&response.text().await.expect("a list is text")).expect("a list is JSON");
    let items = list["items"].as_array().expect("a list has items");
    let key = |item: &serde_json::Value| {
        let text = |field: &str| item["metadata"][field].as_str().unwrap_or_default().to_owned();
        format!("{}/{}", text("namespace"), text("name"))
    };
    items.iter().map(|item| (key(item), version_of(item))).collect()
}

/// kubefan's own account of what happened.
async fn metrics(kubefan: &Kubefan) -> String {
    const NAMES: [&str; 3] =
        ["kubefan_relists_total{", "kubefan_subscriptions_finished_total{", "kubefan_upstream_watch_restarts_total{"];
    let (_, text) = kubefan.admin("/metrics").await.unwrap_or_default();
    let ours = |line: &&str| NAMES.iter().any(|name| line.starts_with(name)) && !line.ends_with(" 0");
    text.lines().filter(ours).collect::<Vec<_>>().join("\n")
}
