//! What a call to kubefan can fail with: no connection, or a status with its machine-readable reason.

use std::{collections::HashMap, error::Error, time::Duration};

use tonic::{Code, Status};
use tonic_types::StatusExt;

/// The domain of kubefan's own error reasons.
pub const ERROR_DOMAIN: &str = "kubefan.dev";

/// How the gRPC library begins its message where an HTTP server has answered that knows nothing of gRPC.
const NO_GRPC_STATUS: &str = "grpc-status header missing";

/// A failed call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The address or the CA file cannot be used.
    #[error("{address:?}: {problem}")]
    Address {
        /// As it was given.
        address: String,
        /// What is wrong with it.
        problem: String,
    },
    /// There was no connection, or it broke.
    #[error("cannot reach kubefan at {address}: {message}")]
    Unreachable {
        /// As it was given.
        address: String,
        /// The system's reason.
        message: String,
    },
    /// kubefan answered with an error.
    #[error("{0}")]
    Status(Box<ServerStatus>),
    /// What kubefan sent does not fit what is held, or was damaged on its way. A watch asks for it again.
    #[error("cannot use what kubefan at {address} sent: {message}")]
    Undecodable {
        /// As it was given.
        address: String,
        /// What was wrong.
        message: String,
    },
    /// The server sent what the contract does not allow.
    #[error("{address} does not speak kubefan's protocol: {message}")]
    Protocol {
        /// As it was given.
        address: String,
        /// What was wrong.
        message: String,
    },
}

/// kubefan's error status.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ServerStatus {
    /// gRPC's code.
    pub code: Code,
    /// The stable reason of kubefan's ErrorInfo; empty where another server or the gRPC library made the status.
    pub reason: String,
    /// The ErrorInfo's metadata.
    pub metadata: HashMap<String, String>,
    /// For humans.
    pub message: String,
    /// The field of the request at fault, such as `target.namespace`; empty where none is.
    pub field: String,
    /// What the server asks to wait before another try.
    pub retry_after: Option<Duration>,
}

impl ClientError {
    /// Reads a status; one that the transport made says that there is no connection.
    pub(super) fn from_status(status: &Status, address: &str) -> Self {
        let info = status.get_details_error_info();
        if info.is_none()
            && let Some(source) = status.source()
        {
            return Self::Unreachable { address: address.to_owned(), message: root_cause(source) };
        }
        if info.is_none() && status.code() == Code::Unimplemented && status.message().contains(NO_GRPC_STATUS) {
            let message =
                "what answers there is no gRPC server (HTTP status 404); kubefan's admin port is none".to_owned();
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

    /// gRPC's code; UNAVAILABLE where there is no connection.
    pub fn code(&self) -> Code {
        match self {
            Self::Address { .. } => Code::InvalidArgument,
            Self::Unreachable { .. } => Code::Unavailable,
            Self::Status(status) => status.code,
            Self::Undecodable { .. } => Code::DataLoss,
            Self::Protocol { .. } => Code::Internal,
        }
    }

    /// The stable reason of kubefan's ErrorInfo; empty where there is none.
    pub fn reason(&self) -> &str {
        match self {
            Self::Status(status) => &status.reason,
            _ => "",
        }
    }

    /// The field of the request at fault; empty where none is.
    pub fn field(&self) -> &str {
        match self {
            Self::Status(status) => &status.field,
            _ => "",
        }
    }

    /// What the server asks to wait before another try.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status(status) => status.retry_after,
            _ => None,
        }
    }

    /// Whether the version to resume from is no longer held. The gRPC library uses the same code for a message that is too
    /// long; kubefan's has a reason.
    pub fn is_expired(&self) -> bool {
        self.code() == Code::OutOfRange && !self.reason().is_empty()
    }

    /// Whether the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Address { .. } | Self::Protocol { .. } => false,
            Self::Unreachable { .. } | Self::Undecodable { .. } => true,
            Self::Status(status) => {
                // UNKNOWN, INTERNAL and CANCELLED are what broken streams and proxies in between look like.
                use Code::*;
                status.retry_after.is_some()
                    || matches!(status.code, Unavailable | Unknown | Internal | Cancelled | Aborted | DeadlineExceeded)
            }
        }
    }
}

/// The innermost error's text.
pub(super) fn root_cause(error: &(dyn Error + 'static)) -> String {
    let mut root = error;
    while let Some(source) = root.source() {
        root = source;
    }
    let text = root.to_string();
    // "Connection refused (os error 111)": the number helps nobody.
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}

#[cfg(test)]
mod tests {
    use tonic_types::ErrorDetails;

    use super::*;

    #[test]
    fn a_status_keeps_its_reason_and_delay() {
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
    fn what_passes_by_itself_is_told_from_what_does_not() {
        let retryable = |code| ClientError::from_status(&Status::new(code, "x"), "h:1").is_retryable();
        assert!([Code::Unavailable, Code::Unknown, Code::Internal].into_iter().all(retryable));
        assert!(
            ![Code::InvalidArgument, Code::NotFound, Code::PermissionDenied, Code::FailedPrecondition]
                .into_iter()
                .any(retryable)
        );
    }
}
