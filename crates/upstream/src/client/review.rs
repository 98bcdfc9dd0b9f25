//! Requests that create a review: the apiserver answers with its verdict and stores nothing.

use std::time::Duration;

use bytes::Bytes;
use http::header;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::time::timeout;

use super::{JSON, Upstream, Verb};
use crate::error::UpstreamError;

/// The longest answer to a review, in bytes.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Maximum time of a review. As long as the apiserver library waits for one.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(10);

/// A kind of review.
pub struct ReviewKind {
    /// The path for new reviews, relative to the server's address.
    pub path: &'static str,
    /// The group and version.
    pub api_version: &'static str,
    /// The kind.
    pub kind: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Request<'a, S> {
    api_version: &'static str,
    kind: &'static str,
    spec: &'a S,
}

#[derive(Deserialize)]
struct Answer<T> {
    status: T,
}

impl Upstream {
    /// Asks for a review and returns its status, or fails after 10 s. An error never quotes the
    /// review, which may contain a token. While the cluster is known from a saved state alone, the
    /// answer counts only after a check of the cluster.
    pub async fn review<T: DeserializeOwned>(
        &self,
        review: &ReviewKind,
        spec: &impl Serialize,
    ) -> Result<T, UpstreamError> {
        let this = self.in_use();
        let &ReviewKind { path, api_version, kind } = review;
        let unusable = |what: &str| UpstreamError::invalid(format_args!("{path}: {what}"));
        let request = Request { api_version, kind, spec };
        let body = serde_json::to_vec(&request).map_err(|_| unusable("the review cannot be written"))?;
        let request = http::Request::post(format!("{}{path}", this.inner.base))
            .header(header::ACCEPT, JSON)
            .header(header::CONTENT_TYPE, JSON)
            .header(header::ACCEPT_ENCODING, "identity")
            .header(header::USER_AGENT, &this.inner.options.user_agent)
            .body(Bytes::from(body))
            .map_err(|_| unusable("not a valid path"))?;
        let answered = this.within_timeout(async {
            let response = this.send_request(Verb::Create, request).await?;
            this.read(response.into_body(), ANSWER_BYTES_MAX).await
        });
        let answer = timeout(REVIEW_TIMEOUT, answered).await.unwrap_or_else(|_| {
            let message = format!("no complete answer from {} within {REVIEW_TIMEOUT:?}", this.inner.server);
            Err(UpstreamError::Timeout { message, retry_after: None })
        })?;
        let Answer { status } =
            serde_json::from_slice(&answer).map_err(|_| unusable("the answer is not the JSON of a review"))?;
        // While a saved state is served, another cluster may answer at its address. Its verdicts
        // would open the state of the saved one to its own users.
        if this.is_assumed() {
            this.confirm().await.map_err(|error| unusable(&error.to_string()))?;
        }
        Ok(status)
    }
}
