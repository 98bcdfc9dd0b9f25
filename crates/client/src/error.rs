//! Errors of the client library: a failed connection, or a gRPC status with its machine-readable
//! reason.

use std::{collections::HashMap, error::Error, time::Duration};

use tonic::{Code, Status};
use tonic_types::StatusExt;

/// The `google.rpc.ErrorInfo` domain of kubefan's error reasons.
pub const ERROR_DOMAIN: &str = "kubefan.dev";

/// Part of tonic's error message for a response of an HTTP server that does not speak gRPC.
const NO_GRPC_STATUS: &str = "grpc-status header missing";

/// The error of a call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The address or the CA file is invalid. A retry cannot succeed.
    #[error("{address:?}: {problem}")]
    Address {
        /// The address, as the caller gave it.
        address: String,
        /// The reason.
        problem: String,
    },
    /// The connection could not be made, or it broke.
    #[error("cannot reach kubefan at {address}: {message}")]
    Unreachable {
        /// The address, as the caller gave it.
        address: String,
        /// The operating system's or TLS library's reason.
        message: String,
    },
    /// kubefan answered with a gRPC error status.
    #[error("{0}")]
    Status(Box<ServerStatus>),
    /// A message was damaged in transit, or its delta does not fit the client's delta base. A watch
    /// handles this itself: it requests the message again.
    #[error("cannot decode a message from kubefan at {address}: {message}")]
    Undecodable {
        /// The address, as the caller gave it.
        address: String,
        /// The reason.
        message: String,
    },
    /// The server violated the protocol of `kubefan.v1alpha1.WatchService`. A retry cannot succeed.
    #[error("{address} does not speak kubefan's protocol: {message}")]
    Protocol {
        /// The address, as the caller gave it.
        address: String,
        /// The reason.
        message: String,
    },
}

/// A gRPC error status of kubefan. The status codes of each call are documented in
/// `proto/kubefan/v1alpha1/watch.proto`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ServerStatus {
    /// The gRPC status code.
    pub code: Code,
    /// The stable `google.rpc.ErrorInfo` reason, such as `RESOURCE_VERSION_TOO_LARGE`. Empty if
    /// another server or the gRPC library produced the status.
    pub reason: String,
    /// The metadata of the ErrorInfo.
    pub metadata: HashMap<String, String>,
    /// The message for people.
    pub message: String,
    /// The invalid field of the request (`google.rpc.BadRequest`), such as `target.namespace`.
    /// Empty if there is none.
    pub field: String,
    /// The delay that the server asks for before a retry (`google.rpc.RetryInfo`).
    pub retry_after: Option<Duration>,
}

impl ClientError {
    /// Converts a status. A status that tonic's transport created becomes [`Self::Unreachable`].
    pub(super) fn from_status(status: &Status, address: &str) -> Self {
        let info = status.get_details_error_info();
        if info.is_none()
            && let Some(source) = status.source()
        {
            return Self::Unreachable { address: address.to_owned(), message: root_cause(source) };
        }
        if info.is_none() && status.code() == Code::Unimplemented && status.message().contains(NO_GRPC_STATUS) {
            let message = "that port does not serve gRPC (HTTP status 404); is it kubefan's admin port?".to_owned();
            return Self::Protocol { address: address.to_owned(), message };
        }
        let info = info.filter(|info| info.domain == ERROR_DOMAIN);
        let (reason, metadata) = info.map(|info| (info.reason, info.metadata)).unwrap_or_default();
        Self::Status(Box::new(ServerStatus {
            code: status.code(),
            reason,
            metadata,
            message: if status.message().is_empty() {
                status.code().description().to_owned()
            } else {
                status.message().to_owned()
            },
            field: status
                .get_details_bad_request()
                .and_then(|bad| bad.field_violations.into_iter().next())
                .map(|violation| violation.field)
                .unwrap_or_default(),
            retry_after: status.get_details_retry_info().and_then(|info| info.retry_delay),
        }))
    }

