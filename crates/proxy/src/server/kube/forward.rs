//! Passes requests on to the apiserver, and its responses back: both bodies as they come, nothing added but where a request is from.
//!
//! The hazard is that kubefan stands where the apiserver stood. So callers never act as kubefan (`upstream::passthrough` sees to that),
//! what cannot be passed on (a client certificate) is said and not silently left out, and no caller can fill the way for all others.

use std::sync::Arc;

use axum::body::Body;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use hyper::upgrade::OnUpgrade;
use tower::BoxError;

use super::{door, hop_by_hop, status::Failure, tunnel::Tunnel, verb};
use crate::{
    server::listen::Peer,
    telemetry::metrics::{Metrics, Refused},
    upstream::{
        UpstreamError,
        client::holding,
        passthrough::{Credentials, Passthrough, Place},
    },
};
use kubefan_model::Media;

/// Who a request came through, from whom to whom; the apiserver writes it into its audit log.
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// How a bearer token is sent where a browser cannot set headers (`apiserver/pkg/authentication/request/websocket`).
pub(super) const WEBSOCKET_TOKEN: &str = "base64url.bearer.authorization.k8s.io.";

/// What a kubeconfig that leads to kubefan itself is told.
const LOOP: &str = "the request has passed this kubefan before: the apiserver that it was started with (--kubeconfig) is kubefan itself";

/// In the extensions of a response: it is upstream's.
#[derive(Debug, Clone, Copy)]
pub struct ByUpstream;

/// Passes requests on.
pub struct Proxy {
    upstream: Passthrough,
    upgrades: bool,
    /// By which a request that comes round again is known (`Via`: RFC 9110, 7.6.3).
    via: HeaderValue,
    metrics: Arc<Metrics>,
}

impl Proxy {
    /// One that passes on by `upstream`; exec, attach, port-forward and websockets too where `upgrades` says so. `number` tells it from
    /// all other proxies.
    pub fn new(upstream: Passthrough, upgrades: bool, number: u64, metrics: Arc<Metrics>) -> Self {
        let via = HeaderValue::try_from(format!("1.1 kubefan-{number:016x}"));
        Self { upstream, upgrades, via: via.expect("hexadecimal digits are visible"), metrics }
    }

    /// Passes a request on that came from `peer`. The response is upstream's, or a `Status` that says why there is none.
    pub async fn forward(&self, request: Request<Body>, peer: Peer) -> Response<Body> {
        let (upgrade, verb) = (hop_by_hop::upgrade(request.headers()), verb::of(&request));
        let place = match self.admit(&request, verb, peer, upgrade.is_some()) {
            Ok(place) => place,
            Err((refused, failure)) => {
                self.metrics.refused_to_pass_on(refused);
                return failure.response(Media::Json);
            }
        };
        let mut passed_on = self.metrics.passed_on(verb);
        let (mut parts, body) = request.into_parts();
        hop_by_hop::remove(&mut parts.headers);
        append_peer(&mut parts.headers, peer);
        parts.headers.append(header::VIA, self.via.clone());
        if let Some(upgrade) = &upgrade {
            write_upgrade(&mut parts.headers, upgrade.clone());
        }
        let switch = parts.extensions.remove::<Tunnel>().zip(parts.extensions.remove::<OnUpgrade>());
        let request = Request::from_parts(parts, body.map_err(BoxError::from).boxed_unsync());
        let mut response = match self.upstream.send(&place, request).await {
            Ok(response) => response,
            Err(error) => return unanswered(&error).response(Media::Json),
        };
        passed_on.answered(response.status());
        response.extensions_mut().insert(ByUpstream);
        let switched = hop_by_hop::upgrade(response.headers());
        hop_by_hop::remove(response.headers_mut());
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return response.map(|body| Body::new(holding(body, (place, passed_on))));
        }
        let Some((protocol, (tunnel, caller))) = switched.or(upgrade).zip(switch) else {
            return Failure::bad_gateway("the apiserver switched to another protocol unasked".to_owned())
                .response(Media::Json);
        };
        tunnel.between(caller, hyper::upgrade::on(&mut response), (place, passed_on));
        write_upgrade(response.headers_mut(), protocol);
        response.map(|_| Body::empty())
    }

    /// Whether a request may be passed on.
    fn admit(
        &self,
        request: &Request<Body>,
        verb: &str,
        peer: Peer,
        is_upgrade: bool,
    ) -> Result<Place, (Refused, Failure)> {
        if request.method() == Method::CONNECT || request.uri().path() == "*" {
            let message = format!("{} {} names nothing of the apiserver's", request.method(), request.uri());
            return Err((Refused::Method, Failure::method_not_allowed(message)));
        }
        if request.headers().get_all(header::VIA).iter().any(|via| *via == self.via) {
            return Err((Refused::Loop, Failure::loop_detected(LOOP.to_owned())));
        }
        match self.upstream.credentials() {
            Credentials::Caller if peer.has_certificate && !has_token(request.headers()) => {
                let message = "a client certificate cannot be passed on to the apiserver, because TLS proves it to kubefan alone; \
                    use a bearer token (in a kubeconfig: token, tokenFile or an exec plugin), or ask the apiserver directly";
                return Err((Refused::Certificate, Failure::unauthorized(message.to_owned())));
            }
            Credentials::Own if !is_from_here(request, peer) => {
                let message = "with --passthrough=self only this machine's programs are served: the request names another host, or \
                    comes from a page of one";
                return Err((Refused::Foreign, Failure::forbidden(message.to_owned())));
            }
            Credentials::Own if request.headers().keys().any(|name| name.as_str().starts_with("impersonate-")) => {
                let message = "with --passthrough=self everybody is who kubefan is: leave out --as, or ask with credentials of your own";
                return Err((Refused::Impersonation, Failure::forbidden(message.to_owned())));
            }
            _ => {}
        }
        if is_upgrade && !self.upgrades {
            let message = "kubefan passes exec, attach, port-forward and websockets on only with --passthrough-upgrades; without it, \
                ask the apiserver directly";
            return Err((Refused::Upgrade, Failure::forbidden(message.to_owned())));
        }
        let lasts = verb::is_long_running(verb, request.uri().path());
        self.upstream.place(is_upgrade, lasts).ok_or_else(|| {
            let most = self.upstream.requests_max();
            let message = format!("the most requests at a time are being passed on (--passthrough-max {most}, of which watches, logs and sessions may have four fifths)");
            (Refused::Limit, Failure::too_many_requests(message))
        })
    }
}

