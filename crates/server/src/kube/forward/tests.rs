//! Tests of forwarded requests that get no answer.

use std::sync::atomic::AtomicUsize;

use futures::stream;
use h2::Reason;
use http::Uri;
use http_body_util::Empty;
use kubefan_testkit::scripted_server::{failure, go_away};
use kubefan_upstream::{
    client::ConnectionLimits,
    passthrough::{ForwardService, PassthroughOptions},
};
use prometheus::Registry;
use tower::{BoxError, service_fn};

use super::*;
use crate::kube::answer::CACHE_STATUS;

/// Returns a passthrough to a server that closes every connection before it has processed a
/// request, and the number of requests that were sent to it.
fn to_closing_server() -> (Passthrough, Arc<AtomicUsize>) {
    let sent = Arc::new(AtomicUsize::new(0));
    let count = sent.clone();
    let service = service_fn(move |request| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Err(failure(request, &go_away(0, Reason::NO_ERROR)).await) }
    });
    let options = PassthroughOptions {
        credentials: Credentials::Caller,
        requests_max: 100,
        allows_insecure_upstream: false,
        connection: ConnectionLimits::APISERVER,
    };
    (Passthrough::over(ForwardService::new(service), &Uri::from_static("http://h"), options).unwrap(), sent)
}

fn forwarder(upstream: Passthrough) -> Forwarder {
    let options = ForwardOptions {
        upgrades: false,
        hosts: AllowedHosts::default(),
        per_identity_max: None,
        is_to_kubefan: false,
    };
    Forwarder::new(upstream, options, 1, Arc::new(Metrics::new(Registry::new()).unwrap()))
}

async fn create(forwarder: &Forwarder, body: Body) -> Response<Body> {
    let request = Request::post("/api/v1/namespaces/a/configmaps").body(body).unwrap();
    let caller = ForwardedCaller { holder: Holder::new(1, None), acting_as: None };
    forwarder.forward(request, "create", &ClientInfo::default(), Ok(caller), &CancellationToken::new()).await
}

#[tokio::test(start_paused = true)]
async fn a_write_that_was_not_read_is_sent_again_within_the_budget_and_then_asks_for_a_retry() {
    const UNKNOWN: usize = 64 << 10;
    let whole = |bytes| Body::from(vec![b'x'; bytes]);
    let of_unknown_length = |bytes| Body::from_stream(stream::iter([Ok::<_, BoxError>(vec![b'x'; bytes])]));
    for (what, body, is_full, times) in [
        ("no body", whole(0), false, 9),
        ("no body", whole(0), true, 9),
        ("a small one", whole(1), false, 9),
        ("one without room", whole(1), true, 1),
        ("the longest", whole(4 << 20), false, 9),
        ("a longer one", whole((4 << 20) + 1), false, 1),
        ("of unknown length", of_unknown_length(UNKNOWN), false, 9),
        ("longer and of unknown length", of_unknown_length(UNKNOWN + 1), false, 1),
    ] {
        let (upstream, sent) = to_closing_server();
        let forwarder = forwarder(upstream);
        let _others = if is_full { forwarder.kept_bodies.fill() } else { None };
        let response = create(&forwarder, body).await;
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS, "{what}");
        assert_eq!(response.headers()[header::RETRY_AFTER], "1", "{what}");
        assert_eq!(sent.load(Ordering::SeqCst), times, "{what}");
        let text = response.into_body().collect().await.unwrap().to_bytes();
        assert!(String::from_utf8_lossy(&text).contains("before it read the request"), "{what}");
    }
}

fn client(address: Option<&str>) -> ClientInfo {
    ClientInfo { address: address.map(|text| text.parse().unwrap()), ..ClientInfo::default() }
}

#[test]
fn the_address_of_the_client_is_appended() {
    let mut headers = HeaderMap::new();
    append_client_address(&mut headers, &client(None));
    assert!(headers.is_empty(), "a Unix socket has no address");
    append_client_address(&mut headers, &client(Some("[::ffff:10.0.0.1]:5")));
    append_client_address(&mut headers, &client(Some("[fd00::1]:5")));
    assert_eq!(headers[X_FORWARDED_FOR], "10.0.0.1, fd00::1");
}

