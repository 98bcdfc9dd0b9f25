//! The failures of requests to upstream, one variant per kind, because each kind needs its own
//! reaction: relist, wait, back off, or report to the operator.
//!
//! The texts are shown to users and logged, so their length is limited and they never contain
//! credentials.

use std::time::Duration;

use kubefan_common::{
    api_status::{self, ApiStatus, ApiStatusCause},
    text::{one_line, without_value},
};
use kubefan_model::{ResourceVersion, protobuf};

/// The maximum length of a text from the apiserver or a library.
const MESSAGE_CHARS_MAX: usize = 512;

/// The apiserver's message while its watch cache is not ready, before a colon and the cause if
/// there is one (`apiserver/pkg/storage/cacher/ready.go`).
pub const INITIALIZING: &str = "storage is (re)initializing";

/// A failed request, or a broken response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UpstreamError {
    /// No connection: it was refused, there is no route, or the host name does not exist.
    #[error("cannot reach the apiserver at {server}: {message}")]
    Unreachable {
        /// Scheme, host and port.
        server: String,
        /// The system's reason.
        message: String,
    },
    /// The TLS handshake failed.
    #[error("TLS with the apiserver at {server} failed: {message}")]
    Tls {
        /// Scheme, host and port.
        server: String,
        /// The TLS library's reason.
        message: String,
    },
    /// No credentials are available: an exec plugin, an OIDC refresh or a token file failed.
    #[error("no credentials for the apiserver: {message}")]
    Credentials {
        /// The failure, without any program output.
        message: String,
    },
    /// 401.
    #[error("the apiserver does not accept kubefan's credentials (401): {message}")]
    Auth {
        /// The apiserver's message.
        message: String,
    },
    /// 403.
    #[error("the apiserver denies the request (403): {message}")]
    Forbidden {
        /// The apiserver's message, which names the user, the verb and the resource.
        message: String,
    },
    /// 404: the resource or its API group is not served.
    #[error("the apiserver does not serve this (404): {message}")]
    NotFound {
        /// The apiserver's message.
        message: String,
    },
    /// 410, as a status or as an ERROR event: the version, or the continue token, is too old.
    #[error("upstream no longer has the version (410): {message}")]
    Gone {
        /// The apiserver's message.
        message: String,
    },
    /// 504 with the cause ResourceVersionTooLarge: the apiserver's cache is behind the requested
    /// version.
    #[error("the apiserver's cache is behind (504): {message}")]
    VersionTooLarge {
        /// The apiserver's message.
        message: String,
        /// The delay that the apiserver asks for.
        retry_after: Option<Duration>,
    },
    /// 429, from a watch cache that is not ready or from API priority and fairness.
    #[error("the apiserver asks to wait (429): {message}")]
    TooManyRequests {
        /// The apiserver's message.
        message: String,
        /// The delay that the apiserver asks for.
        retry_after: Option<Duration>,
    },
    /// 504, or no complete answer within the request timeout.
    #[error("timed out: {message}")]
    Timeout {
        /// The side that gave up, and its limit.
        message: String,
        /// The delay that the apiserver asks for.
        retry_after: Option<Duration>,
    },
    /// Any other 5xx.
    #[error("the apiserver failed ({code}): {message}")]
    Server {
        /// The HTTP status.
        code: u16,
        /// The apiserver's message.
        message: String,
        /// The delay that the apiserver asks for.
        retry_after: Option<Duration>,
    },
    /// Any other 4xx: this apiserver does not accept the request.
    #[error("the apiserver refuses the request ({code}): {message}")]
    Refused {
        /// The HTTP status.
        code: u16,
        /// The apiserver's message.
        message: String,
    },
    /// An answer that a kube-apiserver does not give: another content type, a redirect, broken
    /// JSON.
    #[error("not an answer of an apiserver: {message}")]
    InvalidResponse {
        /// The problem.
        message: String,
    },
    /// The connection broke after the request was sent.
    #[error("the connection to the apiserver broke: {message}")]
    Reset {
        /// The transport's reason.
        message: String,
    },
    /// The connection ended, and the server has certainly not read the request.
    #[error("the apiserver closed the connection before it read the request: {message}")]
    Unread {
        /// The transport's reason.
        message: String,
    },
    /// No data arrived within the idle timeout, so the connection counts as half-open.
    #[error("no event and no bookmark from the apiserver for {idle_timeout:?}; the connection counts as dead")]
    Idle {
        /// The idle timeout.
        idle_timeout: Duration,
    },
    /// A watch event is larger than the limit.
    #[error("a watch event is longer than {line_bytes_max} bytes")]
    LineTooLong {
        /// The limit in bytes.
        line_bytes_max: usize,
    },
    /// A watch ended inside an event.
    #[error("the watch was cut off inside an event, after {partial_bytes} bytes of it")]
    Truncated {
        /// The received bytes of the incomplete event.
        partial_bytes: usize,
    },
    /// The next kubefan does not cache the resource.
    #[error("{message}")]
    NotCached {
        /// Message of the next kubefan.
        message: String,
    },
    /// The next kubefan is shutting down. Another replica answers the next request.
    #[error("{message}")]
    Draining {
        /// Message of the next kubefan.
        message: String,
        /// Delay that the next kubefan asks for.
        retry_after: Option<Duration>,
    },
    /// The answer came from the cache of another kubefan, where the apiserver's own is needed.
    #[error("the server at {server} is a kubefan, which answered from its cache")]
    Cached {
        /// Scheme, host and port.
        server: String,
    },
    /// A response body is longer than allowed.
    #[error("the response is longer than {body_bytes_max} bytes; for a list, a smaller tuning.pageSize helps")]
    TooLarge {
        /// The limit in bytes.
        body_bytes_max: usize,
    },
}

