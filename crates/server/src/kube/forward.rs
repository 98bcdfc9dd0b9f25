//! Passthrough: forwards requests to the apiserver, and its responses back. Both bodies are
//! streamed unchanged. Only headers that name the client are added, and to the response one that
//! says that no cache has made it.
//!
//! The hazard is that kubefan has taken the place of the apiserver. So callers never act with
//! kubefan's credentials by accident (`upstream::passthrough` ensures that), a client certificate,
//! which cannot be forwarded, is refused and not silently dropped, and no caller can use up the
//! capacity of all others.

use std::sync::{Arc, atomic::Ordering};

use axum::body::Body;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header, request::Parts};
use http_body_util::BodyExt;
use hyper::upgrade::OnUpgrade;
use kubefan_access::authentication::websocket_protocols::WebsocketProtocols;
use kubefan_admission::{FairPermit, FairPool, Holder, PermitKind, PermitLimits};
use kubefan_cache::{Refusal, warnings::Warnings};
use kubefan_model::Media;
use kubefan_telemetry::{
    metrics::{Metrics, PassthroughRefusal},
    traces,
};
use kubefan_upstream::{
    UpstreamError,
    acting_as::ActingAs,
    client::holding,
    identity_headers,
    passthrough::{Credentials, Forwarded, FromFallback, Passthrough},
};
use tokio_util::sync::CancellationToken;

use super::{
    allowed_hosts::AllowedHosts,
    answer::FromUpstream,
    error_type::ErrorType,
    guard, hop_by_hop,
    kept_bodies::{Kept, KeptBodies},
    negotiate, passed_on,
    request_body::RequestBody,
    request_info,
    status::Failure,
    tunnel::Tunnel,
};
use crate::client_info::ClientInfo;

/// The chain of addresses that a request came from; the apiserver writes it into its audit log.
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The answer if kubefan's own kubeconfig points at kubefan.
const LOOP: &str = "the request has passed through this kubefan before: the apiserver in its kubeconfig (--kubeconfig) is kubefan itself";

const REQUESTS: PermitKind = PermitKind {
    name: "forwarded requests",
    setting: "limits.passthroughMax",
    identity_setting: "limits.passthroughMaxPerIdentity",
};
const LONG_REQUESTS: PermitKind = PermitKind {
    name: "forwarded watches, logs and sessions",
    setting: "four fifths of limits.passthroughMax",
    identity_setting: "",
};

/// Options of passthrough.
#[derive(Debug, Clone)]
pub struct ForwardOptions {
    /// Whether exec, attach, port-forward and websockets are forwarded.
    pub upgrades: bool,
    /// With kubefan's own credentials, requests must name this machine or one of these.
    pub hosts: AllowedHosts,
    /// Maximum requests of one identity that are forwarded at a time; `None` for no limit.
    pub per_identity_max: Option<usize>,
    /// Whether upstream is another kubefan. Then headers of upstream say who has made an answer,
    /// except for answers of the apiserver of the fallback.
    pub is_to_kubefan: bool,
}

/// The caller of a forwarded request.
pub struct ForwardedCaller {
    /// The holder whose share it counts to.
    pub holder: Holder,
    /// The user that it acts as, with `--access=authorized-impersonate`.
    pub acting_as: Option<ActingAs>,
}

/// A request that is not forwarded.
pub struct NotForwarded {
    /// The reason, as it is counted.
    pub reason: PassthroughRefusal,
    /// The answer.
    pub failure: Failure,
}

impl NotForwarded {
    /// A request that is not forwarded for this reason.
    pub fn new(reason: PassthroughRefusal, failure: Failure) -> Self {
        Self { reason, failure }
    }
}

/// One place in this many is for short requests only, such as the renewal of a lease.
const SHORT_PART: usize = 5;

/// Forwards requests upstream.
pub struct Forwarder {
    upstream: Passthrough,
    /// A place for each request that upstream takes at a time, shared among the callers.
    places: Arc<FairPool>,
    /// The places of long requests among them: watches, logs and sessions.
    long_places: Arc<FairPool>,
    kept_bodies: KeptBodies,
    upgrades: bool,
    /// The names of this machine, beside `localhost` and addresses.
    hosts: AllowedHosts,
    /// Whether upstream is another kubefan.
    is_to_kubefan: bool,
    /// Identifies requests that this kubefan has forwarded (`Via`: RFC 9110, 7.6.3).
    via: HeaderValue,
    metrics: Arc<Metrics>,
}

