//! What a request does, by the apiserver's own verbs: the label of a metric, so there are few of them whatever callers send.

use http::{Method, Request};

use super::{hop_by_hop, path::Path};

/// The verb of a request.
pub fn of<B>(request: &Request<B>) -> &'static str {
    let (method, uri) = (request.method(), request.uri());
    if hop_by_hop::upgrade(request.headers()).is_some() {
        return "connect";
    }
    let is_collection = || Path::parse(uri.path()).is_some_and(|path| path.name.is_empty());
    match *method {
        Method::GET | Method::HEAD if watches(uri.path(), uri.query().unwrap_or_default()) => "watch",
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

fn watches(path: &str, query: &str) -> bool {
    let asks = form_urlencoded::parse(query.as_bytes())
        .any(|(name, value)| name == "watch" && matches!(&*value, "1" | "t" | "T" | "true" | "TRUE" | "True"));
    asks || Path::parse(path).is_some_and(|path| path.is_watch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbs_are_the_apiservers() {
        for (method, uri, verb) in [
            ("GET", "/api/v1/pods", "list"),
            ("GET", "/api/v1/pods?watch=1", "watch"),
            ("GET", "/api/v1/pods?watch=false", "list"),
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
