//! Kubernetes' `Status`: the body of every failed request, and of a watch's ERROR event
//! (`apimachinery/pkg/api/errors`).
//!
//! Maps refusals and stream ends to HTTP status codes. No other file does.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use kubefan_access::{authorization::attributes::Attributes, denial::Forbidden};
use kubefan_cache::{Expired, Refusal, StreamEnd, kube_encoding::watch::error_event};
use kubefan_common::text::without_user;
use kubefan_model::{GroupVersionResource, Media, ResourceVersion, protobuf};
use kubefan_upstream::error::INITIALIZING;
use serde::Serialize;

use kubefan_audit::NotRecorded;

use super::error_type::ErrorType;

/// Wait of clients before they retry, in seconds.
const RETRY_AFTER_SECONDS: u32 = 1;

/// The reason why a field of the request is invalid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cause {
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'static str,
    message: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    field: &'static str,
}

impl Cause {
    /// `field.Forbidden`.
    pub fn forbidden(field: &'static str, message: &str) -> Self {
        Self { reason: "FieldValueForbidden", message: format!("Forbidden: {message}"), field }
    }

    /// `field.NotSupported`.
    pub fn not_supported(field: &'static str, value: &str, supported: &[&str]) -> Self {
        let supported = supported.iter().map(|value| format!("{value:?}")).collect::<Vec<_>>().join(", ");
        let message = format!("Unsupported value: {value:?}: supported values: {supported}");
        Self { reason: "FieldValueNotSupported", message, field }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Details {
    #[serde(skip_serializing_if = "String::is_empty")]
    name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    group: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    kind: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    causes: Vec<Cause>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_seconds: Option<u32>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
struct ListMeta {
    #[serde(rename = "continue", skip_serializing_if = "String::is_empty")]
    continues: String,
}

/// The reason why a request failed, in the extensions of its response.
#[derive(Debug, Clone)]
pub struct Refused {
    /// The reason of the `Status`.
    pub reason: &'static str,
    /// Message of the refusal.
    pub message: String,
}

/// A failed request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    kind: &'static str,
    api_version: &'static str,
    metadata: ListMeta,
    status: &'static str,
    message: String,
    reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Details>,
    code: u16,
    /// Cause, if the status does not tell it.
    #[serde(skip)]
    cause: Option<ErrorType>,
}

impl Failure {
    fn new(code: StatusCode, reason: &'static str, message: String) -> Self {
        Self {
            kind: "Status",
            api_version: "v1",
            metadata: ListMeta::default(),
            status: "Failure",
            message,
            reason,
            details: None,
            code: code.as_u16(),
            cause: None,
        }
    }

    /// Returns the failure with its cause.
    pub fn because(self, cause: ErrorType) -> Self {
        Self { cause: Some(cause), ..self }
    }

    fn with(self, details: Details) -> Self {
        Self { details: Some(details), ..self }
    }

    /// 400: `NewBadRequest`.
    pub fn bad_request(message: String) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    /// 422 if there are causes: `NewInvalid` of `ListOptions`.
    pub fn if_invalid(causes: Vec<Cause>) -> Result<(), Self> {
        if causes.is_empty() {
            return Ok(());
        }
        let texts: Vec<_> = causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect();
        // The format of `utilerrors.Aggregate`.
        let text = if let [text] = &*texts { text.clone() } else { format!("[{}]", texts.join(", ")) };
        let message = format!("ListOptions.meta.k8s.io \"\" is invalid: {text}");
        let group = "meta.k8s.io".to_owned();
        let kind = "ListOptions".to_owned();
        let details = Details { group, kind, causes, ..Details::default() };
        Err(Self::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message).with(details))
    }

    /// 404: `NewNotFound` of an object.
    pub fn no_object(gvr: &GroupVersionResource, name: &str) -> Self {
        let qualified = match gvr.group.as_str() {
            "" => gvr.resource.clone(),
            group => format!("{}.{group}", gvr.resource),
        };
        let name = name.to_owned();
        let group = gvr.group.clone();
        let kind = gvr.resource.clone();
        let message = format!("{qualified} {name:?} not found");
        let details = Details { name, group, kind, ..Details::default() };
        Self::new(StatusCode::NOT_FOUND, "NotFound", message).with(details)
    }

    /// 404 for a path that kubefan does not serve.
    pub fn not_served(message: String) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", message)
    }

