//! HTTP handling: routes, content negotiation and injected faults.

use std::{io::Write as _, sync::Arc};

use bytes::{Bytes, BytesMut};
use flate2::{Compression, write::GzEncoder};
use futures::{StreamExt, stream};
use http::{Method, Request, Response, StatusCode, header, request::Parts};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::Value;

use super::{
    accept::{PROTOBUF, accepts, is_json, is_metadata_list, is_protobuf, prefers_metadata, prefers_protobuf},
    discovery::AGGREGATED,
    faults::{Fault, Verb},
    object::put_value,
    options::ListOptions,
    protobuf,
    resource::CRD_GROUP,
    respond::{Body, as_protobuf, takes_gzip},
    review::Review,
    server::Inner,
    status::{Details, Status},
    store::Collection,
    watch::{Started, Watcher, put_event},
    write::{Part, fresh, merge},
};
use kubefan_model::{GroupVersionResource, ObjectKey};

/// The largest accepted request body. kube-apiserver has the same limit.
const WRITE_BYTES_MAX: usize = 3 * 1024 * 1024;
/// kube-apiserver compresses responses above this size for clients that accept gzip.
const GZIP_BYTES_MIN: usize = 128 * 1024;

/// Makes hyper close the connection without a response.
#[derive(Debug, thiserror::Error)]
#[error("an injected fault closed the connection")]
pub(super) struct Disconnect;

/// The collection, object or subresource that a path names.
struct Target {
    collection: Arc<Collection>,
    namespace: String,
    name: Option<String>,
    subresource: Option<String>,
    old_watch: bool,
}

impl Target {
    fn key(&self) -> ObjectKey {
        ObjectKey::new(&self.namespace, self.name.as_deref().unwrap_or_default())
    }
}

/// Answers one request. An error closes the connection.
pub(super) async fn handle(inner: Arc<Inner>, request: Request<Incoming>) -> Result<Response<Body>, Disconnect> {
    let (parts, body) = request.into_parts();
    let faulty = |verb, gvr: Option<&GroupVersionResource>| inner.faults.take(verb, gvr);
    if let Some(token) = &inner.options.bearer_token {
        let expected = format!("Bearer {token}");
        if parts.headers.get(header::AUTHORIZATION).is_none_or(|value| value.as_bytes() != expected.as_bytes()) {
            return Ok(inner.failure(&Status::failure(401, "Unauthorized", "Unauthorized")));
        }
    }
    if let (&Method::POST, Some(review)) = (&parts.method, Review::at(parts.uri.path())) {
        if let Some(fault) = faulty(Verb::Review, None) {
            return inner.fail(&fault, &parts, None).await;
        }
        let body = Limited::new(body, WRITE_BYTES_MAX).collect().await.map(|body| body.to_bytes());
        let answer = review.answer(&body.unwrap_or_default());
        return Ok(answer.map_or_else(|status| inner.failure(&status), |answer| inner.json(&answer)));
    }
    let target = match inner.route(parts.uri.path()) {
        Some(Ok(target)) => target,
        answer => {
            if let Some(fault) = faulty(Verb::Discovery, None) {
                return inner.fail(&fault, &parts, None).await;
            }
            return Ok(match answer {
                Some(Err(missing)) => missing,
                _ => inner.plain(&parts),
            });
        }
    };
    let gvr = target.collection.resource.gvr.clone();
    let watch = target.old_watch || parts.uri.query().is_some_and(is_watch_query);
    let verb = match (&parts.method, &target.name) {
        (&Method::GET, Some(_)) if !target.old_watch => Verb::Get,
        (&Method::GET, _) if watch => Verb::Watch,
        (&Method::GET, _) => Verb::List,
        _ => Verb::Write,
    };
    let fault = faulty(verb, Some(&gvr));
    if let Some(fault) = &fault
        && !(verb == Verb::Watch && fault.is_in_stream())
    {
        return inner.fail(fault, &parts, Some((verb, &target))).await;
    }
    let answer = match verb {
        Verb::Watch => inner.answer_watch(&parts, target, fault).await,
        Verb::List => inner.answer_list(&parts, &target).await,
        Verb::Get => inner.answer_get(&parts, &target).await,
        Verb::Write | Verb::Discovery | Verb::Review => inner.answer_write(&parts, target, body).await,
    };
    Ok(answer.unwrap_or_else(|status| inner.failure(&status)))
}