    /// The gRPC status code. For errors without a status: `INVALID_ARGUMENT` for an invalid
    /// address, `UNAVAILABLE` without a connection, `DATA_LOSS` for an undecodable message, and
    /// `INTERNAL` for a protocol violation.
    pub fn code(&self) -> Code {
        match self {
            Self::Address { .. } => Code::InvalidArgument,
            Self::Unreachable { .. } => Code::Unavailable,
            Self::Status(status) => status.code,
            Self::Undecodable { .. } => Code::DataLoss,
            Self::Protocol { .. } => Code::Internal,
        }
    }

    /// The stable reason of kubefan's ErrorInfo. Empty if there is none.
    pub fn reason(&self) -> &str {
        match self {
            Self::Status(status) => &status.reason,
            _ => "",
        }
    }

    /// The invalid field of the request. Empty if there is none.
    pub fn field(&self) -> &str {
        match self {
            Self::Status(status) => &status.field,
            _ => "",
        }
    }

    /// The delay that the server asks for before a retry, if any.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status(status) => status.retry_after,
            _ => None,
        }
    }

    /// Whether history cannot resume from the requested resource version (`OUT_OF_RANGE` with a
    /// reason). The gRPC library uses the same code for a message that is too long, but without a
    /// reason.
    pub fn is_expired(&self) -> bool {
        self.code() == Code::OutOfRange && !self.reason().is_empty()
    }

    /// Whether a retry of the same call may succeed.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Address { .. } | Self::Protocol { .. } => false,
            Self::Unreachable { .. } | Self::Undecodable { .. } => true,
            Self::Status(status) => {
                // Broken streams and intermediate proxies surface as UNKNOWN, INTERNAL or
                // CANCELLED.
                use Code::*;
                status.retry_after.is_some()
                    || matches!(status.code, Unavailable | Unknown | Internal | Cancelled | Aborted | DeadlineExceeded)
            }
        }
    }
}

/// The text of the innermost error.
pub(super) fn root_cause(error: &(dyn Error + 'static)) -> String {
    let mut root = error;
    while let Some(source) = root.source() {
        root = source;
    }
    let text = root.to_string();
    // Cuts the error number off, as in "Connection refused (os error 111)".
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}

#[cfg(test)]
mod tests {
    use tonic_types::ErrorDetails;

    use super::*;

    #[test]
    fn a_status_retains_its_reason_and_retry_delay() {
        let mut details =
            ErrorDetails::with_error_info("EXPIRED", ERROR_DOMAIN, [("oldest".to_owned(), "7".to_owned())]);
        details.set_retry_info(Some(Duration::from_secs(3)));
        let status = Status::with_error_details(Code::OutOfRange, "too old resource version: 5 (7)", details);
        let error = ClientError::from_status(&status, "h:1");
        assert!(error.is_expired());
        assert_eq!(
            (error.code(), error.reason(), error.retry_after()),
            (Code::OutOfRange, "EXPIRED", Some(Duration::from_secs(3)))
        );
        assert_eq!(error.to_string(), "too old resource version: 5 (7)");
    }

    #[test]
    fn a_message_that_is_too_long_is_not_an_expired_version() {
        let error = ClientError::from_status(&Status::out_of_range("decoded message length too large"), "h:1");
        assert!(!error.is_expired() && !error.is_retryable());
    }

    #[test]
    fn only_transient_errors_are_retryable() {
        let retryable = |code| ClientError::from_status(&Status::new(code, "x"), "h:1").is_retryable();
        assert!([Code::Unavailable, Code::Unknown, Code::Internal].into_iter().all(retryable));
        assert!(
            ![Code::InvalidArgument, Code::NotFound, Code::PermissionDenied, Code::FailedPrecondition]
                .into_iter()
                .any(retryable)
        );
    }
}