    /// 401.
    pub fn unauthorized(message: String) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "Unauthorized", message)
    }

    /// 403.
    pub fn forbidden(message: String) -> Self {
        Self::new(StatusCode::FORBIDDEN, "Forbidden", message)
    }

    /// 403 of an authorizer: `NewForbidden`.
    pub fn denied(forbidden: &Forbidden) -> Self {
        let Attributes { name, group, resource, .. } = &forbidden.attributes;
        let quoted = if name.is_empty() { String::new() } else { format!(" {name:?}") };
        let message = format!("{}{quoted} is forbidden: {}", forbidden.qualified_resource(), forbidden.message());
        let name = name.clone();
        let group = group.clone();
        let kind = resource.clone();
        Self::forbidden(message).with(Details { name, group, kind, ..Details::default() })
    }

    /// 405: `NewMethodNotSupported`, without a resource.
    pub fn method_not_allowed(message: String) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", message)
    }

    /// 406: `NewNotAcceptableError`.
    pub fn not_acceptable(message: String) -> Self {
        Self::new(StatusCode::NOT_ACCEPTABLE, "NotAcceptable", message)
    }

    /// 429: `NewTooManyRequests`.
    pub fn too_many_requests(message: String) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests", message).retriable()
    }

    /// 410 for a list at a version that is not available any more: `NewResourceExpired`.
    pub fn list_expired() -> Self {
        let message = "The resourceVersion for the provided list is too old.".to_owned();
        Self::new(StatusCode::GONE, "Expired", message)
    }

    /// 410 for a watch from an expired version.
    pub fn watch_expired(expired: &Expired) -> Self {
        Self::new(StatusCode::GONE, "Expired", expired.to_string())
    }

    /// 504 for a version that the cache has not reached (`NewTooLargeResourceVersionError`).
    pub fn too_large(requested: ResourceVersion, current: ResourceVersion) -> Self {
        let message = format!("Timeout: Too large resource version: {requested}, current: {current}");
        let message_of_cause = "Too large resource version".to_owned();
        let cause = Cause { reason: "ResourceVersionTooLarge", message: message_of_cause, field: "" };
        let retry_after_seconds = Some(RETRY_AFTER_SECONDS);
        let details = Details { causes: vec![cause], retry_after_seconds, ..Details::default() };
        Self::new(StatusCode::GATEWAY_TIMEOUT, "Timeout", message).with(details)
    }

    /// 504 for a request that only wants the cache's answer, which has none for this reason (RFC
    /// 9111, section 5.2.1.7). Without a delay, because the client reads at the apiserver at once.
    pub fn only_if_cached(reason: &Self) -> Self {
        let message = format!("kubefan has no answer, and forwards no only-if-cached request: {}", reason.message);
        Self::new(StatusCode::GATEWAY_TIMEOUT, "Timeout", message)
    }

    /// 503.
    pub fn unavailable(message: String) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", message).retriable()
    }

    /// 503: upstream cannot be reached now. Without a delay, because client-go retries a response
    /// that has one ten times in silence, and reports a refused connection at once.
    pub fn unreachable(message: String) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", message)
    }

    /// 502: upstream did not answer a request that it may have received.
    pub fn bad_gateway(message: String) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, "InternalError", message)
    }

    /// 508: the request was forwarded in a loop.
    pub fn loop_detected(message: String) -> Self {
        Self::new(StatusCode::LOOP_DETECTED, "InternalError", message)
    }

    /// 500.
    pub fn internal(message: String) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", message)
    }

    /// 500: the request is answered only if it is recorded.
    pub fn not_recorded(error: NotRecorded) -> Self {
        Self::internal(error.to_string())
    }

    fn retriable(self) -> Self {
        self.with(Details { retry_after_seconds: Some(RETRY_AFTER_SECONDS), ..Details::default() })
    }

    /// Returns the status code.
    pub fn code(&self) -> u16 {
        self.code
    }

    /// Returns the text with the problem and the remedy.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the body, in an encoding.
    fn body(&self, media: Media) -> Bytes {
        match media {
            Media::Json | Media::Table => (self.json() + "\n").into(),
            Media::Protobuf => protobuf::Status::from(self).to_bytes(),
        }
    }

    /// Returns the JSON body, without a line feed.
    pub fn json(&self) -> String {
        // Strings and numbers: this cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Returns the response to the request, in an encoding.
    pub fn response<B: From<Bytes>>(&self, media: Media) -> Response<B> {
        let mut response = Response::new(B::from(self.body(media)));
        *response.status_mut() = StatusCode::from_u16(self.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        response.extensions_mut().insert(Refused { reason: self.reason, message: self.message.clone() });
        if let Some(cause) = self.cause {
            response.extensions_mut().insert(cause);
        }
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(media.content_type()));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
        if let Some(seconds) = self.details.as_ref().and_then(|details| details.retry_after_seconds) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }

    /// Returns the ERROR event of a watch, in an encoding.
    pub fn event(&self, media: Media) -> Bytes {
        match media {
            Media::Json | Media::Table => error_event(media, self.json().as_bytes()),
            Media::Protobuf => error_event(media, &self.body(media)),
        }
    }
}