fn is_watch_query(query: &str) -> bool {
    let mut pairs = form_urlencoded::parse(query.as_bytes());
    pairs.find(|(key, _)| key == "watch").is_some_and(|(_, value)| value != "0" && !value.eq_ignore_ascii_case("false"))
}

impl Fault {
    /// Whether the fault changes the body of a watch, instead of replacing the whole response.
    fn is_in_stream(&self) -> bool {
        matches!(
            self,
            Self::Silence | Self::TruncatedLine | Self::OverlongLine { .. } | Self::GzipMembers | Self::OneByteWrites
        )
    }
}

impl Inner {
    /// Resolves a path. Returns `None` if it is not the path of a resource, and `Some(Err(_))` if
    /// it is but names nothing that is served.
    fn route(&self, path: &str) -> Option<Result<Target, Response<Body>>> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let (group, version, rest) = match &*parts {
            ["api", version, rest @ ..] if !rest.is_empty() => ("", *version, rest),
            ["apis", group, version, rest @ ..] if !rest.is_empty() => (*group, *version, rest),
            _ => return None,
        };
        let (old_watch, rest) = match rest {
            ["watch"] | ["proxy"] => return Some(Err(self.unsplit(path))),
            ["proxy", ..] => return Some(Err(self.missing(group))),
            ["watch", rest @ ..] => (true, rest),
            rest => (false, rest),
        };
        let (namespace, rest) = match rest {
            ["namespaces", _] | ["namespaces", _, "status" | "finalize", ..] if group.is_empty() => ("", rest),
            // Custom resources are found by the parts of the path.
            ["namespaces", namespace] | ["namespaces", namespace, "status" | "finalize", ..] => (*namespace, rest),
            ["namespaces", namespace, rest @ ..] => (*namespace, rest),
            rest => ("", rest),
        };
        let [resource, rest @ ..] = rest else { return Some(Err(self.missing(group))) };
        let gvr = GroupVersionResource::new(group, version, *resource);
        let Some(collection) = self.store.collection(&gvr) else { return Some(Err(self.missing(group))) };
        let namespaced = collection.resource.namespaced;
        let misplaced = if namespace.is_empty() { namespaced && !rest.is_empty() } else { !namespaced };
        if misplaced || rest.len() > 2 {
            return Some(Err(self.missing(group)));
        }
        Some(Ok(Target {
            collection,
            namespace: namespace.to_owned(),
            name: rest.first().map(|name| (*name).to_owned()),
            subresource: rest.get(1).map(|name| (*name).to_owned()),
            old_watch,
        }))
    }

    /// The 500 response to a path that cannot be split (`WithRequestInfo`).
    fn unsplit(&self, path: &str) -> Response<Body> {
        let why = format!("failed to create RequestInfo: unable to determine kind and namespace from url, {path}");
        let text = format!("Internal Server Error: {path:?}: {why}\n");
        self.whole(StatusCode::INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", text.into())
    }

    /// The 404 response. Built-in groups answer with a Status; for an unknown group kube-apiserver
    /// has no handler and answers with plain text.
    fn missing(&self, group: &str) -> Response<Body> {
        match group {
            "" | "apps" | CRD_GROUP => self.failure(&Status::no_such_resource()),
            _ => self.text(StatusCode::NOT_FOUND, "404 page not found\n"),
        }
    }

    /// Answers discovery, version and health requests.
    fn plain(&self, request: &Parts) -> Response<Body> {
        let path: Vec<&str> = request.uri.path().split('/').filter(|part| !part.is_empty()).collect();
        let aggregated =
            accepts(request, |clause| clause.contains("APIGroupDiscoveryList") && clause.contains("v=v2;"));
        let discovered = |value: Option<Value>, group: &str| match value {
            Some(value) => self.json(&value),
            None => self.missing(group),
        };
        match &*path {
            ["livez" | "readyz" | "healthz", ..] => self.text(StatusCode::OK, "ok"),
            ["version"] => self.json(&self.version()),
            ["api"] | ["apis"] if aggregated => {
                let mut response = self.json(&self.aggregated(path == ["api"]));
                let media_type = header::HeaderValue::from_static(AGGREGATED);
                response.headers_mut().insert(header::CONTENT_TYPE, media_type);
                response
            }
            ["api"] => self.json(&serde_json::json!({"kind": "APIVersions", "versions": ["v1"]})),
            ["apis"] => self.json(&self.group_list()),
            ["api", version] => discovered(self.resource_list("", version), ""),
            ["apis", group] => discovered(self.group(group), group),
            ["apis", group, version] => discovered(self.resource_list(group, version), group),
            ["openapi", "v3"] => {
                let mut response = self.json(&self.openapi_index());
                let media_type = header::HeaderValue::from_static("text/plain; charset=utf-8");
                response.headers_mut().insert(header::CONTENT_TYPE, media_type);
                response
            }
            ["openapi", "v3", "apis", group, version] => discovered(self.openapi(group, version), group),
            _ => self.text(StatusCode::NOT_FOUND, "404 page not found\n"),
        }
    }

    fn list_options(&self, request: &Parts, target: &Target) -> Result<ListOptions, Status> {
        let query = request.uri.query().unwrap_or_default();
        let options = ListOptions::read(query, &target.collection.resource, self.options.watch_list)?;
        let has_protobuf = protobuf::is_served(&target.collection.resource.gvr);
        let is_served = |clause: &str| {
            is_json(clause)
                || (!options.watch && is_metadata_list(clause))
                || (has_protobuf && is_protobuf(clause, options.watch))
        };
        if !accepts(request, is_served) {
            return Err(Status::not_acceptable(options.watch));
        }
        if let Some(name) = &target.name
            && !options.fields.is_everything()
            && options.name() != Some(name)
        {
            return Err(Status::bad_request("fieldSelector metadata.name doesn't match requested name"));
        }
        Ok(options)
    }

    async fn answer_list(&self, request: &Parts, target: &Target) -> Result<Response<Body>, Status> {
        let options = self.list_options(request, target)?;
        let list = self.list(&target.collection, &target.namespace, &options).await?;
        self.counters.lists.inc();
        self.counters.list_items.add(list.len());
        if prefers_protobuf(request, &target.collection, false) {
            return Ok(self.whole(StatusCode::OK, PROTOBUF, list.into_protobuf()));
        }
        let metadata_only = prefers_metadata(request);
        let mut chunks = list.into_chunks(&target.collection.resource, metadata_only).peekable();
        let first = chunks.next().unwrap_or_default();
        // Several chunks are not collected into one body: they are compressed or streamed one by
        // one.
        if chunks.peek().is_none() {
            return Ok(self.whole(StatusCode::OK, "application/json", first));
        }
        if takes_gzip(request) {
            let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
            let mut plain = 0;
            for chunk in std::iter::once(first).chain(chunks) {
                plain += chunk.len();
                gzip.write_all(&chunk).map_err(|error| Status::internal(error.to_string()))?;
            }
            debug_assert!(plain > GZIP_BYTES_MIN / 2);
            let bytes = gzip.finish().map_err(|error| Status::internal(error.to_string()))?;
            let mut response = self.whole(StatusCode::OK, "application/json", bytes.into());
            response.headers_mut().insert(header::CONTENT_ENCODING, header::HeaderValue::from_static("gzip"));
            return Ok(response);
        }
        let chunks = stream::iter(std::iter::once(first).chain(chunks));
        Ok(self.streamed(chunks))
    }

    async fn answer_get(&self, request: &Parts, target: &Target) -> Result<Response<Body>, Status> {
        if target
            .subresource
            .as_deref()
            .is_some_and(|sub| sub != "status" || !target.collection.resource.status_subresource)
        {
            return Err(Status::no_such_resource());
        }
        let query = request.uri.query().unwrap_or_default();
        let mut pairs = form_urlencoded::parse(query.as_bytes());
        let version = pairs.find(|(key, _)| key == "resourceVersion").map(|(_, value)| value).unwrap_or_default();
        let object = self.get(&target.collection, &target.key(), &version).await?;
        self.counters.gets.inc();
        Ok(self.object(StatusCode::OK, object.bytes()))
    }

    async fn answer_watch(
        self: &Arc<Self>,
        request: &Parts,
        target: Target,
        fault: Option<Fault>,
    ) -> Result<Response<Body>, Status> {
        let mut options = self.list_options(request, &target)?;
        options.watch = true;
        let name = target.name.as_deref();
        let is_protobuf = prefers_protobuf(request, &target.collection, true);
        let started = Watcher::start(self, target.collection.clone(), &target.namespace, name, options).await?;
        let watcher = match started {
            Started::Stream(mut watcher) => {
                watcher.is_protobuf = is_protobuf;
                watcher
            }
            Started::Error(status) if is_protobuf => {
                self.counters.events_encoded.inc();
                return Ok(as_protobuf(self.streamed(stream::iter([protobuf::error_event(&status)]))));
            }
            Started::Error(status) => {
                let mut line = BytesMut::new();
                let mut json = Vec::new();
                put_value(&mut json, &*status);
                self.counters.events_encoded.inc();
                put_event(&mut line, "ERROR", |line| line.extend_from_slice(&json));
                return Ok(self.streamed(stream::iter([line.freeze()])));
            }
        };
        let lines = stream::unfold(watcher, |mut watcher| async move {
            let lines = watcher.next().await?;
            Some((lines, watcher))
        });
        let gzip = self.options.gzip_watches && takes_gzip(request);
        match fault {
            // The faults in streams are faults of lines.
            Some(Fault::Silence) if is_protobuf => {
                Ok(as_protobuf(self.streamed(lines.filter(|_| std::future::pending::<bool>()))))
            }
            _ if is_protobuf => Ok(as_protobuf(self.streamed(lines))),
            None if gzip => Ok(self.gzipped(lines)),
            Some(Fault::GzipMembers) => Ok(self.gzipped(lines)),
            Some(Fault::Silence) => Ok(self.streamed(lines.filter(|_| std::future::pending::<bool>()))),
            Some(Fault::TruncatedLine) => Ok(self.streamed(lines.take(1).map(|line| {
                let first = line.iter().position(|b| *b == b'\n').unwrap_or(line.len());
                line.slice(..first / 2)
            }))),
            Some(Fault::OverlongLine { bytes }) => {
                let mut line = vec![b'x'; bytes];
                line.push(b'\n');
                Ok(self.streamed(stream::iter([Bytes::from(line)]).chain(lines)))
            }
            Some(Fault::OneByteWrites) => Ok(self.streamed(lines.flat_map(|line| {
                let bytes = (0..line.len()).map(move |i| line.slice(i..=i));
                stream::iter(bytes)
            }))),
            _ => Ok(self.streamed(lines)),
        }
    }

    async fn answer_write(&self, request: &Parts, target: Target, body: Incoming) -> Result<Response<Body>, Status> {
        let body = Limited::new(body, WRITE_BYTES_MAX).collect().await;
        let too_large = |_| Status::failure(413, "RequestEntityTooLarge", format!("limit is {WRITE_BYTES_MAX}"));
        let body = body.map_err(too_large)?.to_bytes();
        let part = match target.subresource.as_deref() {
            None => Part::Main,
            Some("status") if target.collection.resource.status_subresource => Part::Status,
            Some(_) => return Err(Status::no_such_resource()),
        };
        let kind = &target.collection.resource.kind;
        let parse = || {
            serde_json::from_slice::<Value>(&body).map_err(|error| {
                let text = String::from_utf8_lossy(&body);
                let shown: &str = if text.is_empty() { "<empty>" } else { &text };
                Status::bad_request(format!(
                    "the object provided is unrecognized (must be of type {kind}): couldn't get version/kind; \
                     json parse error: {error} ({shown})"
                ))
            })
        };
        match (&request.method, &target.name) {
            (&Method::POST, None) if target.collection.resource.namespaced != target.namespace.is_empty() => {
                let value = in_namespace(&target, parse()?)?;
                Ok(self.object(StatusCode::CREATED, self.create(&target.collection, fresh(value))?.bytes()))
            }
            (&Method::PUT, Some(name)) => {
                let value = in_namespace(&target, parse()?)?;
                let given = value["metadata"]["name"].as_str().unwrap_or_default();
                if given != name {
                    return Err(Status::bad_request(format!(
                        "the name of the object ({given}) does not match the name on the URL ({name})"
                    )));
                }
                let object = self.update(&target.collection, &target.key(), part, |_| Ok(value))?;
                Ok(self.object(StatusCode::OK, object.bytes()))
            }
            (&Method::PATCH, Some(_)) => {
                let media_type = request.headers.get(header::CONTENT_TYPE).map(|value| value.as_bytes());
                let known: [&[u8]; 2] = [b"application/merge-patch+json", b"application/strategic-merge-patch+json"];
                if !media_type.is_some_and(|media_type| known.contains(&media_type)) {
                    let status = Status::failure(415, "UnsupportedMediaType", "415: Unsupported Media Type");
                    return Err(status.with_details(Details::default()));
                }
                let patch = parse()?;
                let object = self.update(&target.collection, &target.key(), part, |old| {
                    let mut value = old.clone();
                    merge(&mut value, &patch);
                    Ok(value)
                })?;
                Ok(self.object(StatusCode::OK, object.bytes()))
            }
            (&Method::DELETE, Some(_)) => {
                let object = self.delete(&target.collection, &target.key())?;
                // kube-apiserver returns the object for kinds whose deletion is graceful, and a
                // Status for the others.
                if matches!(&**kind, "Pod" | "Namespace" | "CustomResourceDefinition") {
                    return Ok(self.object(StatusCode::OK, object.bytes()));
                }
                let gvr = &target.collection.resource.gvr;
                Ok(self.failure(&Status::deleted(&gvr.group, &gvr.resource, object.key.name(), &object.uid)))
            }
            (&Method::DELETE, None) if !target.namespace.is_empty() => {
                let options = self.list_options(request, &target)?;
                let list = self.list(&target.collection, &target.namespace, &options).await?;
                for key in list.keys() {
                    // A concurrent writer may already have deleted it.
                    let _ = self.delete(&target.collection, &key);
                }
                Ok(self.streamed(stream::iter(list.into_chunks(&target.collection.resource, false))))
            }
            _ => Err(Status::method_not_allowed()),
        }
    }

    /// The response for a fault that replaces the whole response.
    async fn fail(
        &self,
        fault: &Fault,
        request: &Parts,
        requested: Option<(Verb, &Target)>,
    ) -> Result<Response<Body>, Disconnect> {
        Ok(match fault {
            Fault::Silence => std::future::pending().await,
            Fault::TooManyRequests { retry_after_seconds } => {
                let message = "too many requests, please try again later";
                self.failure(&Status::too_many_requests(message, *retry_after_seconds))
            }
            Fault::TooManyRequestsText { retry_after_seconds } => {
                let text = "Too many requests, please try again later.\n";
                let mut response = self.text(StatusCode::TOO_MANY_REQUESTS, text);
                response.headers_mut().insert(header::RETRY_AFTER, (*retry_after_seconds).into());
                response
            }
            Fault::Status(status) => self.failure(status),
            Fault::Unauthorized => self.failure(&Status::failure(401, "Unauthorized", "Unauthorized")),
            Fault::Forbidden => self.failure(&forbidden(request, requested)),
            Fault::InternalError => {
                self.failure(&Status::failure(500, "InternalError", "Internal error occurred: etcd"))
            }
            Fault::ServiceUnavailable => {
                let message = "the server is currently unable to handle the request";
                self.failure(&Status::failure(503, "ServiceUnavailable", message))
            }
            _ => return Err(Disconnect),
        })
    }
}

