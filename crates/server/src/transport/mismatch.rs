//! Explains the mistake to a client that speaks plaintext to a port with TLS, or TLS to a port
//! without it.
//!
//! The hazard is a client that retries at once, thousands of times in a second, because it got no
//! answer to its request. So a gRPC call gets a status of its own: a GOAWAY alone says that the
//! call was not processed, and gRPC clients then send it again on a new connection. HTTP/1.1
//! clients get the same answer as from Go's servers, and so from the apiserver
//! (`net/http/server.go`, `tlsRecordHeaderLooksLikeHTTP`).
//!
//! A TLS client can be shown no text: a TLS alert has none. It gets an HTTP response, because
//! clients recognize that (`http: server gave HTTP response to HTTPS client` in Go, "wrong version
//! number" in OpenSSL and BoringSSL), while every alert could mean many things.

use std::{io, time::Duration};

use bytes::Bytes;
use http::{Response, StatusCode};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::timeout,
};

use super::{
    limits::{HEADER_LIST_BYTES_MAX, RECEIVE_FRAME_BYTES_MAX, RECEIVE_WINDOW_BYTES},
    preface::Rewound,
};
use crate::grpc::{call, status};

/// The explanation for plaintext on a port with TLS, with the remedy.
pub const NEEDS_TLS: &str =
    "a plaintext request was sent to an HTTPS port; use https:// (TLS), or with gRPC credentials for TLS";

/// The explanation for TLS on a port without TLS, with the remedy.
pub const HAS_NO_TLS: &str = "a TLS handshake was sent to a plaintext port; use http://, or start kubefan with \
    --tls-cert-file and --tls-private-key-file";

/// Time for which the rest of the request is read. A socket that is closed with unread bytes
/// discards the answer.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum length of the rest of the request that is read, in bytes.
const LINGER_BYTES_MAX: u64 = 64 << 10;

/// Maximum number of concurrent calls on a refused HTTP/2 connection.
const REFUSED_STREAMS_MAX: u32 = 100;

/// The type of a TLS record with a handshake message (RFC 8446, 5.1).
const TLS_HANDSHAKE: u8 = 22;

/// Whether a connection starts with plaintext HTTP. HTTP methods start with a letter; the types of
/// TLS records are lower.
pub fn is_plaintext(first: &[u8]) -> bool {
    first.first().is_some_and(u8::is_ascii_alphabetic)
}

/// Whether a connection starts with a TLS handshake.
pub fn is_tls(first: &[u8]) -> bool {
    first.first() == Some(&TLS_HANDSHAKE)
}

