//! Errors of kubefan that begin an outage, and errors of the apiserver that end the fallback. An
//! error of kubefan itself must not begin one: its apiserver may be in trouble already.

use kubefan_common::reasons::ErrorReason;
use tonic::Code;

use crate::error::ClientError;

/// State of kubefan, as an error of it shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reachability {
    /// kubefan cannot be reached.
    Gone,
    /// kubefan is reachable, and asks to try again later.
    Refused,
    /// kubefan has answered. A retry of the same request would bring the same answer.
    Answered,
}

impl Reachability {
    pub(super) fn of(error: &ClientError) -> Self {
        let gone = match error {
            error if error.is_unreachable() => true,
            // kubefan answers no reads of the resource until its operator switches it back.
            ClientError::Status(status) if status.reason == ErrorReason::Passthrough => true,
            // kubefan's own errors have a reason or a delay. Others are of a proxy in between.
            ClientError::Status(status) => {
                use Code::{Aborted, Cancelled, DeadlineExceeded, Internal, Unavailable, Unknown};
                status.reason.is_empty()
                    && status.retry_after.is_none()
                    && matches!(status.code, Unavailable | Unknown | Internal | Cancelled | Aborted | DeadlineExceeded)
            }
            ClientError::Api(status) => status.reason.is_empty() && matches!(status.code, 502..=504),
            _ => false,
        };
        match error {
            _ if gone => Self::Gone,
            error if error.is_retryable() && !error.is_expired() => Self::Refused,
            _ => Self::Answered,
        }
    }
}

/// Whether this error of the apiserver ends the fallback for the rest of the outage.
pub(super) fn ends_fallback(error: &ClientError) -> bool {
    error.retry_after().is_some()
        || error.code() == Code::ResourceExhausted
        || error.is_expired()
        || !error.is_retryable()
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, time::Duration};

    use super::{Reachability::*, *};
    use crate::error::ServerStatus;

    fn status(code: Code, reason: &str, retry_after: Option<Duration>) -> ClientError {
        ClientError::Status(Box::new(ServerStatus {
            code,
            reason: reason.to_owned(),
            metadata: HashMap::new(),
            message: String::new(),
            field: String::new(),
            retry_after,
        }))
    }

    #[test]
    fn a_connection_that_fails_begins_an_outage_over_either_protocol() {
        let address = "https://kubefan".to_owned();
        let message = "connection refused".to_owned();
        let error = ClientError::HttpUnreachable { address, message };
        assert_eq!(Reachability::of(&error), Gone);
    }

    #[test]
    fn only_errors_of_others_and_passthrough_begin_an_outage() {
        let soon = Some(Duration::from_secs(1));
        let not_synced = ErrorReason::NotSynced.as_str();
        let passthrough = ErrorReason::Passthrough.as_str();
        for (code, reason, retry_after, expected) in [
            (Code::Unavailable, "", None, Gone),
            (Code::Unavailable, passthrough, soon, Gone),
            (Code::Unavailable, "", soon, Refused),
            (Code::Unavailable, not_synced, None, Refused),
            (Code::OutOfRange, "EXPIRED", soon, Answered),
            (Code::PermissionDenied, "", None, Answered),
        ] {
            let found = Reachability::of(&status(code, reason, retry_after));
            assert_eq!(found, expected, "{code:?} {reason:?} {retry_after:?}");
        }
    }
}
