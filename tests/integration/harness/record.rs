//! Records kubefan's gRPC watches and the apiserver's own watches in the same form, so that tests
//! can compare them.

use std::{collections::BTreeMap, pin::Pin, time::Duration};

use futures::{Stream, StreamExt};
use kubefan_common::proto::v1alpha1::{
    DeleteReason, EventType, Target, WatchRequest, WatchResponse, watch_response::Message,
    watch_service_client::WatchServiceClient,
};
use reqwest::StatusCode;
use serde::Deserialize;
use serde_json::value::RawValue;
use tonic::transport::{Channel, Endpoint};

use super::{apiserver::ApiServer, wait};

/// One event as an apiserver's watch sends it: `ADDED`, `MODIFIED` or `DELETED`, and the object's
/// bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Recorded {
    pub(crate) kind: &'static str,
    pub(crate) object: String,
}

/// A namespace and selectors; an empty string selects all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Query {
    pub(crate) namespace: &'static str,
    pub(crate) labels: &'static str,
    pub(crate) fields: &'static str,
}

/// Builds a query in a constant table.
pub(crate) const fn query(namespace: &'static str, labels: &'static str, fields: &'static str) -> Query {
    Query { namespace, labels, fields }
}

impl Query {
    pub(crate) fn target(&self, resource: &str) -> Target {
        Target {
            resource: resource.to_owned(),
            namespace: self.namespace.to_owned(),
            label_selector: self.labels.to_owned(),
            field_selector: self.fields.to_owned(),
            ..Target::default()
        }
    }

    /// The apiserver's path for this query.
    pub(crate) fn pods_path(&self) -> String {
        let collection = match self.namespace {
            "" => "/api/v1/pods".to_owned(),
            namespace => format!("/api/v1/namespaces/{namespace}/pods"),
        };
        let encode = |text: &str| text.bytes().map(|b| format!("%{b:02X}")).collect::<String>();
        format!("{collection}?labelSelector={}&fieldSelector={}", encode(self.labels), encode(self.fields))
    }
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

fn kind(text: &str) -> &'static str {
    match text {
        "ADDED" => "ADDED",
        "MODIFIED" => "MODIFIED",
        "DELETED" => "DELETED",
        other => panic!("event type {other}"),
    }
}

/// Reads one line of a watch; `None` for a bookmark.
pub(crate) fn recorded(line: &[u8]) -> Option<Recorded> {
    let line: Line<'_> = serde_json::from_slice(line).expect("a line of a watch is JSON");
    let event = |line: Line<'_>| Recorded { kind: kind(line.kind), object: line.object.get().to_owned() };
    (line.kind != "BOOKMARK").then(|| event(line))
}