/// Sends `explanation` to a client of HTTP/1.1 or TLS, and ends the connection.
pub async fn refuse<Io: AsyncRead + AsyncWrite + Unpin>(mut io: Rewound<Io>, explanation: &str) -> io::Result<()> {
    io.write_all(&bad_request(explanation)).await?;
    io.shutdown().await?;
    let mut rest = io.take(LINGER_BYTES_MAX);
    // Errors do not matter here: the connection ends anyway.
    let _ = timeout(LINGER_TIMEOUT, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await;
    Ok(())
}

/// Answers the requests of an HTTP/2 client with `explanation`, and ends the connection after the
/// first ones.
pub async fn refuse_http2<Io: AsyncRead + AsyncWrite + Unpin>(
    io: Rewound<Io>,
    explanation: &'static str,
) -> Result<(), h2::Error> {
    let mut http2 = h2::server::Builder::new()
        .initial_window_size(RECEIVE_WINDOW_BYTES)
        .max_frame_size(RECEIVE_FRAME_BYTES_MAX)
        .max_header_list_size(HEADER_LIST_BYTES_MAX)
        .max_concurrent_streams(REFUSED_STREAMS_MAX)
        .handshake(io)
        .await?;
    while let Some(accepted) = http2.accept().await {
        let (request, mut respond) = accepted?;
        if call::is_any_grpc(&request) {
            respond.send_response(status::needs_tls(explanation).into_http(), true)?;
        } else {
            let mut response = Response::new(());
            *response.status_mut() = StatusCode::BAD_REQUEST;
            respond.send_response(response, false)?.send_data(Bytes::from_static(explanation.as_bytes()), true)?;
        }
        http2.graceful_shutdown();
    }
    Ok(())
}

/// HTTP/1.0, which every client understands. Without a length, the body ends with the connection.
/// The explanation is a warning too, because kubectl shows no text of a 400 to its discovery.
fn bad_request(explanation: &str) -> Bytes {
    let head = "HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close";
    format!("{head}\r\nWarning: 299 kubefan \"{explanation}\"\r\n\r\n{explanation}\n").into()
}

#[cfg(test)]
mod tests {
    use tokio::io::{DuplexStream, duplex};
    use tonic::{Code, Status};

    use super::super::preface;
    use super::*;

    #[test]
    fn plaintext_and_tls_are_distinguished() {
        for plain in [&b"GET "[..], b"PRI ", b"D"] {
            assert!(is_plaintext(plain) && !is_tls(plain));
        }
        assert!(is_tls(b"\x16\x03\x01\x02") && !is_plaintext(b"\x16\x03\x01\x02"));
        for other in [&b"\x80"[..], b"\0", b""] {
            assert!(!is_plaintext(other) && !is_tls(other));
        }
    }

    async fn refuse_any(near: DuplexStream) {
        let (is_http2, io) = preface::detect(near).await.unwrap();
        if is_http2 {
            // The client may close the connection first.
            let _ = refuse_http2(io, NEEDS_TLS).await;
        } else if is_tls(io.first()) {
            refuse(io, HAS_NO_TLS).await.unwrap();
        } else {
            refuse(io, NEEDS_TLS).await.unwrap();
        }
    }

    async fn answer(sent: &[u8]) -> String {
        let (near, mut far) = duplex(4096);
        far.write_all(sent).await.unwrap();
        let mut answer = String::new();
        let (_, read) = tokio::join!(refuse_any(near), async {
            let read = far.read_to_string(&mut answer).await;
            drop(far);
            read
        });
        read.unwrap();
        answer
    }

    #[tokio::test]
    async fn a_client_of_http1_or_tls_gets_an_http1_response() {
        for (sent, explanation) in
            [(&b"GET /api HTTP/1.1\r\nHost: localhost\r\n\r\n"[..], NEEDS_TLS), (b"\x16\x03\x01\x02\0\x01", HAS_NO_TLS)]
        {
            let answer = answer(sent).await;
            assert!(answer.starts_with("HTTP/1.0 400 Bad Request\r\n"), "{answer}");
            assert!(answer.ends_with(&format!("\r\n\r\n{explanation}\n")), "{answer}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_grpc_call_without_tls_gets_a_status_of_its_own() {
        let (near, far) = duplex(4096);
        let refused = tokio::spawn(refuse_any(near));
        let (mut send, http2) = h2::client::handshake(far).await.unwrap();
        let connection = tokio::spawn(http2);
        let request = |kind| http::Request::post("http://h/a.B/C").header("content-type", kind).body(()).unwrap();
        // The message of the call is still to come.
        let (answer, _message) = send.send_request(request("application/grpc"), false).unwrap();
        let (other, _) = send.send_request(request("text/plain"), true).unwrap();
        let answer = answer.await.unwrap();
        let status = Status::from_header_map(answer.headers()).unwrap();
        assert_eq!((status.code(), status.message()), (Code::Unavailable, NEEDS_TLS));
        assert!(answer.body().is_end_stream(), "headers only");
        let other = other.await.unwrap();
        assert_eq!(other.status(), 400);
        assert_eq!(other.into_body().data().await.unwrap().unwrap(), NEEDS_TLS);
        // Both sides end by themselves.
        refused.await.unwrap();
        connection.await.unwrap().unwrap();
    }
}
