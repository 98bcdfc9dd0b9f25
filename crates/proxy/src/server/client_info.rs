//! The client at the other end of a connection.

use std::{net::SocketAddr, sync::Arc};

use http::HeaderMap;

use crate::{
    access::{ClientCertificate, Presented},
    fanout::Holder,
};

/// What is known of the client of a connection. Every request carries it in its extensions.
#[derive(Debug, Clone, Default)]
pub struct ClientInfo {
    /// The number of the connection; the server assigns it.
    pub connection: u64,
    /// `None` for a Unix socket.
    pub address: Option<SocketAddr>,
    /// Whether the connection uses TLS.
    pub is_encrypted: bool,
    /// Whether the client presented a TLS certificate. That alone proves no identity.
    pub has_certificate: bool,
    /// The certificate that may say who the caller is; `None` without one, and where certificates
    /// are not asked.
    pub certificate: Option<Arc<ClientCertificate>>,
}

impl ClientInfo {
    /// What a request of this client with these headers presents. A token that came over TCP
    /// without TLS counts as known to others.
    pub fn presents(&self, headers: &HeaderMap, is_websocket: bool) -> Presented {
        let certificate = self.certificate.as_ref().map(|certificate| certificate.verdict());
        Presented::new(headers, is_websocket, self.is_exposed(), self.holder()).with_certificate(certificate)
    }

    /// Whether others could read what it sends: it came over TCP without TLS.
    pub fn is_exposed(&self) -> bool {
        self.address.is_some() && !self.is_encrypted
    }

    /// Whose share the places of this connection count to.
    pub fn holder(&self) -> Holder {
        Holder::new(self.connection, self.address.map(|address| address.ip()))
    }
}
