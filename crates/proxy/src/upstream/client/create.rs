//! Requests that create a review: the apiserver answers with its verdict and stores nothing.

use std::time::Duration;

use bytes::Bytes;
use http::header;
use serde::{Serialize, de::DeserializeOwned};
use tokio::time::timeout;

use super::{JSON, Upstream, Verb};
use crate::upstream::error::UpstreamError;

/// The longest answer to a review, in bytes.
const ANSWER_BYTES_MAX: usize = 1 << 20;

impl Upstream {
    /// Creates an object at a path relative to the server's, and returns the apiserver's answer
    /// within `limit`. An error never quotes the object, which may contain a token.
    pub async fn create<T: DeserializeOwned>(
        &self,
        path: &str,
        object: &impl Serialize,
        limit: Duration,
    ) -> Result<T, UpstreamError> {
        let unusable = |what: &str| UpstreamError::invalid(format_args!("{path}: {what}"));
        let body = serde_json::to_vec(object).map_err(|_| unusable("the object cannot be written"))?;
        let request = http::Request::post(format!("{}{path}", self.inner.base))
            .header(header::ACCEPT, JSON)
            .header(header::CONTENT_TYPE, JSON)
            .header(header::ACCEPT_ENCODING, "identity")
            .header(header::USER_AGENT, &self.inner.options.user_agent)
            .body(Bytes::from(body))
            .map_err(|_| unusable("not a valid path"))?;
        let answered = self.within_timeout(async {
            let response = self.send_request(Verb::Create, request).await?;
            self.read(response.into_body(), ANSWER_BYTES_MAX).await
        });
        let answer = timeout(limit, answered).await.unwrap_or_else(|_| {
            let message = format!("no complete answer from {} within {limit:?}", self.inner.server);
            Err(UpstreamError::Timeout { message, retry_after: None })
        })?;
        serde_json::from_slice(&answer).map_err(|_| unusable("the answer is not the JSON of a review"))
    }
}
