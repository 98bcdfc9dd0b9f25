//! Requests that the apiserver has certainly not processed, so that any method is safe to repeat.
//!
//! kube-apiserver closes a connection (GOAWAY) after a request that it cannot authenticate, and at
//! random to spread the load (`--goaway-chance`). Streams above the last one that GOAWAY names are
//! not processed (RFC 9113, 6.8). The others of this kind are refused streams, and connections that
//! close before a request is written to them.

use std::{error::Error, time::Duration};

use h2::Reason;
use hyper_util::client::legacy;

use kubefan_common::text;

/// The waits before each repeat. Each connection that closes costs one, and several may close while
/// a large body is written. A server that refuses streams (REFUSED_STREAM) needs time.
pub(crate) const DELAYS: [Duration; 8] = [
    Duration::ZERO,
    Duration::from_millis(20),
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(1),
];

/// Whether the server has certainly not processed the request: its stream was refused, or is above
/// the last one of a GOAWAY, or the connection closed before the request was written.
pub(crate) fn is_unprocessed(error: &(dyn Error + Send + Sync + 'static)) -> bool {
    if text::find::<legacy::Error>(error).is_some_and(is_unsent) {
        return true;
    }
    let Some(error) = text::find::<hyper::Error>(error) else { return false };
    if error.is_canceled() || error.is_closed() {
        return true;
    }
    // An error of the body comes from the caller's connection. This is about the server's.
    let of_server = error.source().filter(|_| !error.is_user()).and_then(|error| error.downcast_ref::<h2::Error>());
    // A GOAWAY without an error fails only the streams above its last one; the others end with the
    // connection. After a GOAWAY with an error, any stream may have been processed.
    of_server.is_some_and(|error| {
        let is_closed = error.is_go_away() && error.reason() == Some(Reason::NO_ERROR);
        error.is_remote() && (is_closed || error.reason() == Some(Reason::REFUSED_STREAM))
    })
}

/// Whether the client's pool found no open connection for the request. Its connections close while
/// requests wait for them, and several that connect at once disturb each other until HTTP/2 is
/// negotiated. hyper-util has texts for these errors and no types.
fn is_unsent(error: &legacy::Error) -> bool {
    let is_closed = |source: &dyn Error| source.to_string() == "checked out connection was closed";
    error.to_string() == "client error (Canceled)" || error.is_connect() && error.source().is_some_and(is_closed)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use futures::stream;
    use http::Request;
    use http_body::Frame;
    use http_body_util::{BodyExt, Full, StreamBody};
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use kubefan_testkit::scripted_server::{failure, go_away, reset};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tower::BoxError;

    use super::*;
    use crate::transport::connection::UpstreamBody;

    fn write() -> Request<UpstreamBody> {
        Request::post("http://h/").body(Full::new(Bytes::from("x")).map_err(BoxError::from).boxed_unsync()).unwrap()
    }

    #[tokio::test]
    async fn only_the_server_can_say_that_it_has_not_read_a_request() {
        for (bytes, says_so) in [
            (reset(Reason::REFUSED_STREAM), true),
            (go_away(0, Reason::NO_ERROR), true),
            (go_away(1, Reason::NO_ERROR), false),
            ([go_away(u32::MAX >> 1, Reason::NO_ERROR), go_away(1, Reason::NO_ERROR)].concat(), false),
            (go_away(0, Reason::INTERNAL_ERROR), false),
            (go_away(0, Reason::ENHANCE_YOUR_CALM), false),
            (reset(Reason::NO_ERROR), false),
            (reset(Reason::CANCEL), false),
            (reset(Reason::INTERNAL_ERROR), false),
            (reset(Reason::STREAM_CLOSED), false),
            (reset(Reason::ENHANCE_YOUR_CALM), false),
            (Vec::new(), false),
        ] {
            let error = failure(write(), &bytes).await;
            assert_eq!(is_unprocessed(&*error), says_so, "{bytes:?}: {error:?}");
        }
        let wrapped = |error: h2::Error| std::io::Error::other(error);
        assert!(!is_unprocessed(&wrapped(h2::Error::from(Reason::NO_ERROR))), "an error of this side");
        assert!(!is_unprocessed(&std::io::Error::other("reset")));
    }

    /// The error of a request over HTTP/1.1 whose server closes the connection after these bytes.
    async fn failure_over_http1(body: UpstreamBody, bytes: &'static [u8]) -> BoxError {
        let (client, mut server) = tokio::io::duplex(1 << 16);
        let (mut requests, connection) = hyper::client::conn::http1::handshake(TokioIo::new(client)).await.unwrap();
        tokio::spawn(connection);
        let sent = requests.send_request(Request::post("/").body(body).unwrap());
        let served = async move {
            let _begun = server.read_u8().await;
            let _written = server.write_all(bytes).await;
        };
        let (sent, ()) = tokio::join!(sent, served);
        sent.unwrap_err().into()
    }

    #[tokio::test]
    async fn a_request_over_http1_that_was_begun_may_have_been_read() {
        for bytes in [&b""[..], b"HTTP/1.1 200 OK\r\n", b"no HTTP\r\n\r\n"] {
            let error = failure_over_http1(write().into_body(), bytes).await;
            assert!(!is_unprocessed(&*error), "{error:?}");
        }
        let of_caller = failure(write(), &reset(Reason::REFUSED_STREAM)).await;
        assert!(is_unprocessed(&*of_caller));
        let broken = StreamBody::new(stream::iter([Ok(Frame::data(Bytes::from("x"))), Err(of_caller)])).boxed_unsync();
        let error = failure_over_http1(broken, b"").await;
        assert!(!is_unprocessed(&*error), "the caller has refused something, not the server: {error:?}");
    }

    #[tokio::test]
    async fn a_connection_that_closes_before_a_request_has_not_read_it() {
        let (client, server) = tokio::io::duplex(1 << 16);
        let (mut requests, connection) =
            hyper::client::conn::http2::handshake::<_, _, UpstreamBody>(TokioExecutor::new(), TokioIo::new(client))
                .await
                .unwrap();
        drop(server);
        let _broken = connection.await;
        assert!(is_unprocessed(&requests.ready().await.unwrap_err()));
    }
}