impl UpstreamError {
    /// The minimum delay that the apiserver asks for, limited to five minutes.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::VersionTooLarge { retry_after, .. }
            | Self::TooManyRequests { retry_after, .. }
            | Self::Timeout { retry_after, .. }
            | Self::Server { retry_after, .. }
            | Self::Draining { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Whether there was no answer from an apiserver: it is down, or the way to it is broken. A
    /// gateway in front of it answers 504 then.
    pub fn is_away(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Reset { .. } | Self::Unread { .. } | Self::Timeout { .. })
    }

    /// Whether other settings may help: TLS or kubefan's credentials have failed.
    pub fn may_be_of_settings(&self) -> bool {
        matches!(self, Self::Tls { .. } | Self::Credentials { .. })
    }

    /// Whether a gateway in front of an apiserver that is down may have caused it: 502, 503, 504,
    /// or no answer in time.
    pub fn may_be_of_a_gateway(&self) -> bool {
        matches!(self, Self::Timeout { .. } | Self::Server { code: 502 | 503, .. })
    }

    /// Whether the answer was that the request cannot be served now: 429, 5xx, or a shutdown.
    pub fn is_busy(&self) -> bool {
        matches!(
            self,
            Self::TooManyRequests { .. } | Self::Server { .. } | Self::VersionTooLarge { .. } | Self::Draining { .. }
        )
    }

    /// Whether the same request may succeed in a moment.
    pub fn is_passing(&self) -> bool {
        self.is_away() || self.is_busy()
    }

    /// The apiserver's reason why it cannot list a resource: a conversion webhook is down, for
    /// example. `None` if it may only be busy or starting.
    pub fn cause(&self) -> Option<&str> {
        match self {
            Self::TooManyRequests { message, .. } => message.strip_prefix(INITIALIZING)?.strip_prefix(": "),
            Self::Server { code: 500, message, .. } => Some(message),
            _ => None,
        }
    }

    /// The oldest version from which a watch can start, if the apiserver's watch cache names it:
    /// "too old resource version: N (M)".
    pub fn oldest(&self) -> Option<ResourceVersion> {
        let Self::Gone { message } = self else { return None };
        let (_, versions) = message.split_once("too old resource version: ")?;
        ResourceVersion::parse_place(versions.split_once('(')?.1.split_once(')')?.0).ok()
    }

    /// The kind, as a label in metrics and a field in logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Unreachable { .. } => "unreachable",
            Self::Tls { .. } => "tls",
            Self::Credentials { .. } => "credentials",
            Self::Auth { .. } => "unauthorized",
            Self::Forbidden { .. } => "forbidden",
            Self::NotFound { .. } => "not_found",
            Self::Gone { .. } => "expired",
            Self::VersionTooLarge { .. } => "version_too_large",
            Self::TooManyRequests { .. } => "too_many_requests",
            Self::Timeout { .. } => "timeout",
            Self::Server { .. } => "server_error",
            Self::Refused { .. } => "refused",
            Self::InvalidResponse { .. } => "invalid_response",
            Self::Reset { .. } => "reset",
            Self::Unread { .. } => "unread",
            Self::Idle { .. } => "idle",
            Self::LineTooLong { .. } => "line_too_long",
            Self::Truncated { .. } => "truncated",
            Self::NotCached { .. } => "not_cached",
            Self::Draining { .. } => "draining",
            Self::Cached { .. } => "cached",
            Self::TooLarge { .. } => "too_large",
        }
    }

    /// Converts a failed response: from the Status in its body, or otherwise from its text.
    pub fn from_response(code: http::StatusCode, headers: &http::HeaderMap, body: &[u8]) -> Self {
        let code = code.as_u16();
        let header = headers.get(http::header::RETRY_AFTER);
        let retry_after = header.and_then(|value| api_status::retry_after(value.to_str().ok()?));
        let status = read_status(Some(code), body).unwrap_or_else(|| ApiStatus::from_text(code, body));
        Self::from(status.with_retry_after(retry_after))
    }

    /// JSON that cannot be read. The error does not quote it.
    pub fn invalid_json(error: serde_json::Error) -> Self {
        Self::invalid(without_value(&error))
    }

    /// An answer that breaks the list/watch protocol; a long message is shortened.
    pub fn invalid(message: impl std::fmt::Display) -> Self {
        Self::InvalidResponse { message: shorten(&message.to_string()) }
    }
}