fn in_namespace(target: &Target, mut value: Value) -> Result<Value, Status> {
    if target.namespace.is_empty() || !value.is_object() {
        return Ok(value);
    }
    match value["metadata"]["namespace"].as_str() {
        Some(namespace) if namespace != target.namespace => Err(Status::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        )),
        _ if value["metadata"].is_object() || value["metadata"].is_null() => {
            value["metadata"]["namespace"] = target.namespace.as_str().into();
            Ok(value)
        }
        _ => Err(Status::bad_request("metadata is not a JSON object")),
    }
}

fn forbidden(request: &Parts, requested: Option<(Verb, &Target)>) -> Status {
    let Some((verb, target)) = requested else {
        let message = format!("forbidden: User \"system:anonymous\" cannot get path \"{}\"", request.uri.path());
        return Status::failure(403, "Forbidden", message).with_details(Details::default());
    };
    let verb = match verb {
        Verb::List => "list",
        Verb::Watch => "watch",
        Verb::Write => "update",
        Verb::Get | Verb::Discovery | Verb::Review => "get",
    };
    let gvr = &target.collection.resource.gvr;
    let name = target.name.as_deref().map(|name| format!(" \"{name}\"")).unwrap_or_default();
    let place = match &*target.namespace {
        "" => "at the cluster scope".to_owned(),
        namespace => format!("in the namespace \"{namespace}\""),
    };
    let message = format!(
        "{gvr}{name} is forbidden: User \"system:anonymous\" cannot {verb} resource \"{}\" in API group \"{}\" {place}",
        gvr.resource, gvr.group
    );
    let details = Details {
        name: target.name.clone().unwrap_or_default(),
        group: gvr.group.clone(),
        kind: gvr.resource.clone(),
        ..Details::default()
    };
    Status::failure(403, "Forbidden", message).with_details(details)
}
