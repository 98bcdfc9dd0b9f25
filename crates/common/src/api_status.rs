//! The errors of the Kubernetes API: `metav1.Status` objects, and answers that have none.

use std::time::Duration;

use serde::Deserialize;

use crate::{api_json::null_as_default, text::one_line};

/// Longest delay that a server may ask for. A longer one would look like a hang.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);
/// Longest message, in characters.
const MESSAGE_CHARS_MAX: usize = 1024;
/// Bytes of a text that are looked at.
const TEXT_BYTES_MAX: usize = 8192;

/// An error answer of the Kubernetes API: a failed request, or an ERROR event of a watch.
///
/// See "Response Status Kind" in the [API conventions].
///
/// [API conventions]: https://github.com/kubernetes/community/blob/master/contributors/devel/sig-architecture/api-conventions.md#response-status-kind
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiStatus {
    /// The HTTP status code.
    pub code: u16,
    /// The machine-readable reason, such as `Expired`. If the answer had no Status, the reason that
    /// Kubernetes uses for the code; empty for a code without one.
    pub reason: String,
    /// The message for people: one line of at most 1,024 characters.
    pub message: String,
    /// The delay that the server asks for before a retry, at most five minutes.
    pub retry_after: Option<Duration>,
    /// The causes.
    pub causes: Vec<ApiStatusCause>,
}

/// A cause of an [`ApiStatus`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ApiStatusCause {
    /// Machine-readable, such as `ResourceVersionTooLarge`.
    #[serde(deserialize_with = "null_as_default")]
    pub reason: String,
    /// For people.
    #[serde(deserialize_with = "null_as_default")]
    pub message: String,
    /// The field of the request or object, such as `sendInitialEvents`. Empty if there is none.
    #[serde(deserialize_with = "null_as_default")]
    pub field: String,
}

/// The JSON of a `metav1.Status`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct StatusJson {
    kind: String,
    #[serde(deserialize_with = "null_as_default")]
    code: u16,
    #[serde(deserialize_with = "null_as_default")]
    reason: String,
    #[serde(deserialize_with = "null_as_default")]
    message: String,
    details: Option<DetailsJson>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct DetailsJson {
    #[serde(deserialize_with = "null_as_default")]
    retry_after_seconds: u64,
    causes: Option<Vec<ApiStatusCause>>,
}

impl ApiStatus {
    /// Returns an error without causes. An empty reason becomes the one that Kubernetes uses for
    /// the code.
    pub fn new(code: u16, reason: &str, message: &str) -> Self {
        let reason = if reason.is_empty() { reason_of(code) } else { reason };
        let message = match one_line(message, MESSAGE_CHARS_MAX) {
            text if !text.is_empty() => text,
            _ if reason.is_empty() => format!("the server answered with HTTP status {code}"),
            _ => format!("the server answered with HTTP status {code} ({reason})"),
        };
        Self { code, reason: reason.to_owned(), message, retry_after: None, causes: Vec::new() }
    }

    /// Reads a `metav1.Status`. `None` if the JSON is something else. The code of a response counts
    /// more than the one in its body; a watch event has none.
    pub fn from_json(response_code: Option<u16>, json: &[u8]) -> Option<Self> {
        let status: StatusJson = serde_json::from_slice(json).ok()?;
        if status.kind != "Status" {
            return None;
        }
        let DetailsJson { retry_after_seconds, causes } = status.details.unwrap_or_default();
        let made = Self::new(response_code.unwrap_or(status.code), &status.reason, &status.message);
        Some(made.with_details(retry_after_seconds, causes.unwrap_or_default()))
    }

    /// Adds the details: the delay in seconds, 0 for none, and the causes.
    pub fn with_details(self, retry_after_seconds: u64, causes: Vec<ApiStatusCause>) -> Self {
        let delay = Duration::from_secs(retry_after_seconds).min(RETRY_AFTER_MAX);
        Self { retry_after: Some(delay).filter(|delay| !delay.is_zero()), causes, ..self }
    }

    /// Converts the text of a failed response without a Status. API priority and fairness sends 429
    /// as plain text.
    pub fn from_text(code: u16, body: &[u8]) -> Self {
        Self::new(code, "", &String::from_utf8_lossy(&body[..body.len().min(TEXT_BYTES_MAX)]))
    }

    /// Converts a failed response: from the Status in its body, otherwise from its text.
    /// `retry_after` is the response's header.
    pub fn from_response(code: u16, retry_after: Option<Duration>, body: &[u8]) -> Self {
        Self::from_json(Some(code), body).unwrap_or_else(|| Self::from_text(code, body)).with_retry_after(retry_after)
    }

    /// Adds the delay of the response's `Retry-After` header, which counts more than the one in the
    /// body.
    pub fn with_retry_after(self, header: Option<Duration>) -> Self {
        let retry_after = header.map(|delay| delay.min(RETRY_AFTER_MAX)).or(self.retry_after);
        Self { retry_after, ..self }
    }

