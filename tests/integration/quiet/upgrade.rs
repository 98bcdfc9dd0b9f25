//! An upgrade of the control plane in front of many informers, while objects change: over gRPC and
//! HTTP through kubefan, and straight. At the end every store must equal the apiserver's list.
//!
//! At full scale kube-apiserver of the release before is replaced; in the short form the same
//! release is, which ends the same connections but changes no schema.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use kubefan_client::{
    Client, ClientOptions, Connection, ListWatch, SharedInformer,
    http::{HttpClient, HttpClientOptions},
};
use reqwest::StatusCode;
use serde_json::Value;
use tokio::{task::JoinSet, time::sleep};

use super::cluster::{self, Kind, kind};
use crate::harness::{
    apiserver::{ApiServer, Options},
    assets, is_full_scale,
    kubefan::Kubefan,
    link::Link,
    objects::version_of,
    tests, wait,
};

tests! {
    apiserver slow_faults: watches_survive_a_rolling_upgrade;
    apiserver large: watches_survive_an_upgrade_in_place;
}

struct Scale {
    objects: usize,
    /// Connections of each kind of client, with an informer of each resource.
    connections: usize,
    /// Between the switch to the new kube-apiserver and the end of the old one.
    drain: Duration,
    /// Time for which objects change after the upgrade. kubefan checks the schema every 30 s.
    observed: Duration,
}

fn scale() -> Scale {
    if is_full_scale() {
        let drain = Duration::from_secs(5);
        let observed = Duration::from_secs(240);
        return Scale { objects: 50, connections: 50, drain, observed };
    }
    Scale { objects: 5, connections: 5, drain: Duration::from_millis(200), observed: Duration::from_secs(2) }
}

/// The watched resources.
const RESOURCES: [&str; 4] = ["configmaps", "secrets", "services", "deployments"];
const WRITES_PER_SECOND: u32 = 8;
/// The object that is created last.
const LAST: &str = "last";
const FINISHED_AT_MOST: Duration = Duration::from_secs(120);

/// The new kube-apiserver starts beside the old one, gets the new connections, and the old one
/// stops.
async fn watches_survive_a_rolling_upgrade() {
    let ended = upgrade(async |api: &ApiServer, link: &Link, new: PathBuf| {
        let beside = api.start_beside(&new).await;
        link.lead_to(beside.addr);
        sleep(scale().drain).await;
        api.terminate().await;
        Some(beside)
    })
    .await;
    // Another release may have another schema, which ends watches over HTTP.
    assert!(ended == 0.0 || is_full_scale(), "{ended} watches of kubefan's subscribers have ended");
}

/// The old kube-apiserver stops before the new one starts.
async fn watches_survive_an_upgrade_in_place() {
    upgrade(async |api: &ApiServer, _: &Link, new: PathBuf| {
        api.upgrade(&new).await;
        None::<()>
    })
    .await;
}

