//! A server for tests that reads whole requests over HTTP/2 and answers with chosen frames.

use bytes::Bytes;
use h2::Reason;
use http::Request;
use http_body_util::combinators::UnsyncBoxBody;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// An error of any kind.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A frame of HTTP/2 (RFC 9113, 4.1).
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    [&[0, 0, length, kind, flags], &stream.to_be_bytes()[..], payload].concat()
}

/// Resets the first stream of a connection.
pub fn reset(reason: Reason) -> Vec<u8> {
    frame(3, 0, 1, &u32::from(reason).to_be_bytes())
}

/// Closes a connection, on which the streams up to `last` may have been processed.
pub fn go_away(last: u32, reason: Reason) -> Vec<u8> {
    frame(7, 0, 0, &[last.to_be_bytes(), u32::from(reason).to_be_bytes()].concat())
}

/// The server's first frames, which give windows of 1 GiB.
fn preface() -> Vec<u8> {
    let window = (1_u32 << 30).to_be_bytes();
    [frame(4, 0, 0, &[&[0, 4], &window[..]].concat()), frame(8, 0, 0, &window)].concat()
}

/// The error of a request over a connection of its own, if the server that has all of it sends
/// these bytes and then closes the connection.
pub async fn failure(request: Request<UnsyncBoxBody<Bytes, BoxError>>, bytes: &[u8]) -> BoxError {
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
