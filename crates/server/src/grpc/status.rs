//! Maps refusals and stream ends to gRPC status codes. No other file does.
//!
//! Every error carries an ErrorInfo with a reason, which decides its code (`reasons.yaml`). A
//! temporary error also carries a RetryInfo, and an invalid argument a BadRequest that names the
//! field (google.rpc `error_details.proto`).

use std::{collections::HashMap, time::Duration};

use http::{HeaderMap, HeaderValue};
use kubefan_admission::PermitKind;
use kubefan_cache::{Expired, Refusal, StreamEnd};
use kubefan_common::{
    reasons::{ERROR_DOMAIN, ErrorReason, error_metadata},
    text::without_user,
};
use kubefan_model::ResourceVersion;
use tonic::{Code, Status, metadata::MetadataValue};
use tonic_types::{ErrorDetails, StatusExt};

use kubefan_audit::NotRecorded;

const PENDING_CALLS: PermitKind = PermitKind {
    name: "calls whose request has not arrived yet",
    setting: "limits.callsPendingMax",
    identity_setting: "",
};

/// The status of a request that was refused.
pub fn refused(refusal: &Refusal) -> Status {
    let message = match refusal {
        Refusal::Denied(_) => shortened(refusal.to_string()),
        // Upstream's errors name kubefan's own user.
        _ => shortened(without_user(&refusal.to_string())),
    };
    match refusal {
        Refusal::NotSynced { .. } => failed(ErrorReason::NotSynced, message),
        Refusal::Failing { cause, .. } => failing(message, cause),
        Refusal::Stale { .. } => failed(ErrorReason::Stale, message),
        Refusal::NotFound(_) => failed(ErrorReason::ResourceNotFound, message),
        Refusal::Forbidden(_) => failed(ErrorReason::UpstreamForbidden, message),
        Refusal::Unauthenticated(_) => failed(ErrorReason::Unauthenticated, message),
        Refusal::Denied(_) => failed(ErrorReason::Forbidden, message),
        Refusal::Expired(expired) => too_old(expired),
        Refusal::Rewritten(_) => failed(ErrorReason::HistoryRewritten, message),
        Refusal::Future { .. } => failed(ErrorReason::TooLarge, message),
        Refusal::Invalid { field, message } => invalid(field, shortened(message.clone())),
        Refusal::NotEncoded(_) => invalid("encoding", format!("{message}; request ENCODING_JSON or ENCODING_ZSTD")),
        Refusal::NotCached(_) => failed(ErrorReason::NotCached, message),
        Refusal::Exhausted(_) | Refusal::NoRoom(_) => failed(ErrorReason::LimitReached, message),
        Refusal::RateLimited { retry_after, .. } => failed_for(*retry_after, ErrorReason::LimitReached, message),
        Refusal::Unavailable(_) => failed(ErrorReason::UpstreamUnavailable, message),
        Refusal::Switched(_) => failed(ErrorReason::Passthrough, message),
        Refusal::Draining => failed(ErrorReason::Draining, message),
    }
}

/// Returns the status of a resource whose first list fails. The metadata has the apiserver's cause
/// alone: a kubefan behind this one tells it to its own readers.
fn failing(message: String, cause: &str) -> Status {
    let metadata = HashMap::from([(error_metadata::CAUSE.to_owned(), shortened(without_user(cause)))]);
    with_metadata(ErrorReason::NotSynced, metadata, message)
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
        StreamEnd::SnapshotStalled(_) => Some(failed(ErrorReason::SnapshotStalled, message)),
        StreamEnd::Overloaded(_) => Some(failed(ErrorReason::LimitReached, message)),
        StreamEnd::Expired(expired) => Some(too_old(expired)),
        StreamEnd::NotFound(_) => Some(failed(ErrorReason::ResourceNotFound, message)),
        StreamEnd::Forbidden(_) => Some(failed(ErrorReason::UpstreamForbidden, message)),
        StreamEnd::Rewritten(_) => Some(failed(ErrorReason::HistoryRewritten, message)),
        StreamEnd::Stopped(_) => Some(failed(ErrorReason::Stopped, message)),
        StreamEnd::Revoked(message) => Some(failed(ErrorReason::Forbidden, shortened(message.clone()))),
        StreamEnd::Reauthenticate(_) => Some(failed(ErrorReason::Reauthenticate, message)),
        StreamEnd::Switched(_) => Some(failed(ErrorReason::Switched, message)),
        StreamEnd::Disconnected => Some(failed(ErrorReason::Disconnected, message)),
        StreamEnd::Draining => Some(come_back(ErrorReason::Draining, message, sent)),
        StreamEnd::Aged => Some(come_back(ErrorReason::ConnectionAge, message, sent)),
        StreamEnd::Rebalanced => Some(come_back(ErrorReason::Rebalanced, message, sent)),
    }
}

