//! Connections to the server under test: TCP that counts every byte read, with TLS if configured.

use std::{io, net::SocketAddr, sync::Arc};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;
use tokio_util::io::InspectReader;

use super::{counters::Counters, tls::TlsClient};

/// A TCP or TLS connection.
pub(super) trait Transport: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Transport for T {}

/// Opens connections to a server.
#[derive(Clone)]
pub(super) struct Connector {
    pub(super) address: SocketAddr,
    /// `None` without TLS.
    pub(super) tls: Option<TlsClient>,
}

impl Connector {
    pub(super) async fn connect(&self, counters: &Arc<Counters>) -> io::Result<Box<dyn Transport>> {
        let stream = self.tcp(counters).await?;
        Ok(match &self.tls {
            None => Box::new(stream),
            Some((config, name)) => Box::new(TlsConnector::from(config.clone()).connect(name.clone(), stream).await?),
        })
    }

    /// Connects without TLS, even if it is configured.
    pub(super) async fn tcp(&self, counters: &Arc<Counters>) -> io::Result<impl Transport + use<>> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        let counters = counters.clone();
        Ok(InspectReader::new(stream, move |read: &[u8]| counters.add_bytes(read.len() as u64)))
    }
}
