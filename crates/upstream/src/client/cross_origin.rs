//! Asks which pages of other sites may read answers of the apiserver.
//!
//! `--cors-allowed-origins` has regular expressions, and nothing shows them. But the apiserver's
//! filter (`WithCORS` in k8s.io/apiserver) writes the same headers into every answer to an origin
//! that it allows, so one small request shows them.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use tokio::time::timeout;

use super::{BodyStream, ERROR_BODY_BYTES_MAX, JSON, Upstream, Verb};
use crate::error::UpstreamError;

/// Maximum time of the answer. A page waits for it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The start of the names of the headers.
const PREFIX: &str = "access-control-";
/// The longest headers that are taken, in bytes. The apiserver's have less than 400.
const HEADERS_BYTES_MAX: usize = 4 << 10;

impl Upstream {
    /// The headers that let pages of an origin read an answer; none if they may not.
    ///
    /// # Errors
    /// The apiserver does not answer within 2 s, or the answer may not be the apiserver's.
    pub async fn cross_origin_headers(&self, origin: &HeaderValue) -> Result<HeaderMap, UpstreamError> {
        let unusable = |what: &str| UpstreamError::invalid(format_args!("the headers for an origin: {what}"));
        // Every user may read it.
        let request = http::Request::get(format!("{}/version", self.inner.base))
            .header(header::ORIGIN, origin)
            .header(header::ACCEPT, JSON)
            .header(header::ACCEPT_ENCODING, "identity")
            .header(header::USER_AGENT, &self.inner.options.user_agent)
            .body(Bytes::new())
            .map_err(|_| unusable("not a valid request"))?;
        let answered = async {
            let (parts, body) = self.exchange(Verb::Get, request).await?.into_parts();
            let body = BodyStream::new(&parts.headers, body, &self.inner.server)?;
            self.read(body, ERROR_BODY_BYTES_MAX).await?;
            Ok(parts)
        };
        let parts = timeout(ANSWER_TIMEOUT, answered).await.unwrap_or_else(|_| {
            let message = format!("no complete answer from {} within {ANSWER_TIMEOUT:?}", self.inner.server);
            Err(UpstreamError::Timeout { message, retry_after: None })
        })?;
        // A load balancer knows no origins.
        if parts.status.is_server_error() || parts.status == StatusCode::TOO_MANY_REQUESTS {
            return Err(UpstreamError::from_response(parts.status, &parts.headers, b""));
        }
        let of_origin = parts.headers.iter().filter(|(name, _)| name.as_str().starts_with(PREFIX));
        let headers: HeaderMap = of_origin.map(|(name, value)| (name.clone(), value.clone())).collect();
        let bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
        if bytes > HEADERS_BYTES_MAX { Err(unusable("they are too long")) } else { Ok(headers) }
    }
}
