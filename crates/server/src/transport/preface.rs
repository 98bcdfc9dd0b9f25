//! Detects HTTP/2 by the first bytes of a connection (RFC 9113, section 3.4). Those bytes are
//! returned by the next reads.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// The start of the HTTP/2 preface. HTTP/1.1 has no method `PRI`.
const PREFACE: [u8; 4] = *b"PRI ";

/// A connection whose first bytes were inspected; reading it returns them again.
pub struct Rewound<Io> {
    first: [u8; PREFACE.len()],
    /// Number of these bytes, and of those that were read again.
    len: u8,
    read: u8,
    io: Io,
}

impl<Io> Rewound<Io> {
    /// The inspected bytes.
    pub fn first(&self) -> &[u8] {
        &self.first[..usize::from(self.len)]
    }
}

/// Reads until the protocol is clear. Returns true for HTTP/2.
pub async fn detect<Io: AsyncRead + Unpin>(mut io: Io) -> io::Result<(bool, Rewound<Io>)> {
    let mut first = [0; PREFACE.len()];
    let mut len = 0;
    while len < first.len() && first[..len] == PREFACE[..len] {
        match io.read(&mut first[len..]).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => len += read,
        }
    }
    Ok((first == PREFACE, Rewound { first, len: len as u8, read: 0, io }))
}

impl<Io: AsyncRead + Unpin> AsyncRead for Rewound<Io> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.read < this.len {
            let rest = &this.first[usize::from(this.read)..usize::from(this.len)];
            let rest = &rest[..rest.len().min(buffer.remaining())];
            buffer.put_slice(rest);
            this.read += rest.len() as u8;
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut this.io).poll_read(cx, buffer)
    }
}

impl<Io: AsyncWrite + Unpin> AsyncWrite for Rewound<Io> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_protocol_is_detected_and_no_byte_is_lost() {
        let cases: [(&[u8], bool); 4] = [
            (b"PRI * HTTP/2.0\r\n", true),
            (b"GET / HTTP/1.1\r\n", false),
            (b"PUT /", false),
            (b"\x16\x03\x01", false),
        ];
        for (bytes, http2) in cases {
            let (found, mut io) = detect(bytes).await.unwrap();
            assert_eq!(found, http2);
            let mut read = Vec::new();
            io.read_to_end(&mut read).await.unwrap();
            assert_eq!(read, bytes);
        }
        assert!(detect(&b"PR"[..]).await.is_err(), "the connection ends before the protocol is clear");
    }
}
