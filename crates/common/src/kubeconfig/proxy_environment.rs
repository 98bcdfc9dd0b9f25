//! The proxy that the environment names, by the rules of Go's programs, kubectl among them
//! (`golang.org/x/net/http/httpproxy`).
//!
//! A `proxy-url` in a kubeconfig is not subject to them: it stands above the environment and has no
//! exceptions, as in client-go.

use std::{env, net::IpAddr};

use http::Uri;
use ipnet::IpNet;

use crate::names;

/// The variables as they are set.
#[derive(Default)]
pub struct ProxyEnvironment {
    http: Option<String>,
    https: Option<String>,
    exceptions: String,
}

/// A server that is reached without the proxy. An empty port is any.
enum Exception {
    Network(IpNet),
    Address { address: IpAddr, port: String },
    Domain { suffix: String, includes_itself: bool, port: String },
}

impl ProxyEnvironment {
    /// Reads `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY`, or the same in lower case.
    pub fn read() -> Self {
        Self::of(|name| env::var(name).ok())
    }

    /// Reads the proxies from these variables.
    pub fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let first = |names: [&str; 2]| names.into_iter().find_map(|name| variable(name).filter(|it| !it.is_empty()));
        Self {
            http: first(["HTTP_PROXY", "http_proxy"]),
            https: first(["HTTPS_PROXY", "https_proxy"]),
            exceptions: first(["NO_PROXY", "no_proxy"]).unwrap_or_default(),
        }
    }

    /// The proxy for a server; `None` if it is reached without one, or the variable is not a URL.
    pub fn proxy_for(&self, server: &Uri) -> Option<Uri> {
        let is_plain = server.scheme_str() == Some("http");
        let proxy = if is_plain { self.http.as_ref() } else { self.https.as_ref() }?;
        let port = server.port_u16().unwrap_or(if is_plain { 80 } else { 443 }).to_string();
        if is_loopback(server) || self.is_excepted(host(server), &port) {
            return None;
        }
        if proxy.contains("://") { proxy.parse().ok() } else { format!("http://{proxy}").parse().ok() }
    }

    fn is_excepted(&self, host: &str, port: &str) -> bool {
        let address = address(host);
        let host = host.to_ascii_lowercase();
        let mut parts = self.exceptions.split(',').map(|part| part.trim().to_lowercase());
        parts.any(|part| part == "*" || Exception::parse(&part).is_some_and(|it| it.matches(&host, address, port)))
    }
}

impl Exception {
    fn parse(part: &str) -> Option<Self> {
        if let Ok(network) = part.parse() {
            return Some(Self::Network(network));
        }
        // Only a port needs brackets around an address of IPv6 (`net.SplitHostPort`).
        let (host, port) = match part.rsplit_once(':') {
            Some((host, port)) if !host.contains([':', '[', ']']) => (host, port),
            Some((host, port)) => {
                host.strip_prefix('[').and_then(|it| it.strip_suffix(']')).map_or((part, ""), |host| (host, port))
            }
            None => (part, ""),
        };
        let port = port.to_owned();
        if let Some(address) = address(host) {
            return Some(Self::Address { address, port });
        }
        let suffix = host.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(host);
        let includes_itself = !suffix.starts_with('.');
        let name = suffix.strip_prefix('.').unwrap_or(suffix);
        if suffix.is_empty() {
            return None;
        }
        let name = idna::domain_to_ascii(name).unwrap_or_else(|_| name.to_owned());
        Some(Self::Domain { suffix: format!(".{name}"), includes_itself, port })
    }

    fn matches(&self, host: &str, address: Option<IpAddr>, port: &str) -> bool {
        let has_port = |wanted: &String| wanted.is_empty() || wanted == port;
        match (self, address) {
            (Self::Network(network), Some(address)) => network.contains(&address),
            (Self::Address { address: excepted, port }, Some(address)) => address == *excepted && has_port(port),
            (Self::Domain { suffix, includes_itself, port }, None) => {
                (host.ends_with(suffix) || *includes_itself && host == &suffix[1..]) && has_port(port)
            }
            _ => false,
        }
    }
}

/// Whether a URL names this machine by `localhost` or by a loopback address.
pub fn is_loopback(url: &Uri) -> bool {
    names::is_loopback(host(url))
}

fn host(url: &Uri) -> &str {
    url.host().unwrap_or_default().trim_matches(['[', ']'])
}

/// An address, of IPv4 if it can be.
fn address(text: &str) -> Option<IpAddr> {
    text.parse().ok().map(|address: IpAddr| address.to_canonical())
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
        variables.proxy_for(&server.parse().unwrap()).is_some_and(|proxy| proxy == PROXY)
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
            (".1", "https://10.0.0.1", true),
            ("0.0.1", "https://10.0.0.1", true),
            ("*.0.0.1", "https://10.0.0.1", true),
            ("[fd00::1]", "https://[fd00::1]:6443", true),
            ("10.0.0.0/8", "https://[::ffff:10.1.2.3]", false),
            ("10.1.2.3", "https://[::ffff:10.1.2.3]", false),
            ("::ffff:10.1.2.3", "https://10.1.2.3", false),
            ("example.com:", "https://example.com", false),
            ("bücher.example", "https://api.xn--bcher-kva.example", false),
            ("*.Bücher.example:443", "https://api.xn--bcher-kva.example", false),
        ] {
            assert_eq!(proxied(exceptions, server), is_proxied, "NO_PROXY={exceptions:?}, {server}");
        }
    }

    #[test]
    fn the_scheme_decides_on_the_variable_and_a_proxy_needs_none() {
        let variables = ProxyEnvironment { https: Some("user:secret@proxy:1".to_owned()), ..Default::default() };
        let proxy = variables.proxy_for(&"https://api.example".parse().unwrap()).unwrap();
        assert_eq!(proxy.to_string(), "http://user:secret@proxy:1/");
        assert_eq!(variables.proxy_for(&"http://api.example".parse().unwrap()), None);
        let broken = ProxyEnvironment { https: Some("http://%zz".to_owned()), ..Default::default() };
        assert_eq!(broken.proxy_for(&"https://api.example".parse().unwrap()), None, "Go ignores it");
    }
}
