//! The proxy that the environment names, by the rules of Go's programs, kubectl among them
//! (`golang.org/x/net/http/httpproxy`).
//!
//! A `proxy-url` in a kubeconfig is not subject to them: it stands above the environment and has no
//! exceptions, as in client-go.

use std::{env, net::IpAddr};

use http::Uri;
use ipnet::IpNet;

/// The variables as they are set.
#[derive(Debug, Clone, Default)]
pub(super) struct ProxyEnvironment {
    http: Option<String>,
    https: Option<String>,
    exceptions: String,
}

/// A server that is reached without the proxy.
enum Exception {
    Network(IpNet),
    Address { address: IpAddr, port: Option<String> },
    Domain { suffix: String, includes_itself: bool, port: Option<String> },
}

impl ProxyEnvironment {
    /// Reads `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY`, or the same in lower case.
    pub(super) fn read() -> Self {
        let of = |names: [&str; 2]| names.iter().find_map(|name| env::var(name).ok().filter(|value| !value.is_empty()));
        Self {
            http: of(["HTTP_PROXY", "http_proxy"]),
            https: of(["HTTPS_PROXY", "https_proxy"]),
            exceptions: of(["NO_PROXY", "no_proxy"]).unwrap_or_default(),
        }
    }

    /// The proxy for a server; `None` if it is reached without one.
    ///
    /// # Errors
    /// The variable is not a URL.
    pub(super) fn proxy_for(&self, server: &Uri) -> Result<Option<Uri>, String> {
        let is_plain = server.scheme_str() == Some("http");
        let (name, proxy) = if is_plain { ("HTTP_PROXY", &self.http) } else { ("HTTPS_PROXY", &self.https) };
        let Some(proxy) = proxy else { return Ok(None) };
        let host = server.host().unwrap_or_default().trim_matches(['[', ']']).to_ascii_lowercase();
        let port = server.port_u16().unwrap_or(if is_plain { 80 } else { 443 }).to_string();
        if is_loopback(server) || self.is_excepted(&host, &port) {
            return Ok(None);
        }
        let url = if proxy.contains("://") { proxy.clone() } else { format!("http://{proxy}") };
        // The value may contain a password.
        url.parse().map(Some).map_err(|_| format!("{name} is not the URL of a proxy"))
    }

    fn is_excepted(&self, host: &str, port: &str) -> bool {
        let address = host.parse::<IpAddr>().ok();
        let parts = self.exceptions.split(',').map(|part| part.trim().to_ascii_lowercase());
        let mut parts = parts.filter(|part| !part.is_empty());
        parts.any(|part| part == "*" || Exception::parse(&part).is_some_and(|it| it.matches(host, address, port)))
    }
}

impl Exception {
    fn parse(part: &str) -> Option<Self> {
        if let Ok(network) = part.parse() {
            return Some(Self::Network(network));
        }
        // An address of IPv6 without brackets has more than one colon.
        let (host, port) = match part.rsplit_once(':') {
            Some((host, port)) if !host.contains(':') || host.ends_with(']') => (host, Some(port.to_owned())),
            _ => (part, None),
        };
        let host = host.trim_matches(['[', ']']);
        if let Ok(address) = host.parse() {
            return Some(Self::Address { address, port });
        }
        let suffix = host.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(host);
        if suffix.is_empty() {
            return None;
        }
        let includes_itself = !suffix.starts_with('.');
        let suffix = if includes_itself { format!(".{suffix}") } else { suffix.to_owned() };
        Some(Self::Domain { suffix, includes_itself, port })
    }

    fn matches(&self, host: &str, address: Option<IpAddr>, port: &str) -> bool {
        let has_port = |wanted: &Option<String>| wanted.as_deref().is_none_or(|wanted| wanted == port);
        match self {
            Self::Network(network) => address.is_some_and(|address| network.contains(&address)),
            Self::Address { address: excepted, port } => address == Some(*excepted) && has_port(port),
            Self::Domain { suffix, includes_itself, port } => {
                (host.ends_with(suffix) || *includes_itself && host == &suffix[1..]) && has_port(port)
            }
        }
    }
}

/// Whether a URL names this machine by `localhost` or by a loopback address.
pub(in crate::upstream) fn is_loopback(url: &Uri) -> bool {
    let host = url.host().unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROXY: &str = "http://proxy.example:3128/";

    fn proxied(exceptions: &str, server: &str) -> bool {
        let variables = ProxyEnvironment {
            http: Some("http://other.example:3128".to_owned()),
            https: Some(PROXY.to_owned()),
            exceptions: exceptions.to_owned(),
        };
        variables.proxy_for(&server.parse().unwrap()).unwrap().is_some_and(|proxy| proxy == PROXY)
    }

    #[test]
    fn exceptions_are_those_of_go() {
        for (exceptions, server, is_proxied) in [
            ("", "https://api.example.com:6443", true),
            ("", "https://localhost:6443", false),
            ("", "https://127.0.0.7:6443", false),
            ("", "https://[::1]:6443", false),
            ("*", "https://api.example.com", false),
            ("example.com", "https://example.com", false),
            ("example.com", "https://api.EXAMPLE.com", false),
            ("example.com", "https://notexample.com", true),
            (".example.com", "https://api.example.com", false),
            (".example.com", "https://example.com", true),
            ("*.example.com", "https://api.example.com", false),
            ("*.example.com", "https://example.com", true),
            ("example.com:6443", "https://api.example.com:6443", false),
            ("example.com:6443", "https://api.example.com", true),
            ("example.com:443", "https://api.example.com", false),
            (" a.example , 10.0.0.0/8,", "https://10.1.2.3:6443", false),
            ("10.0.0.0/8", "https://11.1.2.3:6443", true),
            ("10.1.2.3", "https://10.1.2.3:6443", false),
            ("10.1.2.3:443", "https://10.1.2.3:6443", true),
            ("fd00::/8", "https://[fd00::1]:6443", false),
            ("fd00::1", "https://[fd00::1]:6443", false),
            ("[fd00::1]:6443", "https://[fd00::1]:6443", false),
            ("[fd00::1]:443", "https://[fd00::1]:6443", true),
            ("example", "https://api.example.com", true),
        ] {
            assert_eq!(proxied(exceptions, server), is_proxied, "NO_PROXY={exceptions:?}, {server}");
        }
    }

    #[test]
    fn the_scheme_decides_on_the_variable_and_a_proxy_needs_none() {
        let variables = ProxyEnvironment { https: Some("user:secret@proxy:1".to_owned()), ..Default::default() };
        let proxy = variables.proxy_for(&"https://api.example".parse().unwrap()).unwrap();
        assert_eq!(proxy.unwrap().to_string(), "http://user:secret@proxy:1/");
        assert_eq!(variables.proxy_for(&"http://api.example".parse().unwrap()), Ok(None));
        let broken = ProxyEnvironment { https: Some("a secret".to_owned()), ..Default::default() };
        let error = broken.proxy_for(&"https://api.example".parse().unwrap()).unwrap_err();
        assert!(error.contains("HTTPS_PROXY") && !error.contains("secret"), "{error}");
    }
}
