//! Connection options of an HTTP endpoint.

use std::{fmt, path::PathBuf, time::Duration};

/// Connection settings.
#[derive(Clone)]
pub struct HttpClientOptions {
    /// PEM file with the CAs that the server's certificate is verified against. Replaces the
    /// system's CAs. Only for `https://` addresses.
    pub ca_file: Option<PathBuf>,
    /// PEM file with the client certificate and its chain. Needs `client_key_file`.
    pub client_certificate_file: Option<PathBuf>,
    /// PEM file with the key of the client certificate.
    pub client_key_file: Option<PathBuf>,
    /// A bearer token. `token_file` takes precedence.
    pub token: Option<String>,
    /// A file with a bearer token. It is read again after 10 s, and at once if the server refuses
    /// the token (401).
    pub token_file: Option<PathBuf>,
    /// Whether the server is never asked for gzip. Compression saves network and costs both sides
    /// CPU: set this if the network is fast and lists take too long. Default: false. A server on a
    /// loopback address is never asked for it.
    pub disable_compression: bool,
    /// Limit for establishing a connection. Default: 10 s.
    pub connect_timeout: Duration,
    /// The `User-Agent` header, which appears in audit logs and in flow control.
    pub user_agent: String,
}

impl Default for HttpClientOptions {
    fn default() -> Self {
        Self {
            ca_file: None,
            client_certificate_file: None,
            client_key_file: None,
            token: None,
            token_file: None,
            disable_compression: false,
            connect_timeout: Duration::from_secs(10),
            user_agent: concat!("kubefan-client/", env!("CARGO_PKG_VERSION")).to_owned(),
        }
    }
}

/// Does not show the token.
impl fmt::Debug for HttpClientOptions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("HttpClientOptions")
            .field("ca_file", &self.ca_file)
            .field("client_certificate_file", &self.client_certificate_file)
            .field("client_key_file", &self.client_key_file)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("token_file", &self.token_file)
            .field("disable_compression", &self.disable_compression)
            .field("connect_timeout", &self.connect_timeout)
            .field("user_agent", &self.user_agent)
            .finish()
    }
}