/// The versions of a part of the apiserver's history: after `start`, and at least up to `end`.
#[derive(Clone, Copy)]
pub(crate) struct Versions {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// Returns the events of the apiserver's own watch between two versions, without bookmarks.
///
/// A watch of `seconds` ends with a bookmark. If the apiserver gets too little CPU, the watch ends
/// before all events were sent, and the next watch continues from its last version.
pub(crate) async fn upstream_watch(api: &ApiServer, query: &Query, range: Versions, seconds: u32) -> Vec<Recorded> {
    let mut events = Vec::new();
    let mut reached = range.start;
    loop {
        let parameters = format!("timeoutSeconds={seconds}&allowWatchBookmarks=true&resourceVersion={reached}");
        let body = opened(api, &format!("{}&watch=true&{parameters}", query.pods_path())).await.text().await.unwrap();
        for line in body.lines().map(str::as_bytes).take_while(|line| !has_failed(line)) {
            reached = version_in(line);
            events.extend(recorded(line));
        }
        if reached >= range.end {
            return events;
        }
    }
}

/// Opens a watch of the apiserver. An apiserver that is overloaded, or whose cache is not ready,
/// answers 429 for a while.
async fn opened(api: &ApiServer, path: &str) -> reqwest::Response {
    wait::until("a watch of the apiserver", 4 * wait::SOON, || async {
        let response = api.client().get(format!("{}{path}", api.url())).send().await.unwrap();
        let status = response.status();
        assert!(status.is_success() || status == StatusCode::TOO_MANY_REQUESTS, "{path}: {status}");
        status.is_success().then_some(response)
    })
    .await
}

/// Records the apiserver's own watch from version `start` until `end` announces a version. The
/// recording then finishes with [`upstream_watch`] for `seconds`.
///
/// The apiserver ends watches that it cannot serve in time, for instance where it gets too little
/// CPU. The recording continues from the last version with another watch, as client-go does.
pub(crate) async fn upstream_recording(
    api: ApiServer,
    query: Query,
    start: u64,
    mut end: tokio::sync::watch::Receiver<u64>,
    seconds: u32,
) -> Vec<Recorded> {
    let mut events = Vec::new();
    let mut last = start;
    'watches: while *end.borrow() == u64::MAX {
        let path = format!("{}&watch=true&resourceVersion={last}&allowWatchBookmarks=true", query.pods_path());
        let mut response = opened(&api, &path).await;
        let mut body = Vec::new();
        loop {
            let chunk = tokio::select! {
                chunk = response.chunk() => chunk.unwrap(),
                announced = end.wait_for(|version| *version != u64::MAX) => {
                    announced.expect("the end version is announced");
                    break;
                }
            };
            let Some(chunk) = chunk else { break };
            body.extend_from_slice(&chunk);
            while let Some(length) = body.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = body.drain(..=length).collect();
                if has_failed(&line) {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue 'watches;
                }
                last = version_in(&line);
                events.extend(recorded(&line));
            }
        }
    }
    // Collects the events still in flight, and shows that there are no more.
    let rest = Versions { start: last, end: *end.borrow() };
    events.append(&mut upstream_watch(&api, &query, rest, seconds).await);
    events
}