/// The status of a stream that continues elsewhere.
fn come_back(reason: ErrorReason, message: String, sent: Option<ResourceVersion>) -> Status {
    let version = |sent: ResourceVersion| (error_metadata::RESUME_VERSION.to_owned(), sent.least_reached().to_string());
    with_metadata(reason, sent.map(version).into_iter().collect(), message)
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

/// The status of a call without TLS on a port that needs it.
pub fn needs_tls(message: &str) -> Status {
    failed(ErrorReason::TlsRequired, message.to_owned())
}

/// The status of a request that exceeds the size limit.
pub fn too_long(message: &str) -> Status {
    let message = format!("the request is too long (limits.maxMessageSize): {message}");
    failed(ErrorReason::RequestTooLong, message)
}

/// The status of a request that cannot be decoded.
pub fn malformed(message: &str) -> Status {
    failed(ErrorReason::MalformedRequest, format!("the request cannot be decoded: {message}"))
}

/// The status of a compressed request.
pub fn compressed() -> Status {
    let message = "the request is compressed; kubefan accepts only uncompressed requests".to_owned();
    let mut status = failed(ErrorReason::CompressedRequest, message);
    status.metadata_mut().insert("grpc-accept-encoding", MetadataValue::from_static("identity"));
    status
}

/// The status of a call whose deadline has passed.
pub fn deadline_exceeded() -> Status {
    failed(ErrorReason::DeadlineExceeded, StreamEnd::Deadline.to_string())
}

/// The status of a call whose request did not arrive in time.
pub fn request_timeout(timeout: Duration) -> Status {
    let message = format!("the request did not arrive within {timeout:?}");
    failed(ErrorReason::RequestTimeout, message)
}

/// The status of a call beyond the limit of those whose request has not arrived yet.
pub fn too_many_pending(limit: usize) -> Status {
    failed(ErrorReason::LimitReached, PENDING_CALLS.exhausted(limit))
}

/// The status of a call that is answered only if it is recorded.
pub fn not_recorded(error: NotRecorded) -> Status {
    failed(ErrorReason::NotRecorded, error.to_string())
}

/// The status of an unknown method.
pub fn no_such_method(path: &str) -> Status {
    failed(ErrorReason::NoSuchMethod, shortened(format!("there is no method {path}")))
}

/// The status of a watch that was not requested as plain gRPC over HTTP/2.
pub fn not_grpc() -> Status {
    let message = "a watch needs POST over HTTP/2 with content-type application/grpc".to_owned();
    failed(ErrorReason::NotGrpc, message)
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
    failed(ErrorReason::ObjectNotFound, format!("{resource} {name:?} not found"))
}

/// The status for Kubernetes' 410 Expired, with the oldest version from which a watch can resume.
fn too_old(expired: &Expired) -> Status {
    let metadata = HashMap::from([
        (error_metadata::REQUESTED_RESOURCE_VERSION.to_owned(), expired.requested.least_reached().to_string()),
        (error_metadata::OLDEST_RESOURCE_VERSION.to_owned(), expired.oldest.least_reached().to_string()),
    ]);
    with_metadata(ErrorReason::TooOld, metadata, expired.to_string())
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
    let text = format!("{field}: {message}");
    with_details(ErrorReason::InvalidArgument, HashMap::new(), text, |details| {
        details.add_bad_request_violation(field, &message);
    })
}

fn failed(reason: ErrorReason, message: String) -> Status {
    with_metadata(reason, HashMap::new(), message)
}

/// The status of a temporary error with a delay of its own.
fn failed_for(delay: Duration, reason: ErrorReason, message: String) -> Status {
    with_details(reason, HashMap::new(), message, |details| {
        details.set_retry_info(Some(delay));
    })
}

fn with_metadata(reason: ErrorReason, metadata: HashMap<String, String>, message: String) -> Status {
    with_details(reason, metadata, message, |_| {})
}

/// The status for a reason, with the details that `add` adds to those of the reason.
fn with_details(
    reason: ErrorReason,
    metadata: HashMap<String, String>,
    message: String,
    add: impl FnOnce(&mut ErrorDetails),
) -> Status {
    let mut details = ErrorDetails::with_error_info(reason.as_str(), ERROR_DOMAIN, metadata);
    if let Some(delay) = reason.retry_delay() {
        // Clients add their own jitter.
        details.set_retry_info(Some(delay));
    }
    add(&mut details);
    Status::with_error_details(reason.code(), message, details)
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
