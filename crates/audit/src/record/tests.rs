use std::{
    io,
    sync::Mutex,
    time::{Duration, UNIX_EPOCH},
};

use http::Uri;
use kubefan_access::{
    Caller, Denial, Identity, Read, ReadVerb,
    authentication::caller::KnownCaller,
    authorization::{Authorizer, attributes::Attributes},
    denial::Forbidden,
};
use kubefan_admission::Holder;
use kubefan_common::proto::v1alpha1::Target;
use kubefan_telemetry::metrics::Metrics;
use serde_json::{Value, json};

use super::*;
use crate::{AuditLog, AuditWriter, Parts, log_writer::Sink};

/// Keeps the lines, or fails.
#[derive(Clone)]
struct Lines(Option<Arc<Mutex<Vec<u8>>>>);

impl Sink for Lines {
    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        let kept = self.0.as_ref().ok_or(io::ErrorKind::StorageFull)?;
        kept.lock().unwrap().extend_from_slice(lines);
        Ok(())
    }
}

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(1_767_366_245_000_120)
}

fn start(sink: Lines, is_strict: bool) -> (AuditLog, AuditWriter) {
    let metrics = Metrics::new(prometheus::Registry::new()).unwrap().audit().clone();
    AuditLog::start(Parts { sink, records_max: 100, is_strict, clock: now, seed: [7; 32], metrics })
}

