//! The client at the other end of a connection.

use std::net::SocketAddr;

/// What is known of the client of a connection. Every request carries it in its extensions.
#[derive(Debug, Clone, Copy, Default)]
pub struct ClientInfo {
    /// `None` for a Unix socket.
    pub address: Option<SocketAddr>,
    /// Whether the client presented a TLS certificate. The certificate was not verified, so it
    /// proves no identity.
    pub has_certificate: bool,
}
