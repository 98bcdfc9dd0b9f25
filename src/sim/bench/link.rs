//! Connections to the server under test: TCP with every byte read from it counted, and TLS where it is asked for.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use super::board::Board;

/// Either kind of connection.
pub(super) trait Link: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Link for T {}

/// How to connect.
#[derive(Clone)]
pub(super) struct Connector {
    pub(super) address: SocketAddr,
    /// With ALPN set, and the name that the certificate has.
    pub(super) tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
}

impl Connector {
    pub(super) async fn connect(&self, board: &Arc<Board>) -> io::Result<Box<dyn Link>> {
        let stream = self.tcp(board).await?;
        Ok(match &self.tls {
            None => Box::new(stream),
            Some((config, name)) => Box::new(TlsConnector::from(config.clone()).connect(name.clone(), stream).await?),
        })
    }

    /// Without TLS, whatever is configured.
    pub(super) async fn tcp(&self, board: &Arc<Board>) -> io::Result<Counted> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        Ok(Counted { stream, board: board.clone() })
    }
}

/// TCP whose reads are counted.
pub(super) struct Counted {
    stream: TcpStream,
    board: Arc<Board>,
}

impl AsyncRead for Counted {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        self.board.add_bytes((buf.filled().len() - before) as u64);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
