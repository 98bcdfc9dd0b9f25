//! A minimal client: requests, answers, and the events of a watch.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use futures::{StreamExt, stream::BoxStream};
use reqwest::Method;
use serde_json::{Value, json};

/// Time limit for a single wait.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// An apiserver to send requests to.
#[derive(Clone)]
pub(crate) struct Api {
    /// Without a trailing slash.
    pub(crate) base_url: String,
    /// Trusts the server.
    pub(crate) client: reqwest::Client,
}

/// An answer.
pub(super) struct Answer {
    pub(super) code: u16,
    pub(super) content_type: String,
    pub(super) retry_after: Option<String>,
    pub(super) text: String,
}

impl Answer {
    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// Asserts success and returns the body.
    pub(super) fn ok(self) -> Value {
        assert!((200..300).contains(&self.code), "{} {}", self.code, self.text);
        self.json()
    }

    /// Asserts a failure Status with this code, reason and message.
    pub(super) fn fails(&self, code: u16, reason: &str, message: &str) {
        let status = self.json();
        assert_eq!(self.code, code, "{}", self.text);
        assert_eq!((&status["kind"], &status["status"]), (&json!("Status"), &json!("Failure")), "{}", self.text);
        assert_eq!(status["message"], message, "{}", self.text);
        assert_eq!(status["reason"].as_str().unwrap_or_default(), reason, "{}", self.text);
        assert_eq!(status["code"], code, "{}", self.text);
    }
}

/// The events of one watch.
pub(super) struct Events {
    pub(super) code: u16,
    chunks: BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    buffer: Vec<u8>,
}

/// One event.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Event {
    pub(super) kind: String,
    pub(super) object: Value,
    /// The whole line.
    pub(super) line: String,
}

impl Event {
    pub(super) fn name(&self) -> &str {
        self.object["metadata"]["name"].as_str().unwrap_or_default()
    }

    pub(super) fn version(&self) -> u64 {
        version(&self.object)
    }

    /// A short form for comparisons, such as `ADDED a`.
    pub(super) fn short(&self) -> String {
        format!("{} {}", self.kind, self.name())
    }
}

impl Events {
    /// The next event; `None` at the end of the stream.
    pub(super) async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                let line = String::from_utf8(line).unwrap();
                let mut event: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
                let kind = event["type"].as_str().unwrap().to_owned();
                return Some(Event { kind, object: event["object"].take(), line });
            }
            let chunk = tokio::time::timeout(WAIT_MAX, self.chunks.next()).await.expect("the watch should send or end");
            match chunk {
                Some(chunk) => self.buffer.extend_from_slice(&chunk.expect("the watch should end cleanly")),
                None => {
                    assert!(self.buffer.is_empty(), "the stream ended in the middle of a line");
                    return None;
                }
            }
        }
    }

    pub(super) async fn take(&mut self, count: usize) -> Vec<Event> {
        let mut events = Vec::new();
        while events.len() < count {
            events.push(self.next().await.unwrap_or_else(|| panic!("the watch ended after {events:?}")));
        }
        events
    }

    /// All events up to the end of the stream.
    pub(super) async fn rest(mut self) -> Vec<Event> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        events
    }
}

impl Api {
    fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.client.request(method, format!("{}{path}", self.base_url))
    }

    pub(super) async fn send(&self, method: Method, path: &str, media_type: &str, body: String) -> Answer {
        let request = self.request(method, path).header("content-type", media_type).body(body);
        read(request.timeout(WAIT_MAX).send().await.unwrap()).await
    }

    pub(super) async fn get(&self, path: &str) -> Answer {
        self.get_as(path, "application/json").await
    }

    pub(super) async fn get_as(&self, path: &str, accept: &str) -> Answer {
        let request = self.request(Method::GET, path).header("accept", accept);
        read(request.timeout(WAIT_MAX).send().await.unwrap()).await
    }

    pub(super) async fn post(&self, path: &str, object: &Value) -> Answer {
        self.send(Method::POST, path, "application/json", object.to_string()).await
    }

    pub(super) async fn put(&self, path: &str, object: &Value) -> Answer {
        self.send(Method::PUT, path, "application/json", object.to_string()).await
    }

    pub(super) async fn patch(&self, path: &str, patch: &Value) -> Answer {
        self.send(Method::PATCH, path, "application/merge-patch+json", patch.to_string()).await
    }

    pub(super) async fn delete(&self, path: &str) -> Answer {
        self.send(Method::DELETE, path, "application/json", String::new()).await
    }

    /// Starts a watch. `path` may have a query.
    pub(super) async fn watch(&self, path: &str) -> Events {
        let path = format!("{path}{}watch=true", if path.contains('?') { '&' } else { '?' });
        self.stream(&path).await
    }

    pub(super) async fn stream(&self, path: &str) -> Events {
        let response = self.request(Method::GET, path).send().await.unwrap();
        Events { code: response.status().as_u16(), chunks: response.bytes_stream().boxed(), buffer: Vec::new() }
    }

    /// Creates a namespace and returns the path of its config maps.
    pub(super) async fn config_maps(&self) -> String {
        format!("{}/configmaps", self.namespace().await)
    }

    /// Creates a namespace and returns its path.
    pub(super) async fn namespace(&self) -> String {
        let name = unique("row");
        self.post("/api/v1/namespaces", &json!({"metadata": {"name": name}})).await.ok();
        format!("/api/v1/namespaces/{name}")
    }

    /// Creates a config map and returns its version.
    pub(super) async fn config_map(&self, path: &str, name: &str, labels: Value) -> u64 {
        let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}});
        version(&self.post(path, &object).await.ok())
    }
}

async fn read(response: reqwest::Response) -> Answer {
    let header = |name: &str| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    Answer {
        code: response.status().as_u16(),
        content_type: header("content-type").unwrap_or_default(),
        retry_after: header("retry-after"),
        text: String::from_utf8(response.bytes().await.unwrap().to_vec()).unwrap(),
    }
}

/// A name that no other row uses. Every test run has its own servers.
pub(super) fn unique(prefix: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{prefix}-row-{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

pub(super) fn version(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().unwrap_or_default().parse().unwrap_or_default()
}

/// The names of a list's items.
pub(super) fn names(list: &Value) -> Vec<&str> {
    let items = list["items"].as_array().expect("items is an array, even when it is empty");
    items.iter().map(|item| item["metadata"]["name"].as_str().unwrap()).collect()
}
