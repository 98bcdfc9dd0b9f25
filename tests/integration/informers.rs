//! Informers of the same pods side by side: the library's over kubefan's gRPC, over its HTTP and
//! straight from the apiserver, and client-go's. All must report the same changes, and end with the
//! same store.
//!
//! `KUBEFAN_TEST_SCALE=full` runs it with 10,000 pods and 5,000 updates; the default is smaller.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use kubefan_model::GroupVersionResource;
use kubefan_sim::workload::{Change, Operation};
use tokio::{sync::watch, time::timeout};

use self::{
    calls::{Call, History, Kind},
    go_pods::GoPods,
    watched::{Content, Watched, assert_same, sources},
};
use crate::harness::{
    apiserver::{ApiServer, Options},
    is_full_scale,
    kubefan::Kubefan,
    load,
    objects::pod,
    process::free_port,
    tests, wait,
    writes::Writes,
};

pub(crate) mod calls;
mod go_pods;
mod watched;

tests! {
    apiserver slow_programs: informers_over_every_protocol_report_the_same_calls_as_client_go,
        informers_over_every_protocol_have_the_same_store_after_restarts;
}

/// A pod that is created and deleted after all changes. An informer that has seen both has
/// everything: its deletion cannot be part of the same relist as its creation, because the test
/// deletes it only after every handler has it.
const MARKER: &str = "marker";
const NAMESPACE: &str = "team-0";

async fn informers_over_every_protocol_report_the_same_calls_as_client_go() {
    let mut experiment = Experiment::start().await;
    experiment.writes.more(experiment.updates).await;
    let reports = experiment.end().await;
    let (_, expected, store) = reports.last().unwrap();
    let expected = by_key(expected);
    for (name, calls, content) in &reports {
        let calls = by_key(calls);
        for key in expected.keys().chain(calls.keys()) {
            assert_eq!(calls.get(key), expected.get(key), "{name}: {key}");
        }
        assert_same(name, store, content);
    }
    let total = expected.values().map(Vec::len).sum::<usize>();
    println!("{} informers, each with the same {total} calls for {} pods", reports.len(), expected.len());
}

