//! The watch against a server that plays a script: one part per stream.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use futures::{StreamExt, stream::BoxStream};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Code, Request, Response, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::*;
use crate::{ClientOptions, error::ERROR_DOMAIN};
use kubefan_common::backoff::BackoffOptions;
use kubefan_common::proto::v1alpha1::{
    self as pb,
    watch_service_server::{WatchService, WatchServiceServer},
};

mod encodings;
mod tokens;

type Step = Result<WatchResponse, Status>;

/// Plays one script per watch, then answers UNIMPLEMENTED. Records every request.
#[derive(Clone, Default)]
struct Scripted {
    scripts: Arc<Mutex<VecDeque<Vec<Step>>>>,
    requests: Arc<Mutex<Vec<WatchRequest>>>,
    /// The only token that is accepted; `None`: any, and none.
    token: Arc<Mutex<Option<String>>>,
    /// The budget in the metadata of watches.
    budget: Arc<Mutex<Option<&'static str>>>,
}

impl Scripted {
    fn check<T>(&self, request: &Request<T>) -> Result<(), Status> {
        let sent = request.metadata().get("authorization").map(|value| value.to_str().unwrap());
        match &*self.token.lock().unwrap() {
            Some(token) if sent != Some(&*format!("Bearer {token}")) => Err(Status::unauthenticated("not this token")),
            _ => Ok(()),
        }
    }
}

#[tonic::async_trait]
impl WatchService for Scripted {
    type WatchStream = BoxStream<'static, Step>;
    type ListStream = BoxStream<'static, Result<pb::ListResponse, Status>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        self.check(&request)?;
        self.requests.lock().unwrap().push(request.into_inner());
        match self.scripts.lock().unwrap().pop_front() {
            Some(steps) => {
                let mut response = Response::new(futures::stream::iter(steps).boxed());
                if let Some(budget) = *self.budget.lock().unwrap() {
                    response.metadata_mut().insert("kubefan-fallback", budget.parse().unwrap());
                }
                Ok(response)
            }
            None => Err(Status::unimplemented("the script is at its end")),
        }
    }

    async fn list(&self, request: Request<pb::ListRequest>) -> Result<Response<Self::ListStream>, Status> {
        self.check(&request)?;
        let chunk = |version: &str, names: &[&str]| pb::ListResponse {
            resource_version: version.to_owned(),
            objects: names.iter().map(|name| pb::Object { name: name.to_string(), ..Default::default() }).collect(),
            resource: (names.len() == 2).then(Default::default),
            cluster: if names.len() == 2 { "c1".to_owned() } else { String::new() },
            version_is_complete: true,
        };
        let chunks = [Ok(chunk("7", &["a", "b"])), Ok(chunk("7", &["c"]))];
        Ok(Response::new(futures::stream::iter(chunks).boxed()))
    }

    async fn get(&self, _: Request<pb::GetRequest>) -> Result<Response<pb::GetResponse>, Status> {
        Ok(Response::new(pb::GetResponse::default()))
    }

    async fn list_resources(
        &self,
        _: Request<pb::ListResourcesRequest>,
    ) -> Result<Response<pb::ListResourcesResponse>, Status> {
        Ok(Response::new(pb::ListResourcesResponse::default()))
    }

    async fn get_freshness(
        &self,
        _: Request<pb::GetFreshnessRequest>,
    ) -> Result<Response<pb::GetFreshnessResponse>, Status> {
        Ok(Response::new(pb::GetFreshnessResponse::default()))
    }
}

async fn serve(scripts: Vec<Vec<Step>>) -> (Scripted, Client) {
    let server = Scripted { scripts: Arc::new(Mutex::new(scripts.into())), ..Scripted::default() };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let service = WatchServiceServer::new(server.clone());
    tokio::spawn(
        tonic::transport::Server::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(listener)),
    );
    (server, Client::connect(&address, &ClientOptions::default()).await.unwrap())
}

fn options() -> WatchOptions {
    let backoff = BackoffOptions {
        initial: Duration::from_millis(1),
        max: Duration::from_millis(1),
        ..BackoffOptions::default()
    };
    WatchOptions { backoff, seed: Some(1), ..WatchOptions::default() }
}

fn message(resume_version: &str, message: Message) -> Step {
    Ok(WatchResponse { resume_version: resume_version.to_owned(), message: Some(message), ..WatchResponse::default() })
}

fn event(resume_version: &str, name: &str) -> Step {
    message(resume_version, Message::Event(Event { name: name.to_owned(), ..Event::default() }))
}

fn begin() -> Step {
    message("", Message::SnapshotBegin(pb::SnapshotBegin { resource_version: "5".to_owned(), ..Default::default() }))
}

fn end() -> Step {
    message("5", Message::SnapshotEnd(pb::SnapshotEnd { object_count: 1 }))
}

fn drained() -> Step {
    Err(Status::unavailable("draining"))
}

