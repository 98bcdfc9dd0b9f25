//! The record of a request of the Kubernetes API: its begin, and its answer.

use std::borrow::Cow;

use axum::body::Body;
use http::{Method, Request, Response, StatusCode};
use kubefan_audit::{AuditLog, AuditRecord, NotRecorded, ObjectRef, Outcome, RequestHead};
use kubefan_telemetry::requests::Protocol;
use kubefan_upstream::client::holding;

use super::{
    answer::{Answer, FromUpstream},
    path::Path,
    request_info::{self, RequestInfo},
    status::Refused,
};
use crate::client_info::ClientInfo;

/// Begins the record of a request. The request gets its ID, and passes it on if it is forwarded, so
/// the apiserver's record of it has the same.
pub fn begin(log: &AuditLog, request: &mut Request<Body>, info: &RequestInfo<'_>) -> AuditRecord {
    if !log.is_on() {
        return AuditRecord::default();
    }
    let client: ClientInfo = request.extensions().get().cloned().unwrap_or_default();
    let (named, subresource) = named(info.path.as_ref(), request.uri().path());
    let verb = match &named {
        _ if info.is_watch => "watch".into(),
        Some(path) => request_info::verb(request.method(), Some(path), false).into(),
        // The apiserver's verb for requests without a resource.
        None => verb_without_resource(request.method()),
    };
    let record = log.begin(RequestHead {
        protocol: Protocol::Http,
        verb,
        uri: request.uri(),
        headers: request.headers(),
        address: client.address.map(|address| address.ip()),
        object: named.map(|path| object(path, subresource)),
    });
    record.put_id(request.headers_mut());
    request.extensions_mut().insert(record.notes());
    record
}

/// The parts of an answer that a record has.
pub struct Answered {
    outcome: Outcome,
    /// Whether it comes from the apiserver.
    is_forwarded: bool,
    is_stream: bool,
}

/// Records an answer. It is the start of a stream, and the end of any other request.
///
/// # Errors
/// The record cannot be written, and the mode demands it.
pub async fn answered(
    record: &mut AuditRecord,
    Answered { outcome, is_forwarded, is_stream }: Answered,
) -> Result<(), NotRecorded> {
    if is_stream {
        return record.started(outcome, is_forwarded).await;
    }
    record.answered(outcome, is_forwarded).await
}

/// Returns a response whose record is complete when its body has ended.
pub fn recorded(response: Response<Body>, record: AuditRecord) -> Response<Body> {
    if !record.is_on() {
        return response;
    }
    response.map(|body| Body::new(holding(body, record)))
}

/// Returns the parts of an answer that the record of its request has.
pub fn answer(answer: &Answer, is_long_running: bool) -> Answered {
    let response = match answer {
        Answer::Watch(_) => {
            let outcome = Outcome::code(StatusCode::OK.as_u16());
            return Answered { outcome, is_forwarded: false, is_stream: true };
        }
        Answer::Response(response) | Answer::Forwarded(response) => response,
    };
    let code = response.status().as_u16();
    let extensions = response.extensions();
    let outcome = match extensions.get::<Refused>() {
        Some(Refused { reason, message }) => Outcome::failure(code, reason, message),
        None => Outcome::code(code),
    };
    let is_forwarded = extensions.get::<FromUpstream>().is_some();
    let is_stream = is_forwarded && is_long_running && !outcome.is_failure();
    Answered { outcome, is_forwarded, is_stream }
}

/// Returns the object or collection that a path names, and the subresource.
fn named<'a>(path: Option<&Path>, text: &'a str) -> (Option<Path>, &'a str) {
    if let Some(path) = path {
        return (Some(path.clone()), "");
    }
    match Path::parse_subresource(text) {
        Some((path, subresource)) => (Some(path), subresource),
        None => (None, ""),
    }
}

fn object(path: Path, subresource: &str) -> ObjectRef {
    let Path { group: api_group, version: api_version, resource, namespace, name, .. } = path;
    let subresource = subresource.to_owned();
    // The path of a namespace names it twice.
    let namespace = if resource == "namespaces" && namespace.is_empty() { name.clone() } else { namespace };
    ObjectRef { resource, namespace, name, api_group, api_version, subresource }
}

fn verb_without_resource(method: &Method) -> Cow<'static, str> {
    match *method {
        Method::GET => "get".into(),
        _ => method.as_str().to_lowercase().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_an_object_and_its_subresource() {
        let of = |text: &str| {
            let (path, subresource) = named(Path::parse(text).as_ref(), text);
            let object = path.map(|path| object(path, subresource))?;
            let ObjectRef { resource, namespace, name, api_group, api_version, subresource } = object;
            Some([api_group, api_version, resource, namespace, name, subresource].join(" "))
        };
        for (path, expected) in [
            ("/api/v1/pods", Some(" v1 pods   ")),
            ("/api/v1/namespaces/a/pods/p", Some(" v1 pods a p ")),
            ("/api/v1/namespaces/a/pods/p/log", Some(" v1 pods a p log")),
            ("/api/v1/nodes/n/proxy/metrics/x", Some(" v1 nodes  n proxy")),
            ("/api/v1/namespaces/a", Some(" v1 namespaces a a ")),
            ("/api/v1/namespaces/a/finalize", Some(" v1 namespaces a a finalize")),
            ("/apis/apps/v1/namespaces/a/deployments/d/scale", Some("apps v1 deployments a d scale")),
            ("/api/v1/pods/", None),
            ("/api/v1", None),
            ("/apis/apps/v1", None),
            ("/version", None),
            ("/", None),
            ("", None),
        ] {
            assert_eq!(of(path).as_deref(), expected, "{path}");
        }
    }
}
