//! Agents, as on the nodes of a cluster: each has a connection of its own and watches the pods of
//! its own node. An agent is live when a text has arrived that its watch ends its backlog with.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use h2::{
    RecvStream,
    client::{self, SendRequest},
};
use http::{HeaderMap, HeaderValue, Request, header};
use kubefan_common::proto::{
    WATCH_PATH,
    v1alpha1::{OnExpired, OnLag, Target, WatchRequest},
};
use kubefan_upstream::client::encode_query;
use prost::Message;
use tokio::{
    sync::Semaphore,
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep, timeout},
};

use super::{
    BenchError,
    counters::Counters,
    messages::{MessageReader, framed},
    receivers::{UNAVAILABLE, grpc_status},
    rest::Endpoint,
    windows::Windows,
};

/// Agents that connect at a time.
const CONNECTING_MAX: usize = 64;
/// Time within which all agents must be live.
const LIVE_TIMEOUT: Duration = Duration::from_secs(180);
/// The delay before an agent that the server asked to retry connects again.
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// Attempts of an agent.
const ATTEMPTS_MAX: usize = 100;
/// The annotation of the bookmark that ends the initial events.
const INITIAL_EVENTS_END: &[u8] = b"k8s.io/initial-events-end";
/// The error of a server that cannot continue from a version.
const EXPIRED: &[u8] = b"too old resource version";
const EXPIRED_STATUS: u16 = 410;
/// gRPC's OUT_OF_RANGE.
const EXPIRED_CODE: &str = "11";

/// Protocol between agents and server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AgentProtocol {
    Grpc,
    Json,
    Protobuf,
}

/// The request of all agents of a set.
#[derive(Clone)]
pub(super) struct Agents {
    pub(super) protocol: AgentProtocol,
    pub(super) endpoint: Endpoint,
    pub(super) namespace: String,
    /// The URL path of the pods.
    pub(super) path: String,
    /// Text that an agent that resumes waits for. An agent that starts from scratch waits for the
    /// end of the state.
    pub(super) mark: &'static str,
}

/// Figures of the time until all agents were live.
pub(super) struct AllLive {
    /// The time that each agent took.
    pub(super) took: Vec<Duration>,
    /// Agents that had to start from scratch, because their version was too old.
    pub(super) restarted: usize,
    /// The watches, which end when this is dropped.
    _open: Vec<Open>,
}

/// A watch that stays open.
struct Open {
    _body: RecvStream,
    _send: SendRequest<Bytes>,
    connection: JoinHandle<()>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// Result of an attempt to become live.
enum Attempt {
    Live(Open),
    /// The version is too old.
    Expired,
    /// The server asks to retry.
    Later,
}

impl Agents {
    /// Starts an agent for each of these nodes: from its version, or from scratch if it is `None`.
    pub(super) async fn go_live(
        &self,
        nodes: impl IntoIterator<Item = (usize, Option<u64>)>,
    ) -> Result<AllLive, BenchError> {
        let connecting = Arc::new(Semaphore::new(CONNECTING_MAX));
        let mut tasks = JoinSet::new();
        for (node, version) in nodes {
            let agents = self.clone();
            let connecting = connecting.clone();
            tasks.spawn(async move { agents.agent(node, version, &connecting).await });
        }
        let expected = tasks.len() as u64;
        let mut all = AllLive { took: Vec::new(), restarted: 0, _open: Vec::new() };
        let waiting = async {
            while let Some(agent) = tasks.join_next().await {
                let (open, took, is_restarted) =
                    agent.map_err(|error| error.to_string()).flatten().map_err(BenchError::Subscriber)?;
                all._open.push(open);
                all.took.push(took);
                all.restarted += usize::from(is_restarted);
            }
            Ok(())
        };
        match timeout(LIVE_TIMEOUT, waiting).await {
            Ok(result) => result.map(|()| all),
            Err(_) => {
                let reached = all.took.len() as u64;
                Err(BenchError::Stuck { doing: "waiting for agents", limit: LIVE_TIMEOUT, reached, expected })
            }
        }
    }

    async fn agent(
        &self,
        node: usize,
        mut version: Option<u64>,
        connecting: &Semaphore,
    ) -> Result<(Open, Duration, bool), String> {
        let _permit = connecting.acquire().await.map_err(|error| error.to_string())?;
        let start = Instant::now();
        let mut is_restarted = false;
        for _ in 0..ATTEMPTS_MAX {
            match self.attempt(node, version).await? {
                Attempt::Live(open) => return Ok((open, start.elapsed(), is_restarted)),
                Attempt::Expired => {
                    version = None;
                    is_restarted = true;
                }
                Attempt::Later => sleep(RETRY_DELAY).await,
            }
        }
        Err(format!("the agent of node-{node} was asked to retry {ATTEMPTS_MAX} times"))
    }

