//! The reflector against a kubefan that plays a script: one part per stream.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, PoisonError},
};

use futures::{StreamExt, stream::BoxStream};
use hyper_util::rt::TokioIo;
use kubefan_cache::ConflatedChange;
use kubefan_client::{Client, ClientOptions};
use kubefan_common::proto::v1alpha1::{
    self, Event, WatchResponse,
    watch_response::Message,
    watch_service_server::{WatchService, WatchServiceServer},
};
use kubefan_model::{GroupVersionResource, Scope, fields::FieldTable};
use kubefan_telemetry::metrics::{Metrics, WatchPurpose};
use rand::{SeedableRng, rngs::StdRng};
use tonic::{
    Code, Request, Response, Status,
    transport::{Endpoint, Server},
};
use tonic_types::{ErrorDetails, StatusExt};
use tower::{service_fn, util::BoxCloneSyncService};

use super::*;
use crate::client::UpstreamOptions;

type Sent = Result<WatchResponse, Status>;

#[derive(Clone, Default)]
struct Scripted {
    scripts: Arc<Mutex<VecDeque<Vec<Sent>>>>,
    requests: Arc<Mutex<Vec<v1alpha1::WatchRequest>>>,
}

#[tonic::async_trait]
impl WatchService for Scripted {
    type WatchStream = BoxStream<'static, Sent>;
    type ListStream = BoxStream<'static, Result<v1alpha1::ListResponse, Status>>;

    async fn watch(&self, request: Request<v1alpha1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request.into_inner());
        let script = self.scripts.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let script = script.ok_or_else(|| Status::unavailable("the script is at its end"))?;
        // The last stream stays open.
        Ok(Response::new(futures::stream::iter(script).chain(futures::stream::pending()).boxed()))
    }

    async fn list(&self, _: Request<v1alpha1::ListRequest>) -> Result<Response<Self::ListStream>, Status> {
        Err(Status::unimplemented("list"))
    }

    async fn get(&self, _: Request<v1alpha1::GetRequest>) -> Result<Response<v1alpha1::GetResponse>, Status> {
        Err(Status::unimplemented("get"))
    }

    async fn list_resources(
        &self,
        _: Request<v1alpha1::ListResourcesRequest>,
    ) -> Result<Response<v1alpha1::ListResourcesResponse>, Status> {
        Err(Status::unimplemented("list_resources"))
    }

    /// At version 12, a minute old.
    async fn get_freshness(
        &self,
        _: Request<v1alpha1::GetFreshnessRequest>,
    ) -> Result<Response<v1alpha1::GetFreshnessResponse>, Status> {
        let age = Some(prost_types::Duration { seconds: 60, nanos: 0 });
        let resource_version = "12".to_owned();
        let cluster = "c".to_owned();
        Ok(Response::new(v1alpha1::GetFreshnessResponse {
            resource_version,
            age,
            cluster,
            ..v1alpha1::GetFreshnessResponse::default()
        }))
    }
}

fn reflector(scripts: Vec<Vec<Sent>>) -> (Scripted, GrpcReflector) {
    let server = Scripted { scripts: Arc::new(Mutex::new(scripts.into())), ..Scripted::default() };
    let service = WatchServiceServer::new(server.clone());
    let connect = move |_| {
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let incoming = tokio_stream::once(Ok::<_, std::io::Error>(theirs));
        tokio::spawn(Server::builder().add_service(service.clone()).serve_with_incoming(incoming));
        std::future::ready(Ok::<_, std::io::Error>(TokioIo::new(ours)))
    };
    let channel = Endpoint::from_static("http://kubefan.test").connect_with_connector_lazy(service_fn(connect));
    let kubefan = KubefanClient::from_client(Client::from_channel(channel, "kubefan.test", &ClientOptions::default()));
    let gvr = GroupVersionResource::new("", "v1", "pods");
    let parser = Arc::new(ObjectParser::new(&FieldTable::new(&gvr, true, &[])).of("Pod", "v1"));
    let metrics = Metrics::new(prometheus::Registry::new()).expect("a new registry");
    let metrics = metrics.cache(&gvr, &Scope::Cluster, parser.media(), &[]);
    let open_watch = Arc::new(move || metrics.upstream_watch(WatchPurpose::Standing));
    let kind = "Pod".to_owned();
    let scope = Scope::Cluster;
    let field_selector = String::new();
    let target = Target { gvr, kind, namespaced: true, scope, field_selector };
    (server, GrpcReflector::new(kubefan, apiserver(), target, parser, open_watch, StdRng::seed_from_u64(1)))
}