    /// Whether the requested resource version or continue token is too old: client-go's
    /// `isExpiredError`.
    pub fn is_expired(&self) -> bool {
        self.code == 410 || matches!(self.reason.as_str(), "Expired" | "Gone")
    }

    /// Whether the server has not reached the requested resource version: client-go's
    /// `isTooLargeResourceVersionError`. Servers before 1.18.6 name it only in a message.
    pub fn is_resource_version_too_large(&self) -> bool {
        const TEXT: &str = "Too large resource version";
        let named = |cause: &ApiStatusCause| cause.reason == "ResourceVersionTooLarge" || cause.message == TEXT;
        self.causes.iter().any(named) || self.code == 504 && self.message.contains(TEXT)
    }

    /// Whether the server refuses a watch because of `sendInitialEvents`. It answers 422 if its
    /// WatchList feature is off or unknown; some extension apiservers answer 400.
    pub fn is_watch_list_unsupported(&self) -> bool {
        const OPTION: &str = "sendInitialEvents";
        let named = || self.message.contains(OPTION) || self.causes.iter().any(|cause| cause.field == OPTION);
        self.code == 422 || self.reason == "Invalid" || self.code == 400 && named()
    }

    /// Whether a retry of the same request may succeed.
    pub fn is_retryable(&self) -> bool {
        self.retry_after.is_some() || matches!(self.code, 408 | 429 | 500..=599)
    }
}

/// The delay of a `Retry-After` header, if it is a number of seconds.
pub fn retry_after(header: &str) -> Option<Duration> {
    header.trim().parse().ok().map(Duration::from_secs)
}

/// The reason that Kubernetes uses for a code, as in client-go's `NewGenericServerResponse`.
fn reason_of(code: u16) -> &'static str {
    match code {
        400 => "BadRequest",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        405 => "MethodNotAllowed",
        406 => "NotAcceptable",
        409 => "Conflict",
        410 => "Gone",
        422 => "Invalid",
        429 => "TooManyRequests",
        500 => "InternalError",
        503 => "ServiceUnavailable",
        504 => "Timeout",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_429_are_read_with_their_delay() {
        let text = b"Too many requests, please try again later.\n";
        let plain = ApiStatus::from_response(429, Some(Duration::from_secs(7)), text);
        assert_eq!((plain.reason.as_str(), plain.retry_after), ("TooManyRequests", Some(Duration::from_secs(7))));
        assert_eq!(plain.to_string(), "Too many requests, please try again later.");
        let json = br#"{"kind":"Status","message":"storage is (re)initializing","reason":"TooManyRequests",
            "details":{"retryAfterSeconds":3},"code":429}"#;
        let status = ApiStatus::from_response(429, None, json);
        assert_eq!((status.code, status.retry_after), (429, Some(Duration::from_secs(3))));
        assert!(plain.is_retryable() && status.is_retryable());
    }

    #[test]
    fn a_version_that_is_too_large_differs_from_a_timeout() {
        let json =
            br#"{"kind":"Status","code":504,"reason":"Timeout","message":"Timeout: Too large resource version: 9",
            "details":{"causes":[{"reason":"ResourceVersionTooLarge","message":"x"}],"retryAfterSeconds":1}}"#;
        assert!(ApiStatus::from_json(None, json).unwrap().is_resource_version_too_large());
        assert!(!ApiStatus::new(504, "", "").is_resource_version_too_large());
    }

    #[test]
    fn a_server_without_watch_list_is_recognized() {
        let refused = ApiStatus::new(422, "Invalid", "sendInitialEvents: Forbidden");
        assert!(refused.is_watch_list_unsupported() && !refused.is_retryable());
        assert!(ApiStatus::new(400, "", "unknown option sendInitialEvents").is_watch_list_unsupported());
        assert!(!ApiStatus::new(400, "", "unable to parse the selector").is_watch_list_unsupported());
    }

    #[test]
    fn the_servers_message_and_delay_are_limited() {
        let status = ApiStatus::from_response(503, Some(Duration::MAX), "é\u{7}".repeat(5000).as_bytes());
        assert_eq!(status.retry_after, Some(RETRY_AFTER_MAX));
        assert!(status.message.chars().count() <= MESSAGE_CHARS_MAX + 1 && !status.message.contains('\u{7}'));
        assert_eq!(ApiStatus::new(599, "", "").message, "the server answered with HTTP status 599");
    }

    #[test]
    fn null_is_read_as_go_reads_it() {
        let json = br#"{"kind":"Status","code":null,"reason":null,"message":null,
            "details":{"retryAfterSeconds":null,"causes":[{"reason":"Busy","message":null,"field":null}]}}"#;
        let status = ApiStatus::from_json(Some(503), json).unwrap();
        assert_eq!((status.code, status.retry_after, status.causes.len()), (503, None, 1));
        assert_eq!(status.message, "the server answered with HTTP status 503 (ServiceUnavailable)");
    }

    #[test]
    fn other_json_is_not_a_status() {
        for json in [&b"{}"[..], b"[1]", br#"{"kind":"Pod","code":500}"#, b"<html>"] {
            assert_eq!(ApiStatus::from_json(None, json), None);
        }
    }
}
