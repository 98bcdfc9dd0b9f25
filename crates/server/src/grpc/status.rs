//! Maps refusals and stream ends to gRPC status codes. No other file does.
//!
//! Every error carries an ErrorInfo (domain `kubefan.dev`, a stable reason). A temporary error also
//! carries a RetryInfo, and an invalid argument a BadRequest that names the field (google.rpc
//! `error_details.proto`).

use std::{collections::HashMap, time::Duration};

use http::{HeaderMap, HeaderValue};
use kubefan_cache::{Expired, Refusal, StreamEnd};
use kubefan_common::text::without_user;
use kubefan_model::ResourceVersion;
use tonic::{Code, Status, metadata::MetadataValue};
use tonic_types::{ErrorDetails, StatusExt};

use kubefan_audit::NotRecorded;

const DOMAIN: &str = "kubefan.dev";

/// Delay before clients retry after a temporary error; they add their own jitter.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// The status of a request that was refused.
pub fn refused(refusal: &Refusal) -> Status {
    let message = match refusal {
        Refusal::Denied(_) => shortened(refusal.to_string()),
        // Upstream's errors name kubefan's own user.
        _ => shortened(without_user(&refusal.to_string())),
    };
    match refusal {
        Refusal::NotSynced { .. } => temporary(Code::Unavailable, "NOT_SYNCED", message),
        Refusal::Failing { cause, .. } => failing(message, cause),
        Refusal::Stale { .. } => temporary(Code::Unavailable, "STALE", message),
        Refusal::NotFound(_) => failed(Code::NotFound, "RESOURCE_NOT_FOUND", message),
        Refusal::Forbidden(_) => failed(Code::PermissionDenied, "UPSTREAM_FORBIDDEN", message),
        Refusal::Unauthenticated(_) => failed(Code::Unauthenticated, "UNAUTHENTICATED", message),
        Refusal::Denied(_) => failed(Code::PermissionDenied, "FORBIDDEN", message),
        Refusal::Expired(expired) => too_old(expired),
        Refusal::Rewritten(_) => failed(Code::OutOfRange, "HISTORY_REWRITTEN", message),
        Refusal::Future { .. } => temporary(Code::Unavailable, "RESOURCE_VERSION_TOO_LARGE", message),
        Refusal::Invalid { field, message } => invalid(field, shortened(message.clone())),
        Refusal::NotEncoded(_) => invalid("encoding", format!("{message}; request ENCODING_JSON or ENCODING_ZSTD")),
        Refusal::NotCached(_) => failed(Code::FailedPrecondition, "NOT_CACHED", message),
        Refusal::Exhausted(_) | Refusal::NoRoom(_) => temporary(Code::ResourceExhausted, "LIMIT_REACHED", message),
        Refusal::RateLimited { retry_after, .. } => {
            temporary_for(*retry_after, Code::ResourceExhausted, "LIMIT_REACHED", message)
        }
        Refusal::Unavailable(_) => temporary(Code::Unavailable, "UPSTREAM_UNAVAILABLE", message),
        Refusal::Switched(_) => temporary(Code::Unavailable, "PASSTHROUGH", message),
        Refusal::Draining => temporary(Code::Unavailable, "DRAINING", message),
    }
}

/// Returns the status of a resource whose first list fails. The metadata has the apiserver's cause
/// alone: a kubefan behind this one tells it to its own readers.
fn failing(message: String, cause: &str) -> Status {
    let metadata = HashMap::from([("cause".to_owned(), shortened(without_user(cause)))]);
    let mut details = ErrorDetails::with_error_info("NOT_SYNCED", DOMAIN, metadata);
    details.set_retry_info(Some(RETRY_DELAY));
    Status::with_error_details(Code::Unavailable, message, details)
}

/// The name of a code in the gRPC specification.
pub fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

