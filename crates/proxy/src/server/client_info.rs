//! The client at the other end of a connection.

use std::net::SocketAddr;

use crate::fanout::Holder;

/// What is known of the client of a connection. Every request carries it in its extensions.
#[derive(Debug, Clone, Copy, Default)]
pub struct ClientInfo {
    /// The number of the connection; the server assigns it.
    pub connection: u64,
    /// `None` for a Unix socket.
    pub address: Option<SocketAddr>,
    /// Whether the client presented a TLS certificate. The certificate was not verified, so it
    /// proves no identity.
    pub has_certificate: bool,
}

impl ClientInfo {
    /// Whose share the places of this connection count to.
    pub fn holder(&self) -> Holder {
        Holder::new(self.connection, self.address.map(|address| address.ip()))
    }
}
