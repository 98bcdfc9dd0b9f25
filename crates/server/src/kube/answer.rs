//! The answer to a request, and the headers of answers from the cache.

use std::{pin::pin, sync::Arc};

use axum::body::Body;
use futures::{
    StreamExt,
    future::{ready, select},
};
use http::{HeaderMap, HeaderValue, Response, header};
use kubefan_cache::warnings::Warnings;
use kubefan_model::{Media, format::ContentCoding};
use tokio_util::sync::CancellationToken;

use super::{
    content_coding, end_on_mode_change::UntilSwitched, fallback::Refused, header_values, negotiate, tunnel::Tunnel,
};
pub use crate::staleness::CACHE_STATUS;
use crate::{staleness::Staleness, watch::OpenedWatch};

/// The answer to a request.
pub enum Answer {
    /// A watch that was opened. The transport sends it.
    Watch(Box<OpenedWatch>),
    /// A whole response. The client must read it without long pauses, because it pins a snapshot or
    /// a place among forwarded requests.
    Response(Response<Body>),
    /// A forwarded response that the client may read at any pace: a watch, a log, a session.
    Forwarded(Response<Body>),
}

/// Marks a response from upstream, in its extensions.
#[derive(Debug, Clone, Copy)]
pub struct FromUpstream;

/// The value of [`CACHE_STATUS`] for an answer from the cache.
pub const HIT: HeaderValue = HeaderValue::from_static("kubefan; hit");
/// The value of [`CACHE_STATUS`] for the answer to `Cache-Control: only-if-cached` if the cache has
/// none.
pub const NOT_CACHED: HeaderValue = HeaderValue::from_static("kubefan; detail=only-if-cached");

/// The headers of a watch.
pub struct WatchHeaders {
    media: Media,
    coding: ContentCoding,
    warnings: Warnings,
    staleness: Staleness,
    cross_origin: Arc<HeaderMap>,
}

impl WatchHeaders {
    /// Returns the headers of this watch, in an encoding.
    pub fn of(opened: &OpenedWatch, media: Media) -> Self {
        let warnings = opened.subscription.warnings();
        let cross_origin = opened.cross_origin.clone();
        let coding = opened.subscription.coding();
        let staleness = opened.staleness;
        Self { media, coding, warnings, staleness, cross_origin }
    }

    /// Puts them, including upstream's warnings.
    pub fn put(&self, headers: &mut HeaderMap) {
        put_headers(self.media.watch_content_type(), headers);
        content_coding::put_headers(self.coding, headers);
        self.warnings.put(headers);
        self.staleness.put(headers);
        header_values::put(&self.cross_origin, headers);
    }
}

fn put_headers(content_type: &'static str, headers: &mut HeaderMap) {
    headers.insert(CACHE_STATUS, HIT);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
}

/// Returns a response from the cache.
pub fn from_cache(content_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    put_headers(content_type, response.headers_mut());
    response
}

/// Returns a refusal, in an encoding that the client accepts.
pub fn refusal(headers: &HeaderMap, refused: &Refused) -> Response<Body> {
    match refused {
        Refused::Plain(failure) => failure.response(failure_media(headers)),
        Refused::ByCache(failure) => {
            let mut response = failure.response(failure_media(headers));
            response.headers_mut().insert(CACHE_STATUS, HIT);
            response
        }
        Refused::NotCached(failure) => {
            let mut response = failure.response(failure_media(headers));
            response.headers_mut().insert(CACHE_STATUS, NOT_CACHED);
            response
        }
        // The status is 200, as for every watch.
        Refused::Event(failure, media) => from_cache(media.watch_content_type(), Body::from(failure.event(*media))),
    }
}

/// Returns the encoding of a failure for a client that sends these headers.
pub fn failure_media(headers: &HeaderMap) -> Media {
    negotiate::negotiate_failure(negotiate::accept_header(headers)).unwrap_or_default()
}

