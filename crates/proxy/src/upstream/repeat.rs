//! Sends a forwarded request again that the apiserver has not read.
//!
//! Many callers share a connection upstream. kube-apiserver closes an HTTP/2 connection (GOAWAY)
//! after a request that it cannot authenticate, and now and then to spread the load. Requests that
//! were sent meanwhile fail, and without another attempt one caller's wrong token would break the
//! requests of others. client-go sends them again, too.

use std::error::Error;

use h2::Reason;
use http::{Method, Request};
use http_body::Body;
use http_body_util::{BodyExt, Empty};

use super::transport::connection::UpstreamBody;
use kubefan_common::text;

/// A copy of a request that may be sent twice: one that only reads, without a body.
pub(super) fn copy_of(request: &Request<UpstreamBody>) -> Option<Request<UpstreamBody>> {
    let is_repeatable = matches!(*request.method(), Method::GET | Method::HEAD) && request.body().is_end_stream();
    is_repeatable.then(|| {
        let mut copy = Request::new(Empty::new().map_err(|never| match never {}).boxed_unsync());
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = request.uri().clone();
        *copy.version_mut() = request.version();
        *copy.headers_mut() = request.headers().clone();
        *copy.extensions_mut() = request.extensions().clone();
        copy
    })
}

/// Whether the server has closed the connection without an error, and has not read the request.
pub(super) fn is_unread(error: &(dyn Error + Send + Sync + 'static)) -> bool {
    text::find::<h2::Error>(error).is_some_and(|error| {
        let is_refused = error.reason() == Some(Reason::REFUSED_STREAM);
        error.is_remote() && (is_refused || error.is_go_away() && error.reason() == Some(Reason::NO_ERROR))
    })
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::Full;

    use super::*;

    #[test]
    fn only_a_read_without_a_body_is_copied() {
        let request = |method: Method, body: &'static str| {
            let body = Full::new(Bytes::from(body)).map_err(|never| match never {}).boxed_unsync();
            Request::builder().method(method).uri("/api?a=b").header("x-a", "b").body(body).unwrap()
        };
        let copy = copy_of(&request(Method::GET, "")).unwrap();
        assert_eq!((copy.uri().to_string().as_str(), &copy.headers()["x-a"]), ("/api?a=b", &"b".parse().unwrap()));
        assert!(copy.body().is_end_stream());
        assert!(copy_of(&request(Method::GET, "body")).is_none());
        assert!(copy_of(&request(Method::POST, "")).is_none());
    }

    #[test]
    fn only_a_refused_stream_and_a_connection_without_an_error_count_as_unread() {
        let wrapped = |error: h2::Error| std::io::Error::other(error);
        // An error of this side says nothing about the server.
        assert!(!is_unread(&wrapped(h2::Error::from(Reason::NO_ERROR))));
        assert!(!is_unread(&std::io::Error::other("reset")));
    }
}