/// Reads up to the error at the end of every script, and returns the items in short form.
async fn received(mut watch: WatchStream) -> Vec<String> {
    let mut received = Vec::new();
    while let Some(item) = watch.next().await {
        received.push(match item {
            Ok(WatchItem::Event(event)) => event.name,
            Ok(WatchItem::Disconnected { error, .. }) => format!("disconnected: {error}"),
            Ok(WatchItem::Reconnected { from }) => format!("reconnected from {from:?}"),
            Ok(WatchItem::Restarted { error }) => format!("restart: {error}"),
            Ok(WatchItem::SnapshotBegin { .. }) => "begin".to_owned(),
            Ok(WatchItem::SnapshotEnd { .. }) => "end".to_owned(),
            Ok(WatchItem::Bookmark) => "bookmark".to_owned(),
            Ok(WatchItem::GapBegin { .. }) => "gap".to_owned(),
            Ok(WatchItem::GapEnd) => "gap end".to_owned(),
            Ok(WatchItem::CatchUpBegin { .. }) => "catch-up".to_owned(),
            Ok(WatchItem::CatchUpEnd) => "catch-up end".to_owned(),
            Err(error) => format!("{:?}", error.code()),
        });
    }
    received
}

fn requested(server: &Scripted) -> Vec<String> {
    server.requests.lock().unwrap().iter().map(|request| request.resource_version.clone()).collect()
}

#[tokio::test]
async fn the_budget_of_the_fallback_is_that_of_the_last_answer_that_named_one() {
    let (server, client) = serve(vec![vec![drained()], vec![drained()], vec![]]).await;
    assert_eq!(client.fallback_budget(), None);
    let mut watch = client.watch(Target::default(), options());
    for (named, clients) in [(Some("clients=3000, rate=50"), 3000), (Some("clients=7"), 3000), (None, 3000)] {
        *server.budget.lock().unwrap() = named;
        let _ = watch.next().await;
        assert_eq!(client.fallback_budget().map(|budget| budget.clients), Some(clients), "{named:?}");
    }
}

#[tokio::test]
async fn a_broken_watch_reconnects_with_its_last_resume_version() {
    let bookmark = message("9", Message::Bookmark(pb::Bookmark {}));
    let (server, client) = serve(vec![
        vec![begin(), event("", "a"), end(), event("6", "b"), drained()],
        vec![event("8", "c"), bookmark, drained()],
    ])
    .await;
    let received = received(client.watch(Target::default(), options())).await;
    let lost = "disconnected: draining";
    assert_eq!(
        received,
        ["begin", "a", "end", "b", lost, "reconnected from \"6\"", "c", "bookmark", lost, "Unimplemented"],
        "the third attempt reaches the end of the script"
    );
    assert_eq!(requested(&server), ["", "6", "9"]);
}

#[tokio::test]
async fn a_break_inside_a_snapshot_or_a_gap_restarts_it() {
    let gap =
        || message("", Message::GapBegin(pb::GapBegin { resource_version: "5".into(), reason: "expired".into() }));
    let (server, client) = serve(vec![
        vec![begin(), event("", "a"), drained()],
        vec![begin(), event("", "a"), end(), gap(), event("", "x"), drained()],
        vec![gap(), event("", "x"), message("20", Message::GapEnd(pb::GapEnd {})), drained()],
    ])
    .await;
    let received = received(client.watch(Target::default(), options())).await;
    assert_eq!(received.iter().filter(|item| *item == "begin").count(), 2);
    assert_eq!(requested(&server), ["", "", "5", "20"]);
}

#[tokio::test]
async fn the_delay_has_a_limit_of_its_own_while_kubefan_is_not_synced() {
    let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
    let refused = |reason: &str, retry_after| {
        let mut details = ErrorDetails::with_error_info(reason, ERROR_DOMAIN, []);
        details.set_retry_info(Some(retry_after));
        vec![Err(Status::with_error_details(Code::Unavailable, "x", details))]
    };
    for (script, delay) in [
        (refused("NOT_SYNCED", minutes(1)), minutes(2)),
        (refused("NOT_SYNCED", minutes(3)), minutes(3)),
        (refused("DRAINING", minutes(1)), minutes(10)),
    ] {
        let (_server, client) = serve(vec![script]).await;
        let backoff =
            BackoffOptions { initial: minutes(10), max: minutes(10), jitter: 0.0, ..BackoffOptions::default() };
        let options = WatchOptions { backoff, not_synced_delay_max: Some(minutes(2)), ..options() };
        let item = client.watch(Target::default(), options).next().await;
        assert!(matches!(item, Some(Ok(WatchItem::Disconnected { retry_in, .. })) if retry_in == delay), "{item:?}");
    }
}