/// Reads a `metav1.Status` from JSON or protobuf: the body of a failed request, or the object of a
/// watch's ERROR event. `None` if the bytes are something else.
pub(super) fn read_status(response_code: Option<u16>, body: &[u8]) -> Option<ApiStatus> {
    if protobuf::is_enveloped(body) {
        protobuf::Status::read(body).map(|status| from_protobuf(response_code, status))
    } else {
        ApiStatus::from_json(response_code, body)
    }
}

fn from_protobuf(response_code: Option<u16>, status: protobuf::Status) -> ApiStatus {
    let protobuf::Status { message, reason, details, code, .. } = status;
    let details = details.unwrap_or_default();
    let cause = |cause: protobuf::StatusCause| {
        let protobuf::StatusCause { reason, message, field } = cause;
        ApiStatusCause { reason, message, field }
    };
    let own_code = u16::try_from(code).unwrap_or_default();
    let seconds = u64::try_from(details.retry_after_seconds).unwrap_or_default();
    let status = ApiStatus::new(response_code.unwrap_or(own_code), &reason, &message);
    status.with_details(seconds, details.causes.into_iter().map(cause).collect())
}

impl From<ApiStatus> for UpstreamError {
    fn from(status: ApiStatus) -> Self {
        let message = shorten(&status.message);
        // A page that failed with a delay of 0 would be requested again without any.
        let retry_after = status.retry_after.filter(|delay| !delay.is_zero());
        match status.code {
            401 => Self::Auth { message },
            403 => Self::Forbidden { message },
            404 => Self::NotFound { message },
            _ if status.is_expired() => Self::Gone { message },
            429 => Self::TooManyRequests { message, retry_after },
            _ if status.is_resource_version_too_large() => Self::VersionTooLarge { message, retry_after },
            504 => Self::Timeout { message: format!("the apiserver reports: {message}"), retry_after },
            code @ 400..=499 => Self::Refused { code, message },
            code @ 500..=599 => Self::Server { code, message, retry_after },
            code => Self::InvalidResponse { message: format!("status {code}: {message}") },
        }
    }
}