impl Forwarder {
    /// Forwards to `upstream`. `number` must be unique among all instances of kubefan.
    pub fn new(
        upstream: Passthrough,
        ForwardOptions { upgrades, hosts, per_identity_max, is_to_kubefan }: ForwardOptions,
        number: u64,
        metrics: Arc<Metrics>,
    ) -> Self {
        let via = HeaderValue::try_from(format!("1.1 kubefan-{number:016x}"));
        let requests_max = upstream.requests_max();
        let places = FairPool::new(PermitLimits { all: requests_max, per_identity: per_identity_max });
        let long_places = FairPool::new(long_requests_max(requests_max));
        let kept_bodies = KeptBodies::default();
        let via = via.expect("hexadecimal digits are visible");
        Self { upstream, places, long_places, kept_bodies, upgrades, hosts, is_to_kubefan, via, metrics }
    }

    /// Whether requests act as their callers.
    pub fn impersonates(&self) -> bool {
        self.upstream.credentials() == Credentials::Impersonate
    }

    /// Whether the share of a request is that of its caller's tenant: it may keep its place for
    /// hours, or few places are left.
    pub fn needs_tenant(&self, request: &Parts, verb: &str) -> bool {
        is_long(verb, request.uri.path(), &request.headers) || self.places.is_scarce() || self.kept_bodies.is_scarce()
    }

