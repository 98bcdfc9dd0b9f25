//! The part of a kubefan's client in the fallback to the apiserver: it notes what its requests
//! find, and may hand them over to the client of the apiserver while the kubefan is away.

use std::sync::{Arc, atomic::Ordering};

use bytes::Bytes;
use http::{Response, StatusCode, Version, header};
use tokio::time::timeout;

use super::{BodyStream, ERROR_BODY_BYTES_MAX, Tier, Upstream, UpstreamBody, Verb};
use crate::{
    error::UpstreamError,
    fallback::{Attempt, Fallback, PROBE_TIMEOUT, Verdict, is_through_kubefan},
};

/// The path of gRPC's health service, which kubefan serves on its data port without credentials.
const HEALTH_PATH: &str = "/grpc.health.v1.Health/Check";
/// A gRPC message without content: the question about the server as a whole.
const HEALTH_REQUEST: &[u8] = &[0, 0, 0, 0, 0];
/// A gRPC message with the field status: SERVING.
const HEALTH_SERVING: &[u8] = &[0, 0, 0, 0, 2, 0x08, 0x01];

impl Upstream {
    /// Returns the same client, of a kubefan, which notes what its requests find.
    pub fn noting(self, fallback: &Fallback) -> Self {
        Self { tier: Some(Tier { fallback: fallback.clone(), direct: None }), ..self }
    }

    /// As [`Self::noting`]. While the kubefan is away, requests go to `apiserver`.
    pub fn falling_back(self, fallback: &Fallback, apiserver: Self) -> Self {
        Self { tier: Some(Tier { fallback: fallback.clone(), direct: Some(Arc::new(apiserver)) }), ..self }
    }

    /// Returns the same client, before its first request, for the cluster that another one has
    /// identified or identifies.
    pub fn of_cluster_of(self, other: &Self) -> Self {
        Self { identity: Arc::new(other.identity.sharing()), ..self }
    }

    /// Returns the client that requests go to now.
    pub(super) fn in_use(&self) -> &Self {
        match &self.tier {
            Some(Tier { fallback, direct: Some(direct) }) if fallback.is_usable() && !direct.is_doubted() => direct,
            _ => self,
        }
    }

    /// Begins a request, to note its result.
    pub(super) fn attempt(&self) -> Option<Attempt> {
        self.tier.as_ref().map(|tier| tier.fallback.attempt())
    }

    /// Whether the kubefan serves, by gRPC's health service, which costs it no review and no
    /// request to the apiserver. A server in front of it that speaks only HTTP/1.1 cannot pass the
    /// question on: there, any answer of a kubefan but a 5xx is enough, and the 505 to this
    /// question.
    pub(crate) async fn serves(&self) -> bool {
        let request = http::Request::post(format!("{}{HEALTH_PATH}", self.inner.base))
            .header(header::CONTENT_TYPE, "application/grpc")
            .header(header::TE, "trailers")
            .header(header::USER_AGENT, &self.inner.options.user_agent)
            .body(Bytes::from_static(HEALTH_REQUEST));
        let Ok(request) = request else { return false };
        let Ok(response) = self.exchange(Verb::Get, request).await else { return false };
        let status = response.status();
        // kubefan's own answer to gRPC over HTTP/1.1. A proxy may hand it on over HTTP/2.
        if status == StatusCode::HTTP_VERSION_NOT_SUPPORTED {
            return is_through_kubefan(response.headers());
        }
        if response.version() < Version::HTTP_2 {
            return !status.is_server_error() && is_through_kubefan(response.headers());
        }
        let (parts, body) = response.into_parts();
        let Ok(body) = BodyStream::new(&parts.headers, body, &self.inner.server) else { return false };
        self.read(body, ERROR_BODY_BYTES_MAX).await.is_ok_and(|body| body == HEALTH_SERVING)
    }

    /// Whether the kubefan says within [`PROBE_TIMEOUT`] that it serves.
    pub(crate) async fn serves_in_time(&self) -> bool {
        timeout(PROBE_TIMEOUT, self.serves()).await.unwrap_or(false)
    }

    /// Whether the answer to the last check of the cluster has come through a kubefan.
    pub(crate) fn is_kubefan(&self) -> bool {
        self.inner.is_kubefan.load(Ordering::Relaxed)
    }
}

impl Attempt {
    /// Notes the end of a request.
    pub(super) fn exchanged(&self, verb: Verb, result: &Result<Response<UpstreamBody>, UpstreamError>) {
        match result {
            Ok(response) => self.answered(response.status(), response.headers(), is_read(verb)),
            // Another program may listen there, or the kubefan has a certificate of another CA.
            Err(error) if error.is_away() || matches!(error, UpstreamError::Tls { .. }) => self.note(Verdict::Lost),
            Err(_) => {}
        }
    }
}

fn is_read(verb: Verb) -> bool {
    matches!(verb, Verb::List | Verb::Watch)
}