async fn informers_over_every_protocol_have_the_same_store_after_restarts() {
    let mut experiment = Experiment::start().await;
    let part = experiment.updates / 5;
    experiment.writes.more(part).await;
    experiment.kubefan.take().unwrap().process.kill9();
    experiment.writes.more(part).await;
    experiment.kubefan = Some(serve(&experiment.api, experiment.address).await);
    experiment.writes.more(part).await;
    experiment.api.kill9();
    // The writers wait for the apiserver, with changes under way.
    let Experiment { api, writes, .. } = &mut experiment;
    tokio::join!(api.restart(), writes.more(part));
    experiment.writes.more(experiment.updates - 4 * part).await;
    let reports = experiment.end().await;
    let (_, _, store) = reports.last().unwrap();
    for (name, calls, content) in &reports {
        assert_same(name, store, content);
        let mut history = History::default();
        for call in calls {
            history.accept(call).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        let versions: BTreeMap<_, _> =
            content.iter().map(|(key, (version, _))| (key.clone(), version.clone())).collect();
        assert_eq!(history.versions(), versions, "{name}: what the handler knows, and the store");
        let of = |kind: Kind| calls.iter().filter(|call| call.kind == kind).count();
        println!(
            "{name}: {} additions, {} updates, {} deletions and {} with an unknown final state",
            of(Kind::Initial) + of(Kind::Add),
            of(Kind::Update),
            of(Kind::Delete),
            of(Kind::DeleteUnseen)
        );
    }
}

/// The calls of each object, in order.
fn by_key(calls: &[Call]) -> BTreeMap<&str, Vec<&Call>> {
    let mut by_key: BTreeMap<&str, Vec<&Call>> = BTreeMap::new();
    for call in calls {
        by_key.entry(&call.key).or_default().push(call);
    }
    by_key
}

/// The calls of one of the library's informers.
#[derive(Clone)]
struct Recording {
    calls: Arc<Mutex<Vec<Call>>>,
    /// The last call for the marker.
    marker: watch::Sender<Option<Kind>>,
}

/// An apiserver with pods, a kubefan, and the informers.
struct Experiment {
    api: ApiServer,
    address: SocketAddr,
    kubefan: Option<Kubefan>,
    writes: Writes,
    updates: usize,
    informers: Vec<(Watched, Recording)>,
    go: GoPods,
}

impl Experiment {
    /// Starts everything, and waits until all informers have the initial pods.
    async fn start() -> Experiment {
        let program = GoPods::build();
        let (pods, updates) = if is_full_scale() { (10_000, 5_000) } else { (500, 300) };
        let api = ApiServer::start(Options::default()).await;
        let writes = Writes::populate(&api, pods).await;
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let kubefan = serve(&api, address).await;
        let mut informers = Vec::new();
        for (name, source) in sources(&api, address).await {
            let recording = Recording { calls: Arc::default(), marker: watch::Sender::new(None) };
            let Recording { calls, marker } = recording.clone();
            let watched = Watched::start(name, source, move |call| {
                let kind = call.key.ends_with(&format!("/{MARKER}")).then_some(call.kind);
                calls.lock().unwrap().push(call);
                // After the push, because the test reads the calls when it has the marker.
                if kind.is_some() {
                    marker.send_replace(kind);
                }
            });
            informers.push((watched, recording));
        }
        let go = GoPods::start(&program, &api.kubeconfig()).await;
        for (watched, _) in &informers {
            watched.synced().await;
        }
        Experiment { api, address, kubefan: Some(kubefan), writes, updates, informers, go }
    }

    /// Waits until all informers have everything. Returns the name, calls and store of each,
    /// client-go's last.
    async fn end(mut self) -> Vec<(&'static str, Vec<Call>, Content)> {
        self.writes.flush().await;
        let mut marker = pod(MARKER);
        marker["metadata"]["namespace"] = NAMESPACE.into();
        self.apply(Operation::Create(marker)).await;
        self.all_have_marker(|kind| matches!(kind, Kind::Add | Kind::Initial | Kind::Update)).await;
        self.go.has_marker().await;
        self.apply(Operation::Delete { namespace: NAMESPACE.to_owned(), name: MARKER.to_owned() }).await;
        self.all_have_marker(|kind| matches!(kind, Kind::Delete | Kind::DeleteUnseen)).await;
        let mut reports = Vec::new();
        for (watched, recording) in &self.informers {
            println!("{}: {} errors of connections", watched.name, watched.connection_errors());
            reports.push((watched.name, recording.calls.lock().unwrap().clone(), watched.content()));
        }
        let (calls, content) = self.go.report().await;
        reports.push(("client-go", calls, content));
        reports
    }

    async fn apply(&self, operation: Operation) {
        let change = Change { resource: GroupVersionResource::new("", "v1", "pods"), operation };
        load::apply_through_outages(&self.api, change).await;
    }

    /// Waits until every handler got such a call for the marker.
    async fn all_have_marker(&self, such: impl Fn(Kind) -> bool) {
        for (watched, recording) in &self.informers {
            let mut marker = recording.marker.subscribe();
            let arrived = timeout(wait::SOON * 4, marker.wait_for(|kind| kind.is_some_and(&such))).await;
            assert!(arrived.is_ok(), "{} is at {}", watched.name, watched.informer.resource_version());
        }
    }
}

/// Starts kubefan with TLS, as HTTP clients with a token need it.
async fn serve(api: &ApiServer, address: SocketAddr) -> Kubefan {
    let (certificate, key) = api.server_certificate();
    let paths = [certificate, key].map(|path| path.to_str().expect("the path is text").to_owned());
    let args = ["--resource", "pods", "--tls-cert-file", &paths[0], "--tls-private-key-file", &paths[1]];
    let kubefan = Kubefan::spawn_at(&api.kubeconfig(), &address.to_string(), &args).await;
    kubefan.ready().await;
    kubefan
}
