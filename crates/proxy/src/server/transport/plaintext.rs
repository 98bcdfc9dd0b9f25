//! What a peer is told that speaks without TLS to a port that has it: TLS's own alert is noise to it, and names no way out.
//!
//! HTTP/1.1 hears what Go's servers say, and so the apiserver (`net/http/server.go`, `tlsRecordHeaderLooksLikeHTTP`). HTTP/2 has begun before it
//! was answered, as gRPC without TLS does, and is told in its own frames.

use std::{io, time::Duration};

use bytes::{BufMut, Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::timeout,
};

use super::preface::Rewound;

/// The way out.
pub const REFUSAL: &str =
    "a plaintext request was sent to an HTTPS port; use https:// (TLS), or with gRPC credentials for TLS";

/// What has come is read for so long, because a socket that is closed with bytes unread takes its last words back.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);
/// And so much of it, in bytes.
const LINGER_BYTES_MAX: u64 = 64 << 10;

/// Frames of HTTP/2 (RFC 9113, sections 6.5, 6.8 and 7).
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const INADEQUATE_SECURITY: u32 = 0xc;

/// Whether the first bytes of a connection are of no TLS: its records have types below any letter, and methods of HTTP begin with one.
pub fn is_spoken(first: &[u8]) -> bool {
    first.first().is_some_and(u8::is_ascii_alphabetic)
}

/// Says why nothing else is said.
pub async fn refuse<Io: AsyncRead + AsyncWrite + Unpin>(mut io: Rewound<Io>, is_http2: bool) -> io::Result<()> {
    io.write_all(&if is_http2 { go_away() } else { bad_request() }).await?;
    io.shutdown().await?;
    let mut rest = io.take(LINGER_BYTES_MAX);
    // How it ends does not matter.
    let _ = timeout(LINGER_TIMEOUT, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await;
    Ok(())
}

/// HTTP/1.0, which everybody understands, and without a length: it ends with the connection.
fn bad_request() -> Bytes {
    let head = "HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n";
    format!("{head}{REFUSAL}\n").into()
}

fn go_away() -> Bytes {
    let mut frames = BytesMut::new();
    put_frame(SETTINGS, &[], &mut frames);
    let mut payload = Vec::new();
    // No stream was looked at.
    payload.put_u32(0);
    payload.put_u32(INADEQUATE_SECURITY);
    payload.put_slice(REFUSAL.as_bytes());
    put_frame(GOAWAY, &payload, &mut frames);
    frames.freeze()
}

/// A frame of the connection itself, without flags.
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

    use super::*;
    use crate::server::preface;

    #[test]
    fn plaintext_is_told_from_tls() {
        for plain in [&b"GET "[..], b"PRI ", b"D"] {
            assert!(is_spoken(plain));
        }
        for other in [&b"\x16\x03\x01"[..], b"\x80", b"\0", b""] {
            assert!(!is_spoken(other));
        }
    }

    async fn refused(near: tokio::io::DuplexStream) {
        let (is_http2, io) = preface::detect(near).await.unwrap();
        assert!(is_spoken(io.first()));
        refuse(io, is_http2).await.unwrap();
    }

    #[tokio::test]
    async fn a_request_is_answered_by_the_way_out() {
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
    async fn http2_is_told_in_its_own_frames() {
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