/// Returns the records of a session.
async fn recorded(session: impl AsyncFnOnce(&AuditLog)) -> Vec<Value> {
    let kept = Arc::new(Mutex::new(Vec::new()));
    let (log, writer) = start(Lines(Some(kept.clone())), false);
    session(&log).await;
    drop(log);
    writer.finish().await;
    let text = String::from_utf8(kept.lock().unwrap().clone()).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn begin(log: &AuditLog, protocol: Protocol, verb: &'static str, uri: &str) -> AuditRecord {
    let headers: HeaderMap = [("audit-id", "the-id"), ("user-agent", "kubectl"), ("authorization", "Bearer hidden")]
        .into_iter()
        .map(|(name, value)| (http::HeaderName::from_static(name), HeaderValue::from_static(value)))
        .collect();
    let uri = &uri.parse::<Uri>().unwrap();
    let headers = &headers;
    let address = Some([10, 0, 0, 1].into());
    log.begin(RequestHead { protocol, verb: verb.into(), uri, headers, address, object: None })
}

#[tokio::test(start_paused = true)]
async fn a_record_has_at_most_32_kib_whatever_its_client_sends() {
    let long = "\"".repeat(60_000);
    let name = || long.clone();
    let object = ObjectRef {
        resource: name(),
        namespace: name(),
        name: name(),
        api_group: name(),
        api_version: name(),
        subresource: name(),
    };
    let records = recorded(async |log| {
        let uri: Uri = format!("/{}", "a".repeat(60_000)).parse().unwrap();
        let headers = HeaderMap::from_iter([(http::header::USER_AGENT, long.parse().unwrap())]);
        let uri = &uri;
        let headers = &headers;
        let verb = "get".into();
        let mut record = log.begin(RequestHead {
            protocol: Protocol::Http,
            verb,
            uri,
            headers,
            address: None,
            object: Some(object),
        });
        record.answered(Outcome::failure(404, "NotFound", &long), false).await.unwrap();
    })
    .await;
    let bytes = records[0].to_string().len();
    assert!((16 << 10..32 << 10).contains(&bytes), "{bytes}");
}

fn alice() -> Caller {
    let groups = vec!["dev".to_owned(), "system:authenticated".to_owned()];
    let extra = [("scopes".to_owned(), vec!["a".to_owned()])].into();
    let identity = Identity { user: "alice".to_owned(), uid: "u1".to_owned(), groups, extra };
    Caller::Known(KnownCaller::new(identity, None))
}

fn pods(namespace: &str, name: &str) -> Target {
    let own = str::to_owned;
    Target {
        version: own("v1"),
        resource: own("pods"),
        namespace: own(namespace),
        name: own(name),
        ..Target::default()
    }
}

/// Notes a read that is allowed.
async fn allowed(record: &AuditRecord, caller: &Caller, read: Read) {
    let notes = record.notes();
    notes.caller(caller);
    notes.read(&read);
    notes.decided(&Authorizer::AlwaysAllow.authorize(caller, read, Holder::new(1, None)).await);
}

/// The parts that all records of these tests have.
fn with_common(fields: Value) -> Value {
    let mut event = json!({
        "kind": "Event",
        "apiVersion": "audit.k8s.io/v1",
        "level": "Metadata",
        "auditID": "the-id",
        "stage": "ResponseComplete",
        "sourceIPs": ["10.0.0.1"],
        "userAgent": "kubectl",
        "requestReceivedTimestamp": "2026-01-02T15:04:05.000120Z",
        "stageTimestamp": "2026-01-02T15:04:05.000120Z",
    });
    event.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    event
}

fn of_alice() -> Value {
    json!({ "username": "alice", "uid": "u1", "groups": ["dev", "system:authenticated"], "extra": { "scopes": ["a"] } })
}

#[tokio::test(start_paused = true)]
async fn a_list_has_one_record_with_its_counts() {
    let uri = "/api/v1/namespaces/a/pods?resourceVersion=0";
    let lines = recorded(async |log| {
        let mut record = begin(log, Protocol::Http, "list", uri);
        allowed(&record, &alice(), Read::collection(ReadVerb::List, pods("a", ""))).await;
        record.answered(Outcome::code(200), false).await.unwrap();
        record.notes().sent(2, 1000);
        record.notes().sent(1, 500);
    });
    let expected = with_common(json!({
        "requestURI": uri,
        "verb": "list",
        "user": of_alice(),
        "objectRef": { "resource": "pods", "namespace": "a", "apiVersion": "v1" },
        "responseStatus": { "metadata": {}, "code": 200 },
        "annotations": {
            "authorization.k8s.io/decision": "allow",
            "authorization.k8s.io/reason": "",
            "kubefan.dev/protocol": "http",
            "kubefan.dev/objects": "3",
            "kubefan.dev/bytes": "1500",
        },
    }));
    assert_eq!(lines.await, [expected]);
}

#[tokio::test(start_paused = true)]
async fn a_watch_has_a_record_of_its_start_and_one_of_its_end() {
    let uri = "/api/v1/pods?watch=1";
    let lines = recorded(async |log| {
        let mut record = begin(log, Protocol::Http, "watch", uri);
        allowed(&record, &Caller::Any, Read::collection(ReadVerb::Watch, pods("", ""))).await;
        record.started(Outcome::code(200), false).await.unwrap();
        record.ended("timeout", None);
    });
    let expected = |stage: &str, end: Option<&str>| {
        let mut event = with_common(json!({
            "stage": stage,
            "requestURI": uri,
            "verb": "watch",
            "user": { "username": "system:unsecured" },
            "objectRef": { "resource": "pods", "apiVersion": "v1" },
            "responseStatus": { "metadata": {}, "code": 200 },
            "annotations": {
                "authorization.k8s.io/decision": "allow",
                "authorization.k8s.io/reason": "",
                "kubefan.dev/protocol": "http",
            },
        }));
        if let Some(end) = end {
            event["annotations"]["kubefan.dev/end"] = end.into();
        }
        event
    };
    assert_eq!(lines.await, [expected("ResponseStarted", None), expected("ResponseComplete", Some("timeout"))]);
}

#[tokio::test(start_paused = true)]
async fn a_grpc_call_has_the_uri_of_its_http_equivalent_and_the_status_of_its_end() {
    let lines = recorded(async |log| {
        let mut record = begin(log, Protocol::Grpc, "get", "/kubefan.v1alpha1.WatchService/Get");
        allowed(&record, &alice(), Read::object(pods("a", "p"))).await;
        record.answered(Outcome::code(200), false).await.unwrap();
        drop(record);
        let target = Target { label_selector: "app in (x,y)".to_owned(), group: "apps".to_owned(), ..pods("a", "p") };
        let mut record = begin(log, Protocol::Grpc, "watch", "/kubefan.v1alpha1.WatchService/Watch");
        record.notes().parameter("resourceVersion", "7");
        allowed(&record, &alice(), Read::collection(ReadVerb::Watch, target)).await;
        record.started(Outcome::code(200), false).await.unwrap();
        record.ended("draining", Some(Outcome::failure(503, "DRAINING", "kubefan is shutting down")));
    });
    let lines = lines.await;
    let expected = with_common(json!({
        "requestURI": "/api/v1/namespaces/a/pods/p",
        "verb": "get",
        "user": of_alice(),
        "objectRef": { "resource": "pods", "namespace": "a", "name": "p", "apiVersion": "v1" },
        "responseStatus": { "metadata": {}, "code": 200 },
        "annotations": {
            "authorization.k8s.io/decision": "allow",
            "authorization.k8s.io/reason": "",
            "kubefan.dev/protocol": "grpc",
        },
    }));
    assert_eq!(lines[0], expected);
    let uri = "/apis/apps/v1/namespaces/a/pods?fieldSelector=metadata.name%3Dp&labelSelector=app+in+%28x%2Cy%29&resourceVersion=7&watch=true";
    assert_eq!((&lines[1]["requestURI"], &lines[2]["requestURI"]), (&json!(uri), &json!(uri)));
    assert_eq!(lines[2]["objectRef"]["apiGroup"], "apps");
    assert_eq!(lines[2]["annotations"]["kubefan.dev/end"], "draining");
    let status = json!({ "metadata": {}, "status": "Failure", "message": "kubefan is shutting down", "reason": "DRAINING", "code": 503 });
    assert_eq!(lines[2]["responseStatus"], status);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_has_the_caller_the_request_and_the_reason() {
    let lines = recorded(async |log| {
        let mut record = begin(log, Protocol::Http, "get", "/api/v1/namespaces/a/pods/p");
        let notes = record.notes();
        let read = Read::object(pods("a", "p"));
        let attributes: Attributes = read.attributes();
        notes.caller(&alice());
        notes.read(&read);
        let user = "alice".to_owned();
        let reason = "no rule".to_owned();
        notes.decided(&Err(Denial::Forbidden(Box::new(Forbidden { attributes, user, reason }))));
        record.answered(Outcome::failure(403, "Forbidden", "pods \"p\" is forbidden"), false).await.unwrap();
        drop(record);
        let mut record = begin(log, Protocol::Http, "list", "/api/v1/pods");
        record.answered(Outcome::failure(401, "Unauthorized", "Unauthorized"), true).await.unwrap();
    });
    let lines = lines.await;
    let status = json!({ "metadata": {}, "status": "Failure", "message": "pods \"p\" is forbidden", "reason": "Forbidden", "code": 403 });
    let expected = with_common(json!({
        "requestURI": "/api/v1/namespaces/a/pods/p",
        "verb": "get",
        "user": of_alice(),
        "objectRef": { "resource": "pods", "namespace": "a", "name": "p", "apiVersion": "v1" },
        "responseStatus": status,
        "annotations": {
            "authorization.k8s.io/decision": "forbid",
            "authorization.k8s.io/reason": "no rule",
            "kubefan.dev/protocol": "http",
        },
    }));
    assert_eq!(lines[0], expected);
    assert_eq!(lines[1]["user"], json!({}), "nothing is known");
    assert_eq!(lines[1]["annotations"], json!({ "kubefan.dev/protocol": "http", "kubefan.dev/forwarded": "true" }));
}

#[tokio::test(start_paused = true)]
async fn a_record_completes_itself_whatever_happens_to_its_request() {
    let lines = recorded(async |log| {
        // The caller goes away before there is an answer.
        drop(begin(log, Protocol::Http, "list", "/1"));
        // And from a stream.
        let mut record = begin(log, Protocol::Http, "watch", "/2");
        record.started(Outcome::code(200), false).await.unwrap();
        drop(record);
        let record = begin(log, Protocol::Http, "get", "/3");
        let panicked = tokio::spawn(async move {
            let _record = record;
            panic!("planted");
        });
        assert!(panicked.await.unwrap_err().is_panic());
    });
    let seen: Vec<_> = lines
        .await
        .iter()
        .map(|event| {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let status = &event["responseStatus"];
            let end = text(&event["annotations"]["kubefan.dev/end"]);
            format!(
                "{} {} {} {} {end}",
                text(&event["requestURI"]),
                text(&event["stage"]),
                status["code"],
                text(&status["message"])
            )
        })
        .collect();
    let expected = [
        "/1 ResponseComplete 200 Connection closed early ",
        "/2 ResponseStarted 200  ",
        "/2 ResponseComplete 200  cancelled",
        "/3 Panic 500 kubefan has failed (panic); its log says where ",
    ];
    assert_eq!(seen, expected);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_waits_for_its_record_is_refused_without_it_and_recorded_once_with_it() {
    for can_write in [false, true] {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let (log, writer) = start(Lines(can_write.then(|| kept.clone())), true);
        let mut answer = begin(&log, Protocol::Http, "list", "/1");
        assert_eq!(answer.answered(Outcome::code(200), false).await.is_ok(), can_write);
        let mut stream = begin(&log, Protocol::Http, "watch", "/2");
        assert_eq!(stream.started(Outcome::code(200), false).await.is_ok(), can_write);
        let lines = |kept: &Mutex<Vec<u8>>| kept.lock().unwrap().iter().filter(|byte| **byte == b'\n').count();
        assert_eq!(lines(&kept), if can_write { 2 } else { 0 }, "written before the answer");
        drop(answer);
        drop(stream);
        drop(log);
        writer.finish().await;
        assert_eq!(lines(&kept), if can_write { 3 } else { 0 }, "and the end of the stream");
    }
}

#[tokio::test(start_paused = true)]
async fn ids_are_random_uuids_and_no_header_of_the_request_but_its_agent_is_recorded() {
    let lines = recorded(async |log| {
        let headers = HeaderMap::new();
        for _ in 0..2 {
            let head = RequestHead {
                protocol: Protocol::Http,
                verb: "list".into(),
                uri: &Uri::from_static("/"),
                headers: &headers,
                address: None,
                object: None,
            };
            drop(log.begin(head));
        }
        drop(begin(log, Protocol::Http, "list", "/"));
    });
    let lines = lines.await;
    let id = |index: usize| lines[index]["auditID"].as_str().unwrap().to_owned();
    assert_ne!(id(0), id(1));
    let shape: Vec<_> = id(0).split('-').map(str::len).collect();
    assert_eq!((shape, &id(0)[14..15]), (vec![8, 4, 4, 4, 12], "4"), "{}", id(0));
    assert!(!lines[2].to_string().contains("hidden"), "{}", lines[2]);
}