/// Upgrades the apiserver. The result of `replace` must live until the end. Returns how many
/// watches of subscribers have ended.
async fn upgrade<T>(replace: impl AsyncFn(&ApiServer, &Link, PathBuf) -> Option<T>) -> f64 {
    let scale = scale();
    let kinds = RESOURCES.map(kind);
    let new = assets::get().expect("the programs were found before").kube_apiserver.clone();
    let old = if is_full_scale() { assets::kube_apiserver_before() } else { new.clone() };
    let api = ApiServer::start(Options::default().program(old)).await;
    for kind in &kinds {
        cluster::create(&api, kind, scale.objects).await;
    }
    let link = Link::to(api.addr()).await;
    let url = format!("https://{}", link.addr);
    let (certificate, key) = api.server_certificate();
    let [certificate, key] = [&certificate, &key].map(|path| path.to_str().expect("the path is text"));
    let resources = kinds.map(|kind| kind.full_name()).join(",");
    let args = ["--tls-cert-file", certificate, "--tls-private-key-file", key, "--resource", &resources];
    let kubefan = Kubefan::spawn(&api.kubeconfig_to(&url), &args).await;
    kubefan.ready().await;

    let mut informers = Vec::new();
    let mut running = JoinSet::new();
    for (source, connection) in connections(&api, &kubefan, &url, scale.connections).await {
        for kind in kinds {
            let source_of_kind = ListWatch::new(connection.clone(), &kind.full_name(), "", "");
            let informer = SharedInformer::<Value>::new(source_of_kind);
            let run = informer.clone();
            running.spawn(async move { run.run(std::future::pending::<()>()).await });
            informers.push((source, kind, informer));
        }
    }
    for (source, kind, informer) in &informers {
        let synced = tokio::time::timeout(wait::SOON * 4, informer.synced()).await;
        synced.unwrap_or_else(|_| panic!("{source} of {kind:?} does not sync")).unwrap();
    }
    let written = url.clone();
    let objects = scale.objects;
    let writes = cluster::write_at(&api, WRITES_PER_SECOND, move |tick| {
        let kind = kinds[tick as usize % kinds.len()];
        let object = tick as usize / kinds.len() % objects;
        format!("{written}{}/o-{object}", kind.path_in("default"))
    });
    let _replaced = replace(&api, &link, new).await;
    sleep(scale.observed).await;
    drop(writes);

    for kind in &kinds {
        create_last(&api, &url, kind).await;
    }
    for (source, kind, informer) in &informers {
        let what = format!("the {} of {source} to equal the apiserver's", kind.resource);
        wait::until(&what, FINISHED_AT_MOST, || async {
            let listed = listed(&api, &url, kind).await?;
            (stored(informer) == listed && listed.contains_key(&format!("default/{LAST}"))).then_some(())
        })
        .await;
    }
    let ended = kubefan.metric_sum("kubefan_upstream_watch_restarts_total", "").await;
    assert!(ended.is_some_and(|ended| ended >= kinds.len() as f64), "{ended:?} watches of kubefan were ended");
    kubefan.metric_sum("kubefan_subscriptions_finished_total", "").await.unwrap()
}

/// Connections of each kind of client.
async fn connections(api: &ApiServer, kubefan: &Kubefan, url: &str, each: usize) -> Vec<(&'static str, Connection)> {
    let through = format!("https://{}", kubefan.grpc_addr);
    let grpc = ClientOptions { ca_file: Some(api.ca_pem_path()), ..ClientOptions::default() };
    let ca_file = Some(api.ca_pem_path());
    let token = Some(api.admin_token());
    let http = HttpClientOptions { ca_file, token, ..HttpClientOptions::default() };
    let mut connections: Vec<(&'static str, Connection)> = Vec::new();
    for _ in 0..each {
        connections.push(("gRPC", Client::connect(&through, &grpc).await.unwrap().into()));
        connections.push(("HTTP through kubefan", HttpClient::new(&through, &http).await.unwrap().into()));
        connections.push(("HTTP straight", HttpClient::new(url, &http).await.unwrap().into()));
    }
    connections
}

/// Creates the last object. It may take a while until the new kube-apiserver answers.
async fn create_last(api: &ApiServer, url: &str, kind: &Kind) {
    wait::until("the apiserver to take the last object", wait::SOON * 4, || async {
        let request = api.client().post(format!("{url}{}", kind.path_in("default")));
        let answer = request.header("content-type", "application/json").body(kind.object(LAST).to_string());
        let status = answer.send().await.ok()?.status();
        (status.is_success() || status == StatusCode::CONFLICT).then_some(())
    })
    .await;
}

/// The versions of a store, by key.
fn stored(informer: &SharedInformer<Value>) -> BTreeMap<String, u64> {
    let snapshot = informer.indexer().snapshot();
    let version = |text: &str| text.parse().expect("an etcd revision is a number");
    snapshot.iter().map(|object| (object.key().as_str().to_owned(), version(object.resource_version()))).collect()
}

/// The apiserver's versions, by key. `None` while it does not answer.
async fn listed(api: &ApiServer, url: &str, kind: &Kind) -> Option<BTreeMap<String, u64>> {
    let response = api.client().get(format!("{url}{}", kind.path())).send().await.ok()?;
    let list: Value = serde_json::from_str(&response.text().await.ok()?).ok()?;
    let key = |item: &Value| {
        let text = |field: &str| item["metadata"][field].as_str().unwrap_or_default().to_owned();
        format!("{}/{}", text("namespace"), text("name"))
    };
    Some(list["items"].as_array()?.iter().map(|item| (key(item), version_of(item))).collect())
}