/// Whether one line of a watch says that it ends early.
///
/// # Panics If it cannot continue from its last version, because that version is too old.
fn has_failed(line: &[u8]) -> bool {
    let line: Line<'_> = serde_json::from_slice(line).expect("a line of a watch is JSON");
    let status = line.object.get();
    assert!(line.kind != "ERROR" || !status.contains(r#""code":410"#), "{status}");
    line.kind == "ERROR"
}

/// The version that one line of a watch reaches, of a bookmark too.
fn version_in(line: &[u8]) -> u64 {
    let line: Line<'_> = serde_json::from_slice(line).expect("a line of a watch is JSON");
    version_of(line.object.get())
}

fn version_of(object: &str) -> u64 {
    super::objects::version_of(&serde_json::from_str(object).expect("JSON"))
}

/// The initial events of the apiserver's own watch: every object as ADDED, in key order.
pub(crate) async fn upstream_initial(api: &ApiServer, query: &Query) -> Vec<Recorded> {
    let initial = "&watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let mut response = api.client().get(format!("{}{}{initial}", api.url(), query.pods_path())).send().await.unwrap();
    let mut body = Vec::new();
    let mut read = 0;
    let mut events = Vec::new();
    loop {
        let Some(end) = body[read..].iter().position(|byte| *byte == b'\n') else {
            body.extend_from_slice(&response.chunk().await.unwrap().expect("the initial events have an end"));
            continue;
        };
        let line: Line<'_> = serde_json::from_slice(&body[read..read + end]).unwrap();
        if line.kind == "BOOKMARK" {
            return events;
        }
        events.push(Recorded { kind: kind(line.kind), object: line.object.get().to_owned() });
        read += end + 1;
    }
}

/// Opens a new connection to kubefan.
pub(crate) async fn connect(address: std::net::SocketAddr) -> WatchServiceClient<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    WatchServiceClient::new(endpoint.connect().await.unwrap()).max_decoding_message_size(64 << 20)
}

/// The responses of a watch, over the network or inside this process.
pub(crate) type Responses = Pin<Box<dyn Stream<Item = Result<WatchResponse, tonic::Status>> + Send>>;

/// One watch through kubefan, and everything received on it so far.
pub(crate) struct Watch {
    stream: Responses,
    /// The objects of the snapshot.
    pub(crate) snapshot: Vec<Recorded>,
    /// The events outside of snapshots, gaps and catch-ups.
    pub(crate) events: Vec<Recorded>,
    /// The objects by key, after all messages so far.
    pub(crate) state: BTreeMap<String, String>,
    /// The last resume version.
    pub(crate) resume_version: String,
    /// The start and end version of each marked gap.
    pub(crate) gaps: Vec<(String, String)>,
    /// The start and end version of each catch-up.
    pub(crate) catch_ups: Vec<(String, String)>,
    /// The versions that could not be resumed from, so that the stream restarted with a new
    /// snapshot.
    pub(crate) restarted_from: Vec<String>,
    /// The cluster identity in the last snapshot.
    pub(crate) cluster: String,
    /// The reason of each gap.
    pub(crate) gap_reasons: Vec<String>,
    /// Number of deletes that mean only that the object left the selector.
    pub(crate) left: usize,
    /// Number of snapshots started.
    pub(crate) snapshots: usize,
    /// The largest version of an event, including those in snapshots, gaps and catch-ups.
    pub(crate) last_event_version: u64,
    inside: Inside,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Inside {
    Nothing,
    Snapshot,
    Gap,
    CatchUp,
}

/// The version in a resume version, and the place inside it.
pub(crate) fn place(text: &str) -> (u64, u64) {
    let number = |text: &str| text.parse::<u64>().expect("an etcd revision is a number");
    match text.split_once('.') {
        None => (number(text), 0),
        Some((version, "end")) => (number(version), u64::MAX),
        Some((version, sub)) => (number(version), number(sub)),
    }
}

impl Watch {
    /// Starts a watch. An empty `resource_version` asks for a snapshot.
    pub(crate) async fn start(
        client: &mut WatchServiceClient<Channel>,
        target: Target,
        resource_version: &str,
    ) -> Result<Watch, tonic::Status> {
        let request = WatchRequest {
            target: Some(target),
            resource_version: resource_version.to_owned(),
            timeout_seconds: 0,
            bookmark_interval: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
            ..WatchRequest::default()
        };
        Ok(Watch::over(Box::pin(client.watch(request).await?.into_inner()), resource_version))
    }

    /// Records any stream of responses.
    pub(crate) fn over(stream: Responses, resource_version: &str) -> Watch {
        Watch {
            stream,
            snapshot: Vec::new(),
            events: Vec::new(),
            state: BTreeMap::new(),
            resume_version: resource_version.to_owned(),
            gaps: Vec::new(),
            catch_ups: Vec::new(),
            restarted_from: Vec::new(),
            cluster: String::new(),
            gap_reasons: Vec::new(),
            left: 0,
            snapshots: 0,
            last_event_version: 0,
            inside: Inside::Nothing,
        }
    }

    /// Receives the next message; `None` at a clean end.
    pub(crate) async fn step(&mut self) -> Result<Option<WatchResponse>, tonic::Status> {
        let Some(mut response) = self.stream.next().await.transpose()? else { return Ok(None) };
        if response.version_is_complete {
            response.resume_version += ".end";
        }
        match response.message.as_ref().expect("every response has a message") {
            Message::SnapshotBegin(begin) => {
                self.inside = Inside::Snapshot;
                self.snapshots += 1;
                self.cluster.clone_from(&begin.cluster);
                if !begin.restarted_from.is_empty() {
                    self.restarted_from.push(begin.restarted_from.clone());
                    self.state.clear();
                    self.resume_version.clear();
                }
            }
            Message::GapBegin(begin) => {
                self.inside = Inside::Gap;
                self.gaps.push((begin.resource_version.clone(), String::new()));
                self.gap_reasons.push(begin.reason.clone());
            }
            Message::GapEnd(_) => {
                self.inside = Inside::Nothing;
                self.gaps.last_mut().expect("a gap that ends has started").1.clone_from(&response.resume_version);
            }
            Message::SnapshotEnd(_) => self.inside = Inside::Nothing,
            Message::CatchUpBegin(begin) => {
                self.inside = Inside::CatchUp;
                self.catch_ups.push((begin.resource_version.clone(), String::new()));
            }
            Message::CatchUpEnd(_) => {
                self.inside = Inside::Nothing;
                self.catch_ups.last_mut().expect("a catch-up has started").1.clone_from(&response.resume_version);
            }
            Message::SnapshotChunk(_) => panic!("the request did not ask for compressed chunks"),
            Message::Bookmark(_) => assert!(!response.resume_version.is_empty(), "a bookmark carries a version"),
            Message::Event(event) => {
                let kind = match event.r#type() {
                    EventType::Added => "ADDED",
                    EventType::Modified => "MODIFIED",
                    EventType::Deleted => "DELETED",
                    EventType::Unspecified => panic!("an event without a type"),
                };
                let version = event.resource_version.parse().expect("an etcd revision is a number");
                self.last_event_version = self.last_event_version.max(version);
                self.left += usize::from(event.delete_reason() == DeleteReason::LeftSelector);
                let object = String::from_utf8(event.object.to_vec()).expect("JSON is UTF-8");
                let key = format!("{}/{}", event.namespace, event.name);
                match kind {
                    "DELETED" => self.state.remove(&key),
                    _ => self.state.insert(key, object.clone()),
                };
                let recorded = Recorded { kind, object };
                match self.inside {
                    Inside::Nothing => {
                        let (version, _) = place(&response.resume_version);
                        assert_eq!(event.resource_version, version.to_string(), "a live event can be resumed from");
                        self.events.push(recorded);
                    }
                    Inside::Snapshot => self.snapshot.push(recorded),
                    Inside::Gap | Inside::CatchUp => {}
                }
                assert_eq!(self.inside == Inside::Nothing, !response.resume_version.is_empty());
            }
        }
        if !response.resume_version.is_empty() {
            let before = if self.resume_version.is_empty() { (0, 0) } else { place(&self.resume_version) };
            assert!(place(&response.resume_version) > before, "resume versions increase");
            self.resume_version.clone_from(&response.resume_version);
        }
        Ok(Some(response))
    }

    /// The version that was reached. More events of it may come.
    pub(crate) fn reached(&self) -> u64 {
        if self.resume_version.is_empty() { 0 } else { place(&self.resume_version).0 }
    }

    /// Receives messages until the stream ends with a status.
    pub(crate) async fn end(&mut self) -> tonic::Status {
        loop {
            match self.step().await {
                Ok(step) => assert!(step.is_some(), "the stream ends without a reason"),
                Err(status) => return status,
            }
        }
    }

    /// Checks that the stream has sent nothing but single events.
    pub(crate) fn assert_exact(&self, what: &str) {
        assert!(self.snapshot.is_empty() && self.snapshots == 0, "{what}: a snapshot");
        assert!(self.gaps.is_empty() && self.catch_ups.is_empty(), "{what}: {:?}, {:?}", self.gaps, self.catch_ups);
    }

    /// Receives messages until everything up to `version` has arrived.
    pub(crate) async fn until(&mut self, version: u64) {
        let all = async {
            while self.reached() < version {
                assert!(self.step().await.unwrap().is_some(), "the stream ended at {}", self.resume_version);
            }
        };
        let limit = Duration::from_secs(180);
        if tokio::time::timeout(limit, all).await.is_err() {
            panic!("version {version} did not arrive within {limit:?}; at {}", self.resume_version);
        }
    }

    /// Receives messages until there is a resume version, which is the end of the snapshot.
    pub(crate) async fn until_resumable(&mut self) {
        while self.resume_version.is_empty() {
            assert!(self.step().await.unwrap().is_some(), "the stream ended inside the snapshot");
        }
    }

    /// Receives messages until everything up to the version announced by `end` has arrived.
    pub(crate) async fn until_announced(&mut self, mut end: tokio::sync::watch::Receiver<u64>) {
        loop {
            let version = *end.borrow_and_update();
            if self.reached() >= version {
                return;
            }
            tokio::select! {
                step = self.step() => assert!(step.unwrap().is_some(), "the stream ended at {}", self.resume_version),
                changed = end.changed() => changed.expect("the end version is announced"),
            }
        }
    }
}

/// Asserts that two histories are equal, and shows the first difference.
pub(crate) fn assert_equal(what: &str, got: &[Recorded], expected: &[Recorded]) {
    let differs = got.iter().zip(expected).position(|(got, expected)| got != expected);
    if let Some(at) = differs {
        panic!("{what}: event {at} differs\n  kubefan:   {:?}\n  apiserver: {:?}", got[at], expected[at]);
    }
    let next = |list: &[Recorded]| list.get(got.len().min(expected.len())).cloned();
    assert_eq!(got.len(), expected.len(), "{what}: different lengths: {:?} / {:?}", next(got), next(expected));
}