/// What a caller hears where upstream said nothing. Only what was not sent at all is called worth another try: clients repeat writes too.
fn unanswered(error: &UpstreamError) -> Failure {
    match error {
        UpstreamError::Unreachable { .. } => {
            Failure::unavailable(format!("{error}; until it can be reached, kubefan answers only what it has cached"))
        }
        UpstreamError::Tls { .. } | UpstreamError::Credentials { .. } => {
            Failure::bad_gateway(format!("{error}; see the kubeconfig that kubefan was started with"))
        }
        _ => Failure::bad_gateway(error.to_string()),
    }
}

fn has_token(headers: &HeaderMap) -> bool {
    let protocols = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).into_iter().filter_map(|value| value.to_str().ok());
    headers.contains_key(header::AUTHORIZATION)
        || protocols.flat_map(|value| value.split(',')).any(|name| name.trim().starts_with(WEBSOCKET_TOKEN))
}

/// Whether a request is from a program of this machine, and not from a page that a browser here has loaded: that could name any host which
/// resolves to a loopback address, and would act as kubefan.
fn is_from_here(request: &Request<Body>, peer: Peer) -> bool {
    let is_local = door::is_loopback;
    peer.address.is_none()
        || door::host(request).is_some_and(is_local) && door::text(request, &header::ORIGIN).is_none_or(is_local)
}

fn append_peer(headers: &mut HeaderMap, peer: Peer) {
    let Some(address) = peer.address else { return };
    let mut hops: Vec<_> =
        headers.get_all(X_FORWARDED_FOR).into_iter().map(|value| value.as_bytes().to_vec()).collect();
    hops.push(address.ip().to_canonical().to_string().into_bytes());
    if let Ok(value) = HeaderValue::from_bytes(&hops.join(&b", "[..])) {
        headers.insert(X_FORWARDED_FOR, value);
    }
}

fn write_upgrade(headers: &mut HeaderMap, to: HeaderValue) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, to);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(address: Option<&str>) -> Peer {
        Peer { address: address.map(|text| text.parse().unwrap()), ..Peer::default() }
    }

    #[test]
    fn where_a_request_is_from_is_appended() {
        let mut headers = HeaderMap::new();
        append_peer(&mut headers, peer(None));
        assert!(headers.is_empty(), "a Unix socket has no address");
        append_peer(&mut headers, peer(Some("[::ffff:10.0.0.1]:5")));
        append_peer(&mut headers, peer(Some("[fd00::1]:5")));
        assert_eq!(headers[X_FORWARDED_FOR], "10.0.0.1, fd00::1");
    }

    #[test]
    fn a_page_in_a_browser_is_not_from_here() {
        let request = |host: &str, origin: &str| {
            let mut request = Request::get("/api/v1/secrets").body(Body::empty()).unwrap();
            for (name, value) in [(header::HOST, host), (header::ORIGIN, origin)] {
                if !value.is_empty() {
                    request.headers_mut().insert(name, value.parse().unwrap());
                }
            }
            request
        };
        let here = peer(Some("127.0.0.1:5"));
        for (host, origin, is) in [
            ("localhost:7443", "", true),
            ("127.0.0.1", "", true),
            ("[::1]:7443", "http://localhost:3000", true),
            ("evil.example:7443", "", false),
            ("localhost:7443", "https://evil.example", false),
            ("localhost:7443", "null", false),
            ("localhost.evil.example", "", false),
            ("", "", false),
        ] {
            assert_eq!(is_from_here(&request(host, origin), here), is, "{host}, {origin}");
            assert!(is_from_here(&request(host, origin), peer(None)), "no browser speaks over a Unix socket");
        }
    }

    #[test]
    fn a_token_may_come_as_a_websocket_protocol() {
        let mut headers = HeaderMap::new();
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static("v5.channel.k8s.io"));
        assert!(!has_token(&headers));
        let value = HeaderValue::from_static("v5.channel.k8s.io, base64url.bearer.authorization.k8s.io.YQ");
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, value);
        assert!(has_token(&headers));
    }
}
