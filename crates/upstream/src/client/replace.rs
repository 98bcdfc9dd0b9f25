//! Replaces an object that kubefan may write by its name.

use bytes::Bytes;
use http::header;
use serde_json::Value;

use super::{JSON, Upstream, Verb};
use crate::error::UpstreamError;

/// The longest answer to a replacement, in bytes: the object, and the apiserver's additions.
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// Replaces the server's message.
const NO_MESSAGE: &str = "it does not take this object";

impl Upstream {
    /// Replaces the object at a path, if it still has the version of the last read. Returns false
    /// if it has changed meanwhile.
    ///
    /// # Errors
    /// The apiserver does not take it. An error has nothing of the object.
    pub async fn replace(&self, path: &str, object: &Value) -> Result<bool, UpstreamError> {
        let unusable = |what: &str| UpstreamError::invalid(format_args!("{path}: {what}"));
        let body = serde_json::to_vec(object).map_err(|_| unusable("the object cannot be written"))?;
        let request = http::Request::put(format!("{}{path}", self.inner.base))
            .header(header::ACCEPT, JSON)
            .header(header::CONTENT_TYPE, JSON)
            .header(header::ACCEPT_ENCODING, "identity")
            .header(header::USER_AGENT, &self.inner.options.user_agent)
            .body(Bytes::from(body))
            .map_err(|_| unusable("not a valid path"))?;
        let answered = self.within_timeout(async {
            let response = self.send_request(Verb::Update, request).await?;
            self.read(response.into_body(), ANSWER_BYTES_MAX).await.map(drop)
        });
        match answered.await {
            Ok(()) => Ok(true),
            Err(UpstreamError::Refused { code: 409, .. }) => Ok(false),
            Err(error) => Err(without_text(error)),
        }
    }
}

/// Removes the server's text from a failure: the apiserver, a webhook or a gateway may quote the
/// object that it refuses.
fn without_text(error: UpstreamError) -> UpstreamError {
    use UpstreamError::*;
    let message = NO_MESSAGE.to_owned();
    match error {
        Auth { .. } => Auth { message },
        Forbidden { .. } => Forbidden { message },
        NotFound { .. } => NotFound { message },
        Gone { .. } => Gone { message },
        VersionTooLarge { retry_after, .. } => VersionTooLarge { message, retry_after },
        TooManyRequests { retry_after, .. } => TooManyRequests { message, retry_after },
        // The error may also come from kubefan's own limit. Its kind already says so.
        Timeout { retry_after, .. } => Timeout { message: "no answer in time".to_owned(), retry_after },
        Server { code, retry_after, .. } => Server { code, message, retry_after },
        Refused { code, .. } => Refused { code, message },
        InvalidResponse { .. } => InvalidResponse { message: "the answer to an update".to_owned() },
        // The text comes from the transport, or from kubefan itself.
        Unreachable { .. }
        | Tls { .. }
        | Credentials { .. }
        | Reset { .. }
        | Idle { .. }
        | LineTooLong { .. }
        | Truncated { .. }
        | Cached { .. }
        | TooLarge { .. }
        | Unread { .. }
        | NotCached { .. }
        | Draining { .. } => error,
    }
}