/// An apiserver that does not answer.
fn apiserver() -> Upstream {
    let refused = || std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into();
    let service = service_fn(move |_| std::future::ready(Err(refused())));
    let base = http::Uri::from_static("https://apiserver.test");
    Upstream::from_service(BoxCloneSyncService::new(service), &base, UpstreamOptions::default())
}

fn message(resume_version: &str, message: Message) -> Sent {
    Ok(WatchResponse { resume_version: resume_version.to_owned(), message: Some(message), ..WatchResponse::default() })
}

fn event(resume_version: &str, kind: v1alpha1::EventType, name: &str, version: u64) -> Sent {
    let object = format!(
        r#"{{"kind":"Pod","apiVersion":"v1","metadata":{{"namespace":"n","name":"{name}","uid":"{name}","resourceVersion":"{version}"}}}}"#
    );
    let event = Event {
        r#type: kind.into(),
        namespace: "n".to_owned(),
        name: name.to_owned(),
        resource_version: version.to_string(),
        object: object.into(),
        ..Event::default()
    };
    message(resume_version, Message::Event(event))
}

fn gone(name: &str) -> Sent {
    let event = Event {
        r#type: v1alpha1::EventType::Deleted.into(),
        delete_reason: v1alpha1::DeleteReason::FinalStateUnknown.into(),
        namespace: "n".to_owned(),
        name: name.to_owned(),
        ..Event::default()
    };
    message("", Message::Event(event))
}

/// A snapshot of one object at version 10.
fn snapshot() -> Vec<Sent> {
    snapshot_of("c")
}

fn snapshot_of(cluster: &str) -> Vec<Sent> {
    let begin =
        v1alpha1::SnapshotBegin { resource_version: "10".into(), cluster: cluster.into(), ..Default::default() };
    let end = v1alpha1::SnapshotEnd { object_count: 1 };
    vec![
        message("", Message::SnapshotBegin(begin)),
        event("", v1alpha1::EventType::Added, "a", 3),
        message("10", Message::SnapshotEnd(end)),
    ]
}

fn gap(reason: &str, events: Vec<Sent>, end: &str) -> Vec<Sent> {
    let begin = v1alpha1::GapBegin { resource_version: "10".to_owned(), reason: reason.to_owned() };
    let begin = message("", Message::GapBegin(begin));
    let end = message(end, Message::GapEnd(v1alpha1::GapEnd {}));
    [vec![begin], events, vec![end]].concat()
}

/// The steps as text, up to `count` of them; answers about the age come at any time, and are left
/// out.
async fn steps(reflector: &mut GrpcReflector, count: usize) -> Vec<String> {
    let mut steps = Vec::new();
    while steps.len() < count {
        steps.push(match reflector.step().await {
            Ok(ReflectorEvent::Proved { .. }) => continue,
            Ok(ReflectorEvent::Update { update: Update::ListBegin { reason }, .. }) => {
                format!("list {}", reason.as_str())
            }
            Ok(ReflectorEvent::Update { update: Update::ListItem(object), .. }) => format!("item {}", object.key()),
            Ok(ReflectorEvent::Update { update: Update::ListEnd(version), .. }) => format!("listed {version}"),
            Ok(ReflectorEvent::Update { update: Update::Event(_, object), .. }) => {
                format!("event {}", object.version())
            }
            Ok(ReflectorEvent::Update { update: Update::Bookmark(version), .. }) => format!("bookmark {version}"),
            Ok(ReflectorEvent::Update { update: Update::WentBack { .. }, .. }) => "went back".to_owned(),
            Ok(ReflectorEvent::Update { update: Update::Conflated { reason, changes, version }, .. }) => {
                let changes: Vec<_> = changes
                    .iter()
                    .map(|change| match change {
                        ConflatedChange::Put(object) => format!("+{}", object.key().name()),
                        ConflatedChange::Remove(key) => format!("-{}", key.name()),
                    })
                    .collect();
                format!("{} {} to {version}", reason.as_str(), changes.join(" "))
            }
            Ok(ReflectorEvent::Watching { .. }) => "watching".to_owned(),
            Ok(ReflectorEvent::Ended { reason }) => format!("ended {reason}"),
            Err(error) => error.reason().to_owned(),
        });
    }
    steps
}