impl From<&Failure> for protobuf::Status {
    fn from(failure: &Failure) -> Self {
        let Failure { metadata, status, message, reason, details, code, .. } = failure;
        let cause = |cause: &Cause| protobuf::StatusCause {
            reason: cause.reason.to_owned(),
            message: cause.message.clone(),
            field: cause.field.to_owned(),
        };
        let details = details.as_ref().map(|details| protobuf::StatusDetails {
            name: details.name.clone(),
            group: details.group.clone(),
            kind: details.kind.clone(),
            causes: details.causes.iter().map(cause).collect(),
            retry_after_seconds: details.retry_after_seconds.unwrap_or_default().try_into().unwrap_or(i32::MAX),
            uid: String::new(),
        });
        Self {
            metadata: protobuf::StatusMeta { continues: metadata.continues.clone(), ..Default::default() },
            status: (*status).to_owned(),
            message: message.clone(),
            reason: (*reason).to_owned(),
            details,
            code: i32::from(*code),
        }
    }
}

/// The answer to a refused request.
impl From<&Refusal> for Failure {
    fn from(refusal: &Refusal) -> Self {
        let message = match refusal {
            Refusal::Denied(_) => refusal.to_string(),
            // Upstream's errors name the user that kubefan is.
            _ => without_user(&refusal.to_string()),
        };
        match refusal {
            // The apiserver's answers while its watch cache is not ready.
            Refusal::NotSynced { .. } => {
                Self::too_many_requests(INITIALIZING.to_owned()).because(ErrorType::DestinationUnavailable)
            }
            Refusal::Failing { cause, .. } => {
                let message = format!("{INITIALIZING}: {}", without_user(cause));
                Self::too_many_requests(message).because(ErrorType::DestinationUnavailable)
            }
            Refusal::Exhausted(_) | Refusal::NoRoom(_) => Self::too_many_requests(message),
            Refusal::RateLimited { retry_after, .. } => {
                let seconds = retry_after.as_secs() + u64::from(retry_after.subsec_nanos() > 0);
                let retry_after_seconds = Some(u32::try_from(seconds).unwrap_or(u32::MAX));
                Self::too_many_requests(message).with(Details { retry_after_seconds, ..Details::default() })
            }
            Refusal::Stale { .. } | Refusal::Unavailable(_) => Self::unavailable(message),
            Refusal::Switched(_) | Refusal::Draining => {
                Self::unavailable(message).because(ErrorType::ProxyInternalResponse)
            }
            Refusal::NotFound(_) | Refusal::NotCached(_) | Refusal::NotEncoded(_) => Self::not_served(message),
            Refusal::Unauthenticated(_) => Self::unauthorized("Unauthorized".to_owned()),
            Refusal::Forbidden(_) | Refusal::Denied(_) => Self::forbidden(message),
            Refusal::Expired(expired) => Self::watch_expired(expired),
            Refusal::Rewritten(_) => Self::new(StatusCode::GONE, "Expired", message),
            Refusal::Future { requested, current } => Self::too_large(requested.whole(), current.whole()),
            Refusal::Invalid { .. } => Self::bad_request(message),
        }
    }
}

/// Returns the error that a watch reports before it ends. `None` if it ends silently; then its
/// client resumes.
pub fn watch_error(end: &StreamEnd) -> Option<Failure> {
    match end {
        StreamEnd::Expired(expired) => Some(Failure::watch_expired(expired)),
        StreamEnd::Rewritten(because) => {
            let message = format!("too old resource version: upstream's history was rewritten: {because}");
            Some(Failure::new(StatusCode::GONE, "Expired", message))
        }
        // client-go waits a moment and watches on from its version, without a list.
        StreamEnd::Disconnected => Some(Failure::too_many_requests(end.to_string())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_the_apiservers_bytes() {
        let version = |number| ResourceVersion::new(number).unwrap();
        let future = Failure::too_large(version(9), version(7));
        assert_eq!(
            future.json(),
            r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"Timeout: Too large resource version: 9, current: 7","reason":"Timeout","details":{"causes":[{"reason":"ResourceVersionTooLarge","message":"Too large resource version"}],"retryAfterSeconds":1},"code":504}"#
        );
        let response: Response<Bytes> = future.response(Media::Json);
        assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (504, &"1".parse().unwrap()));
        let expired = Failure::watch_expired(&Expired { requested: version(1), oldest: version(5) });
        assert_eq!(
            expired.event(Media::Json),
            concat!(
                r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","#,
                r#""message":"too old resource version: 1 (5)","reason":"Expired","code":410}}"#,
                "\n"
            )
        );
        let gvr = GroupVersionResource::new("apps", "v1", "deployments");
        assert!(Failure::no_object(&gvr, "web").json().contains(
            r#""message":"deployments.apps \"web\" not found","reason":"NotFound","details":{"name":"web","group":"apps","kind":"deployments"},"code":404"#
        ));
    }
}