/// Ends a forwarded watch at a drain, because its client then reconnects to another replica, and at
/// a change of the mode of its resource. A websocket is cut off without a close frame, because
/// kubefan does not read its messages. A refusal stays as it is: its body has the reason.
///
/// A watch that upstream breaks off ends as at its timeout, where that is possible. Then its client
/// resumes from its version, also if the last event is incomplete. After an error it would list.
pub(super) fn forwarded_watch(
    mut response: Response<Body>,
    drain: &CancellationToken,
    switched: Option<UntilSwitched>,
) -> Response<Body> {
    let tunnel = response.extensions_mut().remove::<Tunnel>();
    if tunnel.is_none() && !response.status().is_success() {
        return response;
    }
    let drain = drain.clone().cancelled_owned();
    let ends = async move {
        match switched {
            Some(switched) => {
                select(pin!(drain), pin!(switched.ended())).await;
            }
            None => drain.await,
        }
    };
    let Some(tunnel) = tunnel else {
        let can_end_early = can_end_early(response.headers());
        return response.map(|body| {
            let chunks = body.into_data_stream().take_until(Box::pin(ends));
            Body::from_stream(chunks.take_while(move |chunk| {
                let error = chunk.as_ref().err().filter(|_| can_end_early);
                if let Some(error) = error {
                    tracing::debug!(%error, "upstream broke off a forwarded watch");
                }
                ready(error.is_none())
            }))
        });
    };
    tunnel.end_when(ends);
    response
}

/// Whether a body may end at any byte: not if it is compressed, because its decoder needs the rest,
/// and not if its length was told.
fn can_end_early(headers: &HeaderMap) -> bool {
    let is_plain = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"identity");
    headers.get_all(header::CONTENT_ENCODING).iter().all(is_plain) && !headers.contains_key(header::CONTENT_LENGTH)
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use futures::{FutureExt, stream};
    use http::StatusCode;
    use http_body_util::BodyExt;
    use kubefan_access::{
        Mode, Switches,
        modes::{ModeRule, Modes},
    };

    use super::*;
    use crate::kube::path::Path;

    #[tokio::test]
    async fn a_drain_ends_a_forwarded_watch_and_leaves_a_refusal_whole() {
        let drain = CancellationToken::new();
        drain.cancel();
        let sent = async |status| {
            let mut response = Response::new(Body::from("{}"));
            *response.status_mut() = status;
            forwarded_watch(response, &drain, None).into_body().collect().await.unwrap().to_bytes()
        };
        assert_eq!(sent(StatusCode::OK).await, "", "its client reconnects to another replica");
        assert_eq!(sent(StatusCode::SERVICE_UNAVAILABLE).await, "{}");
        assert_eq!(sent(StatusCode::GONE).await, "{}");
    }

    #[tokio::test]
    async fn a_forwarded_watch_that_breaks_ends_so_that_its_client_resumes_if_its_body_may_end_there() {
        let event = "{\"type\":\"ADDED\"}\n";
        for (name, value, is_clean) in [
            ("content-type", "application/json", true),
            ("content-encoding", "identity", true),
            ("content-encoding", "gzip", false),
            ("content-length", "1000", false),
        ] {
            let broken = stream::iter([Ok(event), Err("the connection broke"), Ok("never")]);
            let mut response = Response::new(Body::from_stream(broken));
            response.headers_mut().insert(name, HeaderValue::from_static(value));
            let mut body = forwarded_watch(response, &CancellationToken::new(), None).into_body();
            let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
            assert_eq!(first, event, "{name}: {value}");
            match body.frame().await {
                None => assert!(is_clean, "{name}: {value}"),
                Some(frame) => assert!(frame.is_err() && !is_clean, "{name}: {value}"),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_and_a_change_of_the_mode_end_a_forwarded_websocket() {
        let path = Path { resource: "pods".to_owned(), ..Path::default() };
        let resources = vec!["pods".parse().unwrap()];
        let deny = ModeRule { resources, users: None, groups: None, mode: Mode::Deny };
        for is_drained in [true, false] {
            let switches = Switches::new(Modes::default());
            let drain = CancellationToken::new();
            let tunnel = Tunnel::default();
            tunnel.set(Box::pin(pending()));
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            response.extensions_mut().insert(tunnel.clone());
            let switched = UntilSwitched::new(&switches, &path, None, Mode::Cache);
            let response = forwarded_watch(response, &drain, switched);
            assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
            let mut open = tunnel.take().unwrap();
            assert!((&mut open).now_or_never().is_none(), "until then it stays open");
            if is_drained {
                drain.cancel();
            } else {
                switches.replace(Modes::new(vec![deny.clone()]));
                assert_eq!(switches.end_concerned(500).await, 1);
            }
            assert!(open.now_or_never().is_some(), "by a drain: {is_drained}");
        }
    }
}
