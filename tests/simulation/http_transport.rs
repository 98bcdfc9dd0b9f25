//! HTTP requests over connections in memory, which fail like those of the other subscribers.

use std::{
    fmt::Display,
    io,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures::{StreamExt, future::BoxFuture, stream};
use http_body_util::{BodyExt, Empty};
use hyper::{
    body::{Body as _, Incoming},
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use kubefan_client::{
    ClientError,
    http::{HttpResponse, HttpTransport},
};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::{
    gzip_decoder::GzipDecoder,
    link::{End, Route},
    sides::{Sides, can_move},
    subscriber::ClientSettings,
    world::World,
};

const ADDRESS: &str = "http://kubefan.test";

/// Names of counts.
pub(crate) const WATCHES_IN_GZIP: &str = "watches in gzip";
const LISTS_IN_GZIP: &str = "lists in gzip";
pub(crate) const ENDS_IN_GZIP: &str = "bodies in gzip checked to their end";
const COMPRESSED_EVENTS: &str = "events compressed in gzip";
pub(crate) const SWITCHES: &str = "changes between stored and compressed events in a watch";
pub(crate) const MOVES: &str = "reads that moved to the apiserver";

/// The time in which TCP keepalive notices that the other end is gone.
const KEEPALIVE: Duration = Duration::from_secs(45);

/// The time in which an apiserver must begin its answer.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Sends requests to the replicas in turn, or to the apiservers.
pub(crate) struct Transport {
    world: Arc<World>,
    number: usize,
    window_bytes: u32,
    turn: Arc<AtomicUsize>,
    accepts_gzip: bool,
    servers: Servers,
    /// One connection to a replica for all requests, while it lives. `None` for HTTP/1.1.
    shared: Option<Mutex<Option<http2::SendRequest<Empty<Bytes>>>>>,
}

/// The requests of a program over HTTP.
pub(crate) struct RequestOptions {
    pub(crate) is_http2: bool,
    pub(crate) accepts_gzip: bool,
    pub(crate) servers: Servers,
}

/// The servers that get a program's requests.
pub(crate) enum Servers {
    /// The replicas, each connection the next one.
    Replicas,
    /// The first replica, and the second one while the first is not running.
    FirstReplica,
    Apiservers,
    /// The replicas, and the apiservers while those are away.
    Both(Sides),
}

/// A response, and the time at which its body is given up.
struct Answer {
    response: http::Response<Incoming>,
    is_direct: bool,
    until: Option<Instant>,
}

impl Transport {
    pub(crate) fn new(
        world: &Arc<World>,
        number: usize,
        settings: &ClientSettings,
        turn: &Arc<AtomicUsize>,
        options: RequestOptions,
    ) -> Transport {
        let RequestOptions { is_http2, accepts_gzip, servers } = options;
        let shared = is_http2.then(Mutex::default);
        let window_bytes = settings.window_bytes;
        Transport { world: world.clone(), number, window_bytes, turn: turn.clone(), accepts_gzip, servers, shared }
    }

    /// The replica of the next request, unless the connection breaks before.
    pub(crate) fn next_replica(&self) -> usize {
        let is_open = |shared: &Mutex<Option<http2::SendRequest<Empty<Bytes>>>>| {
            shared.lock().unwrap().as_ref().is_some_and(|sender| !sender.is_closed())
        };
        let back = usize::from(self.shared.as_ref().is_some_and(is_open));
        (self.turn.load(Ordering::Relaxed) + self.world.nodes.len() - back) % self.world.nodes.len()
    }

    fn connect(&self) -> io::Result<TokioIo<End>> {
        let route = &self.world.controls[self.number].route;
        let replica = self.turn.fetch_add(1, Ordering::Relaxed) % self.world.nodes.len();
        let connected = match self.servers {
            Servers::FirstReplica => self.world.nodes.iter().find_map(|node| node.connect(route).ok()),
            _ => Some(self.world.nodes[replica].connect(route)?),
        };
        connected.map(TokioIo::new).ok_or_else(|| io::ErrorKind::ConnectionRefused.into())
    }

    fn request(&self, uri: String, accept: &'static str) -> Result<http::Request<Empty<Bytes>>, ClientError> {
        let mut request = http::Request::get(uri).header(http::header::ACCEPT, accept);
        if self.accepts_gzip {
            request = request.header(http::header::ACCEPT_ENCODING, "gzip");
        }
        request.header(http::header::HOST, "kubefan.test").body(Empty::new()).map_err(unreachable)
    }

    /// Sends a request to the server whose turn it is.
    async fn answer(&self, path: &str, accept: &'static str) -> Result<Answer, ClientError> {
        let sides = match &self.servers {
            Servers::Apiservers => return self.ask_apiserver(path, accept, None).await,
            Servers::Both(sides) if can_move(path) => sides,
            _ => return self.ask_replica(path, accept).await,
        };
        if sides.back_at().is_none() {
            match self.ask_replica(path, accept).await {
                Ok(answer) if answer.response.status() != http::StatusCode::SERVICE_UNAVAILABLE => return Ok(answer),
                _ => sides.leave(),
            }
        }
        sleep_until(sides.next_start()).await;
        self.world.count(MOVES, 1);
        self.ask_apiserver(path, accept, sides.back_at()).await
    }

    async fn ask_replica(&self, path: &str, accept: &'static str) -> Result<Answer, ClientError> {
        let route = &self.world.controls[self.number].route;
        let response = before(route, self.send(path, accept)).await?;
        Ok(Answer { response, is_direct: false, until: None })
    }

    /// Sends a request over a connection of its own.
    async fn ask_apiserver(
        &self,
        path: &str,
        accept: &'static str,
        until: Option<Instant>,
    ) -> Result<Answer, ClientError> {
        let route = &self.world.controls[self.number].direct;
        let number = self.turn.fetch_add(1, Ordering::Relaxed) % self.world.apiservers.len();
        let (ours, theirs) = route.connect().map_err(unreachable)?;
        tokio::spawn(self.world.apiservers[number].clone().serve_connection(theirs));
        let send = async {
            let (mut sender, connection) = http1::handshake(TokioIo::new(ours)).await.map_err(unreachable)?;
            tokio::spawn(connection);
            sender.send_request(self.request(path.to_owned(), accept)?).await.map_err(unreachable)
        };
        let response = timeout(ANSWER_MAX, send).await.map_err(unreachable)??;
        Ok(Answer { response, is_direct: true, until })
    }

    async fn send(&self, path: &str, accept: &'static str) -> Result<http::Response<Incoming>, ClientError> {
        let Some(shared) = &self.shared else {
            let (mut sender, connection) =
                http1::handshake(self.connect().map_err(unreachable)?).await.map_err(unreachable)?;
            tokio::spawn(connection);
            return sender.send_request(self.request(path.to_owned(), accept)?).await.map_err(unreachable);
        };
        let open = shared.lock().unwrap().clone().filter(|sender| !sender.is_closed());
        let mut sender = match open {
            Some(sender) => sender,
            None => {
                let (sender, connection) = http2::Builder::new(TokioExecutor::new())
                    .timer(TokioTimer::new())
                    .initial_stream_window_size(self.window_bytes)
                    .initial_connection_window_size(2 * self.window_bytes)
                    .keep_alive_interval(Duration::from_secs(10))
                    .keep_alive_timeout(Duration::from_secs(5))
                    .keep_alive_while_idle(true)
                    .handshake(self.connect().map_err(unreachable)?)
                    .await
                    .map_err(unreachable)?;
                tokio::spawn(connection);
                *shared.lock().unwrap() = Some(sender.clone());
                sender
            }
        };
        sender.send_request(self.request(format!("{ADDRESS}{path}"), accept)?).await.map_err(unreachable)
    }
}

impl HttpTransport for Transport {
    fn get(&self, path_and_query: String, accept: &'static str) -> BoxFuture<'_, Result<HttpResponse, ClientError>> {
        Box::pin(async move {
            let Answer { response, is_direct, until } = self.answer(&path_and_query, accept).await?;
            let is_watch = path_and_query.contains("watch=");
            let status = response.status().as_u16();
            let retry_after = response.headers().get(http::header::RETRY_AFTER);
            let retry_after = retry_after.and_then(|value| value.to_str().ok()?.parse().ok()).map(Duration::from_secs);
            let gzip = match response.headers().get(http::header::CONTENT_ENCODING) {
                None => None,
                Some(coding) if self.accepts_gzip && coding == "gzip" => {
                    self.world.count(if is_watch { WATCHES_IN_GZIP } else { LISTS_IN_GZIP }, 1);
                    Some(GzipDecoder::new())
                }
                Some(coding) => return Err(damaged(format!("the body has the coding {coding:?}"))),
            };
            let body = ReceivedBody {
                incoming: response.into_body(),
                is_http2: self.shared.is_some() && !is_direct,
                is_watch,
                is_direct,
                until: until.filter(|_| is_watch),
                gzip,
                world: self.world.clone(),
                number: self.number,
            };
            let body = stream::try_unfold(body, |mut body| async move {
                let data = body.next().await?;
                Ok(data.map(|data| (data, body)))
            });
            Ok(HttpResponse { status, retry_after, body: body.boxed() })
        })
    }

    fn address(&self) -> &str {
        ADDRESS
    }
}

/// A body that is being received, and decoded.
struct ReceivedBody {
    incoming: Incoming,
    is_http2: bool,
    is_watch: bool,
    is_direct: bool,
    /// The program returns to kubefan then.
    until: Option<Instant>,
    /// `None` for a body without a content coding.
    gzip: Option<GzipDecoder>,
    world: Arc<World>,
    number: usize,
}

impl ReceivedBody {
    /// The next bytes without a content coding; `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        loop {
            let frame = async { self.incoming.frame().await.transpose().map_err(unreachable) };
            let control = &self.world.controls[self.number];
            let frame = before(if self.is_direct { &control.direct } else { &control.route }, frame);
            let frame = match self.until {
                None => frame.await?,
                Some(until) => match timeout_at(until, frame).await {
                    Ok(frame) => frame?,
                    Err(_) => return Ok(None),
                },
            };
            let Some(frame) = frame else {
                return self.check_end().map(|()| None);
            };
            let Ok(data) = frame.into_data() else { continue };
            let Some(decoder) = &mut self.gzip else { return Ok(Some(data)) };
            let plain = decoder.decode(&data).map_err(damaged)?;
            self.world.count(ENDS_IN_GZIP, decoder.has_ended().into());
            let compressed = decoder.take_compressed();
            self.world.count(COMPRESSED_EVENTS, if self.is_watch { compressed } else { 0 });
            self.world.count(SWITCHES, if self.is_watch { decoder.take_switches() } else { 0 });
            if !plain.is_empty() {
                return Ok(Some(plain.into()));
            }
        }
    }

    /// Checks that a body which HTTP takes for complete is a whole gzip member.
    fn check_end(&self) -> Result<(), ClientError> {
        let Some(decoder) = &self.gzip else { return Ok(()) };
        if decoder.has_ended() {
            return Ok(());
        }
        // hyper takes a stream that was reset without an error for one that has ended.
        if self.is_http2 && !self.incoming.is_end_stream() {
            return Err(unreachable("the stream was reset inside of a gzip member"));
        }
        Err(damaged("the body has ended inside of its gzip member".to_owned()))
    }
}

/// Waits for an answer, or until keepalive finds the connection dead.
async fn before<T>(route: &Route, answer: impl Future<Output = Result<T, ClientError>>) -> Result<T, ClientError> {
    let mut answer = pin!(answer);
    loop {
        match timeout(KEEPALIVE, &mut answer).await {
            Ok(answer) => return answer,
            Err(_) if route.is_half_open() => return Err(unreachable("the connection is half-open")),
            Err(_) => {}
        }
    }
}

/// The server has sent a body that no client can decode. The oracle takes it for a violation.
fn damaged(message: String) -> ClientError {
    ClientError::Undecodable { address: ADDRESS.to_owned(), message }
}

fn unreachable(error: impl Display) -> ClientError {
    ClientError::HttpUnreachable { address: ADDRESS.to_owned(), message: error.to_string() }
}
