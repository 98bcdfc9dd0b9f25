//! What every request passes on its way in and out: who may come at all, what is counted, and what ends with kubefan.
//!
//! On a loopback address without TLS any page that a browser here has loaded could read what is cached: a name of its own that suddenly
//! resolves to 127.0.0.1 makes kubefan a part of that page's site (DNS rebinding). Such a request names a host that is neither an address nor
//! `localhost`, or says that it comes from a page of one; `kubectl proxy` tells them apart by the same (`--accept-hosts`).

use std::net::IpAddr;

use axum::body::Body;
use futures::StreamExt;
use http::{Method, Request, Response, StatusCode, Uri, header};

use super::{Answer, CACHE_STATUS, Front, path::Path, proxy::ByUpstream, status::Failure, verb};
use crate::{
    fanout::{Catalog, Refusal, StreamWaker},
    server::listen::Peer,
    telemetry::requests::{AnsweredBy, OTHER, Protocol},
    upstream::client::holding,
};
use kubefan_model::{GroupVersionResource, Media};

/// Parts of a path that may follow an object's name and are looked past for the resource's.
const SUBPATH_PARTS_MAX: usize = 4;

impl<C: Catalog> Front<C> {
    /// Answers a request. A watch rings `bell` when there is something to send.
    pub async fn answer(&self, request: Request<Body>, bell: StreamWaker) -> Answer {
        let (verb, is_watch) = (verb::of(&request), verb::is_watch(&request));
        let uri = request.uri().clone();
        let is_long_running = verb::is_long_running(verb, uri.path());
        let is_head = request.method() == Method::HEAD;
        let mut counted = self.metrics.requests().begin(Protocol::Http, verb, is_long_running);
        let answer = match self.foreign(&request) {
            Some(failure) => Answer::Read(failure.response(Media::Json)),
            None => {
                // A watch that has not begun, for want of a proof or of upstream's answer, would end as soon as it does.
                let drained = async {
                    match is_watch {
                        true => self.reader.drain().cancelled().await,
                        false => std::future::pending().await,
                    }
                };
                tokio::select! {
                    biased;
                    answer = self.answer_admitted(request, bell) => answer,
                    () = drained => Answer::Read(Failure::from(&Refusal::Draining).response(Media::Json)),
                }
            }
        };
        let (code, by) = match &answer {
            Answer::Watch(_) => (StatusCode::OK, AnsweredBy::Cache),
            Answer::Read(response) | Answer::PassedOn(response) => (response.status(), answered_by(response)),
        };
        // Now: it may have started the cache.
        counted.answered(&self.resource(uri.path()), code.as_str(), by);
        match answer {
            Answer::Watch(opened) => Answer::Watch(opened),
            // Nothing may follow the headers that answer a HEAD; HTTP/2 has nobody who would see to that.
            Answer::Read(response) | Answer::PassedOn(response) if is_head && by != AnsweredBy::Upstream => {
                Answer::Read(response.map(|_| Body::empty()))
            }
            // A client comes back to another replica; what is cut off of a log, or of a session, nobody brings back.
            Answer::PassedOn(response) if verb == "watch" => {
                let drain = self.reader.drain().clone().cancelled_owned();
                let until = |body: Body| Body::from_stream(body.into_data_stream().take_until(drain));
                Answer::PassedOn(response.map(until))
            }
            Answer::PassedOn(response) if is_long_running => Answer::PassedOn(response),
            // It is under way until its body has ended.
            Answer::Read(response) | Answer::PassedOn(response) => {
                Answer::Read(response.map(|body| Body::new(holding(body, counted))))
            }
        }
    }

    /// The resource that a path names, where it is cached: the label of a metric, of which there are no more than caches.
    fn resource(&self, path: &str) -> String {
        let parents = std::iter::successors(Some(path), |path| path.rsplit_once('/').map(|(parent, _)| parent));
        let named = parents.take(SUBPATH_PARTS_MAX).find_map(Path::parse);
        let is_cached = |path: &Path| {
            [Media::Json, Media::Protobuf, Media::Table].into_iter().any(|media| self.is_cached(path, media))
        };
        match named.filter(is_cached) {
            Some(Path { group, version, resource, .. }) => {
                GroupVersionResource::new(&group, &version, &resource).to_string()
            }
            None => OTHER.to_owned(),
        }
    }

    /// Says why a request is not let in, where a browser could have been led to send it.
    fn foreign(&self, request: &Request<Body>) -> Option<Failure> {
        let is_tcp = request.extensions().get::<Peer>().is_some_and(|peer| peer.address.is_some());
        let host = host(request).unwrap_or_default();
        let origin = text(request, &header::ORIGIN);
        let is_known = (host.is_empty() || is_no_name(host)) && origin.is_none_or(is_loopback);
        (self.options.is_guarded && is_tcp && !is_known).then(|| {
            let what = match origin {
                Some(origin) if !is_loopback(origin) => format!("comes from a page of {origin:.64?}"),
                _ => format!("is for the host {host:.64?}"),
            };
            Failure::forbidden(format!(
                "the request {what}: on a loopback address without TLS a browser could be \
                 led here, so kubefan answers only for addresses and localhost; name 127.0.0.1 or localhost in the server's URL, or \
                 serve TLS (--tls-cert-file) or a Unix socket (--listen unix:PATH)"
            ))
        })
    }
}

fn answered_by(response: &Response<Body>) -> AnsweredBy {
    let is_refused = matches!(response.status(), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    if response.extensions().get::<ByUpstream>().is_some() {
        AnsweredBy::Upstream
    } else if response.headers().contains_key(CACHE_STATUS) && !is_refused {
        AnsweredBy::Cache
    } else {
        AnsweredBy::Kubefan
    }
}

/// The host that a request is for, with its port.
pub(super) fn host(request: &Request<Body>) -> Option<&str> {
    request.uri().authority().map(|authority| authority.as_str()).or(text(request, &header::HOST))
}

/// A header; empty where it is no text.
pub(super) fn text<'a>(request: &'a Request<Body>, name: &header::HeaderName) -> Option<&'a str> {
    request.headers().get(name).map(|value| value.to_str().unwrap_or_default())
}

/// Whether a host, or an origin, is of this machine.
pub(super) fn is_loopback(host: &str) -> bool {
    matches!(read(host), Some(Host::Localhost)) || matches!(read(host), Some(Host::Address(ip)) if ip.is_loopback())
}

/// Whether a host is `localhost` or an address, which nobody can make resolve to another one.
fn is_no_name(host: &str) -> bool {
    read(host).is_some()
}

enum Host {
    Localhost,
    Address(IpAddr),
}

/// `None`: some name.
fn read(host: &str) -> Option<Host> {
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
    fn names_are_told_from_addresses() {
        for (host, no_name, loopback) in [
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
            assert_eq!((is_no_name(host), is_loopback(host)), (no_name, loopback), "{host}");
        }
    }
}