/// The status that a stream ends with; `None` for a clean end. `sent` is the version to resume from
/// if everything up to it was sent: a client that is asked to come back gets it again.
pub fn ended(end: &StreamEnd, sent: Option<ResourceVersion>) -> Option<Status> {
    let message = without_user(&end.to_string());
    match end {
        StreamEnd::Timeout | StreamEnd::Cancelled => None,
        StreamEnd::Deadline => Some(deadline_exceeded()),
        StreamEnd::SnapshotStalled(_) => Some(temporary(Code::ResourceExhausted, "SNAPSHOT_STALLED", message)),
        StreamEnd::Overloaded(_) => Some(temporary(Code::ResourceExhausted, "LIMIT_REACHED", message)),
        StreamEnd::Expired(expired) => Some(too_old(expired)),
        StreamEnd::NotFound(_) => Some(failed(Code::NotFound, "RESOURCE_NOT_FOUND", message)),
        StreamEnd::Forbidden(_) => Some(failed(Code::PermissionDenied, "UPSTREAM_FORBIDDEN", message)),
        StreamEnd::Rewritten(_) => Some(failed(Code::OutOfRange, "HISTORY_REWRITTEN", message)),
        StreamEnd::Stopped(_) => Some(temporary(Code::Unavailable, "STOPPED", message)),
        StreamEnd::Revoked(message) => Some(failed(Code::PermissionDenied, "FORBIDDEN", shortened(message.clone()))),
        StreamEnd::Reauthenticate(_) => Some(temporary(Code::Unavailable, "REAUTHENTICATE", message)),
        StreamEnd::Switched(_) => Some(temporary(Code::Unavailable, "SWITCHED", message)),
        StreamEnd::Disconnected => Some(temporary(Code::Unavailable, "DISCONNECTED", message)),
        StreamEnd::Draining => Some(come_back(RETRY_DELAY, "DRAINING", message, sent)),
        StreamEnd::Aged => Some(come_back(Duration::ZERO, "CONNECTION_AGE", message, sent)),
        StreamEnd::Rebalanced => Some(come_back(Duration::ZERO, "REBALANCED", message, sent)),
    }
}

/// The status of a stream that continues elsewhere.
fn come_back(delay: Duration, reason: &str, message: String, sent: Option<ResourceVersion>) -> Status {
    let metadata = sent.map(|version| ("resume_version".to_owned(), version.least_reached().to_string()));
    let mut details = ErrorDetails::with_error_info(reason, DOMAIN, metadata.into_iter().collect::<HashMap<_, _>>());
    details.set_retry_info(Some(delay));
    Status::with_error_details(Code::Unavailable, message, details)
}

/// Replaces a status that the gRPC library made by one with a reason of kubefan's. The library
/// reports a request that is too long as OUT_OF_RANGE, which in kubefan's API means that a resource
/// version is too old.
pub fn replace_library_status<B: Default>(response: http::Response<B>) -> http::Response<B> {
    // Present if the response consists of a status only.
    let Some(status) = response.extensions().get::<Status>() else { return response };
    if status.get_details_error_info().is_some() {
        return response;
    }
    let message = status.message();
    match status.code() {
        Code::OutOfRange => too_long(message).into_http(),
        // The library failed before kubefan's code ran, so the request is at fault.
        Code::Internal => malformed(message).into_http(),
        _ => response,
    }
}

/// The status of a call without TLS on a port that needs it. Without a retry delay: a retry cannot
/// succeed.
pub fn needs_tls(message: &str) -> Status {
    failed(Code::Unavailable, "TLS_REQUIRED", message.to_owned())
}

/// The status of a request that exceeds the size limit.
pub fn too_long(message: &str) -> Status {
    let message = format!("the request is too long (--max-message-size): {message}");
    failed(Code::ResourceExhausted, "REQUEST_TOO_LONG", message)
}

/// The status of a request that cannot be decoded.
pub fn malformed(message: &str) -> Status {
    failed(Code::InvalidArgument, "MALFORMED_REQUEST", format!("the request cannot be decoded: {message}"))
}

