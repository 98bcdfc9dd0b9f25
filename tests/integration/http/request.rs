//! One request to one server, and its answer.

use std::time::Duration;

use reqwest::{Method, header::HeaderMap};
use tokio::time::{Instant, timeout_at};

use super::{protobuf_json, world::World};
use crate::harness::servers::is_of_cache;

/// The server that must answer a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AnsweredBy {
    /// kubefan, from its cache.
    Cache,
    /// Upstream.
    Upstream,
    /// Either of them, depending on timing.
    Either,
}

/// A request to compare.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) method: Method,
    /// With the query.
    pub(super) path: String,
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) by: AnsweredBy,
}

impl Request {
    pub(super) fn get(path: String, by: AnsweredBy) -> Self {
        Self { method: Method::GET, path, headers: Vec::new(), by }
    }

    pub(super) fn accepting(self, accept: &str) -> Self {
        Self { headers: vec![("accept", accept.to_owned())], ..self }
    }

    pub(super) fn query(&self) -> &str {
        self.path.split_once('?').map_or("", |(_, query)| query)
    }

    /// The value of a parameter; the first if there are several.
    pub(super) fn parameter(&self, name: &str) -> Option<String> {
        let mut all = form_urlencoded::parse(self.query().as_bytes());
        all.find(|(known, _)| known == name).map(|(_, value)| value.into_owned())
    }
}

impl std::fmt::Display for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.method, self.path)?;
        for (name, value) in &self.headers {
            write!(f, " [{name}: {value}]")?;
        }
        Ok(())
    }
}

/// An answer.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    /// 0 if there was no answer.
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

/// Time limit for reading an answer. A watch sets its own, shorter timeout.
const ANSWER_SECONDS_MAX: u64 = 20;

impl Answer {
    pub(super) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// Whether kubefan answered from its cache.
    pub(super) fn is_cached(&self) -> bool {
        is_of_cache(&self.headers)
    }

    /// Whether the body is protobuf.
    pub(super) fn is_protobuf(&self) -> bool {
        self.header("content-type").starts_with(protobuf_json::CONTENT_TYPE)
    }

    pub(super) fn text(&self) -> String {
        if self.is_protobuf() {
            protobuf_json::text(self.header("content-type"), &self.body)
        } else {
            String::from_utf8_lossy(&self.body).into_owned()
        }
    }
}

impl World {
    /// Sends a request to the apiserver.
    pub(super) async fn ask_direct(&self, request: &Request) -> Answer {
        ask(&self.direct, &format!("{}{}", self.api.url(), request.path), request).await
    }

    /// Sends a request to kubefan. `turn` chooses the protocol version.
    pub(super) async fn ask_kubefan(&self, request: &Request, turn: usize) -> Answer {
        ask(&self.clients[turn % self.clients.len()], &self.url(&request.path), request).await
    }
}

async fn ask(client: &reqwest::Client, url: &str, request: &Request) -> Answer {
    let mut sent = client.request(request.method.clone(), url);
    for (name, value) in &request.headers {
        sent = sent.header(*name, value);
    }
    let limit = Instant::now() + Duration::from_secs(ANSWER_SECONDS_MAX);
    let answered = timeout_at(limit, sent.send()).await.unwrap_or_else(|_| panic!("{request}: no answer from {url}"));
    let mut response = match answered {
        Ok(response) => response,
        Err(error) => return Answer { status: 0, headers: HeaderMap::new(), body: format!("{error:?}").into_bytes() },
    };
    let status = response.status().as_u16();
    let headers = response.headers().clone();
    let mut body = Vec::new();
    // An answer that does not end in time is compared up to this point.
    while let Ok(chunk) = timeout_at(limit, response.chunk()).await {
        match chunk {
            Ok(Some(chunk)) => body.extend_from_slice(&chunk),
            Ok(None) => break,
            Err(error) => {
                body.extend_from_slice(format!("INCOMPLETE: {error:?}").as_bytes());
                break;
            }
        }
    }
    Answer { status, headers, body }
}