#[test]
fn an_unreachable_apiserver_is_reported_in_the_status_and_asks_for_no_retry() {
    let unreachable =
        |message: &str| UpstreamError::Unreachable { server: "https://h:6443".into(), message: message.into() };
    let response = unanswered(&unreachable("Connection refused"), Media::Protobuf, ClientReaction::Discovery);
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()[header::CONTENT_TYPE], Media::Protobuf.content_type(), "as the client asked");
    assert!(!response.headers().contains_key(header::RETRY_AFTER), "client-go would retry for ten seconds");
    assert_eq!(response.extensions().get(), Some(&ErrorType::DestinationUnavailable));
    assert_eq!(
        response.headers()[header::WARNING],
        "299 kubefan \"cannot reach the apiserver at https://h:6443: Connection refused; until it is reachable, kubefan answers \
         only reads of any version (resourceVersion=0) and watches of what it has cached\""
    );
    let response = unanswered(&unreachable("Connection refused"), Media::Json, ClientReaction::Other);
    assert!(!response.headers().contains_key(header::WARNING), "client-go would show it for every read");
    let response =
        unanswered(&UpstreamError::Reset { message: "closed".into() }, Media::Json, ClientReaction::Discovery);
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    assert_eq!(response.extensions().get(), Some(&ErrorType::ConnectionTerminated));
    assert!(response.headers().contains_key(header::WARNING));
}

#[test]
fn a_watch_of_an_unreachable_apiserver_is_answered_so_that_informers_retry_in_silence() {
    let unreachable = UpstreamError::Unreachable { server: "https://h:6443".into(), message: "refused".into() };
    let response = unanswered(&unreachable, Media::Json, ClientReaction::Watch);
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.headers()[header::RETRY_AFTER], "1");
    assert!(!response.headers().contains_key(header::WARNING));
}

#[test]
fn only_discovery_is_answered_with_a_warning() {
    for path in ["/api", "/apis", "/api/v1", "/apis/apps", "/apis/apps/v1", "/openapi/v3", "/version"] {
        assert_eq!(ClientReaction::of("get", path), ClientReaction::Discovery, "{path}");
    }
    for path in ["/api/v1/pods", "/apis/apps/v1/deployments", "/apis/apps/v1/namespaces/a/deployments/b"] {
        assert_eq!(
            (ClientReaction::of("list", path), ClientReaction::of("watch", path)),
            (ClientReaction::Other, ClientReaction::Watch),
            "{path}"
        );
    }
}

#[test]
fn a_token_may_be_a_websocket_protocol() {
    let mut headers = HeaderMap::new();
    headers.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static("v5.channel.k8s.io"));
    assert!(!has_token(&headers));
    let value = HeaderValue::from_static("v5.channel.k8s.io, base64url.bearer.authorization.k8s.io.YQ");
    headers.insert(header::SEC_WEBSOCKET_PROTOCOL, value);
    assert!(has_token(&headers));
    remove_websocket_token(&mut headers);
    assert_eq!(headers[header::SEC_WEBSOCKET_PROTOCOL], "v5.channel.k8s.io");
}

/// The kubefan of a node, while that of the cluster is there and while the apiserver takes its
/// place.
#[tokio::test]
async fn only_a_kubefan_tells_who_made_the_answer() {
    let forwarded = |is_from_fallback: bool| async move {
        let service = service_fn(move |_| async move {
            let mut response = Response::new(Empty::new().map_err(|never| match never {}).boxed_unsync());
            response.headers_mut().insert(CACHE_STATUS, HeaderValue::from_static("kubefan; hit"));
            if is_from_fallback {
                response.extensions_mut().insert(FromFallback);
            }
            Ok(response)
        });
        let options = PassthroughOptions {
            credentials: Credentials::Caller,
            requests_max: 100,
            allows_insecure_upstream: false,
            connection: ConnectionLimits::APISERVER,
        };
        let upstream = Passthrough::over(ForwardService::new(service), &Uri::from_static("http://h"), options).unwrap();
        let forwarder = Forwarder { is_to_kubefan: true, ..forwarder(upstream) };
        create(&forwarder, Body::empty()).await.headers()[CACHE_STATUS].clone()
    };
    assert_eq!(forwarded(false).await, "kubefan; hit");
    assert_eq!(forwarded(true).await, "kubefan; fwd=bypass");
}
