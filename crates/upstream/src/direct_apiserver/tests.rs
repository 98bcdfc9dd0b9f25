//! Requests that go through a kubefan that is away.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use kubefan_client::FallbackBudget;
use kubefan_telemetry::metrics::Metrics;
use rand::{SeedableRng, rngs::StdRng};
use tower::{BoxError, service_fn, util::BoxCloneSyncService};

use super::*;
use crate::{
    client::{ConnectionLimits, UpstreamBody, UpstreamOptions, Verb},
    error::UpstreamError,
    fallback::{FallbackOptions, Verdict},
    passthrough::{Credentials, ForwardService, Forwarded, FromFallback, Passthrough, PassthroughOptions},
};

/// A kubefan that refuses connections, and the apiserver of a cluster.
struct Servers {
    /// The client of the kubefan.
    upstream: Upstream,
    direct: DirectApiserver,
    /// The cluster that the apiserver shows.
    found: Arc<Mutex<&'static str>>,
    passthrough: Passthrough,
    /// The forwarded requests that the apiserver has read.
    forwarded: Arc<AtomicUsize>,
}

impl Servers {
    /// The kubefan was of the cluster `known`; the apiserver shows `found`.
    async fn new(known: &'static str, found: &'static str) -> Self {
        Self::with_kubefan(passthrough("https://kubefan", || Err(refused())), known, found).await
    }

    /// Forwarded requests go to `kubefan` first.
    async fn with_kubefan(kubefan: Passthrough, known: &'static str, found: &'static str) -> Self {
        let found = Arc::new(Mutex::new(found));
        let direct = client("https://apiserver", found.clone());
        let metrics = Metrics::new(prometheus::Registry::new()).expect("a new registry");
        let fallback = Fallback::new(FallbackOptions {
            apiserver: direct.server().to_owned(),
            kubefan: "https://kubefan".to_owned(),
            budget: FallbackBudget { clients: 500, starts_per_second: 50.0 },
            metrics: metrics.fallback().clone(),
            random: StdRng::seed_from_u64(1),
        });
        let before = client("https://kubefan", Arc::new(Mutex::new(known)));
        let direct = direct.of_cluster_of(&before);
        let upstream = refusing().of_cluster_of(&before).falling_back(&fallback, direct.clone());
        let forwarded = Arc::new(AtomicUsize::new(0));
        let count = forwarded.clone();
        let apiserver = passthrough("https://apiserver", move || {
            count.fetch_add(1, Ordering::Relaxed);
            Ok(answer(StatusCode::CREATED, "{}".to_owned()))
        });
        let direct = DirectApiserver::new(fallback, direct);
        let passthrough = kubefan.with_fallback(direct.clone(), apiserver);
        before.confirm().await.expect("the first cluster");
        Self { upstream, direct, found, passthrough, forwarded }
    }

    async fn create(&self) -> Result<StatusCode, UpstreamError> {
        self.forward().await.map(|response| response.status())
    }

    async fn forward(&self) -> Result<Response<UpstreamBody>, UpstreamError> {
        let body = Full::new(Bytes::from("{}")).map_err(|never| match never {}).boxed_unsync();
        let request = Request::builder().method(Method::POST).uri("/api/v1/namespaces/a/pods").body(body);
        let request = request.expect("a request");
        let forwarded = Forwarded { request, acting_as: None, is_upgrade: false, kept_bytes_max: 1 << 10 };
        self.passthrough.send(forwarded).await
    }
}

fn refused() -> BoxError {
    std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into()
}

fn answer(status: StatusCode, body: String) -> Response<UpstreamBody> {
    let body = Full::new(Bytes::from(body)).map_err(|never| match never {}).boxed_unsync();
    Response::builder().status(status).body(body).expect("a response")
}

