//! Connections to the server under test: TCP with every byte read from it counted, and TLS where it is asked for.

use std::{io, net::SocketAddr, sync::Arc};

use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;
use tokio_util::io::InspectReader;

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
    pub(super) async fn tcp(&self, board: &Arc<Board>) -> io::Result<impl Link + use<>> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        let board = board.clone();
        Ok(InspectReader::new(stream, move |read: &[u8]| board.add_bytes(read.len() as u64)))
    }
}
