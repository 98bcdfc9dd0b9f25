//! A way to a server that closes every connection, for tests.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use h2::Reason;
use http::Uri;
use kubefan_testkit::scripted_server::{failure, go_away};
use tower::service_fn;

use super::{Credentials, ForwardService, Passthrough, PassthroughOptions};
use crate::transport::connection::ConnectionLimits;

pub(super) fn options() -> PassthroughOptions {
    PassthroughOptions {
        credentials: Credentials::Caller,
        requests_max: 100,
        allows_insecure_upstream: false,
        connection: ConnectionLimits::APISERVER,
    }
}

/// A way to a server that closes every connection before it has processed a request, and the
/// number of requests that were sent to it.
pub(super) fn to_closing_server() -> (Passthrough, Arc<AtomicUsize>) {
    let sent = Arc::new(AtomicUsize::new(0));
    let count = sent.clone();
    let service = service_fn(move |request| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Err(failure(request, &go_away(0, Reason::NO_ERROR)).await) }
    });
    let options = options();
    let passthrough = Passthrough::over(ForwardService::new(service), &Uri::from_static("http://h"), options).unwrap();
    (passthrough, sent)
}
