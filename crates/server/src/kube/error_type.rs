//! The errors of kubefan itself, by their types in RFC 9209 (`Proxy-Status`).
//!
//! A client that can read elsewhere must tell an error of kubefan from an answer: a 404 of the
//! apiserver is about an object, and a 404 of kubefan about kubefan. The status alone does not tell
//! them apart. [`OwnAnswer::error`] decides which answers are errors of kubefan, and no other place
//! does.

use http::{HeaderName, HeaderValue, StatusCode};

/// Names the error of the proxy that has made an answer (RFC 9209).
pub const PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");

/// A type of error of RFC 9209, section 2.3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorType {
    /// kubefan does not serve what the request names.
    DestinationNotFound,
    /// The apiserver, or the state that the request needs, cannot be read now.
    DestinationUnavailable,
    /// The connection to the apiserver ended without an answer.
    ConnectionTerminated,
    /// A limit of kubefan is reached.
    ConnectionLimitReached,
    /// The TLS handshake with the apiserver failed.
    TlsProtocolError,
    /// kubefan's rules, or the caller's rights, forbid the request.
    HttpRequestDenied,
    /// The apiserver, or the version that the request needs, did not come in time.
    HttpResponseTimeout,
    /// The answer was none of an apiserver.
    HttpProtocolError,
    /// kubefan answers by itself, because it shuts down or was told to.
    ProxyInternalResponse,
    /// A bug of kubefan, or a part of it that failed.
    ProxyInternalError,
    /// kubefan's own settings do not lead to an apiserver.
    ProxyConfigurationError,
    /// The request has passed through this kubefan before.
    ProxyLoopDetected,
}

impl ErrorType {
    /// Returns the value of [`PROXY_STATUS`].
    pub fn value(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::DestinationNotFound => "kubefan; error=destination_not_found",
            Self::DestinationUnavailable => "kubefan; error=destination_unavailable",
            Self::ConnectionTerminated => "kubefan; error=connection_terminated",
            Self::ConnectionLimitReached => "kubefan; error=connection_limit_reached",
            Self::TlsProtocolError => "kubefan; error=tls_protocol_error",
            Self::HttpRequestDenied => "kubefan; error=http_request_denied",
            Self::HttpResponseTimeout => "kubefan; error=http_response_timeout",
            Self::HttpProtocolError => "kubefan; error=http_protocol_error",
            Self::ProxyInternalResponse => "kubefan; error=proxy_internal_response",
            Self::ProxyInternalError => "kubefan; error=proxy_internal_error",
            Self::ProxyConfigurationError => "kubefan; error=proxy_configuration_error",
            Self::ProxyLoopDetected => "kubefan; error=proxy_loop_detected",
        })
    }

    /// Returns the type of a status, if no cause is known. `None` if the status is about the
    /// request, and would be the same at any server.
    fn of_status(status: StatusCode) -> Option<Self> {
        Some(match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Self::HttpRequestDenied,
            StatusCode::NOT_FOUND => Self::DestinationNotFound,
            StatusCode::TOO_MANY_REQUESTS => Self::ConnectionLimitReached,
            StatusCode::BAD_GATEWAY => Self::ConnectionTerminated,
            StatusCode::SERVICE_UNAVAILABLE => Self::DestinationUnavailable,
            StatusCode::GATEWAY_TIMEOUT => Self::HttpResponseTimeout,
            StatusCode::LOOP_DETECTED => Self::ProxyLoopDetected,
            status if status.is_server_error() => Self::ProxyInternalError,
            _ => return None,
        })
    }
}

/// An answer that no upstream has made.
#[derive(Debug, Clone, Copy)]
pub struct OwnAnswer {
    /// The status.
    pub status: StatusCode,
    /// Whether a cache has decided it.
    pub is_of_cache: bool,
    /// The cause, if it is known.
    pub cause: Option<ErrorType>,
}

impl OwnAnswer {
    /// Returns the error of kubefan; `None` if this is an answer.
    pub fn error(self) -> Option<ErrorType> {
        let Self { status, is_of_cache, cause } = self;
        let by_status = ErrorType::of_status(status)?;
        // With other statuses a cache answers as the apiserver would: the object does not exist, or
        // the cluster has not reached the version.
        let is_refusal = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
        if is_of_cache && !is_refusal {
            return None;
        }
        Some(cause.unwrap_or(by_status))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_kubefan_are_named_and_answers_are_not() {
        let unavailable = Some(ErrorType::DestinationUnavailable);
        for (status, cause, without_cache, of_cache) in [
            (200, None, "", ""),
            (200, unavailable, "", ""),
            (400, None, "", ""),
            (401, None, "http_request_denied", ""),
            (403, None, "http_request_denied", ""),
            (404, None, "destination_not_found", ""),
            (405, None, "", ""),
            (406, None, "", ""),
            (410, None, "", ""),
            (422, None, "", ""),
            (429, None, "connection_limit_reached", "connection_limit_reached"),
            (429, unavailable, "destination_unavailable", "destination_unavailable"),
            (500, None, "proxy_internal_error", ""),
            (502, None, "connection_terminated", ""),
            (502, Some(ErrorType::TlsProtocolError), "tls_protocol_error", ""),
            (503, None, "destination_unavailable", "destination_unavailable"),
            (503, Some(ErrorType::ProxyInternalResponse), "proxy_internal_response", "proxy_internal_response"),
            (504, None, "http_response_timeout", ""),
            (508, None, "proxy_loop_detected", ""),
        ] {
            let status = StatusCode::from_u16(status).unwrap();
            for (is_of_cache, expected) in [(false, without_cache), (true, of_cache)] {
                let error = OwnAnswer { status, is_of_cache, cause }.error();
                let value = error.map(|error| error.value().to_str().unwrap().to_owned());
                let expected = (!expected.is_empty()).then(|| format!("kubefan; error={expected}"));
                assert_eq!(value, expected, "{status}, {cause:?}, of a cache: {is_of_cache}");
            }
        }
    }
}
