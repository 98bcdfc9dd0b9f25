//! A reflector between a kubefan and an apiserver that are both played by the test.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, Uri};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use kubefan_cache::Update;
use kubefan_client::FallbackBudget;
use kubefan_model::{GroupVersionResource, Scope, fields::FieldTable};
use kubefan_telemetry::metrics::{Metrics, WatchPurpose};
use tokio::{sync::mpsc, time::sleep};
use tokio_stream::wrappers::ReceiverStream;
use tower::{BoxError, service_fn, util::BoxCloneSyncService};

use super::*;
use crate::{
    client::{Upstream, UpstreamBody, UpstreamOptions},
    fallback::FallbackOptions,
};

type Chunk = Result<Frame<Bytes>, BoxError>;

/// A server of pods.
#[derive(Clone)]
struct Server(Arc<Mutex<Behaviour>>);

struct Behaviour {
    uid: &'static str,
    /// The version of the cluster.
    version: Arc<AtomicU64>,
    refuses_connections: bool,
    /// Whether requests for pods have no answer.
    is_stuck: bool,
    /// The answer to requests for pods, if not 200.
    status: StatusCode,
    /// Time and path of each request for pods.
    requests: Vec<(Instant, String)>,
    /// Number of requests for the uid of the cluster.
    checks: usize,
    watches: Vec<mpsc::Sender<Chunk>>,
}

impl Server {
    fn new(uid: &'static str, version: &Arc<AtomicU64>) -> Self {
        Self(Arc::new(Mutex::new(Behaviour {
            uid,
            version: version.clone(),
            refuses_connections: false,
            is_stuck: false,
            status: StatusCode::OK,
            requests: Vec::new(),
            checks: 0,
            watches: Vec::new(),
        })))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Behaviour) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Breaks all connections, and refuses new ones.
    async fn vanish(&self) {
        self.change(|server| server.refuses_connections = true);
        self.break_watches().await;
    }

    async fn break_watches(&self) {
        let watches = self.change(|server| std::mem::take(&mut server.watches));
        for watch in watches {
            let _ = watch.send(Err(BoxError::from("connection reset"))).await;
        }
    }

    fn come_back(&self) {
        self.change(|server| server.refuses_connections = false);
    }

