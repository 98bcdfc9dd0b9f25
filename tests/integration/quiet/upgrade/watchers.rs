//! Clients that keep a resource's state as informers do, over HTTP or gRPC, and count why each of
//! their watches ended.

use std::{
    collections::BTreeMap,
    fmt::{self, Display, Formatter},
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use kubefan_common::proto::v1alpha1::{
    OnExpired, OnLag, Target, WatchRequest, watch_service_client::WatchServiceClient,
};
use reqwest::Client;
use serde::Deserialize;
use tokio::{sync::watch, time::sleep};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};
use tonic_types::StatusExt;

use super::LAST;
use crate::{
    harness::{objects::version_of, record::Watch, wait},
    quiet::cluster::Kind,
};

/// Wait after a refused request.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Parts of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Before,
    Switch,
    Later,
}

/// Shows the test when all watches are open, and the clients the phase.
#[derive(Clone)]
pub(super) struct Start {
    open: Arc<AtomicUsize>,
    all: usize,
    phase: watch::Sender<Phase>,
}

impl Start {
    pub(super) fn new(all: usize) -> Start {
        Start { open: Arc::default(), all, phase: watch::channel(Phase::Before).0 }
    }

    /// Waits until every client has its first watch.
    pub(super) async fn all_open(&self) {
        let open = || async { (self.open.load(Ordering::Relaxed) == self.all).then_some(()) };
        wait::until("all watches to be open", wait::SOON * 4, open).await;
    }

    pub(super) fn enter(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    fn one_is_open(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
    }
}

/// Why watches and requests ended, by phase.
#[derive(Default)]
pub(super) struct Ends(BTreeMap<(Phase, String), usize>);

impl Ends {
    /// Number of watches that ended in a phase, and of requests that were refused.
    pub(super) fn in_phase(&self, phase: Phase) -> usize {
        self.0.iter().filter(|((of, _), _)| *of == phase).map(|(_, count)| count).sum()
    }

    pub(super) fn sum<'a>(all: impl Iterator<Item = &'a Ends>) -> Ends {
        let mut sum = Ends::default();
        for (why, count) in all.flat_map(|ends| &ends.0) {
            *sum.0.entry(why.clone()).or_default() += count;
        }
        sum
    }

    fn add(&mut self, start: &Start, why: impl Into<String>) {
        *self.0.entry((*start.phase.borrow(), why.into())).or_default() += 1;
    }
}

impl Display for Ends {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|((phase, why), count)| write!(f, "{count} × {phase:?}: {why}; "))
    }
}

/// What a client has seen.
pub(super) struct Report {
    pub(super) client: &'static str,
    pub(super) resource: &'static str,
    pub(super) ends: Ends,
    /// Lists after the first, or snapshots after the first.
    pub(super) restarts: usize,
    /// Marked gaps.
    pub(super) gaps: usize,
    /// The objects' versions by key.
    pub(super) state: BTreeMap<String, u64>,
}

impl Report {
    fn new(client: &'static str, kind: &Kind) -> Report {
        let (ends, state) = (Ends::default(), BTreeMap::new());
        Report { client, resource: kind.resource, ends, restarts: 0, gaps: 0, state }
    }

    fn is_complete(&self) -> bool {
        self.state.contains_key(&format!("default/{LAST}"))
    }
}

#[derive(Deserialize)]
struct Line {
    #[serde(rename = "type")]
    kind: String,
    object: Object,
}

#[derive(Deserialize)]
struct Object {
    #[serde(default)]
    metadata: Metadata,
    /// Of a Status.
    #[serde(default)]
    code: u16,
    #[serde(default)]
    message: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    namespace: String,
    name: String,
    resource_version: String,
}

#[derive(Deserialize)]
struct List {
    metadata: Metadata,
    items: Vec<Object>,
}

impl Metadata {
    fn version(&self) -> u64 {
        self.resource_version.parse().expect("an etcd revision is a number")
    }

    fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// Lists and watches over HTTP until the last object is there.
pub(super) async fn http(client: Client, agent: &'static str, url: String, kind: Kind, start: Start) -> Report {
    let mut report = Report::new(agent, &kind);
    let url = format!("{url}{}", kind.path());
    let mut version = None;
    let mut was_open = false;
    // As in client-go, the first list may be of any version, and a list after a 410 must not be.
    let mut any = "?resourceVersion=0";
    while !report.is_complete() {
        let Some(from) = version else {
            match list(&client, agent, &format!("{url}{any}")).await {
                Ok(list) => {
                    report.restarts += usize::from(any.is_empty());
                    any = "";
                    version = Some(list.metadata.version());
                    let entry = |object: &Object| (object.metadata.key(), object.metadata.version());
                    report.state = list.items.iter().map(entry).collect();
                }
                Err(why) => {
                    report.ends.add(&start, format!("list: {why}"));
                    sleep(RETRY_DELAY).await;
                }
            }
            continue;
        };
        let path = format!("{url}?watch=1&allowWatchBookmarks=true&timeoutSeconds=3600&resourceVersion={from}");
        let response = match client.get(path).header("user-agent", agent).send().await {
            Ok(response) if response.status().is_success() => response,
            Ok(response) => {
                report.ends.add(&start, format!("refused: {}", response.status()));
                if response.status().as_u16() == 410 {
                    version = None;
                }
                sleep(RETRY_DELAY).await;
                continue;
            }
            Err(_) => {
                report.ends.add(&start, "refused: no connection");
                sleep(RETRY_DELAY).await;
                continue;
            }
        };
        if !was_open {
            start.one_is_open();
            was_open = true;
        }
        match follow(response, &mut report, from).await {
            Followed::Complete => {}
            Followed::Ended(at, why) => {
                version = Some(at);
                report.ends.add(&start, why);
            }
            Followed::Expired(why) => {
                version = None;
                report.ends.add(&start, why);
            }
        }
    }
    report
}

async fn list(client: &Client, agent: &str, url: &str) -> Result<List, String> {
    let response = client.get(url).header("user-agent", agent).send().await.map_err(|_| "no connection".to_owned())?;
    let status = response.status();
    let text = response.text().await.map_err(|_| "broken connection".to_owned())?;
    if !status.is_success() {
        return Err(status.to_string());
    }
    serde_json::from_str(&text).map_err(|error| error.to_string())
}

/// How a watch ended.
enum Followed {
    Complete,
    /// At this version, and why.
    Ended(u64, String),
    /// The version is gone.
    Expired(String),
}

/// Receives a watch until it ends or the last object is there.
async fn follow(mut response: reqwest::Response, report: &mut Report, mut version: u64) -> Followed {
    let (mut body, mut read) = (Vec::new(), 0);
    loop {
        let Some(length) = body[read..].iter().position(|byte| *byte == b'\n') else {
            body.drain(..read);
            read = 0;
            match response.chunk().await {
                Ok(Some(chunk)) => body.extend_from_slice(&chunk),
                Ok(None) => return Followed::Ended(version, "end of the stream".to_owned()),
                Err(_) => return Followed::Ended(version, "broken connection".to_owned()),
            }
            continue;
        };
        let line: Line = serde_json::from_slice(&body[read..read + length]).expect("a line of a watch is JSON");
        read += length + 1;
        let Line { kind, object } = line;
        match kind.as_str() {
            "ERROR" if object.code == 410 => return Followed::Expired("410".to_owned()),
            "ERROR" => return Followed::Ended(version, format!("error {}: {}", object.code, object.message)),
            "BOOKMARK" => {}
            "DELETED" => drop(report.state.remove(&object.metadata.key())),
            _ => drop(report.state.insert(object.metadata.key(), object.metadata.version())),
        }
        version = object.metadata.version();
        if report.is_complete() {
            return Followed::Complete;
        }
    }
}

/// Watches over gRPC until the last object is there.
pub(super) async fn grpc(ca: PathBuf, address: SocketAddr, kind: Kind, start: Start) -> Report {
    let mut report = Report::new("gRPC", &kind);
    let ca = Certificate::from_pem(std::fs::read(ca).expect("the CA is readable"));
    let endpoint = Endpoint::from_shared(format!("https://{address}")).expect("an address is a URI");
    let endpoint = endpoint.tls_config(ClientTlsConfig::new().ca_certificate(ca)).expect("the CA is valid");
    let mut client = WatchServiceClient::new(endpoint.connect_lazy()).max_decoding_message_size(64 << 20);
    let last = format!("default/{LAST}");
    let (mut from, mut state, mut was_open) = (String::new(), BTreeMap::new(), false);
    while !state.contains_key(&last) {
        let request = WatchRequest {
            target: Some(Target { resource: kind.full_name(), ..Target::default() }),
            resource_version: from.clone(),
            on_lag: OnLag::Conflate.into(),
            on_expired: OnExpired::Restart.into(),
            ..WatchRequest::default()
        };
        let mut watch = match client.watch(request).await {
            Ok(response) => Watch::over(Box::pin(response.into_inner()), &from),
            Err(status) => {
                report.ends.add(&start, format!("refused: {}", reason(&status)));
                sleep(RETRY_DELAY).await;
                continue;
            }
        };
        watch.state = std::mem::take(&mut state);
        let why = loop {
            match watch.step().await {
                Ok(Some(_)) if watch.state.contains_key(&last) => break None,
                Ok(Some(_)) => {
                    watch.events.clear();
                    if !was_open && !watch.resume_version.is_empty() {
                        start.one_is_open();
                        was_open = true;
                    }
                }
                Ok(None) => break Some("end of the stream".to_owned()),
                Err(status) => break Some(reason(&status)),
            }
        };
        report.gaps += watch.gaps.len();
        report.restarts += watch.restarted_from.len();
        from.clone_from(&watch.resume_version);
        state = watch.state;
        if let Some(why) = why {
            report.ends.add(&start, why);
        }
    }
    let version = |object: &String| version_of(&serde_json::from_str(object).expect("JSON"));
    report.state = state.iter().map(|(key, object)| (key.clone(), version(object))).collect();
    report
}

fn reason(status: &tonic::Status) -> String {
    let reason = status.get_details_error_info().map(|info| info.reason).unwrap_or_default();
    format!("{:?} {reason}", status.code())
}
