//! Refuses requests that a browser could be tricked into sending.
//!
//! The first hazard is DNS rebinding. Without TLS, a web page could read the cache: its host name
//! suddenly resolves to kubefan's address, which makes kubefan part of the page's site. Such a
//! request names a host that is neither an address nor a known name, or has the origin of a page
//! from one. `kubectl proxy` uses the same criterion (`--accept-hosts`).
//!
//! The second is a request that a page sends without reading the answer, such as the address of an
//! image. It has no origin, but browsers name the relation of its site (`Sec-Fetch-Site`).

use http::{HeaderName, Request, header};

use super::{
    allowed_hosts::AllowedHosts,
    host::{host, is_localhost_or_address, is_loopback, text},
    status::Failure,
};
use crate::client_info::ClientInfo;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const SEC_FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

/// The rules by which requests are refused.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Guard {
    /// The names that requests may name, beside `localhost` and addresses.
    pub hosts: AllowedHosts,
    /// Whether only this machine can connect.
    pub is_loopback: bool,
}

impl Guard {
    /// Refuses a request over TCP that names a foreign host or origin, or that a page of another
    /// site has sent without an origin. Links to kubefan may be followed.
    ///
    /// # Errors
    /// 403, with the remedy.
    pub fn check<B>(&self, request: &Request<B>) -> Result<(), Failure> {
        if !is_tcp(request) {
            return Ok(());
        }
        let named = host(request).unwrap_or_default();
        let origin = text(request, &header::ORIGIN);
        let what = match origin {
            Some(origin) if !self.is_known_origin(origin, named) => format!("comes from a page of {origin:.64?}"),
            _ if !self.is_known(named) => format!("is for the host {named:.64?}"),
            None if is_embedded(request) => "comes from a page of another site".to_owned(),
            _ => return Ok(()),
        };
        let way_out = if self.is_loopback {
            "name 127.0.0.1 or localhost in the server's URL, allow the name (--allowed-hosts)"
        } else {
            "name kubefan's address or Service in the server's URL, allow the name (--allowed-hosts)"
        };
        Err(Failure::forbidden(format!(
            "the request {what}: without TLS a browser could be tricked into sending it, so kubefan answers only for addresses, \
             localhost and known names; {way_out}, or serve TLS (--tls-cert-file) or a Unix socket (--listen unix:PATH)"
        )))
    }

    /// Whether a request names a known host, or came over a Unix socket.
    pub fn names_known_host<B>(&self, request: &Request<B>) -> bool {
        !is_tcp(request) || self.is_known(host(request).unwrap_or_default())
    }

    fn is_known(&self, host: &str) -> bool {
        host.is_empty() || is_localhost_or_address(host) || self.hosts.allow(host)
    }

    /// Whether pages of an origin may read. Pages that kubefan itself seems to have sent may if
    /// their host is known, but not on loopback, where every address is this machine's.
    fn is_known_origin(&self, origin: &str, host: &str) -> bool {
        let is_own = || !self.is_loopback && origin.strip_prefix("http://").is_some_and(|own| own == host);
        is_loopback(origin) || self.hosts.allow_origin(origin) || is_own()
    }
}

/// Whether a request comes from a program on this machine, and not from a web page in a browser,
/// which would act as kubefan. A page can name any host that resolves to a loopback address, and a
/// browser sends no origin with the address of an image or with a link that is followed.
pub fn is_local<B>(request: &Request<B>, hosts: &AllowedHosts) -> bool {
    let is_ours = |host: &str| is_loopback(host) || hosts.allow(host);
    let is_our_origin = |origin: &str| is_loopback(origin) || hosts.allow_origin(origin);
    let is_own_page = matches!(text(request, &SEC_FETCH_SITE), None | Some("same-origin" | "none"));
    !is_tcp(request)
        || host(request).is_some_and(is_ours) && text(request, &header::ORIGIN).is_none_or(is_our_origin) && is_own_page
}

/// Whether a request came over TCP. No browser uses a Unix socket.
fn is_tcp<B>(request: &Request<B>) -> bool {
    request.extensions().get::<ClientInfo>().is_some_and(|client| client.address.is_some())
}