/// The status of a compressed request.
pub fn compressed() -> Status {
    let message = "the request is compressed; kubefan accepts only uncompressed requests".to_owned();
    let mut status = failed(Code::Unimplemented, "COMPRESSED_REQUEST", message);
    status.metadata_mut().insert("grpc-accept-encoding", MetadataValue::from_static("identity"));
    status
}

/// The status of a call whose deadline has passed.
pub fn deadline_exceeded() -> Status {
    failed(Code::DeadlineExceeded, "DEADLINE_EXCEEDED", StreamEnd::Deadline.to_string())
}

/// The status of a call whose request did not arrive in time.
pub fn request_timeout(timeout: Duration) -> Status {
    let message = format!("the request did not arrive within {timeout:?}");
    failed(Code::DeadlineExceeded, "REQUEST_TIMEOUT", message)
}

/// The status of a call beyond the limit of those whose request has not arrived yet.
pub fn too_many_pending(limit: usize) -> Status {
    let message = format!(
        "kubefan waits for the requests of at most {limit} calls, and the last places are for clients with fewer of them \
         (--calls-pending-max)"
    );
    temporary(Code::ResourceExhausted, "LIMIT_REACHED", message)
}

/// The status of a call that is answered only if it is recorded.
pub fn not_recorded(error: NotRecorded) -> Status {
    failed(Code::Internal, "NOT_RECORDED", error.to_string())
}

/// The status of an unknown method.
pub fn no_such_method(path: &str) -> Status {
    failed(Code::Unimplemented, "NO_SUCH_METHOD", shortened(format!("there is no method {path}")))
}

/// The status of a watch that was not requested as plain gRPC over HTTP/2.
pub fn not_grpc() -> Status {
    let message = "a watch needs POST over HTTP/2 with content-type application/grpc".to_owned();
    failed(Code::Unimplemented, "NOT_GRPC", message)
}

/// The trailers of a response that ends with `status`; `None` means OK.
pub fn trailers(status: Option<Status>) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    let status = status.unwrap_or_else(|| Status::ok(""));
    if status.add_header(&mut trailers).is_err() {
        // The message does not fit into a header, so only the code is sent.
        trailers.insert("grpc-status", HeaderValue::from(status.code() as i32));
    }
    trailers
}

/// The status of a Get for an object that does not exist.
pub fn object_not_found(resource: &str, name: &str) -> Status {
    failed(Code::NotFound, "OBJECT_NOT_FOUND", format!("{resource} {name:?} not found"))
}

/// The status for Kubernetes' 410 Expired, with the oldest version from which a watch can resume.
fn too_old(expired: &Expired) -> Status {
    let metadata = HashMap::from([
        ("requested_resource_version".to_owned(), expired.requested.least_reached().to_string()),
        ("oldest_resource_version".to_owned(), expired.oldest.least_reached().to_string()),
    ]);
    let details = ErrorDetails::with_error_info("RESOURCE_VERSION_TOO_OLD", DOMAIN, metadata);
    Status::with_error_details(Code::OutOfRange, expired.to_string(), details)
}

/// The longest message, in bytes. Messages quote the request, and a status is sent in headers,
/// which clients limit to a few KiB.
const MESSAGE_BYTES_MAX: usize = 1024;

fn shortened(mut message: String) -> String {
    if message.len() > MESSAGE_BYTES_MAX {
        let cut = (0..=MESSAGE_BYTES_MAX).rev().find(|at| message.is_char_boundary(*at)).unwrap_or(0);
        message.truncate(cut);
        message.push('…');
    }
    message
}

fn invalid(field: &str, message: String) -> Status {
    let mut details = ErrorDetails::with_bad_request_violation(field, &message);
    details.set_error_info("INVALID_ARGUMENT", DOMAIN, HashMap::new());
    Status::with_error_details(Code::InvalidArgument, format!("{field}: {message}"), details)
}