    async fn attempt(&self, node: usize, version: Option<u64>) -> Result<Attempt, String> {
        let failed = |error: h2::Error| format!("the agent of node-{node}: {error}");
        // A placeholder: these bytes are not counted.
        let counters = Arc::new(Counters::new(0, false));
        let transport = self.endpoint.connector.connect(&counters).await.map_err(|error| error.to_string())?;
        let windows = Windows::GO;
        let (send, connection) = client::Builder::new()
            .initial_window_size(windows.stream)
            .initial_connection_window_size(windows.connection)
            .max_frame_size(windows.frame)
            .handshake::<_, Bytes>(transport)
            .await
            .map_err(failed)?;
        let connection = tokio::spawn(async move { connection.await.unwrap_or_default() });
        let (request, message) = self.request(node, version)?;
        let mut ready = send.clone().ready().await.map_err(failed)?;
        let (response, mut stream) = ready.send_request(request, message.is_none()).map_err(failed)?;
        if let Some(message) = message {
            stream.send_data(message, true).map_err(failed)?;
        }
        let (head, body) = response.await.map_err(failed)?.into_parts();
        if let Some(ended) = ended(&head.headers) {
            return ended;
        }
        match head.status.as_u16() {
            200 => {}
            EXPIRED_STATUS => return Ok(Attempt::Expired),
            429 | 503 => return Ok(Attempt::Later),
            status => return Err(format!("the agent of node-{node} was answered {status}")),
        }
        let sign = match (version, self.protocol) {
            (Some(_), _) => Sign::Text(self.mark.as_bytes()),
            (None, AgentProtocol::Grpc) => Sign::ResumeVersion,
            (None, _) => Sign::Text(INITIAL_EVENTS_END),
        };
        let mut open = Open { _body: body, _send: send, connection };
        match read_until(&mut open._body, sign).await? {
            Found::Sign => Ok(Attempt::Live(open)),
            Found::Expired => Ok(Attempt::Expired),
            Found::End => match open._body.trailers().await.ok().flatten().and_then(|trailers| ended(&trailers)) {
                Some(ended) => ended,
                None => Ok(Attempt::Later),
            },
        }
    }

    /// The request of the agent of a node, and its gRPC message.
    fn request(&self, node: usize, version: Option<u64>) -> Result<(Request<()>, Option<Bytes>), String> {
        let fields = format!("spec.nodeName=node-{node}");
        if self.protocol == AgentProtocol::Grpc {
            let target = Target {
                resource: "pods".to_owned(),
                namespace: self.namespace.clone(),
                field_selector: fields,
                ..Target::default()
            };
            let message = WatchRequest {
                target: Some(target),
                resource_version: version.map(|version| version.to_string()).unwrap_or_default(),
                on_lag: OnLag::Conflate.into(),
                on_expired: OnExpired::Fail.into(),
                ..WatchRequest::default()
            }
            .encode_to_vec();
            let request = Request::post(format!("http://localhost{WATCH_PATH}"))
                .header("content-type", "application/grpc")
                .header("te", "trailers")
                .body(())
                .map_err(|error| error.to_string())?;
            return Ok((request, Some(framed(&message))));
        }
        let version = version.map(|version| version.to_string());
        let mut query = vec![("watch", "1"), ("fieldSelector", &*fields), ("allowWatchBookmarks", "true")];
        match &version {
            Some(version) => query.push(("resourceVersion", version)),
            None => query.extend([
                ("resourceVersion", "0"),
                ("sendInitialEvents", "true"),
                ("resourceVersionMatch", "NotOlderThan"),
            ]),
        }
        let path = format!("{}{}", self.path, encode_query(query));
        let mut request = self.endpoint.request(http::Method::GET, &path, None).map_err(|error| error.to_string())?;
        if self.protocol == AgentProtocol::Protobuf {
            let accept = HeaderValue::from_static("application/vnd.kubernetes.protobuf;stream=watch");
            request.headers_mut().insert(header::ACCEPT, accept);
        }
        Ok((request, None))
    }
}

/// The end that a gRPC status means; `None` if there is no status.
fn ended(headers: &HeaderMap) -> Option<Result<Attempt, String>> {
    let code = headers.get("grpc-status")?.to_str().unwrap_or_default();
    Some(match code {
        EXPIRED_CODE => Ok(Attempt::Expired),
        UNAVAILABLE => Ok(Attempt::Later),
        _ => Err(grpc_status(headers)),
    })
}

/// The sign that an agent is live.
enum Sign {
    Text(&'static [u8]),
    /// The first message with a `resume_version`.
    ResumeVersion,
}

enum Found {
    Sign,
    Expired,
    End,
}

/// Reads until the sign, which may be split between two reads.
async fn read_until(body: &mut RecvStream, sign: Sign) -> Result<Found, String> {
    let mut messages = MessageReader::default();
    let mut tail = Vec::new();
    while let Some(data) = body.data().await {
        let data = data.map_err(|error| error.to_string())?;
        // Cannot fail: this many bytes were just received.
        let _ = body.flow_control().release_capacity(data.len());
        match sign {
            Sign::ResumeVersion => {
                let mut is_found = false;
                messages.read(&data, |_, version| is_found |= version.is_some());
                if is_found {
                    return Ok(Found::Sign);
                }
            }
            Sign::Text(text) => {
                tail.extend_from_slice(&data);
                if memchr::memmem::find(&tail, text).is_some() {
                    return Ok(Found::Sign);
                }
                if memchr::memmem::find(&tail, EXPIRED).is_some() {
                    return Ok(Found::Expired);
                }
                let kept = text.len().max(EXPIRED.len()) - 1;
                tail.drain(..tail.len().saturating_sub(kept));
            }
        }
    }
    Ok(Found::End)
}
