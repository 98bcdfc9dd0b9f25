//! The subscribers: over gRPC by the client library, and over HTTP as informers are. Each notes
//! every event with the time at which it came.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use kubefan_client::{Client, EventType, OnExpired, Target, WatchItem, WatchOptions};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde::Deserialize;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

/// The first and the longest delay between two attempts of an informer of client-go.
const DELAYS: [Duration; 2] = [Duration::from_millis(800), Duration::from_secs(30)];

/// The kind and the version of an event.
pub(super) type Change = (EventType, u64);

/// State that all subscribers share.
#[derive(Clone)]
pub(super) struct Test {
    pub(super) namespace: String,
    /// Start of all measured times.
    pub(super) start: Instant,
    /// Number of subscribers that have the initial state.
    pub(super) open: Arc<AtomicUsize>,
    /// The version after which they end.
    pub(super) end: watch::Receiver<u64>,
}

/// History of one subscriber.
#[derive(Default)]
pub(super) struct History {
    /// The version of the initial state.
    pub(super) from: u64,
    /// The events, with their times in microseconds.
    pub(super) events: Vec<(Change, u64)>,
    /// Streams and requests that failed. A client that is asked to move has no failure.
    pub(super) failures: usize,
    /// Whole states after the first, marked gaps and catch-ups: histories that are not exact.
    pub(super) restarts: usize,
    version: u64,
}

impl History {
    fn opened(&mut self, test: &Test, version: u64) {
        self.from = version;
        self.version = version;
        test.open.fetch_add(1, Ordering::Relaxed);
    }

    fn add(&mut self, test: &Test, kind: EventType, version: u64) {
        self.version = self.version.max(version);
        self.events.push(((kind, version), micros(test.start)));
    }

    fn is_complete(&self, test: &Test) -> bool {
        self.version >= *test.end.borrow()
    }
}

/// Microseconds since `start`.
pub(super) fn micros(start: Instant) -> u64 {
    start.elapsed().as_micros() as u64
}

/// Watches over gRPC until the end.
pub(super) async fn grpc(client: Client, test: Test) -> History {
    let mut history = History::default();
    let mut initial = Some(String::new());
    let target = Target { resource: "configmaps".to_owned(), namespace: test.namespace.clone(), ..Target::default() };
    let mut stream = client.watch(target, WatchOptions { on_expired: OnExpired::Fail, ..WatchOptions::default() });
    let mut end = test.end.clone();
    while !history.is_complete(&test) {
        let item = tokio::select! {
            item = stream.next() => item.expect("a watch without a timeout").expect("the watch goes on"),
            Ok(()) = end.changed() => continue,
        };
        match item {
            WatchItem::SnapshotBegin { resource_version, .. } => match &mut initial {
                Some(version) => *version = resource_version,
                None => history.restarts += 1,
            },
            WatchItem::SnapshotEnd { .. } => {
                if let Some(version) = initial.take() {
                    history.opened(&test, version.parse().expect("a version is a number"));
                }
            }
            WatchItem::Event(event) if initial.is_none() => {
                let version = event.resource_version.parse().expect("a version is a number");
                history.add(&test, event.r#type(), version);
            }
            WatchItem::GapBegin { .. } | WatchItem::CatchUpBegin { .. } | WatchItem::Restarted { .. } => {
                history.restarts += 1;
            }
            WatchItem::Disconnected { .. } => history.failures += 1,
            _ => {}
        }
    }
    history
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
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    resource_version: String,
}

/// Lists and watches over HTTP until the end. As an informer does, it resumes from the version of
/// the last event or bookmark, and waits after a failure. `number` seeds its delays.
pub(super) async fn http(client: reqwest::Client, url: String, test: Test, number: u64) -> History {
    let mut history = History::default();
    let mut delay = DELAYS[0];
    let mut random = Pcg64Mcg::seed_from_u64(number);
    let url = format!("{url}/api/v1/namespaces/{}/configmaps", test.namespace);
    let mut version = None;
    while !history.is_complete(&test) {
        let failed = match version {
            None => match list(&client, &format!("{url}?resourceVersion=0")).await {
                Some(listed) => {
                    match history.from {
                        0 => history.opened(&test, listed),
                        _ => history.restarts += 1,
                    }
                    version = Some(listed);
                    false
                }
                None => true,
            },
            Some(from) => {
                let seconds = random.random_range(300..600);
                let url =
                    format!("{url}?watch=1&allowWatchBookmarks=true&timeoutSeconds={seconds}&resourceVersion={from}");
                let (reached, failed) = follow(&client, &url, from, &mut history, &test).await;
                version = reached;
                failed
            }
        };
        if !failed {
            delay = DELAYS[0];
            continue;
        }
        history.failures += 1;
        sleep(delay.mul_f64(random.random_range(1.0..2.0))).await;
        delay = (delay * 2).min(DELAYS[1]);
    }
    history
}

async fn list(client: &reqwest::Client, url: &str) -> Option<u64> {
    let answer = client.get(url).send().await.ok()?;
    let status = answer.status();
    let text = answer.text().await.ok()?;
    // 429 is the apiserver's way to say "later"; another refusal would last.
    assert!(!status.is_client_error() || status == 429, "{status}: {text}");
    if !status.is_success() {
        return None;
    }
    let list: Object = serde_json::from_str(&text).ok()?;
    list.metadata.resource_version.parse().ok()
}

/// Watches until the end of the answer. Returns the version to resume from, `None` if it has
/// expired, and whether the request was refused. An answer that breaks off is an end like others.
async fn follow(
    client: &reqwest::Client,
    url: &str,
    from: u64,
    history: &mut History,
    test: &Test,
) -> (Option<u64>, bool) {
    let Ok(mut response) = client.get(url).send().await else { return (Some(from), true) };
    match response.status().as_u16() {
        200 => {}
        410 => return (None, false),
        _ => return (Some(from), true),
    }
    let mut version = from;
    let mut rest = Vec::new();
    let mut end = test.end.clone();
    while !history.is_complete(test) {
        let chunk = tokio::select! {
            chunk = response.chunk() => chunk,
            Ok(()) = end.changed() => continue,
        };
        let Ok(Some(bytes)) = chunk else { break };
        rest.extend_from_slice(&bytes);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            let line: Line = serde_json::from_slice(&line).expect("a line of a watch is an event");
            let kind = match line.kind.as_str() {
                "ADDED" => EventType::Added,
                "MODIFIED" => EventType::Modified,
                "DELETED" => EventType::Deleted,
                "BOOKMARK" => EventType::Unspecified,
                _ => return (None, false),
            };
            version = line.object.metadata.resource_version.parse().expect("a version is a number");
            if kind != EventType::Unspecified {
                history.add(test, kind, version);
            }
        }
    }
    (Some(version), false)
}