    /// Forwards a request of a client. The response is upstream's, or a `Status` that says why
    /// there is none. A request that does not arrive soon after `drain` is cancelled is cut off.
    pub async fn forward(
        &self,
        request: Request<Body>,
        verb: &'static str,
        client: &ClientInfo,
        caller: Result<ForwardedCaller, NotForwarded>,
        drain: &CancellationToken,
    ) -> Response<Body> {
        let upgrade = hop_by_hop::upgrade(request.headers());
        let media = negotiate::negotiate_failure(negotiate::accept_header(request.headers())).unwrap_or_default();
        let admitted = self.check(&request, client, upgrade.is_some()).and_then(|()| {
            let ForwardedCaller { holder, acting_as } = caller?;
            Ok((self.admit(&request, verb, holder)?, holder, acting_as))
        });
        let (places, holder, acting_as) = match admitted {
            Ok(admitted) => admitted,
            Err(NotForwarded { reason, failure }) => {
                self.metrics.count_passthrough_refusal(reason);
                return failure.response(media);
            }
        };
        let mut passed_on = self.metrics.passthrough_started(verb);
        let (mut parts, body) = request.into_parts();
        hop_by_hop::remove(&mut parts.headers);
        if acting_as.is_some() {
            remove_websocket_token(&mut parts.headers);
        }
        append_client_address(&mut parts.headers, client);
        parts.headers.append(header::VIA, self.via.clone());
        let wait = traces::wait_for_server("upstream");
        wait.put_into(&mut parts.headers);
        if let Some(upgrade) = &upgrade {
            write_upgrade(&mut parts.headers, upgrade.clone());
        }
        let reaction = ClientReaction::of(verb, parts.uri.path());
        let sends_nothing = self.upstream.credentials() == Credentials::Caller
            && client.is_exposed()
            && !parts.headers.contains_key(header::AUTHORIZATION);
        let switch = parts.extensions.remove::<Tunnel>().zip(parts.extensions.remove::<OnUpgrade>());
        let body = RequestBody::new(body, drain);
        let is_cut_off = body.is_cut_off();
        let Kept { bytes_max: kept_bytes_max, place: kept } = self.kept_bodies.keep(&body, holder);
        let request = Request::from_parts(parts, holding(body, kept).boxed_unsync());
        let is_upgrade = upgrade.is_some();
        let sent = self.upstream.send(Forwarded { request, acting_as, is_upgrade, kept_bytes_max }).await;
        let status = sent.as_ref().map_or(0, |response| response.status().as_u16());
        wait.note("http.response.status_code", i64::from(status));
        drop(wait);
        let mut response = match sent {
            Ok(response) => response,
            Err(_) if is_cut_off.load(Ordering::Relaxed) => return Failure::from(&Refusal::Draining).response(media),
            Err(error) => return unanswered(&error, media, reaction),
        };
        passed_on.answered(response.status());
        if sends_nothing && matches!(response.status(), StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            Warnings::own(NO_CREDENTIALS).put(response.headers_mut());
        }
        response.extensions_mut().insert(FromUpstream);
        let switched = hop_by_hop::upgrade(response.headers());
        hop_by_hop::remove(response.headers_mut());
        let is_of_kubefan = self.is_to_kubefan && response.extensions().get::<FromFallback>().is_none();
        passed_on::mark(response.headers_mut(), is_of_kubefan);
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return response.map(|body| Body::new(holding(body, (places, passed_on))));
        }
        let Some((protocol, (tunnel, caller))) = switched.or(upgrade).zip(switch) else {
            let message = "the apiserver switched to another protocol without a request for that".to_owned();
            return Failure::bad_gateway(message).because(ErrorType::HttpProtocolError).response(media);
        };
        tunnel.connect(caller, hyper::upgrade::on(&mut response), (places, passed_on));
        response.extensions_mut().insert(tunnel);
        write_upgrade(response.headers_mut(), protocol);
        response.map(|_| Body::empty())
    }

    /// Checks whether a request may be forwarded.
    fn check(&self, request: &Request<Body>, client: &ClientInfo, is_upgrade: bool) -> Result<(), NotForwarded> {
        let path = request.uri().path();
        if request.method() == Method::CONNECT || path == "*" || self.upstream.leads_out(path) {
            let message = format!("{} {} is not a request for the apiserver", request.method(), request.uri());
            return Err(NotForwarded::new(PassthroughRefusal::Method, Failure::method_not_allowed(message)));
        }
        if request.headers().get_all(header::VIA).iter().any(|via| *via == self.via) {
            return Err(NotForwarded::new(PassthroughRefusal::Loop, Failure::loop_detected(LOOP.to_owned())));
        }
        if let Some(name) = hop_by_hop::hidden_identity(request.headers()) {
            let message = format!(
                "the header Connection names {name}, and without that header this would be another user's request"
            );
            return Err(NotForwarded::new(PassthroughRefusal::Identity, Failure::bad_request(message)));
        }
        match self.upstream.credentials() {
            Credentials::Caller if client.has_certificate && !has_token(request.headers()) => {
                let message = "a client certificate cannot be forwarded to the apiserver, because TLS proves it only to kubefan; \
                    use a bearer token (in a kubeconfig: token, tokenFile or an exec plugin), or ask the apiserver directly";
                return Err(NotForwarded::new(
                    PassthroughRefusal::Certificate,
                    Failure::unauthorized(message.to_owned()),
                ));
            }
            Credentials::Own if !guard::is_local(request, &self.hosts) => {
                let message = "with --access=local-self only programs on this machine are served: the request names another host, or \
                    comes from a page of one";
                return Err(NotForwarded::new(PassthroughRefusal::Foreign, Failure::forbidden(message.to_owned())));
            }
            Credentials::Own if identity_headers::impersonates(request.headers()) => {
                let message = "with --access=local-self every caller acts as kubefan and can be no other user: leave out --as (in a \
                    kubeconfig: as), or send this request to the apiserver itself";
                return Err(NotForwarded::new(
                    PassthroughRefusal::Impersonation,
                    Failure::forbidden(message.to_owned()),
                ));
            }
            _ => {}
        }
        if is_upgrade && !self.upgrades {
            let message = "kubefan forwards exec, attach, port-forward and websockets only with tuning.passthroughUpgrades; without it, \
                ask the apiserver directly";
            return Err(NotForwarded::new(PassthroughRefusal::Upgrade, Failure::forbidden(message.to_owned())));
        }
        Ok(())
    }

    /// Takes the places of a request.
    fn admit(&self, request: &Request<Body>, verb: &str, holder: Holder) -> Result<Places, NotForwarded> {
        let is_long = is_long(verb, request.uri().path(), request.headers());
        let take = |places: &Arc<FairPool>, kind: PermitKind| {
            places.try_take(Some(holder)).ok_or_else(|| {
                let failure = Failure::too_many_requests(kind.refusal(places, holder));
                NotForwarded::new(PassthroughRefusal::Limit, failure)
            })
        };
        let place = take(&self.places, REQUESTS)?;
        let long = if is_long { Some(take(&self.long_places, LONG_REQUESTS)?) } else { None };
        Ok(Places { _place: place, _long: long })
    }
}

