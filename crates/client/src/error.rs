//! Errors of the client library: a failed connection, a gRPC status of kubefan with its
//! machine-readable reason, or an error of the Kubernetes API.

mod cause;

use std::{collections::HashMap, error::Error as _, time::Duration};

use tonic::{Code, Status};
use tonic_types::StatusExt;

use cause::NEEDS_TLS;
pub(crate) use cause::root_cause;
pub use kubefan_common::api_status::{ApiStatus, ApiStatusCause};
pub use kubefan_common::reasons::{ERROR_DOMAIN, error_metadata};
use kubefan_common::{api_status::RETRY_AFTER_MAX, reasons::ErrorReason};

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
        /// The operating system's reason, or the fault in TLS.
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
    /// A Kubernetes API answered with an error, over HTTP.
    #[error("{0}")]
    Api(Box<ApiStatus>),
    /// A connection over HTTP could not be made, or it broke.
    #[error("cannot reach {address}: {message}")]
    HttpUnreachable {
        /// Scheme, host and port.
        address: String,
        /// The operating system's or HTTP library's reason, or the fault in TLS.
        message: String,
    },
    /// The answer is not one of a Kubernetes API: broken JSON, a redirect, a web page.
    #[error("{address} does not answer as a Kubernetes API: {message}")]
    HttpProtocol {
        /// Scheme, host and port.
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
    /// The delay that the server asks for before a retry (`google.rpc.RetryInfo`), at most 300 s.
    pub retry_after: Option<Duration>,
}

impl ClientError {
    /// Converts a status. A status that tonic's transport created becomes [`Self::Unreachable`].
    pub(crate) fn from_status(status: &Status, address: &str) -> Self {
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
        if info.as_ref().is_some_and(|info| info.reason == ErrorReason::TlsRequired) {
            return Self::Unreachable { address: address.to_owned(), message: NEEDS_TLS.to_owned() };
        }
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
            retry_after: status
                .get_details_retry_info()
                .and_then(|info| info.retry_delay)
                .map(|delay| delay.min(RETRY_AFTER_MAX)),
        }))
    }

    /// The gRPC status code. For errors without a status: `INVALID_ARGUMENT` for an invalid
    /// address, `UNAVAILABLE` without a connection, `DATA_LOSS` for an undecodable message, and
    /// `INTERNAL` for a protocol violation. For an error of a Kubernetes API, the code that fits
    /// its HTTP status.
    pub fn code(&self) -> Code {
        match self {
            Self::Address { .. } => Code::InvalidArgument,
            Self::Unreachable { .. } | Self::HttpUnreachable { .. } => Code::Unavailable,
            Self::Status(status) => status.code,
            Self::Undecodable { .. } => Code::DataLoss,
            Self::Protocol { .. } | Self::HttpProtocol { .. } => Code::Internal,
            Self::Api(status) => code_of(status),
        }
    }

    /// The stable reason: of kubefan's ErrorInfo, or of the Kubernetes Status. Empty if there is
    /// none.
    pub fn reason(&self) -> &str {
        match self {
            Self::Status(status) => &status.reason,
            Self::Api(status) => &status.reason,
            _ => "",
        }
    }

    /// The invalid field of the request. Empty if there is none.
    pub fn field(&self) -> &str {
        match self {
            Self::Status(status) => &status.field,
            Self::Api(status) => {
                status.causes.iter().map(|cause| &*cause.field).find(|it| !it.is_empty()).unwrap_or("")
            }
            _ => "",
        }
    }

    /// The delay that the server asks for before a retry, if any.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status(status) => status.retry_after,
            Self::Api(status) => status.retry_after,
            _ => None,
        }
    }

    /// Whether history cannot resume from the requested resource version (`OUT_OF_RANGE` with a
    /// reason; 410 from a Kubernetes API). The gRPC library uses the same code for a message that
    /// is too long, but without a reason.
    pub fn is_expired(&self) -> bool {
        match self {
            Self::Api(status) => status.is_expired(),
            _ => self.code() == Code::OutOfRange && !self.reason().is_empty(),
        }
    }

    /// Whether the server has not reached the requested resource version.
    pub fn is_resource_version_too_large(&self) -> bool {
        match self {
            Self::Api(status) => status.is_resource_version_too_large(),
            _ => self.reason() == ErrorReason::TooLarge,
        }
    }

    /// Whether kubefan has not read the resource completely yet.
    pub fn is_not_synced(&self) -> bool {
        matches!(self, Self::Status(status) if status.reason == ErrorReason::NotSynced)
    }

    /// Whether the server refuses a watch because it was to start with the current state
    /// (`sendInitialEvents`). A list followed by a watch may then succeed.
    pub fn is_watch_list_unsupported(&self) -> bool {
        matches!(self, Self::Api(status) if status.is_watch_list_unsupported())
    }

    /// Whether there was no connection, or it broke.
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::HttpUnreachable { .. })
    }

    /// Whether a retry of the same call may succeed.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Address { .. } | Self::Protocol { .. } => false,
            Self::Unreachable { .. } | Self::Undecodable { .. } => true,
            // A load balancer may answer in place of the server for a while.
            Self::HttpUnreachable { .. } | Self::HttpProtocol { .. } => true,
            Self::Api(status) => status.is_retryable(),
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

