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
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use kubefan_client::{
    ClientError,
    http::{HttpResponse, HttpTransport},
};
use tokio::time::timeout;

use super::{
    link::End,
    subscriber::ClientSettings,
    world::{SubscriberControl, World},
};

const ADDRESS: &str = "http://kubefan.test";

/// The time in which TCP keepalive notices that the other end is gone.
const KEEPALIVE: Duration = Duration::from_secs(45);

/// Sends requests to the replicas in turn.
pub(crate) struct Transport {
    world: Arc<World>,
    number: usize,
    window_bytes: u32,
    turn: Arc<AtomicUsize>,
    /// One connection for all requests, while it lives. `None` for HTTP/1.1.
    shared: Option<Mutex<Option<http2::SendRequest<Empty<Bytes>>>>>,
}

impl Transport {
    pub(crate) fn new(
        world: &Arc<World>,
        number: usize,
        settings: &ClientSettings,
        turn: &Arc<AtomicUsize>,
        is_http2: bool,
    ) -> Transport {
        let shared = is_http2.then(Mutex::default);
        Transport { world: world.clone(), number, window_bytes: settings.window_bytes, turn: turn.clone(), shared }
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
            let request = http::Request::get(uri).header(http::header::ACCEPT, accept);
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
            let status = response.status().as_u16();
            let retry_after = response.headers().get(http::header::RETRY_AFTER);
            let retry_after = retry_after.and_then(|value| value.to_str().ok()?.parse().ok()).map(Duration::from_secs);
            let parts = (response.into_body(), self.world.clone(), self.number);
            let body = stream::try_unfold(parts, |(mut body, world, number)| async move {
                loop {
                    let frame = async { body.frame().await.transpose().map_err(unreachable) };
                    let frame = before(&world.controls[number], frame).await?;
                    match frame.map(http_body::Frame::into_data) {
                        None => return Ok(None),
                        Some(Ok(data)) => return Ok(Some((data, (body, world, number)))),
                        Some(Err(_)) => {}
                    }
                }
            });
            Ok(HttpResponse { status, retry_after, body: body.boxed() })
        })
    }

    fn address(&self) -> &str {
        ADDRESS
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

fn unreachable(error: impl Display) -> ClientError {
    ClientError::HttpUnreachable { address: ADDRESS.to_owned(), message: error.to_string() }
}