/// Whether a page of another site sent the request by itself, and not because its user followed a
/// link.
fn is_embedded<B>(request: &Request<B>) -> bool {
    text(request, &SEC_FETCH_SITE) == Some("cross-site") && text(request, &SEC_FETCH_MODE) != Some("navigate")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: &str = "127.0.0.1:5";

    fn request(client: Option<&str>, headers: &[(&str, &str)]) -> Request<()> {
        let client = ClientInfo { address: client.map(|text| text.parse().unwrap()), ..ClientInfo::default() };
        let request = Request::get("/api/v1/secrets").extension(client);
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value)).body(()).unwrap()
    }

    fn allowing(names: &[&str]) -> AllowedHosts {
        AllowedHosts::new(names.iter().map(|name| name.parse().unwrap()).collect())
    }

    #[test]
    fn a_foreign_host_is_refused_on_every_address_without_tls() {
        let loopback = Guard { is_loopback: true, hosts: allowing(&["dev.example"]) };
        let open = Guard { is_loopback: false, hosts: allowing(&["dev.example"]).with_services("") };
        for (host, on_loopback, elsewhere) in [
            ("127.0.0.1:7443", true, true),
            ("localhost", true, true),
            ("10.0.0.1:7443", true, true),
            ("dev.example:7443", true, true),
            ("kubefan.kubefan.svc:7443", false, true),
            ("kubefan:7443", false, true),
            ("evil.example", false, false),
            ("dev.example.evil.example", false, false),
        ] {
            let headers = [("host", host)];
            for (guard, is) in [(&loopback, on_loopback), (&open, elsewhere)] {
                assert_eq!(guard.check(&request(Some(LOCAL), &headers)).is_ok(), is, "{host}, {guard:?}");
                assert!(guard.check(&request(None, &headers)).is_ok(), "a Unix socket");
            }
        }
        assert!(open.check(&request(Some(LOCAL), &[])).is_ok(), "HTTP/1.0");
    }

    #[test]
    fn a_page_of_a_foreign_origin_is_refused() {
        let loopback = Guard { is_loopback: true, hosts: allowing(&["dev.example"]) };
        let open = Guard { is_loopback: false, hosts: loopback.hosts.clone().with_services("") };
        for (host, origin, on_loopback, elsewhere) in [
            ("localhost:7443", "http://localhost:3000", true, true),
            ("10.0.0.1:7443", "http://localhost:3000", true, true),
            ("10.0.0.1:7443", "http://10.0.0.1:7443", false, true),
            ("10.0.0.1:7443", "http://10.0.0.2:7443", false, false),
            ("10.0.0.1:7443", "https://dev.example", true, true),
            ("10.0.0.1:7443", "https://evil.example", false, false),
            ("evil.example", "http://evil.example", false, false),
            ("localhost", "null", false, false),
        ] {
            let page = request(Some(LOCAL), &[("host", host), ("origin", origin)]);
            assert_eq!(loopback.check(&page).is_ok(), on_loopback, "{host}, {origin}");
            assert_eq!(open.check(&page).is_ok(), elsewhere, "{host}, {origin}");
        }
    }

    #[test]
    fn an_embedded_request_is_refused_and_a_link_is_followed() {
        let guard = Guard { is_loopback: true, ..Guard::default() };
        for (site, mode, is) in [
            ("cross-site", "no-cors", false),
            ("cross-site", "websocket", false),
            ("cross-site", "navigate", true),
            ("same-site", "no-cors", true),
            ("same-origin", "cors", true),
            ("none", "navigate", true),
        ] {
            let headers = [("host", "localhost"), ("sec-fetch-site", site), ("sec-fetch-mode", mode)];
            assert_eq!(guard.check(&request(Some(LOCAL), &headers)).is_ok(), is, "{site}, {mode}");
        }
        let of_loopback =
            [("host", "127.0.0.1"), ("origin", "http://localhost:3000"), ("sec-fetch-site", "cross-site")];
        assert!(guard.check(&request(Some(LOCAL), &of_loopback)).is_ok(), "its origin is known");
    }

    #[test]
    fn a_web_page_in_a_browser_is_not_local() {
        for (host, origin, site, is) in [
            ("localhost:7443", "", "", true),
            ("127.0.0.1", "", "", true),
            ("[::1]:7443", "http://localhost:3000", "", true),
            ("dev.example", "", "", true),
            ("evil.example:7443", "", "", false),
            ("localhost:7443", "https://evil.example", "", false),
            ("localhost:7443", "null", "", false),
            ("localhost.evil.example", "", "", false),
            ("", "", "", false),
            ("localhost:7443", "", "none", true),
            ("localhost:7443", "http://localhost:7443", "same-origin", true),
            ("localhost:7443", "http://localhost:3000", "same-site", false),
            ("localhost:7443", "", "same-site", false),
            ("localhost:7443", "", "cross-site", false),
            ("localhost:7443", "", "anything else", false),
        ] {
            let given = [("host", host), ("origin", origin), ("sec-fetch-site", site)];
            let headers: Vec<_> = given.into_iter().filter(|(_, value)| !value.is_empty()).collect();
            let hosts = allowing(&["dev.example"]);
            assert_eq!(is_local(&request(Some(LOCAL), &headers), &hosts), is, "{host}, {origin}, {site}");
            assert!(is_local(&request(None, &headers), &hosts), "no browser uses a Unix socket");
        }
    }
}