#[tokio::test]
async fn a_watch_that_is_asked_to_move_resumes_at_once_and_its_caller_does_not_notice() {
    for reason in MOVED {
        let moved = || {
            let mut details = ErrorDetails::with_error_info(reason.as_str(), ERROR_DOMAIN, []);
            details.set_retry_info(Some(Duration::ZERO));
            Err(Status::with_error_details(Code::Unavailable, "come back", details))
        };
        let bookmark = message("9", Message::Bookmark(pb::Bookmark {}));
        let scripts = vec![vec![begin(), end(), bookmark, moved()], vec![event("10", "b"), moved()]];
        let (server, client) = serve(scripts).await;
        let mut watch = client.watch(Target::default(), options());
        for _ in 0..3 {
            watch.next().await.unwrap().unwrap();
        }
        watch.opened_at = watch.opened_at.and_then(|at| at.checked_sub(MOVED_AFTER));
        let item = watch.next().await.unwrap().unwrap();
        assert!(matches!(&item, WatchItem::Event(event) if event.name == "b"), "{item:?}");
        assert_eq!(requested(&server), ["", "9"]);
        // A stream that is moved right after it was opened waits like one that failed.
        let item = watch.next().await.unwrap().unwrap();
        assert!(matches!(item, WatchItem::Disconnected { .. }), "{item:?}");
    }
}

fn expired() -> Step {
    let details = ErrorDetails::with_error_info("EXPIRED", ERROR_DOMAIN, []);
    Err(Status::with_error_details(Code::OutOfRange, "too old resource version: 3 (4)", details))
}

#[tokio::test]
async fn on_expired_decides_whether_an_expired_version_is_an_error_or_a_restart() {
    let from_3 = || WatchOptions { resource_version: "3".to_owned(), ..options() };
    let (server, client) = serve(vec![vec![expired()], vec![expired()], vec![begin(), end(), drained()]]).await;
    let fail = WatchOptions { on_expired: OnExpired::Fail, ..from_3() };
    assert_eq!(received(client.watch(Target::default(), fail)).await, ["OutOfRange"]);
    let received = received(client.watch(Target::default(), from_3())).await;
    assert_eq!(received[..3], ["restart: too old resource version: 3 (4)", "begin", "end"]);
    assert_eq!(requested(&server), ["3", "3", "", "5"]);
}

#[tokio::test]
async fn a_version_is_sent_together_with_its_cluster() {
    let begin_in = |cluster: &str| {
        let begin = pb::SnapshotBegin { cluster: cluster.to_owned(), ..Default::default() };
        message("", Message::SnapshotBegin(begin))
    };
    let (server, client) = serve(vec![
        vec![begin_in("c1"), end(), drained()],
        vec![begin_in("c2"), drained()],
        vec![begin_in("c2"), end(), drained()],
        vec![expired()],
    ])
    .await;
    let from_1 = WatchOptions { resource_version: "1".to_owned(), cluster: "c0".to_owned(), ..options() };
    received(client.watch(Target::default(), from_1)).await;
    let requested: Vec<_> = server.requests.lock().unwrap().iter().map(|request| request.cluster.clone()).collect();
    assert_eq!(
        requested,
        ["c0", "c1", "c1", "c2", ""],
        "an incomplete snapshot changes neither the version nor the cluster"
    );
    assert_eq!(client.list(Target::default(), "").await.unwrap().cluster, "c1", "the first chunk has it");
}

#[tokio::test]
async fn only_a_timeout_ends_the_watch_without_an_error() {
    let (server, client) = serve(vec![vec![begin(), end()], vec![event("6", "a")]]).await;
    let with_timeout = WatchOptions { timeout: Some(Duration::from_secs(100)), ..options() };
    assert_eq!(received(client.watch(Target::default(), with_timeout)).await, ["begin", "end"]);
    let received = received(client.watch(Target::default(), options())).await;
    assert_eq!(received, ["a", "disconnected: the stream ended", "Unimplemented"]);
    assert_eq!(server.requests.lock().unwrap()[0].timeout_seconds, 100);
}

#[tokio::test]
async fn a_list_joins_its_chunks_and_a_get_without_an_object_is_an_error() {
    let (_server, client) = serve(Vec::new()).await;
    let list = client.list(Target::default(), "").await.unwrap();
    assert_eq!((list.resource_version.as_str(), list.objects.len(), list.resource.is_some()), ("7.end", 3, true));
    let error = client.get(Target::default(), "").await.unwrap_err();
    assert!(error.to_string().contains("does not speak kubefan's protocol: a get without an object"), "{error}");
}

#[tokio::test]
async fn a_certificate_is_trusted_only_if_the_given_ca_signed_it() {
    let key = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let identity = tonic::transport::Identity::from_pem(key.cert.pem(), key.signing_key.serialize_pem());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    let tls = tonic::transport::ServerTlsConfig::new().identity(identity);
    let mut server = tonic::transport::Server::builder().tls_config(tls).unwrap();
    let server = server.add_service(WatchServiceServer::new(Scripted::default()));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));

    let dir = tempfile::tempdir().unwrap();
    let ca_file = dir.path().join("ca.crt");
    std::fs::write(&ca_file, key.cert.pem()).unwrap();
    let trusting = ClientOptions { ca_file: Some(ca_file), ..ClientOptions::default() };
    let client = Client::connect(&address, &trusting).await.unwrap();
    assert_eq!(client.list(Target::default(), "").await.unwrap().objects.len(), 3);
    let error = Client::connect(&address, &ClientOptions::default()).await.unwrap_err();
    assert!(error.to_string().contains("certificate"), "{error}");
}