impl From<ApiStatus> for ClientError {
    fn from(status: ApiStatus) -> Self {
        Self::Api(Box::new(status))
    }
}

/// The gRPC code for an error of a Kubernetes API.
fn code_of(status: &ApiStatus) -> Code {
    match status.code {
        _ if status.is_expired() => Code::OutOfRange,
        400 | 406 | 422 => Code::InvalidArgument,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::NotFound,
        405 | 501 => Code::Unimplemented,
        408 | 504 => Code::DeadlineExceeded,
        409 => Code::Aborted,
        429 => Code::ResourceExhausted,
        502 | 503 => Code::Unavailable,
        500..=599 => Code::Internal,
        _ => Code::Unknown,
    }
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
    fn a_retry_delay_is_never_longer_than_the_limit() {
        let details = ErrorDetails::with_retry_info(Some(Duration::from_secs(i64::MAX.unsigned_abs())));
        let status = Status::with_error_details(Code::Unavailable, "later", details);
        assert_eq!(ClientError::from_status(&status, "h:1").retry_after(), Some(RETRY_AFTER_MAX));
    }

    #[test]
    fn a_call_without_tls_to_a_port_that_needs_it_names_the_remedy() {
        let details = ErrorDetails::with_error_info(ErrorReason::TlsRequired.as_str(), ERROR_DOMAIN, HashMap::new());
        let error = ClientError::from_status(&Status::with_error_details(Code::Unavailable, "use TLS", details), "h:1");
        assert_eq!(
            error.to_string(),
            "cannot reach kubefan at h:1: the server needs TLS on this port; use an https:// address"
        );
    }

    #[test]
    fn a_message_that_is_too_long_is_not_an_expired_version() {
        let error = ClientError::from_status(&Status::out_of_range("decoded message length too large"), "h:1");
        assert!(!error.is_expired() && !error.is_retryable());
    }

    #[test]
    fn a_kubernetes_status_answers_the_same_questions_as_one_of_kubefan() {
        let api = |code, reason: &str| ClientError::from(ApiStatus::new(code, reason, "x"));
        for expired in [api(410, "Expired"), api(410, "Gone"), api(410, ""), api(200, "Expired")] {
            assert!(expired.is_expired() && !expired.is_retryable());
            assert_eq!(expired.code(), Code::OutOfRange);
        }
        let codes = [
            (400, Code::InvalidArgument, false),
            (401, Code::Unauthenticated, false),
            (403, Code::PermissionDenied, false),
            (404, Code::NotFound, false),
            (408, Code::DeadlineExceeded, true),
            (422, Code::InvalidArgument, false),
            (429, Code::ResourceExhausted, true),
            (500, Code::Internal, true),
            (503, Code::Unavailable, true),
            (504, Code::DeadlineExceeded, true),
        ];
        for (http, grpc, retryable) in codes {
            let error = api(http, "");
            assert_eq!((error.code(), error.is_retryable(), error.is_expired()), (grpc, retryable, false), "{http}");
        }
        let unreachable = ClientError::HttpUnreachable { address: "https://h:6443".into(), message: "refused".into() };
        assert_eq!(unreachable.to_string(), "cannot reach https://h:6443: refused");
        assert!(unreachable.is_unreachable() && unreachable.is_retryable());
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