fn client(address: &'static str, uid: Arc<Mutex<&'static str>>) -> Upstream {
    let service = service_fn(move |_: Request<Bytes>| {
        let uid = *uid.lock().unwrap();
        let body = format!(r#"{{"metadata":{{"uid":"{uid}"}}}}"#);
        std::future::ready(Ok::<_, BoxError>(answer(StatusCode::OK, body)))
    });
    let service = BoxCloneSyncService::new(service);
    Upstream::from_service(service, &Uri::from_static(address), UpstreamOptions::default())
}

fn refusing() -> Upstream {
    let service = BoxCloneSyncService::new(service_fn(|_: Request<Bytes>| async { Err(refused()) }));
    Upstream::from_service(service, &Uri::from_static("https://kubefan"), UpstreamOptions::default())
}

fn passthrough(
    address: &'static str,
    respond: impl Fn() -> Result<Response<UpstreamBody>, BoxError> + Clone + Send + Sync + 'static,
) -> Passthrough {
    let service = service_fn(move |_: Request<UpstreamBody>| std::future::ready(respond()));
    let options = PassthroughOptions {
        credentials: Credentials::Caller,
        requests_max: 10,
        allows_insecure_upstream: false,
        connection: ConnectionLimits::KUBEFAN,
    };
    Passthrough::over(ForwardService::new(service), &Uri::from_static(address), options).expect("an address")
}

#[tokio::test]
async fn requests_that_the_kubefan_has_not_read_go_to_the_apiserver() {
    let servers = Servers::new("a", "a").await;
    assert_eq!(servers.create().await, Ok(StatusCode::CREATED));
    assert_eq!(servers.forwarded.load(Ordering::Relaxed), 1);
    assert!(servers.upstream.get(Verb::Get, "/version").await.is_ok(), "kubefan's own requests go there, too");
}

#[tokio::test]
async fn an_answer_tells_whether_it_has_come_through_the_kubefan() {
    let servers = Servers::new("a", "a").await;
    let of_apiserver = servers.forward().await.expect("an answer");
    assert!(of_apiserver.extensions().get::<FromFallback>().is_some());
    let kubefan = passthrough("https://kubefan", || Ok(answer(StatusCode::CREATED, "{}".to_owned())));
    let servers = Servers::with_kubefan(kubefan, "a", "a").await;
    let of_kubefan = servers.forward().await.expect("an answer");
    assert!(of_kubefan.extensions().get::<FromFallback>().is_none());
}

/// Such as an upload that its sender resets.
#[tokio::test]
async fn a_caller_that_breaks_off_its_request_does_not_move_the_process() {
    let broken = || Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe).into());
    let servers = Servers::with_kubefan(passthrough("https://kubefan", broken), "a", "a").await;
    assert!(matches!(servers.create().await, Err(UpstreamError::Reset { .. })));
    assert!(!servers.direct.fallback().is_away());
}

#[tokio::test]
async fn nothing_is_sent_to_the_apiserver_of_another_cluster() {
    let servers = Servers::new("a", "b").await;
    assert!(matches!(servers.create().await, Err(UpstreamError::Unreachable { .. })));
    assert_eq!(servers.forwarded.load(Ordering::Relaxed), 0);
    let own = servers.upstream.get(Verb::Get, "/version").await;
    assert!(matches!(own, Err(UpstreamError::Unreachable { .. })), "{own:?}");
}

/// Such as after a change of its name in DNS.
#[tokio::test(start_paused = true)]
async fn an_apiserver_that_leads_to_another_cluster_later_in_an_outage_is_left() {
    let servers = Servers::new("a", "a").await;
    assert_eq!(servers.create().await, Ok(StatusCode::CREATED));
    *servers.found.lock().unwrap() = "b";
    assert!(servers.direct.may_be_read().await, "it was asked just now");
    tokio::time::advance(CONFIRMED_FOR).await;
    assert!(!servers.direct.may_be_read().await, "as each cache asks before it starts there");
    assert!(matches!(servers.create().await, Err(UpstreamError::Unreachable { .. })));
    assert!(servers.upstream.get(Verb::Get, "/version").await.is_err());
    assert_eq!(servers.forwarded.load(Ordering::Relaxed), 1);
    *servers.found.lock().unwrap() = "a";
    assert!(servers.direct.may_be_read().await);
    assert_eq!(servers.create().await, Ok(StatusCode::CREATED));
}

#[tokio::test]
async fn a_check_of_an_earlier_outage_does_not_confirm_this_one() {
    let servers = Servers::new("a", "a").await;
    servers.create().await.expect("a fallback");
    let fallback = servers.direct.fallback();
    fallback.checked(0, None);
    assert!(servers.direct.is_usable(), "nor does it take back what is known");
    fallback.probed(true);
    fallback.attempt().note(Verdict::Lost);
    fallback.checked(1, None);
    assert!(fallback.is_away() && !servers.direct.is_usable());
}
