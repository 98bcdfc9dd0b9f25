//! A server for tests that reads whole requests over HTTP/2 and answers with chosen frames.

use std::io;

use bytes::Bytes;
use h2::Reason;
use http::Request;
use http_body_util::combinators::UnsyncBoxBody;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};

/// An error of any kind.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The type of the frame that begins a request or an answer (RFC 9113, 6.2 to 6.5).
pub const HEADERS: u8 = 1;
/// The type of the frame that resets a stream.
pub const RST_STREAM: u8 = 3;
/// The type of the first frame of both sides.
pub const SETTINGS: u8 = 4;
/// The flags of headers that end a stream.
pub const END_STREAM_AND_HEADERS: u8 = 5;

/// A frame of HTTP/2 (RFC 9113, 4.1).
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    [&[0, 0, length, kind, flags], &stream.to_be_bytes()[..], payload].concat()
}

/// Reads the next frame, and returns its type, its flags and its stream.
///
/// # Errors
/// The stream fails or ends.
pub async fn read_frame(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<FrameHead> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await?;
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    stream.read_exact(&mut vec![0; length as usize]).await?;
    Ok(FrameHead { kind: head[3], flags: head[4], stream: u32::from_be_bytes([head[5], head[6], head[7], head[8]]) })
}

/// The head of a frame.
#[derive(Debug, Clone, Copy)]
pub struct FrameHead {
    /// The type.
    pub kind: u8,
    /// The flags, whose meaning depends on the type.
    pub flags: u8,
    /// The number of the stream, and 0 for the connection.
    pub stream: u32,
}

/// Resets the first stream of a connection.
pub fn reset(reason: Reason) -> Vec<u8> {
    frame(RST_STREAM, 0, 1, &u32::from(reason).to_be_bytes())
}

/// Closes a connection, on which the streams up to `last` may have been processed.
pub fn go_away(last: u32, reason: Reason) -> Vec<u8> {
    frame(7, 0, 0, &[last.to_be_bytes(), u32::from(reason).to_be_bytes()].concat())
}

/// The server's first frames, which give windows of 1 GiB.
fn preface() -> Vec<u8> {
    let window = (1_u32 << 30).to_be_bytes();
    [frame(SETTINGS, 0, 0, &[&[0, 4], &window[..]].concat()), frame(8, 0, 0, &window)].concat()
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
        loop {
            let head = read_frame(&mut server).await.unwrap();
            // The end of the stream, in a frame of data or headers.
            if head.kind <= HEADERS && head.flags & 1 == 1 {
                break;
            }
        }
        server.write_all(bytes).await.unwrap();
    };
    let (sent, ()) = tokio::join!(requests.send_request(request), served);
    sent.unwrap_err().into()
}
