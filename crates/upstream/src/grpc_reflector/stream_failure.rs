//! Failures of a stream of the next kubefan.

use kubefan_client::{ClientError, ErrorReason, WatchItem};

use super::stream_state::ANSWER_TIMEOUT;
use crate::{error::UpstreamError, fallback::Attempt, kubefan_client::KubefanClient};

/// The failure of a stream.
pub(super) struct StreamFailure {
    pub(super) error: UpstreamError,
    /// Whether the version that was asked for is of another history.
    pub(super) is_rewritten: bool,
}

impl StreamFailure {
    /// Returns the failure of a stream from its last item.
    pub(super) async fn of(
        kubefan: &KubefanClient,
        attempt: Option<&Attempt>,
        last: Option<Result<WatchItem, ClientError>>,
    ) -> Self {
        let error = match last {
            Some(Err(error) | Ok(WatchItem::Disconnected { error, .. })) => {
                let is_rewritten = error.reason() == ErrorReason::HistoryRewritten;
                return Self { error: kubefan.failed(attempt, &error).await, is_rewritten };
            }
            Some(Ok(_)) => UpstreamError::invalid("a message before the start of the watch"),
            None => UpstreamError::Reset { message: format!("kubefan at {} ended the stream", kubefan.address()) },
        };
        Self { error, is_rewritten: false }
    }
}

/// The failure of a stream that brought nothing for too long.
pub(super) fn stalled() -> UpstreamError {
    let message = format!("the next kubefan sent nothing for {ANSWER_TIMEOUT:?}");
    UpstreamError::Timeout { message, retry_after: None }
}
