//! The only place where outcomes become gRPC status codes.
//!
//! Every error carries an ErrorInfo (domain `kubefan.dev`, a stable reason); one that passes by itself a RetryInfo; a bad argument a
//! BadRequest that names the field (google.rpc `error_details.proto`).

use std::{collections::HashMap, time::Duration};

use http::{HeaderMap, HeaderValue};
use tonic::{Code, Status, metadata::MetadataValue};
use tonic_types::{ErrorDetails, StatusExt};

use crate::{
    cache::Expired,
    fanout::{Refusal, StreamEnd},
};

const DOMAIN: &str = "kubefan.dev";

/// What clients wait before they ask again for what is not ready yet; they add jitter of their own.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// The status of a request that was refused.
pub fn refused(refusal: &Refusal) -> Status {
    let message = shortened(refusal.to_string());
    match refusal {
        Refusal::NotSynced { .. } => retriable(Code::Unavailable, "NOT_SYNCED", message),
        Refusal::Stale { .. } => retriable(Code::Unavailable, "STALE", message),
        Refusal::NotFound(_) => failed(Code::NotFound, "RESOURCE_NOT_FOUND", message),
        Refusal::Forbidden(_) => failed(Code::PermissionDenied, "UPSTREAM_FORBIDDEN", message),
        Refusal::Expired(expired) => too_old(expired),
        Refusal::Rewritten(_) => failed(Code::OutOfRange, "HISTORY_REWRITTEN", message),
        Refusal::Future { .. } => retriable(Code::Unavailable, "RESOURCE_VERSION_TOO_LARGE", message),
        Refusal::Invalid { field, message } => {
            let message = &shortened(message.clone());
            let mut details = ErrorDetails::with_bad_request_violation(*field, message);
            details.set_error_info("INVALID_ARGUMENT", DOMAIN, HashMap::new());
            Status::with_error_details(Code::InvalidArgument, format!("{field}: {message}"), details)
        }
        Refusal::NotCached(_) => failed(Code::FailedPrecondition, "NOT_CACHED", message),
        Refusal::Exhausted(_) => retriable(Code::ResourceExhausted, "LIMIT_REACHED", message),
        Refusal::Unavailable(_) => retriable(Code::Unavailable, "UPSTREAM_UNAVAILABLE", message),
        Refusal::Draining => retriable(Code::Unavailable, "DRAINING", message),
    }
}

/// The name of a code, as the specification of gRPC has it.
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

/// The status that a stream ends with; `None` for a clean end.
pub fn ended(end: &StreamEnd) -> Option<Status> {
    let message = end.to_string();
    match end {
        StreamEnd::Timeout | StreamEnd::Cancelled => None,
        StreamEnd::Deadline => Some(deadline_exceeded()),
        StreamEnd::SnapshotStalled(_) => Some(retriable(Code::ResourceExhausted, "SNAPSHOT_STALLED", message)),
        StreamEnd::Overloaded(_) => Some(retriable(Code::ResourceExhausted, "LIMIT_REACHED", message)),
        StreamEnd::Expired(expired) => Some(too_old(expired)),
        StreamEnd::NotFound(_) => Some(failed(Code::NotFound, "RESOURCE_NOT_FOUND", message)),
        StreamEnd::Forbidden(_) => Some(failed(Code::PermissionDenied, "UPSTREAM_FORBIDDEN", message)),
        StreamEnd::Rewritten(_) => Some(failed(Code::OutOfRange, "HISTORY_REWRITTEN", message)),
        StreamEnd::Stopped(_) => Some(retriable(Code::Unavailable, "STOPPED", message)),
        StreamEnd::Draining => Some(retriable(Code::Unavailable, "DRAINING", message)),
    }
}

/// What the gRPC library refuses by itself, in the contract's words. It knows none of our reasons, and it says OUT_OF_RANGE, which
/// here means that a version is too old, for a request that is too long.
pub fn explain<B: Default>(response: http::Response<B>) -> http::Response<B> {
    // Present where the answer is a status and nothing else.
    let Some(status) = response.extensions().get::<Status>() else { return response };
    if status.get_details_error_info().is_some() {
        return response;
    }
    let message = status.message();
    match status.code() {
        Code::OutOfRange => too_long(message).into_http(),
        // Nothing of ours has seen the request yet: only the request can be at fault.
        Code::Internal => malformed(message).into_http(),
        _ => response,
    }
}

/// The status of a request that is longer than is taken.
pub fn too_long(message: &str) -> Status {
    let message = format!("the request is too long (--max-message-size): {message}");
    failed(Code::ResourceExhausted, "REQUEST_TOO_LONG", message)
}

/// The status of a request that is no message of ours.
pub fn malformed(message: &str) -> Status {
    failed(Code::InvalidArgument, "MALFORMED_REQUEST", format!("the request cannot be read: {message}"))
}

/// The status of a request that is compressed.
pub fn compressed() -> Status {
    let message = "the request is compressed, and only plain ones are read".to_owned();
    let mut status = failed(Code::Unimplemented, "COMPRESSED_REQUEST", message);
    status.metadata_mut().insert("grpc-accept-encoding", MetadataValue::from_static("identity"));
    status
}

