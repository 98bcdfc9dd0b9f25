//! A transport with scripted answers, and a real HTTP server with them.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Body, extract::State, http};
use bytes::Bytes;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream};

use crate::{
    error::ClientError,
    http::{HttpClient, HttpClientOptions, HttpResponse, HttpTransport},
};

/// An answer to a request.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) retry_after: Option<Duration>,
    pub(super) content_encoding: Option<&'static str>,
    pub(super) chunks: Vec<Bytes>,
    pub(super) is_endless: bool,
}

impl Answer {
    pub(super) fn new(status: u16, body: &str) -> Self {
        Self::chunks(status, &[body])
    }

    pub(super) fn ok(body: &str) -> Self {
        Self::new(200, body)
    }

    pub(super) fn chunks<T: AsRef<[u8]>>(status: u16, chunks: &[T]) -> Self {
        let chunks = chunks.iter().map(|chunk| Bytes::copy_from_slice(chunk.as_ref())).collect();
        Self { status, retry_after: None, content_encoding: None, chunks, is_endless: false }
    }

    /// The body stays open after the chunks.
    pub(super) fn endless(self) -> Self {
        Self { is_endless: true, ..self }
    }
}

/// Answers requests in order, and records them.
pub(super) struct Scripted {
    answers: Mutex<VecDeque<Answer>>,
    requests: Mutex<Vec<(String, &'static str)>>,
}

impl Scripted {
    pub(super) fn new(answers: Vec<Answer>) -> Self {
        Self { answers: Mutex::new(answers.into()), requests: Mutex::default() }
    }

    pub(super) fn requests(&self) -> Vec<(String, &'static str)> {
        self.requests.lock().unwrap().clone()
    }
}

impl HttpTransport for Scripted {
    fn get(&self, path_and_query: String, accept: &'static str) -> BoxFuture<'_, Result<HttpResponse, ClientError>> {
        self.requests.lock().unwrap().push((path_and_query, accept));
        let answer = self.answers.lock().unwrap().pop_front().map(
            |Answer { status, retry_after, chunks, is_endless, .. }| {
                let chunks = stream::iter(chunks.into_iter().map(Ok));
                let body = if is_endless { chunks.chain(stream::pending()).boxed() } else { chunks.boxed() };
                HttpResponse { status, retry_after, body }
            },
        );
        let unreachable = || ClientError::HttpUnreachable {
            address: self.address().to_owned(),
            message: "no answer left".to_owned(),
        };
        async move { answer.ok_or_else(unreachable) }.boxed()
    }

    fn address(&self) -> &str {
        "http://scripted"
    }
}

/// A request that the real server received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Received {
    pub(super) path_and_query: String,
    pub(super) accept: String,
    pub(super) accept_encoding: String,
    pub(super) authorization: Option<String>,
    pub(super) user_agent: String,
}

#[derive(Default)]
struct World {
    answers: VecDeque<Answer>,
    received: Vec<Received>,
}

/// An HTTP server on a port of its own.
pub(super) struct Server {
    world: Arc<Mutex<World>>,
    pub(super) address: String,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    pub(super) async fn new(answers: Vec<Answer>) -> Self {
        let world = Arc::new(Mutex::new(World { answers: answers.into(), received: Vec::new() }));
        let app = Router::new().fallback(answer).with_state(world.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { world, address, task }
    }

    pub(super) async fn client(&self, options: &HttpClientOptions) -> HttpClient {
        HttpClient::new(&self.address, options).await.unwrap()
    }

    pub(super) fn received(&self) -> Vec<Received> {
        self.world.lock().unwrap().received.clone()
    }
}

async fn answer(State(world): State<Arc<Mutex<World>>>, request: http::Request<Body>) -> http::Response<Body> {
    let header = |name: &str| request.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    let received = Received {
        path_and_query: request.uri().path_and_query().unwrap().to_string(),
        accept: header("accept").unwrap(),
        accept_encoding: header("accept-encoding").unwrap(),
        authorization: header("authorization"),
        user_agent: header("user-agent").unwrap(),
    };
    let answer = {
        let mut world = world.lock().unwrap();
        world.received.push(received);
        world.answers.pop_front().unwrap_or_else(|| Answer::new(500, "no answer left"))
    };
    let mut response = http::Response::builder().status(answer.status);
    if let Some(delay) = answer.retry_after {
        response = response.header("retry-after", delay.as_secs());
    }
    if let Some(coding) = answer.content_encoding {
        response = response.header("content-encoding", coding);
    }
    let chunks = stream::iter(answer.chunks.into_iter().map(Ok::<_, std::convert::Infallible>));
    let body =
        if answer.is_endless { Body::from_stream(chunks.chain(stream::pending())) } else { Body::from_stream(chunks) };
    response.body(body).unwrap()
}