    /// Sends a bookmark on the last watch.
    async fn bookmark(&self, version: u64) {
        let object = format!(r#"{{"kind":"Pod","apiVersion":"v1","metadata":{{"resourceVersion":"{version}"}}}}"#);
        let line = format!("{{\"type\":\"BOOKMARK\",\"object\":{object}}}\n");
        let watch = self.change(|server| {
            server.version.store(version, Ordering::Relaxed);
            server.watches.last().cloned()
        });
        let watch = watch.expect("an open watch");
        watch.send(Ok(Frame::data(Bytes::from(line)))).await.expect("the watch is read");
    }

    /// The requests for pods that match a text.
    fn requests(&self, with: &str) -> Vec<String> {
        let requests = self.change(|server| server.requests.clone());
        requests.into_iter().map(|(_, path)| path).filter(|path| path.contains(with)).collect()
    }

    fn upstream(&self, name: &str) -> Upstream {
        let server = self.clone();
        let service = service_fn(move |request: Request<Bytes>| {
            let answer = server.answer(&request);
            let is_stuck = server.change(|server| server.is_stuck) && request.uri().path().ends_with("/pods");
            async move { if is_stuck { std::future::pending().await } else { answer } }
        });
        let base: Uri = format!("https://{name}").parse().expect("an address");
        Upstream::from_service(BoxCloneSyncService::new(service), &base, UpstreamOptions::default())
    }

    fn answer(&self, request: &Request<Bytes>) -> Result<Response<UpstreamBody>, BoxError> {
        let path = request.uri().path_and_query().map(ToString::to_string).unwrap_or_default();
        self.change(|server| {
            if server.refuses_connections {
                return Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into());
            }
            if path.contains("kube-system") {
                server.checks += 1;
                return Ok(whole(StatusCode::OK, format!(r#"{{"metadata":{{"uid":"{}"}}}}"#, server.uid)));
            }
            if path.contains("grpc.health") {
                // Over HTTP/1.1 a kubefan refuses the question: transport/http1/connection.rs.
                let mut refusal = whole(StatusCode::HTTP_VERSION_NOT_SUPPORTED, "needs HTTP/2\n".to_owned());
                let error = HeaderValue::from_static("kubefan; error=http_protocol_error");
                refusal.headers_mut().insert("proxy-status", error);
                return Ok(refusal);
            }
            server.requests.push((Instant::now(), path.clone()));
            if server.status != StatusCode::OK {
                return Ok(whole(server.status, "{}".to_owned()));
            }
            if path.contains("watch=1") {
                let (sender, receiver) = mpsc::channel(16);
                server.watches.push(sender);
                return Ok(Response::new(StreamBody::new(ReceiverStream::new(receiver)).boxed_unsync()));
            }
            let version = server.version.load(Ordering::Relaxed);
            let metadata = format!(r#"{{"resourceVersion":"{version}"}}"#);
            let list = format!(r#"{{"kind":"PodList","apiVersion":"v1","metadata":{metadata},"items":[]}}"#);
            Ok(whole(StatusCode::OK, list))
        })
    }
}

fn whole(status: StatusCode, body: String) -> Response<UpstreamBody> {
    let body = Full::new(Bytes::from(body)).map_err(|never| match never {}).boxed_unsync();
    Response::builder().status(status).body(body).expect("a response")
}

/// A cache behind a kubefan.
struct Cache {
    kubefan: Server,
    apiserver: Server,
    source: Source,
    reflector: TieredReflector,
    has_state: bool,
    errors: Vec<ReflectorError>,
}

impl Cache {
    /// A cache that has listed nothing yet. Its kubefan is probed in the background.
    fn new() -> Self {
        let version = Arc::new(AtomicU64::new(5));
        let kubefan = Server::new("a", &version);
        let apiserver = Server::new("a", &version);
        let metrics = Metrics::new(prometheus::Registry::new()).expect("a new registry");
        let direct = apiserver.upstream("apiserver");
        let source = Source::kubefan(kubefan.upstream("kubefan"), direct.clone());
        let fallback = Fallback::new(FallbackOptions {
            apiserver: direct.server().to_owned(),
            kubefan: source.name().to_owned(),
            budget: FallbackBudget { clients: 100, starts_per_second: 10.0 },
            metrics: metrics.fallback().clone(),
            random: StdRng::seed_from_u64(1),
        });
        let source = source.with_fallback(DirectApiserver::new(fallback, direct.clone()), direct);
        tokio::spawn(source.clone().keep_probing(None));
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let parser = Arc::new(ObjectParser::new(&FieldTable::new(&gvr, true, &[])).of("Pod", "v1"));
        let metrics = metrics.cache(&gvr, &Scope::Cluster, parser.media(), &[]);
        let open_watch = Arc::new(move || metrics.upstream_watch(WatchPurpose::Standing));
        let field_selector = String::new();
        let target = Target { gvr, kind: "Pod".to_owned(), namespaced: true, scope: Scope::Cluster, field_selector };
        let options = ReflectorOptions {
            page_size: 500,
            watch_list: false,
            upstream_idle_timeout: Duration::from_secs(3600),
            line_bytes_max: 1 << 20,
        };
        let reflector = TieredReflector::new(&source, target, parser, options, open_watch, StdRng::seed_from_u64(2));
        Self { kubefan, apiserver, source, reflector, has_state: false, errors: Vec::new() }
    }

    /// A cache that watches its kubefan from version 5.
    async fn watching() -> Self {
        let mut cache = Self::new();
        cache.source.current().confirm().await.expect("the same cluster");
        cache.until_watching().await;
        cache.has_state = true;
        cache
    }

    /// Makes steps as an informer does, up to an event.
    async fn step(&mut self) -> ReflectorEvent {
        loop {
            self.reflector.choose_server(self.has_state).await;
            match self.reflector.step().await {
                Ok(event) => return event,
                Err(error) => self.errors.push(error),
            }
            tokio::select! {
                () = self.reflector.until_misplaced() => {}
                () = sleep(Duration::from_secs(1)) => {}
            }
        }
    }

    async fn until_watching(&mut self) {
        while !matches!(self.step().await, ReflectorEvent::Watching { .. }) {}
    }

    async fn until_bookmark(&mut self) -> u64 {
        loop {
            if let ReflectorEvent::Update { update: Update::Bookmark(version), .. } = self.step().await {
                return version.whole().to_string().parse().expect("a number");
            }
        }
    }

    fn status(&self) -> String {
        self.source.fallback().expect("a fallback").status()
    }

    fn is_at_kubefan(&self) -> bool {
        self.reflector.source().is_kubefan()
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_continues_at_the_apiserver_from_its_version_and_returns_without_a_list() {
    let mut cache = Cache::watching().await;
    cache.kubefan.bookmark(7).await;
    assert_eq!(cache.until_bookmark().await, 7);
    let lost_at = Instant::now();
    cache.kubefan.vanish().await;
    cache.until_watching().await;
    let moved_after = lost_at.elapsed().as_secs();
    assert!((10..21).contains(&moved_after), "a cache with a state starts in the second window: {moved_after}");
    assert!(!cache.is_at_kubefan() && cache.status().starts_with("upstream: the apiserver at https://apiserver; "));
    let [watch] = &cache.apiserver.requests("watch=1")[..] else { panic!("one watch") };
    assert!(watch.contains("resourceVersion=7&"), "{watch}");

    cache.apiserver.bookmark(9).await;
    assert_eq!(cache.until_bookmark().await, 9);
    let back_at = Instant::now();
    cache.kubefan.come_back();
    cache.until_watching().await;
    let returned_after = back_at.elapsed().as_secs();
    assert!((30..101).contains(&returned_after), "{returned_after}");
    assert!(cache.is_at_kubefan() && cache.status() == "upstream: the kubefan at https://kubefan");
    let watches = cache.kubefan.requests("watch=1");
    assert!(watches.last().is_some_and(|watch| watch.contains("resourceVersion=9&")), "{watches:?}");
    assert!(cache.apiserver.requests("limit=500").is_empty(), "nothing is listed");
    assert_eq!(cache.kubefan.requests("limit=500").len(), 1, "the first list");
}

#[tokio::test(start_paused = true)]
async fn a_cache_without_a_state_lists_at_the_apiserver_in_the_first_window() {
    let mut cache = Cache::new();
    cache.kubefan.vanish().await;
    let began = Instant::now();
    cache.until_watching().await;
    let started_after = began.elapsed().as_secs();
    assert!(started_after < 11, "{started_after}");
    assert_eq!(cache.apiserver.requests("limit=500").len(), 1);
    assert_eq!(cache.apiserver.requests("watch=1").len(), 1, "a list and its watch are one start");
}

#[tokio::test(start_paused = true)]
async fn a_kubefan_that_another_replica_replaces_is_not_left() {
    let mut cache = Cache::watching().await;
    let checks = cache.apiserver.change(|server| server.checks);
    cache.kubefan.vanish().await;
    cache.kubefan.come_back();
    let lost_at = Instant::now();
    cache.until_watching().await;
    assert!(cache.is_at_kubefan() && lost_at.elapsed() < Duration::from_secs(2));
    assert!(cache.apiserver.requests("").is_empty());
    assert_eq!(cache.apiserver.change(|server| server.checks), checks, "nobody asks the apiserver");
}

/// Several connections end with one replica, and each notices that at another time.
#[tokio::test(start_paused = true)]
async fn a_watch_that_breaks_after_its_outage_does_not_begin_the_next() {
    let mut cache = Cache::watching().await;
    cache.kubefan.change(|server| server.refuses_connections = true);
    cache.source.current().confirm().await.expect_err("no connection");
    assert!(cache.source.is_fallen_back());
    cache.kubefan.come_back();
    sleep(Duration::from_secs(2)).await;
    assert!(!cache.source.is_fallen_back());
    cache.kubefan.break_watches().await;
    cache.until_watching().await;
    assert!(!cache.source.is_fallen_back() && cache.is_at_kubefan());
    assert_eq!(cache.errors.len(), 1, "{:?}", cache.errors);
}

#[tokio::test(start_paused = true)]
async fn an_open_watch_is_read_until_the_apiserver_has_one() {
    let mut cache = Cache::watching().await;
    // New connections fail, and the open one goes on.
    cache.kubefan.change(|server| server.refuses_connections = true);
    cache.source.current().confirm().await.expect_err("no connection");
    cache.kubefan.bookmark(8).await;
    assert_eq!(cache.until_bookmark().await, 8);
    assert!(cache.is_at_kubefan() && cache.source.is_fallen_back());
    cache.until_watching().await;
    assert!(!cache.is_at_kubefan() && cache.errors.is_empty());
    assert!(cache.apiserver.requests("watch=1")[0].contains("resourceVersion=8&"));
}

#[tokio::test(start_paused = true)]
async fn an_apiserver_that_does_not_answer_delays_no_event_of_an_open_watch() {
    let mut cache = Cache::watching().await;
    cache.apiserver.change(|server| server.is_stuck = true);
    cache.kubefan.change(|server| server.refuses_connections = true);
    cache.source.current().confirm().await.expect_err("no connection");
    let kubefan = cache.kubefan.clone();
    let apiserver = cache.apiserver.clone();
    let sent = tokio::spawn(async move {
        // In the middle of an attempt to move.
        while apiserver.requests("watch=1").is_empty() {
            sleep(Duration::from_millis(100)).await;
        }
        kubefan.bookmark(8).await;
        Instant::now()
    });
    assert_eq!(cache.until_bookmark().await, 8);
    let late = sent.await.expect("a bookmark").elapsed();
    assert!(late <= MOVE_TIMEOUT, "{late:?}");
    cache.apiserver.change(|server| server.is_stuck = false);
    cache.until_watching().await;
    assert!(!cache.is_at_kubefan() && cache.errors.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_denial_of_an_apiserver_that_has_just_started_does_not_count_for_long() {
    let mut cache = Cache::watching().await;
    cache.apiserver.change(|server| server.status = StatusCode::FORBIDDEN);
    cache.kubefan.vanish().await;
    assert!(tokio::time::timeout(DENIED_FOR / 2, cache.step()).await.is_err(), "no event");
    cache.apiserver.change(|server| server.status = StatusCode::OK);
    assert!(tokio::time::timeout(DENIED_FOR, cache.until_watching()).await.is_ok());
    assert!(!cache.is_at_kubefan());
}

#[tokio::test(start_paused = true)]
async fn a_watch_stays_at_the_apiserver_while_the_kubefan_does_not_take_it_over() {
    let mut cache = Cache::watching().await;
    cache.kubefan.vanish().await;
    cache.until_watching().await;
    cache.kubefan.come_back();
    cache.kubefan.change(|server| server.status = StatusCode::GONE);
    let lists = cache.kubefan.requests("limit=500").len();
    assert!(tokio::time::timeout(Duration::from_secs(300), cache.step()).await.is_err(), "nothing happens");
    assert!(!cache.is_at_kubefan() && !cache.source.is_fallen_back());
    assert!(cache.kubefan.requests("watch=1").len() > 2, "it is tried again and again");
    cache.kubefan.change(|server| server.status = StatusCode::OK);
    cache.until_watching().await;
    assert!(cache.is_at_kubefan());
    assert_eq!(cache.kubefan.requests("limit=500").len(), lists, "nothing is listed again");
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_the_apiserver_denies_stays_at_the_kubefan() {
    let mut cache = Cache::watching().await;
    cache.apiserver.change(|server| server.status = StatusCode::FORBIDDEN);
    cache.kubefan.vanish().await;
    assert!(tokio::time::timeout(Duration::from_secs(120), cache.step()).await.is_err(), "no event");
    assert!(cache.is_at_kubefan());
    assert_eq!(cache.apiserver.requests("watch=1").len(), 1, "it is asked once in an outage");
    let is_denial = |error: &ReflectorError| matches!(error.upstream(), Some(UpstreamError::Forbidden { .. }));
    assert!(!cache.errors.iter().any(is_denial), "the state is served on: {:?}", cache.errors);
    assert!(cache.status().contains("without a fallback for some: watch: the apiserver denies"), "{}", cache.status());
    cache.kubefan.come_back();
    cache.until_watching().await;
    assert!(cache.kubefan.requests("watch=1").last().is_some_and(|watch| watch.contains("resourceVersion=5&")));
}

#[tokio::test(start_paused = true)]
async fn another_cluster_is_never_read() {
    let mut cache = Cache::watching().await;
    cache.apiserver.change(|server| server.uid = "b");
    cache.kubefan.vanish().await;
    assert!(tokio::time::timeout(Duration::from_secs(120), cache.step()).await.is_err(), "no event");
    assert!(cache.apiserver.requests("").is_empty());
    assert!(cache.status().contains("without a fallback: another cluster answers"), "{}", cache.status());
}
