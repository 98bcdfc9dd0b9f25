//! The transport from a kubefan to the apiserver: connections that can fail, and watch lines that
//! are lost, repeated or replaced by an error.
//!
//! It only drops bookmarks and repeats lines, as broken proxies and servers have done. It never
//! drops or swaps events, because no reader of a watch could notice.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures::{Stream, stream};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use kubefan_sim::apiserver::SimApiserver;
use kubefan_upstream::{
    Upstream,
    client::{HttpService, UpstreamBody, UpstreamOptions},
};
use tokio::time::Instant;
use tower::{BoxError, service_fn};

use super::link::{End, Route};

/// Fault of the next event of a live watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventFault {
    /// The event is sent twice.
    Duplicate,
    /// An earlier event is sent again after it.
    OutOfOrder,
    /// The watch ends with an ERROR event (expired version) in its place.
    Expire,
}

/// In the query of a list at a version.
const AT_VERSION: &str = "resourceVersionMatch=Exact";

/// The class of the requests for the cluster's version.
const LOOK_UP: &str = "look-up of a version";

/// The class of lists of pods at a version that had no result. They are also counted in theirs.
pub(crate) const FAILED_LIST: &str = "list of pods at a version that failed";
/// Requests of a cache that got no state and no watch.
pub(crate) const REFUSED_STATES: &str = "refused state";
pub(crate) const REFUSED_WATCHES: &str = "refused watch";

/// The most look-ups of a cache that may fail within a second. Proofs that fail are a second apart,
/// and a few readers and the watch ask for the version as well.
const FAILED_LOOK_UPS_MAX: usize = 8;

/// The number of recent lines that can be repeated.
const RECENT_LINES_MAX: usize = 8;

/// A kubefan's transport to the apiserver.
pub(crate) struct Transport {
    /// The apiservers behind the one address. Each new connection goes to the next one.
    apiservers: Vec<SimApiserver>,
    turn: AtomicUsize,
    /// One connection over HTTP/2 for all requests, while it lives. `None` for HTTP/1.1, with a
    /// connection for each request.
    shared: Option<Mutex<Option<Http2>>>,
    pub(crate) route: Route,
    tampering: Mutex<Tampering>,
    /// An apiserver of another cluster that new connections reach.
    other_cluster: Mutex<Option<SimApiserver>>,
}

#[derive(Default)]
struct Tampering {
    /// With the name of the fault in the counts.
    event_fault: Option<(EventFault, &'static str)>,
    no_bookmarks_until: Option<Instant>,
    applied: BTreeMap<&'static str, u64>,
    requests: BTreeMap<&'static str, u64>,
    /// Times at which a state was requested.
    states_at: Vec<Instant>,
    /// Since the start of the replica.
    standing: BTreeMap<&'static str, Standing>,
    /// Whether the replica knows its cluster.
    is_identified: bool,
    /// The last look-ups that failed, by the form of the cache.
    failed_look_ups: BTreeMap<&'static str, VecDeque<Instant>>,
    hasty: Option<String>,
}

/// The requests of one cache that lists and watches, as the apiserver sees them.
struct Standing {
    /// Time of the last request for a state or a watch.
    asked_at: Instant,
    /// The apiserver wants no request before this time.
    not_before: Option<Instant>,
}

type Http2 = http2::SendRequest<Full<Bytes>>;

impl Transport {
    /// A transport to one of `apiservers`, beginning with the one at `first`.
    pub(crate) fn to(apiservers: Vec<SimApiserver>, first: usize, is_http2: bool) -> Arc<Transport> {
        let shared = is_http2.then(Mutex::default);
        Arc::new(Transport {
            apiservers,
            turn: AtomicUsize::new(first),
            shared,
            route: Default::default(),
            tampering: Mutex::default(),
            other_cluster: Mutex::default(),
        })
    }

    /// The requests, by their class.
    pub(crate) fn requests(&self) -> BTreeMap<&'static str, u64> {
        self.tampering.lock().unwrap().requests.clone()
    }

    /// Times at which a state was requested, with a list or a watch.
    pub(crate) fn states_at(&self) -> Vec<Instant> {
        self.tampering.lock().unwrap().states_at.clone()
    }