const LISTED: [&str; 4] = ["list initial", "item n/a", "watching", "listed 10"];

fn refused(code: Code, reason: &str) -> Sent {
    let details = ErrorDetails::with_error_info(reason, "kubefan.dev", HashMap::new());
    Err(Status::with_error_details(code, "no", details))
}

#[tokio::test]
async fn a_snapshot_from_before_is_taken_only_if_the_cluster_went_back() {
    // The other kubefan proves that the cluster is at version 12.
    for (version, expected) in
        [(11, ["expired", "version_too_large"].as_slice()), (20, &["expired", "went back", "list expired"])]
    {
        let newer = event(&version.to_string(), v1alpha1::EventType::Modified, "a", version);
        let first = [snapshot(), vec![newer, refused(Code::OutOfRange, "RESOURCE_VERSION_TOO_OLD")]].concat();
        let (_server, mut reflector) = reflector(vec![first, snapshot()]);
        assert_eq!(steps(&mut reflector, 4).await, LISTED);
        assert_eq!(steps(&mut reflector, expected.len() + 1).await[1..], *expected, "{version}");
    }
}

/// The cache has read the apiserver meanwhile.
#[tokio::test]
async fn a_snapshot_from_before_what_was_read_elsewhere_is_not_taken() {
    let (_server, mut reflector) = reflector(vec![snapshot(), snapshot()]);
    let floor = |version| ResourceVersion::new(version);
    reflector.relist_above(RelistReason::Expired, floor(11));
    assert_eq!(steps(&mut reflector, 1).await, ["version_too_large"]);
    reflector.relist_above(RelistReason::Expired, floor(10));
    assert_eq!(steps(&mut reflector, 1).await, ["version_too_large"], "the newest one counts");
}

#[tokio::test]
async fn a_resume_without_a_snapshot_names_the_cluster_too() {
    let (server, mut reflector) = reflector(vec![vec![]]);
    reflector.resume_from(ResourceVersion::new(10).expect("a version"));
    assert_eq!(steps(&mut reflector, 1).await, ["watching"]);
    assert_eq!(server.requests.lock().unwrap_or_else(PoisonError::into_inner)[0].cluster, "c");
}

#[tokio::test]
async fn an_age_of_another_cluster_ends_the_watch() {
    let (_server, mut reflector) = reflector(vec![snapshot_of("d")]);
    assert_eq!(steps(&mut reflector, 5).await[4], "invalid_response");
}

#[tokio::test]
async fn a_span_with_a_version_inside_or_none_at_its_end_is_refused() {
    let added = |version: &str| event(version, v1alpha1::EventType::Added, "b", 12);
    let bookmark = message("12", Message::Bookmark(v1alpha1::Bookmark {}));
    for (inside, end) in [(vec![added(""), bookmark], "12"), (vec![added("12")], "12"), (vec![added("")], "")] {
        let (_server, mut reflector) = reflector(vec![[snapshot(), gap("expired", inside, end)].concat(), snapshot()]);
        assert_eq!(steps(&mut reflector, 4).await, LISTED);
        assert_eq!(steps(&mut reflector, 2).await, ["invalid_response", "list interrupted"]);
    }
}

#[tokio::test]
async fn a_marked_span_that_breaks_is_dropped_and_asked_for_again() {
    let mut broken = gap("expired", vec![event("", v1alpha1::EventType::Added, "b", 12)], "");
    broken.pop();
    broken.push(Err(Status::unavailable("restarting")));
    let again = gap("expired", vec![gone("a"), event("", v1alpha1::EventType::Added, "c", 13)], "15");
    let (server, mut reflector) = reflector(vec![[snapshot(), broken].concat(), again]);
    assert_eq!(steps(&mut reflector, 4).await, LISTED);
    assert_eq!(steps(&mut reflector, 3).await, ["server_error", "watching", "expired -a +c to 15"]);
    let requests = server.requests.lock().unwrap_or_else(PoisonError::into_inner);
    let sent = |at: usize| (requests[at].resource_version.as_str(), requests[at].cluster.as_str());
    assert_eq!((sent(0), sent(1)), (("", ""), ("10", "c")));
}

