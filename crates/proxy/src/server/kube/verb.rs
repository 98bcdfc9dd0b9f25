//! What a request does, by the apiserver's own verbs: the label of a metric, so there are few of them whatever callers send.

use http::{Method, Request};

use super::{hop_by_hop, options::truth, path::Path};

/// The verb of a request.
pub fn of<B>(request: &Request<B>) -> &'static str {
    let (method, uri) = (request.method(), request.uri());
    if hop_by_hop::upgrade(request.headers()).is_some() {
        return "connect";
    }
    let is_collection = || Path::parse(uri.path()).is_some_and(|path| path.name.is_empty());
    match *method {
        _ if is_watch(request) => "watch",
        Method::GET | Method::HEAD if is_collection() => "list",
        Method::GET | Method::HEAD => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE if is_collection() => "deletecollection",
        Method::DELETE => "delete",
        _ => "other",
    }
}

/// Whether a request is a watch, over a websocket as well.
pub fn is_watch<B>(request: &Request<B>) -> bool {
    let (method, uri) = (request.method(), request.uri());
    matches!(*method, Method::GET | Method::HEAD) && watches(uri.path(), uri.query().unwrap_or_default())
}

/// Whether a request of this verb lasts for as long as its caller likes (`BasicLongRunningRequestCheck` of the apiserver, as kube-apiserver
/// sets it up).
pub fn is_long_running(verb: &str, path: &str) -> bool {
    matches!(verb, "watch" | "connect")
        || matches!(subresource(path), Some("attach" | "exec" | "log" | "portforward" | "proxy"))
}

/// What follows the name of an object.
fn subresource(path: &str) -> Option<&str> {
    let mut parts = path.strip_prefix('/')?.split('/');
    let above = match parts.next()? {
        "api" => 1,
        "apis" => 2,
        _ => return None,
    };
    let rest: Vec<_> = parts.skip(above).take(5).collect();
    match *rest {
        ["namespaces", _, _, _, subresource] => Some(subresource),
        ["namespaces", ..] => None,
        ["proxy", ..] => Some("proxy"),
        [_, _, subresource, ..] => Some(subresource),
        _ => None,
    }
}

fn watches(path: &str, query: &str) -> bool {
    let asks = form_urlencoded::parse(query.as_bytes())
        .find(|(name, _)| name == "watch")
        .is_some_and(|(_, value)| truth(&value));
    Path::parse(path).is_some_and(|path| path.is_watch || (asks && path.name.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lasts_is_told_by_verb_and_subresource() {
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
    fn verbs_are_the_apiservers() {
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
            let request = Request::builder().method(method).uri(uri).body(()).unwrap();
            assert_eq!(of(&request), verb, "{method} {uri}");
        }
    }
}