/// The text as one line of limited length.
pub(crate) fn shorten(text: &str) -> String {
    one_line(text, MESSAGE_CHARS_MAX)
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue, StatusCode, header::RETRY_AFTER};

    use super::*;

    #[test]
    fn both_forms_of_429_are_parsed_with_their_delay() {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, HeaderValue::from_static("7"));
        let plain = b"Too many requests, please try again later.\n";
        let error = UpstreamError::from_response(StatusCode::TOO_MANY_REQUESTS, &headers, plain);
        assert_eq!((error.reason(), error.retry_after()), ("too_many_requests", Some(Duration::from_secs(7))));
        assert!(error.to_string().ends_with("Too many requests, please try again later."), "{error}");

        let status = br#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"storage is (re)initializing",
            "reason":"TooManyRequests","details":{"retryAfterSeconds":3},"code":429}"#;
        let error = UpstreamError::from_response(StatusCode::TOO_MANY_REQUESTS, &HeaderMap::new(), status);
        assert_eq!(error.retry_after(), Some(Duration::from_secs(3)));
        headers.insert(RETRY_AFTER, HeaderValue::from_static("0"));
        let error = UpstreamError::from_response(StatusCode::SERVICE_UNAVAILABLE, &headers, plain);
        assert_eq!(error.retry_after(), None, "the caller's own delay counts");
    }

    #[test]
    fn a_protobuf_status_gives_the_same_error_as_json() {
        let cause = protobuf::StatusCause { reason: "ResourceVersionTooLarge".into(), ..Default::default() };
        let details = protobuf::StatusDetails { causes: vec![cause], retry_after_seconds: 1, ..Default::default() };
        let status = protobuf::Status {
            message: "Too large resource version: 9".into(),
            reason: "Timeout".into(),
            details: Some(details),
            code: 504,
            ..Default::default()
        };
        let body = status.to_bytes();
        let error = UpstreamError::from_response(StatusCode::GATEWAY_TIMEOUT, &HeaderMap::new(), &body);
        assert_eq!((error.reason(), error.retry_after()), ("version_too_large", Some(Duration::from_secs(1))));
        assert!(error.to_string().ends_with("Too large resource version: 9"), "{error}");
        let gone = protobuf::Status { reason: "Expired".into(), code: 410, ..Default::default() };
        assert_eq!(UpstreamError::from(read_status(None, &gone.to_bytes()).unwrap()).reason(), "expired");
    }

    #[test]
    fn each_status_code_maps_to_its_variant() {
        let cases = [
            (400, "refused"),
            (401, "unauthorized"),
            (403, "forbidden"),
            (404, "not_found"),
            (410, "expired"),
            (422, "refused"),
            (429, "too_many_requests"),
            (500, "server_error"),
            (503, "server_error"),
            (504, "timeout"),
            (302, "invalid_response"),
        ];
        for (code, reason) in cases {
            let error = UpstreamError::from_response(StatusCode::from_u16(code).unwrap(), &HeaderMap::new(), b"");
            assert_eq!(error.reason(), reason, "{code}");
        }
    }

    #[test]
    fn a_future_version_is_not_a_plain_timeout() {
        let body = br#"{"kind":"Status","code":504,"reason":"Timeout","message":"Timeout: Too large resource version: 9, current: 5",
            "details":{"causes":[{"reason":"ResourceVersionTooLarge","message":"Too large resource version"}],"retryAfterSeconds":1}}"#;
        let error = UpstreamError::from_response(StatusCode::GATEWAY_TIMEOUT, &HeaderMap::new(), body);
        assert_eq!((error.reason(), error.retry_after()), ("version_too_large", Some(Duration::from_secs(1))));
    }

    #[test]
    fn a_status_with_null_for_what_it_does_not_have_is_read() {
        for details in ["null", r#"{"causes":null}"#] {
            let body = format!(r#"{{"kind":"Status","code":403,"message":"no","details":{details}}}"#);
            let error = UpstreamError::from_response(StatusCode::FORBIDDEN, &HeaderMap::new(), body.as_bytes());
            assert_eq!(error, UpstreamError::Forbidden { message: "no".to_owned() });
        }
    }

    #[test]
    fn a_cause_is_the_apiservers_message_about_the_resource() {
        let status = |code, message: &str| UpstreamError::from(ApiStatus::new(code, "", message));
        let cause = |code, message: &str| status(code, message).cause().map(str::to_owned);
        let down = "conversion webhook for x.y/v1, Kind=Z failed";
        assert_eq!(cause(429, &format!("storage is (re)initializing: {down}")).as_deref(), Some(down));
        assert_eq!(cause(500, down).as_deref(), Some(down));
        for (code, message) in
            [(429, "storage is (re)initializing"), (429, "Too many requests"), (503, down), (404, down)]
        {
            assert_eq!(cause(code, message), None, "{code} {message}");
        }
    }

    #[test]
    fn the_oldest_version_is_parsed_if_the_message_names_it() {
        let gone = |message: &str| UpstreamError::Gone { message: message.to_owned() };
        let oldest = |message: &str| gone(message).oldest().map(ResourceVersion::get);
        assert_eq!(oldest("too old resource version: 5 (120)"), Some(120));
        for message in
            ["too old resource version: 5", "too old resource version: 5 (0)", "The provided (1) is too old", ""]
        {
            assert_eq!(oldest(message), None, "{message}");
        }
    }

    #[test]
    fn the_servers_delay_and_message_are_limited() {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, HeaderValue::from_static("999999999"));
        let error = UpstreamError::from_response(StatusCode::TOO_MANY_REQUESTS, &headers, &vec![b'\n'; 1 << 20]);
        assert_eq!(error.retry_after(), Some(api_status::RETRY_AFTER_MAX));
        let error = UpstreamError::from_response(StatusCode::FORBIDDEN, &headers, "é\u{7}".repeat(5000).as_bytes());
        assert!(error.to_string().chars().count() < MESSAGE_CHARS_MAX + 100);
        assert!(!error.to_string().contains('\u{7}'));
    }
}