/// The places of a forwarded request, until its response has ended.
struct Places {
    _place: FairPermit,
    _long: Option<FairPermit>,
}

/// Returns the number of long requests among this many forwarded ones.
pub fn long_requests_max(requests_max: usize) -> usize {
    requests_max - requests_max / SHORT_PART
}

/// Whether the caller decides how long a request lasts.
fn is_long(verb: &str, path: &str, headers: &HeaderMap) -> bool {
    hop_by_hop::upgrade(headers).is_some() || request_info::is_long_running(verb, path)
}

/// kubectl and client-go send no credentials without TLS, whatever their kubeconfig has.
const NO_CREDENTIALS: &str = "kubefan forwarded this request without credentials: clients send none without TLS; serve TLS \
    (--tls-cert-file, --tls-private-key-file), or on your own machine forward as yourself (--access=local-self)";

/// The reaction of a request's client to a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClientReaction {
    /// client-go retries a watch in silence if its connection is refused, and if the answer is 429.
    /// For any other answer it reports an error, and then it lists again.
    Watch,
    /// client-go shows no text of a failed discovery, and everything that kubectl does starts with
    /// discovery. It does show warnings.
    Discovery,
    /// The client shows the text.
    Other,
}

impl ClientReaction {
    fn of(verb: &str, path: &str) -> Self {
        let names: Vec<&str> = path.split('/').filter(|name| !name.is_empty()).take(4).collect();
        match names.as_slice() {
            _ if verb == "watch" => Self::Watch,
            ["version" | "openapi", ..] | ["api"] | ["api", _] | ["apis"] | ["apis", _] | ["apis", _, _] => {
                Self::Discovery
            }
            _ => Self::Other,
        }
    }
}

/// Returns the answer if there is no response from upstream.
fn unanswered(error: &UpstreamError, media: Media, reaction: ClientReaction) -> Response<Body> {
    let (text, failure): (_, fn(String) -> Failure) = match error {
        UpstreamError::Unreachable { .. } => {
            let text = format!(
                "{error}; until it is reachable, kubefan answers only reads of any version (resourceVersion=0) and \
                 watches of what it has cached"
            );
            (text, if reaction == ClientReaction::Watch { Failure::too_many_requests } else { Failure::unreachable })
        }
        UpstreamError::Unread { .. } => (error.to_string(), Failure::too_many_requests),
        UpstreamError::Tls { .. } | UpstreamError::Credentials { .. } => {
            (format!("{error}; see the kubeconfig that kubefan was started with"), Failure::bad_gateway)
        }
        _ => (error.to_string(), Failure::bad_gateway),
    };
    let warning = (reaction == ClientReaction::Discovery).then(|| Warnings::own(&text));
    let mut response = failure(text).because(cause(error)).response(media);
    if let Some(warning) = warning {
        warning.put(response.headers_mut());
    }
    response
}

/// Returns the type of a failure to get a response from upstream.
fn cause(error: &UpstreamError) -> ErrorType {
    match error {
        UpstreamError::Unreachable { .. } => ErrorType::DestinationUnavailable,
        UpstreamError::Tls { .. } => ErrorType::TlsProtocolError,
        UpstreamError::Credentials { .. } => ErrorType::ProxyConfigurationError,
        UpstreamError::Timeout { .. } => ErrorType::HttpResponseTimeout,
        UpstreamError::InvalidResponse { .. } => ErrorType::HttpProtocolError,
        _ => ErrorType::ConnectionTerminated,
    }
}

fn has_token(headers: &HeaderMap) -> bool {
    headers.contains_key(header::AUTHORIZATION) || WebsocketProtocols::of(headers).has_token()
}

/// Removes the token of a websocket, which was for kubefan: the request carries kubefan's own.
fn remove_websocket_token(headers: &mut HeaderMap) {
    let left = WebsocketProtocols::of(headers).without_token();
    match left {
        Some(left) => drop(headers.insert(header::SEC_WEBSOCKET_PROTOCOL, left)),
        None => drop(headers.remove(header::SEC_WEBSOCKET_PROTOCOL)),
    }
}

fn append_client_address(headers: &mut HeaderMap, client: &ClientInfo) {
    let Some(address) = client.address else { return };
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
mod tests;
