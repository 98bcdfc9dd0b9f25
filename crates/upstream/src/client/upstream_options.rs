//! Limits of a client of the apiserver.

use std::time::Duration;

use crate::transport::connection::ConnectionLimits;

/// Limits of a client.
#[derive(Debug, Clone)]
pub struct UpstreamOptions {
    /// Times after which a connection counts as dead.
    pub connection: ConnectionLimits,
    /// Time limit for a read with its whole answer, and for the headers of a watch.
    /// kube-apiserver's own limit for reads is 60 s.
    pub request_timeout: Duration,
    /// Limit for the answer to a read, in bytes.
    pub body_bytes_max: usize,
    /// The `User-Agent`, which appears in audit logs and flow control.
    pub user_agent: String,
}

impl Default for UpstreamOptions {
    fn default() -> Self {
        Self {
            connection: ConnectionLimits::APISERVER,
            request_timeout: Duration::from_secs(60),
            body_bytes_max: 512 << 20,
            user_agent: format!(
                "kubefan/{} ({}/{})",
                env!("CARGO_PKG_VERSION"),
                std::env::consts::OS,
                std::env::consts::ARCH
            ),
        }
    }
}
