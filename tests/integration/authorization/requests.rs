//! A request of the table of verdicts, sent to kubefan or to the apiserver.

use std::net::SocketAddr;

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use http::{Method, Version};
use kubefan_common::proto::v1alpha1::{GetRequest, ListRequest, Target, WatchRequest};
use reqwest::StatusCode;
use serde_json::Value;
use tonic::Code;

use super::{identities::Who, world::World};
use crate::harness::https::Https;

/// The form of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum By {
    Json,
    Protobuf,
    Metadata,
    /// A Table, and nothing else.
    Table,
    /// A watch over a websocket. A token is one of its protocols.
    WebSocket,
    /// The deprecated path with `/watch/`.
    WatchPath,
    Grpc,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verb {
    Get,
    List,
    Watch,
}

/// A request. `NS` stands for the namespace of the test.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) who: Who,
    pub(super) verb: Verb,
    pub(super) resource: &'static str,
    pub(super) namespace: &'static str,
    pub(super) name: &'static str,
    /// As in a query.
    pub(super) selectors: &'static str,
    pub(super) by: By,
}

pub(super) const fn row(
    who: Who,
    verb: Verb,
    resource: &'static str,
    namespace: &'static str,
    name: &'static str,
    selectors: &'static str,
    by: By,
) -> Row {
    Row { who, verb, resource, namespace, name, selectors, by }
}

use By::{Metadata, Protobuf, Table, WatchPath, WebSocket};
use Verb::{Get, List, Watch};

/// Headers of every websocket handshake.
pub(super) const WEBSOCKET: [(&str, &str); 5] = [
    ("origin", "http://localhost"),
    ("connection", "Upgrade"),
    ("upgrade", "websocket"),
    ("sec-websocket-version", "13"),
    ("sec-websocket-key", "BwcHBwcHBwcHBwcHBwcHBw=="),
];

/// The protocol that contains a token.
pub(super) fn token_protocol(token: &str) -> String {
    format!("base64url.bearer.authorization.k8s.io.{}", BASE64_URL_SAFE_NO_PAD.encode(token))
}

/// The protocols of a client with a token. The apiserver requires one beside the token.
fn websocket_protocols(token: &str) -> String {
    format!("{}, base64.channel.k8s.io", token_protocol(token))
}

impl World {
    /// The HTTP path and query of a row. A name in a gRPC list or watch is a field selector.
    pub(super) fn path(&self, row: Row) -> String {
        let Row { verb, resource, namespace, name, selectors, by, .. } = row;
        let namespace = self.named(namespace);
        let name = self.named(name);
        let selectors = self.named(selectors);
        let group = if resource == "deployments" { "/apis/apps/v1" } else { "/api/v1" };
        let prefix = if by == WatchPath { "/watch" } else { "" };
        let scope = if namespace.is_empty() { String::new() } else { format!("/namespaces/{namespace}") };
        let is_in_path = verb == Get || by == WatchPath;
        let tail = if is_in_path && !name.is_empty() { format!("/{name}") } else { String::new() };
        let mut query: Vec<String> = Vec::new();
        if !selectors.is_empty() {
            query.push(selectors.replace(' ', "%20"));
        }
        if !is_in_path && !name.is_empty() {
            query.push(format!("fieldSelector=metadata.name={name}"));
        }
        match verb {
            // Answered from the cache without passthrough, however fresh it is.
            Get | List => query.push("resourceVersion=0".to_owned()),
            Watch if by == WatchPath => query.push("timeoutSeconds=1&resourceVersion=0".to_owned()),
            Watch => query.push("watch=1&timeoutSeconds=1&resourceVersion=0".to_owned()),
        }
        format!("{group}{prefix}{scope}/{resource}{tail}?{}", query.join("&"))
    }

    /// The answer of a server, with its body if that is JSON.
    pub(super) async fn over_http(&self, row: Row, server: SocketAddr) -> (StatusCode, Value) {
        if row.by == WebSocket {
            return self.over_websocket(row, server).await;
        }
        let accept = match row.by {
            Protobuf => "application/vnd.kubernetes.protobuf,application/json",
            Metadata if row.verb == Get => {
                "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
            }
            Metadata => "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json",
            Table => "application/json;as=Table;g=meta.k8s.io;v=v1",
            _ => "application/json",
        };
        let url = format!("https://{server}{}", self.path(row));
        let answer = self.client(row.who).get(url).header("accept", accept).send().await.unwrap();
        let status = answer.status();
        let body = answer.bytes().await.unwrap();
        (status, serde_json::from_slice(&body).unwrap_or_default())
    }

    async fn over_websocket(&self, row: Row, server: SocketAddr) -> (StatusCode, Value) {
        let token = self.token(row.who).map(|token| ("sec-websocket-protocol", websocket_protocols(token)));
        let headers = WEBSOCKET.map(|(name, value)| (name, value.to_owned())).into_iter().chain(token);
        let headers: Vec<_> = headers.map(|(name, value)| (name.to_owned(), value)).collect();
        let ca = self.ca();
        let server = Https { addr: server, ca_pem: &ca, identity: self.certificate(row.who) };
        let answer = server.ask(Version::HTTP_11, &Method::GET, &self.path(row), &headers).await;
        (answer.status, serde_json::from_slice(&answer.body).unwrap_or_default())
    }

    /// Whether kubefan lets a gRPC call read: its code, in HTTP's words.
    pub(super) async fn over_grpc(&self, row: Row) -> (StatusCode, String) {
        let Row { who, verb, resource, namespace, name, selectors, .. } = row;
        let field = |kind: &str| {
            let of = selectors.split('&').find_map(|part| part.strip_prefix(kind)?.strip_prefix('='));
            self.named(of.unwrap_or_default())
        };
        let target = Some(Target {
            resource: resource.to_owned(),
            namespace: self.named(namespace),
            name: self.named(name),
            label_selector: field("labelSelector"),
            field_selector: field("fieldSelector"),
            ..Target::default()
        });
        let mut client = self.grpc_as(who).await;
        let done = match verb {
            Get => client.get(self.call(who, GetRequest { target, ..GetRequest::default() })).await.map(drop),
            List => client.list(self.call(who, ListRequest { target, ..ListRequest::default() })).await.map(drop),
            Watch => client.watch(self.call(who, WatchRequest { target, ..WatchRequest::default() })).await.map(drop),
        };
        match done {
            Ok(()) => (StatusCode::OK, String::new()),
            Err(status) => {
                let code = match status.code() {
                    Code::Unauthenticated => StatusCode::UNAUTHORIZED,
                    Code::PermissionDenied => StatusCode::FORBIDDEN,
                    Code::NotFound => StatusCode::NOT_FOUND,
                    other => panic!("{other:?}: {}", status.message()),
                };
                (code, status.message().to_owned())
            }
        }
    }
}
