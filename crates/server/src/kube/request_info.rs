//! The path, the query and the verb of a request, each parsed once (`RequestInfo` in the
//! apiserver's `requestinfo.go`).
//!
//! Verbs are labels of metrics, so there is a fixed number of them, whatever callers send.

use http::{HeaderMap, Method, Uri, request::Parts};
use kubefan_audit::Notes;
use kubefan_model::ApiPath;

use super::{
    hop_by_hop,
    path::Path,
    query::{Query, is_true},
};
use crate::{client_info::ClientInfo, request_caller::RequestCaller};

/// The parsed parts of a request.
pub struct RequestInfo<'a> {
    /// `None` if the path names nothing that can be cached.
    pub path: Option<Path>,
    /// The query.
    pub query: Query<'a>,
    /// The apiserver's verb; `connect` for every upgrade, `other` for unknown methods.
    pub verb: &'static str,
    /// Whether it is a watch, including one over a websocket.
    pub is_watch: bool,
}

impl<'a> RequestInfo<'a> {
    /// Parses a request.
    pub fn new(method: &Method, uri: &'a Uri, headers: &HeaderMap) -> Self {
        let path = Path::parse(uri.path());
        let query = Query::parse(uri.query().unwrap_or_default());
        let is_read = matches!(*method, Method::GET | Method::HEAD);
        let is_watch = is_read && path.as_ref().is_some_and(|path| is_watch(path, &query));
        let verb = match hop_by_hop::upgrade(headers) {
            Some(_) => "connect",
            None => verb(method, path.as_ref(), is_watch),
        };
        Self { path, query, verb, is_watch }
    }
}

fn is_watch(path: &Path, query: &Query<'_>) -> bool {
    path.is_watch || (path.name.is_empty() && query.first("watch").is_some_and(is_true))
}

/// Returns the verb of a request that is no upgrade; `other` for unknown methods.
pub fn verb(method: &Method, path: Option<&Path>, is_watch: bool) -> &'static str {
    let is_collection = path.is_some_and(|path| path.name.is_empty());
    match *method {
        _ if is_watch => "watch",
        Method::GET | Method::HEAD if is_collection => "list",
        Method::GET | Method::HEAD => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE if is_collection => "deletecollection",
        Method::DELETE => "delete",
        _ => "other",
    }
}

/// Whether the caller decides how long a request lasts (`BasicLongRunningRequestCheck`, as
/// kube-apiserver configures it).
pub fn is_long_running(verb: &str, path: &str) -> bool {
    matches!(verb, "watch" | "connect")
        || matches!(subresource(path), Some("attach" | "exec" | "log" | "portforward" | "proxy"))
}

/// Returns the path segment after the name of an object.
pub fn subresource(path: &str) -> Option<&str> {
    let path = ApiPath::split(path)?;
    // A deprecated verb.
    path.verb.filter(|verb| *verb == "proxy").or_else(|| path.subresource())
}

/// Returns the notes for the record of a request; nothing is noted if it has none.
pub fn notes_of(request: &Parts) -> Notes {
    request.extensions.get::<Notes>().cloned().unwrap_or_default()
}

/// Returns the caller of a request, not authenticated yet.
pub fn caller_of(request: &Parts) -> RequestCaller {
    let presented = client_of(request).presents(&request.headers, hop_by_hop::is_websocket(&request.headers));
    RequestCaller::new(presented, notes_of(request))
}

/// Returns the client that sent a request.
pub fn client_of(request: &Parts) -> ClientInfo {
    request.extensions.get().cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_running_requests_are_known_by_verb_and_subresource() {
        for (verb, path, lasts) in [
            ("watch", "/api/v1/pods", true),
            ("connect", "/apis/x/v1/things", true),
            ("get", "/api/v1/namespaces/a/pods/p/log", true),
            ("create", "/api/v1/namespaces/a/pods/p/proxy/some/where", true),
            ("get", "/api/v1/nodes/n/proxy/metrics", true),
            ("get", "/api/v1/namespaces/a/pods/log", false),
            ("get", "/api/v1/namespaces/a/pods/p/status", false),
            ("get", "/apis/apps/v1/namespaces/a/deployments/d/scale", false),
            ("get", "/api/v1/namespaces/proxy", false),
            ("list", "/api/v1/pods", false),
            ("get", "/version", false),
        ] {
            assert_eq!(is_long_running(verb, path), lasts, "{verb} {path}");
        }
    }

    #[test]
    fn verbs_match_the_apiservers() {
        for (method, uri, verb) in [
            ("GET", "/api/v1/pods", "list"),
            ("GET", "/api/v1/pods?watch=1", "watch"),
            ("GET", "/api/v1/pods?watch=false", "list"),
            ("GET", "/api/v1/pods?watch=yes", "watch"),
            ("GET", "/api/v1/pods?watch=0&watch=1", "list"),
            ("GET", "/api/v1/watch/pods", "watch"),
            ("GET", "/api/v1/namespaces/a/pods/p", "get"),
            ("GET", "/api/v1/namespaces/a/pods/p/log?follow=true", "get"),
            ("GET", "/version", "get"),
            ("POST", "/api/v1/namespaces/a/pods", "create"),
            ("PUT", "/api/v1/namespaces/a/pods/p/status", "update"),
            ("PATCH", "/api/v1/namespaces/a/pods/p", "patch"),
            ("DELETE", "/api/v1/namespaces/a/pods/p", "delete"),
            ("DELETE", "/api/v1/namespaces/a/pods", "deletecollection"),
            ("OPTIONS", "/", "other"),
        ] {
            let known = method.parse().unwrap();
            let parsed = uri.parse().unwrap();
            assert_eq!(RequestInfo::new(&known, &parsed, &HeaderMap::new()).verb, verb, "{method} {uri}");
        }
    }
}
