//! A server for tests that reads whole requests over HTTP/2 and answers with chosen frames.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use h2::Reason;
use http::{Request, Uri};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tower::{BoxError, service_fn};

use super::{
    AcceptedTokens, BaseUrl, Credentials, ForwardService, Passthrough, PassthroughOptions, Renewed, StreamPermits,
};
use crate::upstream::transport::connection::{ConnectionLimits, UpstreamBody};

/// A frame of HTTP/2 (RFC 9113, 4.1).
pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    [&[0, 0, length, kind, flags], &stream.to_be_bytes()[..], payload].concat()
}

/// Resets the first stream of a connection.
pub(super) fn reset(reason: Reason) -> Vec<u8> {
    frame(3, 0, 1, &u32::from(reason).to_be_bytes())
}

/// Closes a connection, on which the streams up to `last` may have been processed.
pub(super) fn go_away(last: u32, reason: Reason) -> Vec<u8> {
    frame(7, 0, 0, &[last.to_be_bytes(), u32::from(reason).to_be_bytes()].concat())
}

/// The server's first frames, which give windows of 1 GiB.
fn preface() -> Vec<u8> {
    let window = (1_u32 << 30).to_be_bytes();
    [frame(4, 0, 0, &[&[0, 4], &window[..]].concat()), frame(8, 0, 0, &window)].concat()
}

/// The error of a request over a connection of its own, if the server that has all of it sends
/// these bytes and then closes the connection.
pub(super) async fn failure(request: Request<UpstreamBody>, bytes: &[u8]) -> BoxError {
    let (client, mut server) = tokio::io::duplex(1 << 16);
    let io = TokioIo::new(client);
    let (mut requests, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    let served = async move {
        server.write_all(&preface()).await.unwrap();
        server.read_exact(&mut [0; 24]).await.unwrap();
        let mut head = [0; 9];
        // Until the end of the stream, in a frame of data or headers.
        while head[3] > 1 || head[4] & 1 == 0 {
            server.read_exact(&mut head).await.unwrap();
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            server.read_exact(&mut vec![0; length as usize]).await.unwrap();
        }
        server.write_all(bytes).await.unwrap();
    };
    let (sent, ()) = tokio::join!(requests.send_request(request), served);
    sent.unwrap_err().into()
}

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
pub(crate) fn to_closing_server() -> (Passthrough, Arc<AtomicUsize>) {
    let sent = Arc::new(AtomicUsize::new(0));
    let count = sent.clone();
    let service = service_fn(move |request| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Err(failure(request, &go_away(0, Reason::NO_ERROR)).await) }
    });
    let options = options();
    let passthrough = Passthrough {
        service: Renewed::fixed(ForwardService::new(service)),
        base: BaseUrl::of(&Uri::from_static("http://h")).unwrap(),
        server: "http://h".to_owned(),
        streams: StreamPermits::new(options.requests_max),
        options,
        accepted: AcceptedTokens::default(),
    };
    (passthrough, sent)
}