#[tokio::test]
async fn a_reason_of_a_later_version_is_still_a_gap() {
    let events = vec![event("", v1alpha1::EventType::Modified, "a", 12)];
    let (_server, mut reflector) = reflector(vec![[snapshot(), gap("who_knows", events, "12")].concat()]);
    assert_eq!(steps(&mut reflector, 5).await[4], "other +a to 12");
}

#[tokio::test]
async fn an_age_counts_once_its_version_is_reached() {
    let events =
        vec![event("11", v1alpha1::EventType::Modified, "a", 11), event("12", v1alpha1::EventType::Modified, "a", 12)];
    let (_server, mut reflector) = reflector(vec![[snapshot(), events].concat()]);
    let mut reached = 0;
    let began = Instant::now();
    loop {
        match reflector.step().await.expect("no step fails") {
            ReflectorEvent::Update { update: Update::Event(_, object), .. } => reached = object.version().get(),
            ReflectorEvent::Proved { at } => {
                assert_eq!(reached, 12);
                assert!(at + Duration::from_secs(50) < began, "it is as old as the other kubefan said");
                return;
            }
            _ => {}
        }
    }
}

#[tokio::test]
async fn each_refusal_leads_where_that_of_an_apiserver_does() {
    for (code, reason, expected) in [
        (Code::OutOfRange, "RESOURCE_VERSION_TOO_OLD", ["expired", "list expired"]),
        (Code::PermissionDenied, "FORBIDDEN", ["forbidden", "list forbidden"]),
        (Code::NotFound, "RESOURCE_NOT_FOUND", ["not_found", "list not_found"]),
        (Code::Unauthenticated, "UNAUTHENTICATED", ["unauthorized", "watching"]),
        (Code::Unavailable, "DRAINING", ["draining", "watching"]),
        (Code::ResourceExhausted, "LIMIT_REACHED", ["too_many_requests", "watching"]),
    ] {
        let ends = [snapshot(), vec![refused(code, reason)]].concat();
        let (_server, mut reflector) = reflector(vec![ends, snapshot()]);
        assert_eq!(steps(&mut reflector, 4).await, LISTED);
        assert_eq!(steps(&mut reflector, 2).await, expected, "{reason}");
    }
    let ends = [snapshot(), vec![refused(Code::OutOfRange, "HISTORY_REWRITTEN")]].concat();
    let (_server, mut reflector) = reflector(vec![ends, snapshot()]);
    assert_eq!(steps(&mut reflector, 7).await[4..], ["expired", "went back", "list rewritten"]);
}

#[tokio::test]
async fn the_cause_of_a_list_that_fails_is_that_of_the_apiserver() {
    for (metadata, expected) in
        [(HashMap::from([("cause".to_owned(), "a webhook".to_owned())]), Some("a webhook")), (HashMap::new(), None)]
    {
        let details = ErrorDetails::with_error_info("NOT_SYNCED", "kubefan.dev", metadata);
        let status = Status::with_error_details(Code::Unavailable, "pods is not synced: a webhook", details);
        let (_server, mut reflector) = reflector(vec![vec![Err(status)]]);
        let error = reflector.step().await.err().expect("the list fails");
        assert_eq!(error.upstream().and_then(UpstreamError::cause), expected);
    }
}

#[tokio::test]
async fn a_backfill_takes_single_events_only() {
    let span = gap("expired", vec![event("", v1alpha1::EventType::Added, "b", 12)], "12");
    let version = |number| ResourceVersion::new(number).expect("a version");
    let (_server, by_gap) = reflector(vec![span]);
    assert_eq!(steps(&mut by_gap.for_backfill(version(10), false), 2).await, ["watching", "expired"]);
    let (server, with_state) = reflector(vec![]);
    assert_eq!(steps(&mut with_state.for_backfill(version(10), true), 1).await, ["expired"]);
    assert!(server.requests.lock().unwrap_or_else(PoisonError::into_inner).is_empty());
}
