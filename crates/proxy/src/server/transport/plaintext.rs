//! Explains to a client that speaks plaintext that this port needs TLS. A TLS alert would be noise
//! to it and name no remedy.
//!
//! HTTP/1.1 clients get the same answer as from Go's servers, and so from the apiserver
//! (`net/http/server.go`, `tlsRecordHeaderLooksLikeHTTP`). HTTP/2 clients, such as gRPC without
//! TLS, get a GOAWAY frame with the text.

use std::{io, time::Duration};

use bytes::{BufMut, Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::timeout,
};

use super::preface::Rewound;

/// The explanation, with the remedy.
pub const REFUSAL: &str =
    "a plaintext request was sent to an HTTPS port; use https:// (TLS), or with gRPC credentials for TLS";

/// How long the rest of the request is read. A socket that is closed with unread bytes discards the
/// answer.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);
/// How much of the rest of the request is read, in bytes.
const LINGER_BYTES_MAX: u64 = 64 << 10;

/// HTTP/2 frame types and an error code (RFC 9113, sections 6.5, 6.8 and 7).
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const INADEQUATE_SECURITY: u32 = 0xc;

/// Whether a connection starts with plaintext HTTP. HTTP methods start with a letter; the types of
/// TLS records are lower.
pub fn is_plaintext(first: &[u8]) -> bool {
    first.first().is_some_and(u8::is_ascii_alphabetic)
}

/// Sends the explanation and ends the connection.
pub async fn refuse<Io: AsyncRead + AsyncWrite + Unpin>(mut io: Rewound<Io>, is_http2: bool) -> io::Result<()> {
    io.write_all(&if is_http2 { go_away() } else { bad_request() }).await?;
    io.shutdown().await?;
    let mut rest = io.take(LINGER_BYTES_MAX);
    // Errors do not matter here: the connection ends anyway.
    let _ = timeout(LINGER_TIMEOUT, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await;
    Ok(())
}

/// HTTP/1.0, which every client understands. Without a length, the body ends with the connection.
fn bad_request() -> Bytes {
    let head = "HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n";
    format!("{head}{REFUSAL}\n").into()
}

fn go_away() -> Bytes {
    let mut frames = BytesMut::new();
    put_frame(SETTINGS, &[], &mut frames);
    let mut payload = Vec::new();
    // The last stream that was processed: none.
    payload.put_u32(0);
    payload.put_u32(INADEQUATE_SECURITY);
    payload.put_slice(REFUSAL.as_bytes());
    put_frame(GOAWAY, &payload, &mut frames);
    frames.freeze()
}

/// Writes a frame on stream 0, without flags.
fn put_frame(kind: u8, payload: &[u8], out: &mut BytesMut) {
    out.put_uint(payload.len() as u64, 3);
    out.put_u8(kind);
    out.put_u8(0);
    out.put_u32(0);
    out.put_slice(payload);
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::super::preface;
    use super::*;

    #[test]
    fn plaintext_is_distinguished_from_tls() {
        for plain in [&b"GET "[..], b"PRI ", b"D"] {
            assert!(is_plaintext(plain));
        }
        for other in [&b"\x16\x03\x01"[..], b"\x80", b"\0", b""] {
            assert!(!is_plaintext(other));
        }
    }

    async fn refused(near: tokio::io::DuplexStream) {
        let (is_http2, io) = preface::detect(near).await.unwrap();
        assert!(is_plaintext(io.first()));
        refuse(io, is_http2).await.unwrap();
    }

    #[tokio::test]
    async fn an_http1_request_gets_the_explanation() {
        let (near, mut far) = duplex(4096);
        far.write_all(b"GET /api HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        let (_, read) = tokio::join!(refused(near), async {
            let read = far.read_to_string(&mut answer).await;
            drop(far);
            read
        });
        read.unwrap();
        assert!(answer.starts_with("HTTP/1.0 400 Bad Request\r\n"), "{answer}");
        assert!(answer.ends_with(&format!("\r\n\r\n{REFUSAL}\n")), "{answer}");
    }

    #[tokio::test(start_paused = true)]
    async fn http2_gets_a_goaway_frame() {
        let (near, far) = duplex(4096);
        let refused = tokio::spawn(refused(near));
        let (mut send, http2) = h2::client::handshake(far).await.unwrap();
        let (answer, _) = send.send_request(http::Request::new(()), true).unwrap();
        let error = tokio::join!(http2, answer).0.unwrap_err();
        assert_eq!(error.reason(), Some(h2::Reason::INADEQUATE_SECURITY), "{error}");
        assert!(error.is_go_away() && error.is_remote());
        refused.await.unwrap();
    }
}
