//! Traces: a real OTLP receiver gets the spans of requests, with kubefan's findings about them and
//! no secret, under the parents that callers name. A collector that is away disturbs nothing.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use kubefan_common::proto::v1alpha1::WatchRequest;
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value},
    trace::v1::Span,
};
use reqwest::StatusCode;
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use crate::{
    authorization::{Who, World},
    harness::{
        apiserver::ApiServer,
        process::closed_port,
        record::{Watch, connect},
        rig::target,
        simulated::Simulated,
        tests, wait,
    },
};

tests! {
    apiserver: requests_have_spans_with_their_decisions_and_without_secrets;
    local: a_resume_and_its_stream_are_one_trace_under_the_callers, a_collector_that_is_away_disturbs_nothing;
}

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// The attributes of a resource, a header, and a span.
type ReceivedSpan = (Vec<KeyValue>, Option<String>, Span);

/// The spans that a collector has received.
#[derive(Clone, Default)]
struct Received(Arc<Mutex<Vec<ReceivedSpan>>>);

#[tonic::async_trait]
impl TraceService for Received {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let header = request.metadata().get("x-tenant").and_then(|value| value.to_str().ok()).map(str::to_owned);
        for of_resource in request.into_inner().resource_spans {
            let resource = of_resource.resource.unwrap_or_default().attributes;
            for span in of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                self.0.lock().unwrap().push((resource.clone(), header.clone(), span));
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A collector, which stops when dropped.
struct Collector {
    received: Received,
    addr: SocketAddr,
    serving: JoinHandle<()>,
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Collector {
    async fn start() -> Collector {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let received = Received::default();
        let service = TraceServiceServer::new(received.clone());
        let server = tonic::transport::Server::builder().add_service(service);
        let serving = tokio::spawn(async move {
            server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
        });
        Collector { received, addr, serving }
    }

    fn flag(&self) -> String {
        format!("--otlp-endpoint=http://{}", self.addr)
    }

    /// Waits for a span with this name and this attribute.
    async fn span(&self, name: &str, key: &str, value: &str) -> Span {
        wait::until(&format!("a span {name} with {key}={value}"), wait::SOON, || async {
            let received = self.received.0.lock().unwrap();
            let spans = received.iter().map(|(_, _, span)| span);
            spans.filter(|span| span.name == name).find(|span| attribute(span, key) == value).cloned()
        })
        .await
    }

    fn children(&self, of: &Span) -> Vec<String> {
        let received = self.received.0.lock().unwrap();
        let children = received.iter().filter(|(_, _, span)| span.parent_span_id == of.span_id);
        children.map(|(_, _, span)| span.name.clone()).collect()
    }
}

fn text(value: Option<&Value>) -> String {
    match value {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::BoolValue(is)) => is.to_string(),
        _ => String::new(),
    }
}

/// The value of an attribute; empty if there is none.
fn attribute(span: &Span, key: &str) -> String {
    let found = span.attributes.iter().find(|attribute| attribute.key == key);
    text(found.and_then(|found| found.value.as_ref()?.value.as_ref()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn a_resume_and_its_stream_are_one_trace_under_the_callers() {
    let simulated = Simulated::start().await;
    let collector = Collector::start().await;
    let headers = simulated.dir.path().join("headers");
    std::fs::write(&headers, "x-tenant: secret-of-a-tenant\n").unwrap();
    let headers = format!("tuning.otlpHeadersFile={}", headers.display());
    let kubefan = simulated.kubefan(&["--resource=pods", &collector.flag(), &headers]).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let mut watch = Watch::start(&mut client, target("pods"), "").await.unwrap();
    watch.until_resumable().await;
    let version = simulated.stage("a", "later").to_string();
    watch.until(version.parse().unwrap()).await;
    drop(watch);
    let snapshot = collector.span("kubefan.v1alpha1.WatchService/Watch", "kubefan.resume", "snapshot").await;
    assert_eq!(attribute(&snapshot, "rpc.method"), "Watch");

    let request = WatchRequest { target: Some(target("pods")), resource_version: version, ..WatchRequest::default() };
    let mut request = Request::new(request);
    request.metadata_mut().insert("traceparent", format!("00-{TRACE}-{PARENT}-01").parse().unwrap());
    let mut stream = client.watch(request).await.unwrap().into_inner();
    simulated.stage("a", "last");
    while !format!("{:?}", stream.message().await.unwrap().unwrap()).contains("last") {}
    drop(stream);
    let resumed = collector.span("kubefan.v1alpha1.WatchService/Watch", "kubefan.resume", "ring").await;
    assert_eq!((hex(&resumed.trace_id), hex(&resumed.parent_span_id)), (TRACE.to_owned(), PARENT.to_owned()));
    for (key, value) in [
        ("rpc.system", "grpc"),
        ("rpc.service", "kubefan.v1alpha1.WatchService"),
        ("k8s.request.verb", "watch"),
        ("k8s.resource.name", "pods"),
        ("k8s.resource.scope", "cluster"),
        ("http.response.status_code", "200"),
        ("kubefan.authorization.decision", "allow"),
    ] {
        assert_eq!(attribute(&resumed, key), value, "{key}: {resumed:?}");
    }
    wait::until("the span of the stream", wait::SOON, || async {
        collector.children(&resumed).contains(&"stream".to_owned()).then_some(())
    })
    .await;
    let received = collector.received.0.lock().unwrap().clone();
    let (resource, header, _) = &received[0];
    let service = resource.iter().find(|attribute| attribute.key == "service.name").unwrap();
    assert_eq!(text(service.value.as_ref().and_then(|value| value.value.as_ref())), "kubefan");
    assert_eq!(header.as_deref(), Some("secret-of-a-tenant"));
    assert!(!kubefan.process.log().contains("secret-of-a-tenant"), "{}", kubefan.process.log());
    wait::until("spans to be counted", wait::SOON, || async {
        kubefan.metric("kubefan_trace_spans_exported_total").await.filter(|count| *count >= 3.0)
    })
    .await;
}

async fn requests_have_spans_with_their_decisions_and_without_secrets() {
    let collector = Collector::start().await;
    let world = World::start(ApiServer::shared().await, &[&collector.flag()]).await;
    let path = format!("/api/v1/namespaces/{}/configmaps", world.own);
    let list = format!("list {}", "/api/v1/namespaces/{namespace}/configmaps");
    let ask = async |who: Who, uri: &str| world.client(who).get(world.url(uri)).send().await.unwrap().status();
    assert_eq!(ask(Who::Own, &format!("{path}?labelSelector=of-no-one")).await, StatusCode::OK);
    let allowed = collector.span(&list, "kubefan.authorization.decision", "allow").await;
    assert_eq!(attribute(&allowed, "http.route"), "/api/v1/namespaces/{namespace}/configmaps");
    assert_eq!(attribute(&allowed, "k8s.namespace.name"), world.own);
    let children = collector.children(&allowed);
    for wait in ["authenticate", "authorize", "freshness proof"] {
        assert!(children.iter().any(|name| name == wait), "{wait}: {children:?}");
    }
    assert_eq!(ask(Who::Stranger, &format!("{path}?resourceVersion=0")).await, StatusCode::FORBIDDEN);
    let denied = collector.span(&list, "kubefan.authorization.decision", "forbid").await;
    assert_eq!((&*attribute(&denied, "http.response.status_code"), &*attribute(&denied, "error.type")), ("403", "403"));
    assert_eq!(ask(Who::Own, &format!("{path}/one")).await, StatusCode::OK);
    let forwarded =
        collector.span("get /api/v1/namespaces/{namespace}/configmaps/{name}", "kubefan.forwarded", "true").await;
    assert!(collector.children(&forwarded).contains(&"upstream".to_owned()));
    let received = format!("{:?}", collector.received.0.lock().unwrap());
    for secret in ["eyJhbGciOi", "token-of-", "of-no-one", "content-of-"] {
        assert!(!received.contains(secret), "{secret} in {received}");
    }
}

async fn a_collector_that_is_away_disturbs_nothing() {
    let simulated = Simulated::start().await;
    let (_closed, address) = closed_port();
    let away = format!("--otlp-endpoint=http://{address}");
    let mut kubefan = simulated.kubefan(&["--resource=pods", &away]).await;
    for _ in 0..50 {
        let url = format!("http://{}/api/v1/pods?resourceVersion=0", kubefan.grpc_addr);
        assert_eq!(reqwest::get(url).await.unwrap().status(), StatusCode::OK);
    }
    wait::until("the failure to be counted", wait::SOON, || async {
        kubefan.metric("kubefan_trace_spans_failed_total").await.filter(|count| *count >= 50.0)
    })
    .await;
    kubefan.process.terminate();
    assert_eq!(kubefan.process.ended(wait::SOON).await.code(), Some(0));
    assert_eq!(kubefan.process.log().matches("spans cannot be exported").count(), 1, "{}", kubefan.process.log());
}
