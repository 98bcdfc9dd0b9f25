//! Addresses to listen on: a TCP address or the path of a Unix socket.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

use serde::{Deserialize, Deserializer, de};

/// An address to listen on: `127.0.0.1:7443`, `[::1]:7443`, `localhost:7443`, `:7443` (all
/// addresses), or `unix:/path`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ListenAddress {
    /// TCP. With port 0 the system chooses the port.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

/// The text is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a listen address; write it like 127.0.0.1:7443, :7443 or unix:/run/kubefan.sock")]
pub struct InvalidAddress {
    text: String,
}

impl ListenAddress {
    /// Whether only programs on this machine can connect to it.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp(address) => address.ip().to_canonical().is_loopback(),
            Self::Unix(_) => true,
        }
    }
}

impl FromStr for ListenAddress {
    type Err = InvalidAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidAddress { text: text.chars().take(256).collect() };
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.is_empty() { Err(invalid()) } else { Ok(Self::Unix(path.into())) };
        }
        let (host, port) = text.rsplit_once(':').ok_or_else(invalid)?;
        let port = port.parse().map_err(|_| invalid())?;
        let ip: IpAddr = match host {
            // IPv6 and IPv4, as Go's listeners do.
            "" => Ipv6Addr::UNSPECIFIED.into(),
            "localhost" => Ipv4Addr::LOCALHOST.into(),
            host => match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
                Some(host) => host.parse::<Ipv6Addr>().map_err(|_| invalid())?.into(),
                None => host.parse::<Ipv4Addr>().map_err(|_| invalid())?.into(),
            },
        };
        Ok(Self::Tcp(SocketAddr::new(ip, port)))
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl<'de> Deserialize<'de> for ListenAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_and_unix_sockets_are_local() {
        let cases = [
            ("127.0.0.1:7443", true),
            ("127.8.8.8:0", true),
            ("[::1]:7443", true),
            ("[::ffff:127.0.0.1]:7443", true),
            ("localhost:7443", true),
            ("unix:/run/kubefan.sock", true),
            ("unix:kubefan.sock", true),
            ("0.0.0.0:7443", false),
            ("[::]:7443", false),
            (":7443", false),
            ("10.0.0.1:7443", false),
        ];
        for (text, local) in cases {
            let address: ListenAddress = text.parse().unwrap();
            assert_eq!(address.is_local(), local, "{text}");
            assert_eq!(address.to_string().parse(), Ok(address), "{text}");
        }
    }

    #[test]
    fn invalid_addresses_are_refused() {
        for text in [
            "",
            "7443",
            "127.0.0.1",
            "127.0.0.1:x",
            "127.0.0.1:70000",
            "::1:7443",
            "host.example:7443",
            "unix:",
            "[::1]",
        ] {
            assert!(text.parse::<ListenAddress>().is_err(), "{text}");
        }
    }
}