    fn connect(&self) -> io::Result<TokioIo<End>> {
        let (ours, theirs) = self.route.connect()?;
        let apiserver = &self.apiservers[self.turn.fetch_add(1, Ordering::Relaxed) % self.apiservers.len()];
        let other = self.other_cluster.lock().unwrap().clone();
        tokio::spawn(other.unwrap_or_else(|| apiserver.clone()).serve_connection(theirs));
        Ok(TokioIo::new(ours))
    }

    /// Directs new connections to an apiserver of another cluster, or back.
    pub(crate) fn misroute(&self, other: Option<SimApiserver>) {
        *self.other_cluster.lock().unwrap() = other;
        self.route.each(|link| link.cut());
    }

    /// The replica starts again, and knows nothing of its requests before.
    pub(crate) fn forget(&self) {
        let mut tampering = self.tampering.lock().unwrap();
        (tampering.standing, tampering.is_identified) = Default::default();
        // A replica takes the first cluster that answers for its own.
        *self.other_cluster.lock().unwrap() = None;
    }

    /// Whether the replica knows its cluster.
    pub(crate) fn is_identified(&self) -> bool {
        self.tampering.lock().unwrap().is_identified
    }

    /// Whether every cache has asked for a state or a watch since `at`.
    pub(crate) fn all_asked_since(&self, at: Instant) -> bool {
        self.tampering.lock().unwrap().standing.values().all(|standing| standing.asked_at > at)
    }

    /// A request that was sent before the time that the apiserver had asked for.
    pub(crate) fn hasty(&self) -> Option<String> {
        self.tampering.lock().unwrap().hasty.clone()
    }

    async fn send_over(&self, request: http::Request<Full<Bytes>>) -> Result<http::Response<Incoming>, BoxError> {
        let Some(shared) = &self.shared else {
            let (mut sender, connection) = http1::handshake(self.connect()?).await?;
            tokio::spawn(connection);
            return Ok(sender.send_request(request).await?);
        };
        let open = shared.lock().unwrap().clone().filter(|sender| !sender.is_closed());
        let mut sender = match open {
            Some(sender) => sender,
            None => {
                // As kubefan's own connections.
                let (sender, connection) = http2::Builder::new(TokioExecutor::new())
                    .timer(TokioTimer::new())
                    .keep_alive_interval(Duration::from_secs(30))
                    .keep_alive_timeout(Duration::from_secs(15))
                    .handshake(self.connect()?)
                    .await?;
                tokio::spawn(connection);
                *shared.lock().unwrap() = Some(sender.clone());
                sender
            }
        };
        Ok(sender.send_request(request).await?)
    }

    /// A client that uses this transport.
    pub(crate) fn upstream(self: &Arc<Transport>) -> Upstream {
        let transport = self.clone();
        let service = service_fn(move |request| transport.clone().send(request));
        let base = http::Uri::from_static("http://apiserver.test");
        Upstream::from_service(HttpService::new(service), &base, UpstreamOptions::default())
    }

    /// Applies `event_fault` to the next event, and then counts it as `fault`.
    pub(crate) fn schedule(&self, event_fault: EventFault, fault: &'static str) {
        self.tampering.lock().unwrap().event_fault = Some((event_fault, fault));
    }

    pub(crate) fn lose_bookmarks_until(&self, until: Instant) {
        self.tampering.lock().unwrap().no_bookmarks_until = Some(until);
    }

    /// Cancels all faults of lines.
    pub(crate) fn heal(&self) {
        let mut tampering = self.tampering.lock().unwrap();
        tampering.event_fault = None;
        tampering.no_bookmarks_until = None;
    }

