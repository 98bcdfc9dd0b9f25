//! The host that a request names, and whether it is this machine.

use std::net::IpAddr;

use http::{HeaderName, Request, Uri, header};

/// Returns the host that a request names, with its port.
pub fn host<B>(request: &Request<B>) -> Option<&str> {
    request.uri().authority().map(|authority| authority.as_str()).or(text(request, &header::HOST))
}

/// Returns a header of a request; empty if it is not visible ASCII.
pub fn text<'a, B>(request: &'a Request<B>, name: &HeaderName) -> Option<&'a str> {
    request.headers().get(name).map(|value| value.to_str().unwrap_or_default())
}

/// Whether a host, or the host of an origin, is `localhost` or a loopback address.
pub fn is_loopback(host: &str) -> bool {
    matches!(parse(host), Some(Host::Localhost)) || matches!(parse(host), Some(Host::Address(ip)) if ip.is_loopback())
}

/// Whether a host is `localhost` or an address. Unlike other names, DNS cannot change their
/// meaning.
pub fn is_localhost_or_address(host: &str) -> bool {
    parse(host).is_some()
}

enum Host {
    Localhost,
    Address(IpAddr),
}

/// Parses a host. `None` for any other name.
fn parse(host: &str) -> Option<Host> {
    let uri = host.parse::<Uri>().ok()?;
    let name = uri.host()?;
    if name.eq_ignore_ascii_case("localhost") {
        return Some(Host::Localhost);
    }
    let address = name.trim_matches(['[', ']']).parse::<IpAddr>().ok()?;
    Some(Host::Address(address.to_canonical()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinguished_from_addresses() {
        for (host, is_known, loopback) in [
            ("localhost", true, true),
            ("LocalHost:7443", true, true),
            ("127.0.0.1:7443", true, true),
            ("127.9.9.9", true, true),
            ("[::1]:7443", true, true),
            ("[::ffff:127.0.0.1]", true, true),
            ("10.0.0.1:7443", true, false),
            ("[2001:db8::1]", true, false),
            ("http://localhost:3000", true, true),
            ("https://evil.example", false, false),
            ("evil.example:7443", false, false),
            ("localhost.evil.example", false, false),
            ("127.0.0.1.evil.example", false, false),
            ("evil@localhost", true, true),
            ("null", false, false),
            ("", false, false),
        ] {
            assert_eq!((is_localhost_or_address(host), is_loopback(host)), (is_known, loopback), "{host}");
        }
    }
}