/// The status of a call whose own deadline is over.
pub fn deadline_exceeded() -> Status {
    failed(Code::DeadlineExceeded, "DEADLINE_EXCEEDED", StreamEnd::Deadline.to_string())
}

/// The status of a method that there is not.
pub fn no_such_method(path: &str) -> Status {
    failed(Code::Unimplemented, "NO_SUCH_METHOD", shortened(format!("there is no method {path}")))
}

/// The status of a watch that was not asked for in gRPC's own form.
pub fn not_by_this_way() -> Status {
    let message = "a watch is asked for with POST over HTTP/2 and content-type application/grpc".to_owned();
    failed(Code::Unimplemented, "NOT_GRPC", message)
}

/// The last headers of a response that ends with `status`, or well.
pub fn trailers(status: Option<Status>) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    let status = status.unwrap_or_else(|| Status::ok(""));
    if status.add_header(&mut trailers).is_err() {
        // A message that no header can carry; the code says enough.
        trailers.insert("grpc-status", HeaderValue::from(status.code() as i32));
    }
    trailers
}

/// The status of a Get that found nothing.
pub fn object_not_found(resource: &str, name: &str) -> Status {
    failed(Code::NotFound, "OBJECT_NOT_FOUND", format!("{resource} {name:?} not found"))
}

/// Kubernetes' 410 Expired, with the oldest version that can be resumed from.
fn too_old(expired: &Expired) -> Status {
    let metadata = HashMap::from([
        ("requested_resource_version".to_owned(), expired.requested.to_string()),
        ("oldest_resource_version".to_owned(), expired.oldest.to_string()),
    ]);
    let details = ErrorDetails::with_error_info("RESOURCE_VERSION_TOO_OLD", DOMAIN, metadata);
    Status::with_error_details(Code::OutOfRange, expired.to_string(), details)
}

/// What a peer sent is quoted in messages, and a status travels in the headers, which peers limit to some KiB.
const MESSAGE_BYTES_MAX: usize = 1024;

fn shortened(mut message: String) -> String {
    if message.len() > MESSAGE_BYTES_MAX {
        let cut = (0..=MESSAGE_BYTES_MAX).rev().find(|at| message.is_char_boundary(*at)).unwrap_or(0);
        message.truncate(cut);
        message.push('…');
    }
    message
}

fn failed(code: Code, reason: &str, message: String) -> Status {
    let details = ErrorDetails::with_error_info(reason, DOMAIN, HashMap::new());
    Status::with_error_details(code, message, details)
}

fn retriable(code: Code, reason: &str, message: String) -> Status {
    let mut details = ErrorDetails::with_error_info(reason, DOMAIN, HashMap::new());
    details.set_retry_info(Some(RETRY_DELAY));
    Status::with_error_details(code, message, details)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kubefan_model::ResourceVersion;

    #[test]
    fn a_version_too_old_names_the_oldest_as_kubernetes_does() {
        let version = |number| ResourceVersion::new(number).unwrap();
        let status = refused(&Expired { requested: version(5), oldest: version(9) }.into());
        assert_eq!((status.code(), status.message()), (Code::OutOfRange, "too old resource version: 5 (9)"));
        let info = status.get_details_error_info().unwrap();
        assert_eq!((info.reason.as_str(), info.domain.as_str()), ("RESOURCE_VERSION_TOO_OLD", "kubefan.dev"));
        assert_eq!(info.metadata["oldest_resource_version"], "9");
    }

    #[test]
    fn what_the_library_refuses_has_a_reason_and_no_code_that_means_something_else() {
        let explained = |status: Status| {
            let response: http::Response<()> = explain(status.into_http());
            let status = Status::from_header_map(response.headers()).unwrap();
            (status.code(), status.get_details_error_info().map(|info| info.reason).unwrap_or_default())
        };
        assert_eq!(explained(Status::out_of_range("x")), (Code::ResourceExhausted, "REQUEST_TOO_LONG".to_owned()));
        assert_eq!(explained(Status::internal("x")), (Code::InvalidArgument, "MALFORMED_REQUEST".to_owned()));
        assert_eq!(explained(Status::unimplemented("x")), (Code::Unimplemented, String::new()));
        let version = |number| ResourceVersion::new(number).unwrap();
        let ours = refused(&Expired { requested: version(5), oldest: version(9) }.into());
        assert_eq!(explained(ours), (Code::OutOfRange, "RESOURCE_VERSION_TOO_OLD".to_owned()));
    }

    #[test]
    fn a_long_fault_still_fits_into_the_headers() {
        let status = refused(&Refusal::Invalid { field: "target.label_selector", message: "ä".repeat(10_000) });
        assert!(status.message().len() < 1100 && status.details().len() < 2500, "{}", status.message().len());
    }

    #[test]
    fn a_bad_argument_names_the_field_and_what_passes_names_a_delay() {
        let status = refused(&Refusal::Invalid { field: "target.label_selector", message: "bad".into() });
        assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, "target.label_selector");
        assert!(refused(&Refusal::Draining).get_details_retry_info().is_some());
        assert!(ended(&StreamEnd::Timeout).is_none());
    }
}
