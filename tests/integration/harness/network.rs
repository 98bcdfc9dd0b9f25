//! An in-memory network between kubefan and a simulated apiserver. It records every request, and
//! can refuse, delay or forge answers. With a paused clock the network takes no time, so a test
//! controls the exact order and time of all events.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use futures::StreamExt;
use http_body_util::{BodyExt, Full, StreamBody};
use kubefan_sim::apiserver::SimApiserver;
use kubefan_upstream::{
    Upstream,
    client::{HttpService, UpstreamBody, UpstreamOptions},
};
use tokio::{
    sync::mpsc::Receiver,
    time::{Duration, Instant},
};
use tokio_util::sync::CancellationToken;
use tower::{BoxError, service_fn};

/// The buffer size of the in-memory pipe, in bytes.
const PIPE_BYTES: usize = 64 << 10;

/// A recorded request.
#[derive(Clone, Debug)]
pub(crate) struct RecordedRequest {
    /// Time of the request.
    pub(crate) at: Instant,
    /// Path and query.
    pub(crate) path: String,
    /// Whether the request asks only for metadata, not for whole objects.
    pub(crate) is_metadata_only: bool,
}

impl RecordedRequest {
    /// Whether the request is a watch.
    pub(crate) fn is_watch(&self) -> bool {
        RecordedRequest::is_watch_path(&self.path)
    }

    /// Whether a path and query belong to a watch.
    pub(crate) fn is_watch_path(path: &str) -> bool {
        path.contains("watch=1")
    }
}

type Answer = http::Response<UpstreamBody>;
type Rule = Box<dyn FnMut(&str) -> Option<Answer> + Send>;

#[derive(Default)]
struct State {
    asked: Vec<RecordedRequest>,
    refused: bool,
    rules: VecDeque<Rule>,
}

/// A handle to the network. Clones share the network.
#[derive(Clone)]
pub(crate) struct Network {
    sim: Arc<Mutex<SimApiserver>>,
    state: Arc<Mutex<State>>,
}

impl Network {
    /// A network whose connections end at `sim`.
    pub(crate) fn to(sim: SimApiserver) -> Network {
        Network { sim: Arc::new(Mutex::new(sim)), state: Arc::default() }
    }

    /// Connects all later requests to another apiserver.
    pub(crate) fn connect_to(&self, sim: SimApiserver) {
        *self.sim.lock().unwrap() = sim;
    }

    /// A client on this network.
    pub(crate) fn upstream(&self) -> Upstream {
        let network = self.clone();
        let service = service_fn(move |request| network.clone().send(request));
        let base = http::Uri::from_static("http://apiserver.test");
        Upstream::from_service(HttpService::new(service), &base, UpstreamOptions::default())
    }

    /// Starts or stops refusing connections.
    pub(crate) fn refuse(&self, refused: bool) {
        self.state.lock().unwrap().refused = refused;
    }

    /// Adds a rule that sees the path and query of every request before it is sent. If the rule
    /// returns `Some`, that is the answer. Rules apply in the order in which they were added.
    pub(crate) fn rule(&self, rule: impl FnMut(&str) -> Option<Answer> + Send + 'static) {
        self.state.lock().unwrap().rules.push_back(Box::new(rule));
    }

    /// Removes all rules.
    pub(crate) fn clear_rules(&self) {
        self.state.lock().unwrap().rules.clear();
    }

    /// Answers the next request whose path fulfils `fits`, once.
    pub(crate) fn answer_once(&self, fits: impl Fn(&str) -> bool + Send + 'static, answer: Answer) {
        let mut answer = Some(answer);
        self.rule(move |path| if fits(path) { answer.take() } else { None });
    }

    /// The requests for a collection so far, in order.
    pub(crate) fn recorded_requests(&self, collection: &str) -> Vec<RecordedRequest> {
        let state = self.state.lock().unwrap();
        let ours = |asked: &&RecordedRequest| asked.path.split('?').next() == Some(collection);
        state.asked.iter().filter(ours).cloned().collect()
    }

    async fn send(self, request: http::Request<Bytes>) -> Result<Answer, BoxError> {
        let path = request.uri().path_and_query().map(ToString::to_string).unwrap_or_default();
        let accept = request.headers().get(http::header::ACCEPT).and_then(|accept| accept.to_str().ok());
        let is_metadata_only = accept.is_some_and(|accept| accept.contains("as=PartialObjectMetadata"));
        {
            let mut state = self.state.lock().unwrap();
            state.asked.push(RecordedRequest { at: Instant::now(), path: path.clone(), is_metadata_only });
            if state.refused {
                return Err(io::Error::from(io::ErrorKind::ConnectionRefused).into());
            }
            if let Some(answer) = state.rules.iter_mut().find_map(|rule| rule(&path)) {
                return Ok(answer);
            }
        }
        let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
        let sim = self.sim.lock().unwrap().clone();
        tokio::spawn(sim.serve_connection(theirs));
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(ours)).await?;
        tokio::spawn(connection);
        let (mut parts, body) = request.into_parts();
        parts.uri = path.parse()?;
        parts.headers.insert(http::header::HOST, http::HeaderValue::from_static("apiserver.test"));
        let response = sender.send_request(http::Request::from_parts(parts, Full::new(body))).await?;
        Ok(response.map(|body| body.map_err(BoxError::from).boxed_unsync()))
    }
}

/// Builds a forged answer: a status code and lines of JSON. With `then_silence` the body never
/// ends.
pub(crate) fn answer(code: u16, lines: Vec<String>, then_silence: bool) -> Answer {
    let end = CancellationToken::new();
    if !then_silence {
        end.cancel();
    }
    answer_until(code, lines, end)
}

/// Builds a forged answer whose body ends at `end`.
pub(crate) fn answer_until(code: u16, lines: Vec<String>, end: CancellationToken) -> Answer {
    let chunks = lines.into_iter().map(|line| Ok(http_body::Frame::data(Bytes::from(line + "\n"))));
    let silence = futures::stream::pending().take_until(end.cancelled_owned());
    let body = StreamBody::new(futures::stream::iter(chunks).chain(silence)).boxed_unsync();
    let response = http::Response::builder().status(code).header(http::header::CONTENT_TYPE, "application/json");
    response.body(body).expect("the answer is well formed")
}

/// Builds a forged answer with the lines that the test sends. It ends with their sender.
pub(crate) fn answer_with(lines: Receiver<String>) -> Answer {
    let chunks = futures::stream::unfold(lines, |mut lines| async move {
        let line = lines.recv().await?;
        Some((Ok(http_body::Frame::data(Bytes::from(line + "\n"))), lines))
    });
    let body = StreamBody::new(chunks).boxed_unsync();
    let response = http::Response::builder().header(http::header::CONTENT_TYPE, "application/json");
    response.body(body).expect("the answer is well formed")
}

/// The intervals between consecutive requests.
pub(crate) fn waits(asked: &[RecordedRequest]) -> Vec<Duration> {
    asked.windows(2).map(|pair| pair[1].at - pair[0].at).collect()
}
