//! The client at the other end of a connection.

use std::{
    hash::{BuildHasher, RandomState},
    net::{IpAddr, SocketAddr},
    sync::{Arc, LazyLock},
};

use http::{HeaderMap, HeaderValue, header::USER_AGENT};
use kubefan_admission::Holder;

use kubefan_access::{ClientCertificate, Presented};

use crate::staleness::StaleWarning;

/// The client of a connection, as far as it is known. Every request carries it in its extensions.
#[derive(Debug, Clone, Default)]
pub struct ClientInfo {
    /// The number of the connection; the server assigns it.
    pub connection: u64,
    /// `None` for a Unix socket.
    pub address: Option<SocketAddr>,
    /// Whether the connection uses TLS.
    pub is_encrypted: bool,
    /// Whether the client presented a TLS certificate. The certificate alone proves no identity.
    pub has_certificate: bool,
    /// The certificate that may identify the caller; `None` without one, and where certificates are
    /// not asked.
    pub certificate: Option<Arc<ClientCertificate>>,
    /// Whether it is a proxy whose `X-Forwarded-For` is trusted (`--trusted-proxies`).
    pub is_trusted_proxy: bool,
    /// The client behind a trusted proxy.
    pub forwarded_for: Option<IpAddr>,
    /// Whether the connection was warned of a state that is not confirmed.
    pub stale_warning: StaleWarning,
}

/// The sender of a request, as far as operators want to know. It proves nothing.
#[derive(Debug, Clone, Default)]
pub struct RequestOrigin {
    /// The other end of the connection; `None` for a Unix socket.
    pub address: Option<SocketAddr>,
    /// The client behind a trusted proxy.
    pub forwarded_for: Option<IpAddr>,
    /// The client's name for itself, cut to a few hundred bytes; may be empty.
    pub user_agent: Box<str>,
}

/// The longest user agent that is kept, in bytes.
const USER_AGENT_BYTES_MAX: usize = 256;

const X_FORWARDED_FOR: &str = "x-forwarded-for";

impl ClientInfo {
    /// Returns the credentials of this client's request with these headers. A token that came over
    /// TCP without TLS counts as known to others.
    pub fn presents(&self, headers: &HeaderMap, is_websocket: bool) -> Presented {
        let certificate = self.certificate.as_ref().map(|certificate| certificate.verdict());
        Presented::new(headers, is_websocket, self.is_exposed(), self.holder()).with_certificate(certificate)
    }

    /// Whether others could read its requests: they came over TCP without TLS.
    pub fn is_exposed(&self) -> bool {
        self.address.is_some() && !self.is_encrypted
    }

    /// Returns the client of one request: behind a trusted proxy, the client that it forwards for.
    /// It is the last address in the header, which the proxy has seen itself; a client may have
    /// written the others.
    #[must_use]
    pub fn of_request(&self, headers: &HeaderMap) -> Self {
        let last = |headers: &HeaderMap| {
            let value = headers.get_all(X_FORWARDED_FOR).into_iter().next_back()?.to_str().ok()?;
            value.rsplit(',').next()?.trim().parse::<IpAddr>().ok()
        };
        let forwarded_for = if self.is_trusted_proxy { last(headers) } else { None };
        Self { forwarded_for, ..self.clone() }
    }

    /// Returns the sender of a request with these headers, for operators.
    pub fn sender(&self, headers: &HeaderMap) -> RequestOrigin {
        let value = headers.get(USER_AGENT).map_or(&b""[..], HeaderValue::as_bytes);
        let value = &value[..value.len().min(USER_AGENT_BYTES_MAX)];
        RequestOrigin {
            address: self.address,
            forwarded_for: self.forwarded_for,
            user_agent: String::from_utf8_lossy(value).into_owned().into_boxed_str(),
        }
    }

    /// Returns the holder that the places of a request count to. A proxy sends the requests of many
    /// clients on one connection, so each of them counts as a connection of its own.
    pub fn holder(&self) -> Holder {
        static NUMBERS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        match self.forwarded_for {
            Some(client) => Holder::new(NUMBERS.hash_one(client), Some(client)),
            None => Holder::new(self.connection, self.address.map(|address| address.ip())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_trusted_proxy_says_for_whom_it_forwards() {
        let address = Some(([10, 0, 0, 1], 1).into());
        let proxy = ClientInfo { connection: 7, address, is_trusted_proxy: true, ..ClientInfo::default() };
        let of = |client: &ClientInfo, value: &str| {
            let mut headers = HeaderMap::new();
            headers.append(X_FORWARDED_FOR, "3.3.3.3".parse().unwrap());
            headers.append(X_FORWARDED_FOR, value.parse().unwrap());
            client.of_request(&headers).holder()
        };
        assert_eq!(of(&proxy, "1.1.1.1, 2.2.2.2"), of(&proxy, "2.2.2.2"), "the last one");
        assert_ne!(of(&proxy, "1.1.1.1"), of(&proxy, "2.2.2.2"));
        assert_eq!(of(&proxy, "x"), proxy.holder());
        let other = ClientInfo { is_trusted_proxy: false, ..proxy.clone() };
        assert_eq!(of(&other, "1.1.1.1"), other.holder());
    }
}