    /// The faults that were applied, by their names in the counts.
    pub(crate) fn applied(&self) -> BTreeMap<&'static str, u64> {
        self.tampering.lock().unwrap().applied.clone()
    }

    async fn send(
        self: Arc<Transport>,
        request: http::Request<Bytes>,
    ) -> Result<http::Response<UpstreamBody>, BoxError> {
        let path = request.uri().path_and_query().map(ToString::to_string).unwrap_or_default();
        let (mut parts, body) = request.into_parts();
        let class = class(&path, &parts.headers);
        {
            let mut tampering = self.tampering.lock().unwrap();
            *tampering.requests.entry(class).or_default() += 1;
            if matches!(class, "list of pods" | "watch of pods with the state") {
                tampering.states_at.push(Instant::now());
            }
        }
        match &self.shared {
            Some(_) => {
                parts.uri = format!("http://apiserver.test{path}").parse()?;
                parts.version = http::Version::HTTP_2;
            }
            None => {
                parts.uri = path.parse()?;
                parts.headers.insert(http::header::HOST, http::HeaderValue::from_static("apiserver.test"));
            }
        }
        let form = form(&parts.headers);
        let standing = is_standing(&path, class).then_some(form);
        if let Some(cache) = standing {
            self.tampering.lock().unwrap().asked(cache);
        }
        let response = self.send_over(http::Request::from_parts(parts, Full::new(body))).await;
        let is_failed = !response.as_ref().is_ok_and(|response| response.status().is_success());
        if is_failed && class == "list of pods" && path.contains(AT_VERSION) {
            *self.tampering.lock().unwrap().requests.entry(FAILED_LIST).or_default() += 1;
        } else if is_failed && standing.is_some() {
            let refused = if class == "watch of pods" { REFUSED_WATCHES } else { REFUSED_STATES };
            *self.tampering.lock().unwrap().requests.entry(refused).or_default() += 1;
        }
        let response = response?;
        if path.ends_with("/namespaces/kube-system") && response.status() == http::StatusCode::OK {
            self.tampering.lock().unwrap().is_identified = true;
        }
        if class == LOOK_UP && response.status().is_server_error() {
            self.tampering.lock().unwrap().look_up_failed(form);
        }
        if let Some(cache) = standing
            && let Some(seconds) = response.headers().get(http::header::RETRY_AFTER)
        {
            let seconds = seconds.to_str()?.parse()?;
            self.tampering.lock().unwrap().refused(cache, Duration::from_secs(seconds));
        }
        let is_json =
            response.headers().get(http::header::CONTENT_TYPE).is_some_and(|value| value == "application/json");
        let response = response.map(|body| body.map_err(BoxError::from).boxed_unsync());
        if !is_json || !class.starts_with("watch of pods") {
            return Ok(response);
        }
        let live = !path.contains("sendInitialEvents");
        Ok(response.map(|body| StreamBody::new(self.tampered(body, live)).boxed_unsync()))
    }

    /// The lines of a watch, with the faults applied.
    fn tampered(
        self: Arc<Transport>,
        body: UpstreamBody,
        live: bool,
    ) -> impl Stream<Item = Result<Frame<Bytes>, BoxError>> + use<> {
        let reader = Reader {
            transport: self,
            body,
            partial: BytesMut::new(),
            recent_lines: VecDeque::new(),
            live,
            finished: false,
        };
        stream::unfold(reader, |mut reader| async move {
            let chunk = reader.next().await?;
            Some((chunk.map(Frame::data), reader))
        })
    }
}

/// The class of a request, by its cost for the apiserver.
fn class(path: &str, headers: &http::HeaderMap) -> &'static str {
    let is_metadata = headers
        .get(http::header::ACCEPT)
        .is_some_and(|value| value.to_str().unwrap_or_default().contains("PartialObjectMetadata"));
    if !path.contains("/pods") {
        "discovery, identity and schema"
    } else if path.contains("watch=1") && path.contains("sendInitialEvents") {
        "watch of pods with the state"
    } else if path.contains("watch=1") {
        "watch of pods"
    } else if path.contains("metadata.name") {
        LOOK_UP
    } else if is_metadata {
        "list of metadata"
    } else if path.contains("continue=") {
        "later page"
    } else {
        "list of pods"
    }
}

/// Whether a request lists or watches for a cache, and not for a span of history or a proof.
fn is_standing(path: &str, class: &str) -> bool {
    let seconds = path.split_once("timeoutSeconds=").map(|(_, rest)| rest.split('&').next().unwrap_or_default());
    let is_short = seconds.is_some_and(|seconds| seconds.len() < 3);
    match class {
        "watch of pods with the state" => true,
        "watch of pods" => !is_short,
        "list of pods" => !path.contains(AT_VERSION),
        _ => false,
    }
}

