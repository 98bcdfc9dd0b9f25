//! Refuses requests that a browser could be tricked into sending.
//!
//! The hazard is DNS rebinding. On a loopback address without TLS, a web page could read the cache:
//! its host name suddenly resolves to 127.0.0.1, which makes kubefan part of the page's site. Such
//! a request names a host that is neither an address nor `localhost`, or has the origin of a page
//! from one. `kubectl proxy` uses the same criterion (`--accept-hosts`).

use http::{Request, header};

use super::{
    host::{host, is_localhost_or_address, is_loopback, text},
    status::Failure,
};
use crate::server::client_info::ClientInfo;

/// Refuses a request over TCP that names a foreign host or origin.
///
/// # Errors
/// 403, with the remedy.
pub fn check<B>(request: &Request<B>) -> Result<(), Failure> {
    let is_tcp = request.extensions().get::<ClientInfo>().is_some_and(|client| client.address.is_some());
    let host = host(request).unwrap_or_default();
    let origin = text(request, &header::ORIGIN);
    let is_known = (host.is_empty() || is_localhost_or_address(host)) && origin.is_none_or(is_loopback);
    if !is_tcp || is_known {
        return Ok(());
    }
    let what = match origin {
        Some(origin) if !is_loopback(origin) => format!("comes from a page of {origin:.64?}"),
        _ => format!("is for the host {host:.64?}"),
    };
    Err(Failure::forbidden(format!(
        "the request {what}: on a loopback address without TLS a browser could be tricked into sending it, so kubefan answers only for \
         addresses and localhost; name 127.0.0.1 or localhost in the server's URL, or serve TLS (--tls-cert-file) or a Unix socket \
         (--listen unix:PATH)"
    )))
}
