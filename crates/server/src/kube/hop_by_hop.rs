//! Headers that belong to a connection and not to the message (RFC 9110, section 7.6.1).
//!
//! The hazard: if they were forwarded, one side could control the other side's connection, smuggle
//! a second request, or switch protocols unnoticed.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use kubefan_upstream::identity_headers::is_identity;

/// The hop-by-hop headers, besides those that `Connection` names.
const NAMES: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Removes all hop-by-hop headers.
pub(super) fn remove(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = tokens(headers, &header::CONNECTION).filter_map(|name| name.parse().ok()).collect();
    for name in NAMES.iter().chain(&named) {
        headers.remove(name);
    }
}

/// Returns a header with the identity of the caller or the way of the request, if `Connection`
/// names it. Without this header the request would be another user's.
pub(super) fn hidden_identity(headers: &HeaderMap) -> Option<String> {
    const OTHERS: [&str; 4] = ["audit-id", "sec-websocket-protocol", "via", "x-forwarded-for"];
    let mut names = tokens(headers, &header::CONNECTION).map(str::to_ascii_lowercase);
    names.find(|name| is_identity(name) || OTHERS.contains(&name.as_str()))
}

/// Returns the protocol that a request wants to upgrade to, if it is one of exec, attach,
/// port-forward or websocket watches. A server may ignore all others, such as h2c.
pub(super) fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    if !tokens(headers, &header::CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade")) {
        return None;
    }
    let is_known = |token: &str| {
        token.eq_ignore_ascii_case("websocket") || token.get(..5).is_some_and(|name| name.eq_ignore_ascii_case("SPDY/"))
    };
    tokens(headers, &header::UPGRADE).any(is_known).then(|| headers.get(header::UPGRADE).cloned()).flatten()
}

/// Whether a request wants to upgrade to a websocket. Only then may one of its protocols be a
/// token.
pub(super) fn is_websocket(headers: &HeaderMap) -> bool {
    upgrade(headers).is_some_and(|to| to.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name, value);
        }
        headers
    }

    #[test]
    fn a_connection_header_must_not_hide_the_caller() {
        for name in [
            "Authorization",
            "close, Impersonate-User",
            "X-Remote-Group",
            "X-Forwarded-For",
            "keep-alive,audit-ID",
            "Via",
            "Upgrade, Sec-WebSocket-Protocol",
        ] {
            assert!(hidden_identity(&headers(&[("connection", name)])).is_some(), "{name}");
        }
        assert_eq!(hidden_identity(&headers(&[("connection", "close, upgrade, x-mine")])), None);
    }

    #[test]
    fn exactly_the_hop_by_hop_headers_are_removed() {
        let mut all = headers(&[
            ("connection", "close, X-Mine"),
            ("connection", "x-other,, not a name"),
            ("keep-alive", "timeout=5"),
            ("proxy-authorization", "Basic eA=="),
            ("proxy-authenticate", "Basic"),
            ("proxy-connection", "keep-alive"),
            ("te", "trailers"),
            ("trailer", "x"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "websocket"),
            ("x-mine", "1"),
            ("x-other", "1"),
            ("x-other", "2"),
            ("x-stays", "1"),
            ("content-length", "5"),
            ("accept-encoding", "gzip"),
        ]);
        remove(&mut all);
        let mut left: Vec<_> = all.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["accept-encoding", "content-length", "x-stays"]);
    }

    #[test]
    fn only_known_protocols_are_upgrades() {
        for (connection, to, is, has_websocket) in [
            ("Upgrade", "websocket", true, true),
            ("keep-alive, upgrade", "WebSocket", true, true),
            ("Upgrade", "SPDY/3.1", true, false),
            ("Upgrade", "h2c, websocket", true, false),
            ("Upgrade, HTTP2-Settings", "h2c", false, false),
            ("keep-alive", "websocket", false, false),
            ("Upgrade", "", false, false),
        ] {
            let headers = headers(&[("connection", connection), ("upgrade", to)]);
            assert_eq!(
                (upgrade(&headers).is_some(), is_websocket(&headers)),
                (is, has_websocket),
                "{connection}, {to}"
            );
        }
        let first = [("connection", "Upgrade"), ("upgrade", "SPDY/3.1"), ("upgrade", "websocket")];
        assert!(!is_websocket(&headers(&first)), "the apiserver reads the first");
    }
}