/// The form of the objects that a request asks for. A replica has one cache of each.
fn form(headers: &http::HeaderMap) -> &'static str {
    let form = headers.get(http::header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if form.contains("protobuf") { "protobuf" } else { "JSON" }
}

impl Tampering {
    fn asked(&mut self, cache: &'static str) {
        let now = Instant::now();
        let standing = Standing { asked_at: now, not_before: None };
        let before = self.standing.insert(cache, standing).and_then(|before| before.not_before);
        if let Some(left) = before.and_then(|before| before.checked_duration_since(now)).filter(|left| !left.is_zero())
        {
            self.hasty =
                Some(format!("the {cache} cache asked {left:?} before the apiserver wanted to be asked again"));
        }
    }

    fn refused(&mut self, cache: &'static str, wait: Duration) {
        if let Some(standing) = self.standing.get_mut(cache) {
            standing.not_before = Some(Instant::now() + wait);
        }
    }
}

impl Tampering {
    fn look_up_failed(&mut self, cache: &'static str) {
        let now = Instant::now();
        let failed = self.failed_look_ups.entry(cache).or_default();
        failed.push_back(now);
        failed.retain(|at| now - *at < Duration::from_secs(1));
        if failed.len() > FAILED_LOOK_UPS_MAX {
            self.hasty =
                Some(format!("{} look-ups of the version for the {cache} cache failed in a second", failed.len()));
        }
    }
}

struct Reader {
    transport: Arc<Transport>,
    body: UpstreamBody,
    partial: BytesMut,
    recent_lines: VecDeque<Bytes>,
    live: bool,
    finished: bool,
}

impl Reader {
    async fn next(&mut self) -> Option<Result<Bytes, BoxError>> {
        while !self.finished {
            let frame = match Pin::new(&mut self.body).frame().await {
                Some(Ok(frame)) => frame,
                ended => {
                    self.finished = true;
                    let rest = self.partial.split().freeze();
                    // The incomplete last line is delivered first, then the error.
                    return match ended {
                        _ if !rest.is_empty() => Some(Ok(rest)),
                        Some(Err(error)) => Some(Err(error)),
                        _ => None,
                    };
                }
            };
            let Ok(data) = frame.into_data() else { continue };
            self.partial.extend_from_slice(&data);
            let mut out = BytesMut::new();
            while let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
                let line = self.partial.split_to(end + 1).freeze();
                self.forward_line(line, &mut out);
            }
            if !out.is_empty() {
                return Some(Ok(out.freeze()));
            }
        }
        None
    }

    fn forward_line(&mut self, line: Bytes, out: &mut BytesMut) {
        if self.finished {
            return;
        }
        let mut tampering = self.transport.tampering.lock().unwrap();
        if line.starts_with(br#"{"type":"BOOKMARK""#) {
            let ends_state = line.windows(18).any(|window| window == b"initial-events-end");
            self.live |= ends_state;
            let lost = tampering.no_bookmarks_until.is_some_and(|until| Instant::now() < until);
            if ends_state || !lost {
                out.extend_from_slice(&line);
            }
            return;
        }
        if !self.live {
            out.extend_from_slice(&line);
            return;
        }
        let due = tampering
            .event_fault
            .take_if(|(event_fault, _)| *event_fault != EventFault::OutOfOrder || self.recent_lines.len() > 1);
        if let Some((_, fault)) = due {
            *tampering.applied.entry(fault).or_default() += 1;
        }
        let event_fault = due.map(|(event_fault, _)| event_fault);
        if event_fault == Some(EventFault::Expire) {
            let status = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"too old resource version","reason":"Expired","code":410}"#;
            out.extend_from_slice(format!("{{\"type\":\"ERROR\",\"object\":{status}}}\n").as_bytes());
            self.finished = true;
            return;
        }
        out.extend_from_slice(&line);
        match event_fault {
            Some(EventFault::Duplicate) => out.extend_from_slice(&line),
            Some(EventFault::OutOfOrder) => out.extend_from_slice(&self.recent_lines[0]),
            _ => {}
        }
        self.recent_lines.push_back(line);
        if self.recent_lines.len() > RECENT_LINES_MAX {
            self.recent_lines.pop_front();
        }
    }
}