fn failed(code: Code, reason: &str, message: String) -> Status {
    let details = ErrorDetails::with_error_info(reason, DOMAIN, HashMap::new());
    Status::with_error_details(code, message, details)
}

fn temporary(code: Code, reason: &str, message: String) -> Status {
    temporary_for(RETRY_DELAY, code, reason, message)
}

fn temporary_for(delay: Duration, code: Code, reason: &str, message: String) -> Status {
    let mut details = ErrorDetails::with_error_info(reason, DOMAIN, HashMap::new());
    details.set_retry_info(Some(delay));
    Status::with_error_details(code, message, details)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expired_version_is_reported_with_the_oldest_version() {
        let version = |number| ResourceVersion::new(number).unwrap();
        let status = refused(&Expired { requested: version(5), oldest: version(9) }.into());
        assert_eq!((status.code(), status.message()), (Code::OutOfRange, "too old resource version: 5 (9)"));
        let info = status.get_details_error_info().unwrap();
        assert_eq!((info.reason.as_str(), info.domain.as_str()), ("RESOURCE_VERSION_TOO_OLD", "kubefan.dev"));
        assert_eq!(info.metadata["oldest_resource_version"], "9");
    }

    #[test]
    fn statuses_of_the_library_get_a_reason_and_an_unambiguous_code() {
        let replaced = |status: Status| {
            let response: http::Response<()> = replace_library_status(status.into_http());
            let status = Status::from_header_map(response.headers()).unwrap();
            (status.code(), status.get_details_error_info().map(|info| info.reason).unwrap_or_default())
        };
        assert_eq!(replaced(Status::out_of_range("x")), (Code::ResourceExhausted, "REQUEST_TOO_LONG".to_owned()));
        assert_eq!(replaced(Status::internal("x")), (Code::InvalidArgument, "MALFORMED_REQUEST".to_owned()));
        assert_eq!(replaced(Status::unimplemented("x")), (Code::Unimplemented, String::new()));
        let version = |number| ResourceVersion::new(number).unwrap();
        let ours = refused(&Expired { requested: version(5), oldest: version(9) }.into());
        assert_eq!(replaced(ours), (Code::OutOfRange, "RESOURCE_VERSION_TOO_OLD".to_owned()));
    }

    #[test]
    fn a_long_message_is_cut_to_fit_into_headers() {
        let status = refused(&Refusal::Invalid { field: "target.label_selector", message: "ä".repeat(10_000) });
        assert!(status.message().len() < 1100 && status.details().len() < 2500, "{}", status.message().len());
        let status = refused(&Refusal::Failing { resource: "pods".into(), cause: "ä".repeat(10_000) });
        assert!(status.message().len() < 1100 && status.details().len() < 2500, "{}", status.details().len());
    }

    #[test]
    fn a_cause_does_not_name_the_user_that_kubefan_is() {
        let status = refused(&Refusal::Failing { resource: "pods".into(), cause: "User \"secret\" cannot".into() });
        assert_eq!(status.get_details_error_info().unwrap().metadata["cause"], "kubefan cannot");
        assert!(status.get_details_retry_info().is_some() && !status.message().contains("secret"), "{status:?}");
    }

    #[test]
    fn an_invalid_argument_names_the_field_and_a_temporary_error_a_delay() {
        let status = refused(&Refusal::Invalid { field: "target.label_selector", message: "bad".into() });
        assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, "target.label_selector");
        let status = refused(&Refusal::NotEncoded("widgets are not cached as protobuf".into()));
        assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, "encoding");
        assert!(status.message().contains("ENCODING_JSON"), "{status:?}");
        assert!(refused(&Refusal::Draining).get_details_retry_info().is_some());
        assert!(ended(&StreamEnd::Timeout, None).is_none());
    }
}
