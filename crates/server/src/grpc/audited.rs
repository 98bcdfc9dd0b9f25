//! The record of a gRPC call: its start, and the HTTP form of its status.

use http::Request;
use kubefan_audit::{AuditLog, AuditRecord, Outcome, RequestHead};
use kubefan_telemetry::requests::Protocol;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::client_info::ClientInfo;

/// Start of the paths of the methods that are recorded.
const SERVICE: &str = "/kubefan.v1alpha1.WatchService/";

/// Begins the record of a call. Calls for health and reflection read nothing, and have none. Call
/// it once per call: its notes are in the extensions of the request.
pub fn begin<B>(log: &AuditLog, request: &mut Request<B>) -> AuditRecord {
    let method = request.uri().path().strip_prefix(SERVICE);
    let verb = match method.filter(|_| log.is_on()) {
        Some("Watch") => "watch",
        Some("List" | "ListResources") => "list",
        Some("Get" | "GetFreshness") => "get",
        _ => return AuditRecord::default(),
    };
    let client: ClientInfo = request.extensions().get().cloned().unwrap_or_default();
    let record = log.begin(RequestHead {
        protocol: Protocol::Grpc,
        verb: verb.into(),
        uri: request.uri(),
        headers: request.headers(),
        address: client.address.map(|address| address.ip()),
        object: None,
    });
    request.extensions_mut().insert(record.notes());
    record
}

/// The outcome of a call that ends with a status. The code is HTTP's, so that one query finds the
/// refusals of both protocols; the caller gets the same reason.
pub fn outcome(status: &Status) -> Outcome {
    let code = match status.code() {
        Code::Ok => return Outcome::code(200),
        Code::InvalidArgument | Code::FailedPrecondition => 400,
        Code::Unauthenticated => 401,
        Code::PermissionDenied => 403,
        Code::NotFound => 404,
        Code::AlreadyExists | Code::Aborted => 409,
        // In kubefan's API: a version that is too old.
        Code::OutOfRange => 410,
        Code::ResourceExhausted => 429,
        Code::Cancelled => 499,
        Code::Unknown | Code::Internal | Code::DataLoss => 500,
        Code::Unimplemented => 501,
        Code::Unavailable => 503,
        Code::DeadlineExceeded => 504,
    };
    let info = status.get_details_error_info();
    Outcome::failure(code, info.as_ref().map_or("", |info| &info.reason), status.message())
}
