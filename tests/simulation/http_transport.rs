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
use tokio::time::timeout;

use super::{
    gzip_decoder::GzipDecoder,
    link::End,
    subscriber::ClientSettings,
    world::{SubscriberControl, World},
};

const ADDRESS: &str = "http://kubefan.test";

/// Names of counts.
pub(crate) const WATCHES_IN_GZIP: &str = "watches in gzip";
const LISTS_IN_GZIP: &str = "lists in gzip";
pub(crate) const ENDS_IN_GZIP: &str = "bodies in gzip checked to their end";
const COMPRESSED_EVENTS: &str = "events compressed in gzip";

/// The time in which TCP keepalive notices that the other end is gone.
const KEEPALIVE: Duration = Duration::from_secs(45);

/// Sends requests to the replicas in turn.
pub(crate) struct Transport {
    world: Arc<World>,
    number: usize,
    window_bytes: u32,
    turn: Arc<AtomicUsize>,
    accepts_gzip: bool,
    /// One connection for all requests, while it lives. `None` for HTTP/1.1.
    shared: Option<Mutex<Option<http2::SendRequest<Empty<Bytes>>>>>,
}

/// The requests of a program over HTTP.
#[derive(Clone, Copy)]
pub(crate) struct RequestOptions {
    pub(crate) is_http2: bool,
    pub(crate) accepts_gzip: bool,
}

impl Transport {
    pub(crate) fn new(
        world: &Arc<World>,
        number: usize,
        settings: &ClientSettings,
        turn: &Arc<AtomicUsize>,
        options: RequestOptions,
    ) -> Transport {
        let RequestOptions { is_http2, accepts_gzip } = options;
        let shared = is_http2.then(Mutex::default);
        let window_bytes = settings.window_bytes;
        Transport { world: world.clone(), number, window_bytes, turn: turn.clone(), accepts_gzip, shared }
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
        let replica = self.turn.fetch_add(1, Ordering::Relaxed) % self.world.nodes.len();
        self.world.nodes[replica].connect(&self.world.controls[self.number].route).map(TokioIo::new)
    }

    async fn send(&self, path: &str, accept: &'static str) -> Result<http::Response<Incoming>, ClientError> {
        let request = |uri: String| {
            let mut request = http::Request::get(uri).header(http::header::ACCEPT, accept);
            if self.accepts_gzip {
                request = request.header(http::header::ACCEPT_ENCODING, "gzip");
            }
            request.header(http::header::HOST, "kubefan.test").body(Empty::new()).map_err(unreachable)
        };
        let Some(shared) = &self.shared else {
            let (mut sender, connection) =
                http1::handshake(self.connect().map_err(unreachable)?).await.map_err(unreachable)?;
            tokio::spawn(connection);
            return sender.send_request(request(path.to_owned())?).await.map_err(unreachable);
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
        sender.send_request(request(format!("{ADDRESS}{path}"))?).await.map_err(unreachable)
    }
}

impl HttpTransport for Transport {
    fn get(&self, path_and_query: String, accept: &'static str) -> BoxFuture<'_, Result<HttpResponse, ClientError>> {
        Box::pin(async move {
            let response = before(&self.world.controls[self.number], self.send(&path_and_query, accept)).await?;
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
                is_http2: self.shared.is_some(),
                is_watch,
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
            let Some(frame) = before(&self.world.controls[self.number], frame).await? else {
                return self.check_end().map(|()| None);
            };
            let Ok(data) = frame.into_data() else { continue };
            let Some(decoder) = &mut self.gzip else { return Ok(Some(data)) };
            let plain = decoder.decode(&data).map_err(damaged)?;
            self.world.count(ENDS_IN_GZIP, decoder.has_ended().into());
            let compressed = decoder.take_compressed();
            self.world.count(COMPRESSED_EVENTS, if self.is_watch { compressed } else { 0 });
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
async fn before<T>(
    control: &SubscriberControl,
    answer: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, ClientError> {
    let mut answer = pin!(answer);
    loop {
        match timeout(KEEPALIVE, &mut answer).await {
            Ok(answer) => return answer,
            Err(_) if control.route.is_half_open() => return Err(unreachable("the connection is half-open")),
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
