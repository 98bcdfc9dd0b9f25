//! The conclusion from an answer about the kubefan at `--upstream`: whether it is there and serves.
//!
//! | verdict | over HTTP | over gRPC |
//! |---|---|---|
//! | `Lost` | no connection, or it broke; no answer in time; 502 or 503 of a server in between | the same; an error without kubefan's reason |
//! | `Busy` | 429; 5xx of kubefan's own (`Proxy-Status: kubefan; error=…`); 504 | `RESOURCE_EXHAUSTED`, and `UNAVAILABLE` with kubefan's reason |
//! | `Answered` | all else: of its cache, or the apiserver's, which kubefan passed on | all else, with the apiserver's reason why it cannot list a resource |
//!
//! A kubefan that is busy may be so with one resource only. So a tier leaves it if all that it
//! asked for some seconds was answered so.

use http::{HeaderMap, StatusCode};
use kubefan_client::{ClientError, ErrorReason};
use kubefan_common::reasons::error_metadata;
use tonic::Code;

/// Header of the apiserver's priority and fairness, which kubefan passes on.
const FLOW_SCHEMA: &str = "x-kubernetes-pf-flowschema-uid";

/// The conclusion from one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The kubefan is there, or its apiserver.
    Answered,
    /// The kubefan cannot serve the request now.
    Busy,
    /// No kubefan was found.
    Lost,
    /// Nothing: another replica answers the next request.
    Unknown,
}

/// The server that has made an answer, as far as its headers tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Author {
    Kubefan,
    Apiserver,
    Unknown,
}

impl Verdict {
    /// Reads the head of an answer over HTTP.
    pub(crate) fn of_response(status: StatusCode, headers: &HeaderMap) -> Self {
        let author = author(headers);
        if author == Author::Apiserver {
            return Self::Answered;
        }
        match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::GATEWAY_TIMEOUT => Self::Busy,
            StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE if author == Author::Unknown => Self::Lost,
            status if status.is_server_error() => Self::Busy,
            _ => Self::Answered,
        }
    }

    /// Reads an error over gRPC.
    pub(crate) fn of_client_error(error: &ClientError) -> Self {
        let ClientError::Status(status) = error else {
            return if error.is_unreachable() { Self::Lost } else { Self::Unknown };
        };
        if status.reason == ErrorReason::Draining {
            return Self::Unknown;
        }
        if status.reason == ErrorReason::NotSynced && status.metadata.contains_key(error_metadata::CAUSE) {
            return Self::Answered;
        }
        // kubefan's own errors have a reason or a delay. Others are of a proxy in between.
        let is_kubefans = !status.reason.is_empty() || status.retry_after.is_some();
        match status.code {
            Code::ResourceExhausted => Self::Busy,
            Code::Unavailable if is_kubefans => Self::Busy,
            Code::Unavailable
            | Code::Unknown
            | Code::Internal
            | Code::Cancelled
            | Code::Aborted
            | Code::DeadlineExceeded
                if !is_kubefans =>
            {
                Self::Lost
            }
            _ => Self::Answered,
        }
    }
}

/// Whether a kubefan has made an answer, or passed it on.
pub(crate) fn is_through_kubefan(headers: &HeaderMap) -> bool {
    member(headers, "cache-status").is_some() || member(headers, "proxy-status").is_some()
}

/// Whether an answer is of a kubefan's cache, so that no other server has made its headers.
pub(super) fn is_of_cache(headers: &HeaderMap) -> bool {
    member(headers, "cache-status").is_some_and(|parameters| !has_parameter(parameters, "fwd"))
}

fn author(headers: &HeaderMap) -> Author {
    if let Some(parameters) = member(headers, "cache-status") {
        return if has_parameter(parameters, "fwd") { Author::Apiserver } else { Author::Kubefan };
    }
    if member(headers, "proxy-status").is_some_and(|parameters| has_parameter(parameters, "error")) {
        return Author::Kubefan;
    }
    if headers.contains_key(FLOW_SCHEMA) { Author::Apiserver } else { Author::Unknown }
}

/// Returns the parameters of kubefan's member of a List (RFC 9651). Its values have no commas and
/// semicolons.
fn member<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    let members = values.flat_map(|value| value.split(','));
    let mut parts = members.map(|member| member.trim().split_once(';').unwrap_or((member.trim(), "")));
    parts.find_map(|(server, parameters)| (server.trim() == "kubefan").then_some(parameters))
}

fn has_parameter(parameters: &str, name: &str) -> bool {
    let mut names = parameters.split(';').map(|parameter| parameter.split('=').next().unwrap_or_default().trim());
    names.any(|found| found == name)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use http::{HeaderName, HeaderValue};
    use kubefan_client::ServerStatus;

    use super::{Verdict::*, *};

    #[test]
    fn the_headers_of_an_answer_tell_kubefans_failures_from_the_apiservers() {
        let own = Some(("proxy-status", "kubefan; error=connection_refused"));
        let passed_on = Some(("cache-status", "kubefan; fwd=bypass"));
        let cached = Some(("cache-status", "kubefan; hit"));
        let apiservers = Some((FLOW_SCHEMA, "6a0"));
        for (code, header, expected) in [
            (200, cached, Answered),
            (200, None, Answered),
            (410, cached, Answered),
            (403, None, Answered),
            (429, own, Busy),
            (429, None, Busy),
            (429, passed_on, Answered),
            (503, own, Busy),
            (503, cached, Busy),
            (503, None, Lost),
            (502, None, Lost),
            (503, passed_on, Answered),
            (503, apiservers, Answered),
            (500, None, Busy),
            (500, passed_on, Answered),
            (504, None, Busy),
            (504, passed_on, Answered),
        ] {
            let mut headers = HeaderMap::new();
            headers
                .extend(header.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))));
            let status = StatusCode::from_u16(code).unwrap();
            assert_eq!(Verdict::of_response(status, &headers), expected, "{code} {header:?}");
        }
    }

    #[test]
    fn a_kubefan_is_seen_among_other_proxies() {
        let through = |value: &'static str| {
            is_through_kubefan(&HeaderMap::from_iter([(
                HeaderName::from_static("cache-status"),
                HeaderValue::from_static(value),
            )]))
        };
        assert!(through("kubefan; hit") && through("edge; fwd=miss, kubefan;fwd=bypass") && through("kubefan"));
        assert!(!through("edge; hit") && !through("kubefans; hit"));
    }

    #[test]
    fn a_budget_counts_only_in_an_answer_of_the_cache() {
        for (value, expected) in
            [("kubefan; hit", true), ("kubefan", true), ("kubefan; fwd=bypass", false), ("edge; hit", false)]
        {
            let name = HeaderName::from_static("cache-status");
            let headers = HeaderMap::from_iter([(name, HeaderValue::from_static(value))]);
            assert_eq!(is_of_cache(&headers), expected, "{value}");
        }
    }

    #[test]
    fn the_reason_of_a_status_tells_kubefans_failures_from_a_proxys() {
        let status = |code, reason: &str, cause: Option<&str>| {
            let metadata = cause.map(|cause| (error_metadata::CAUSE.to_owned(), cause.to_owned()));
            ClientError::Status(Box::new(ServerStatus {
                code,
                reason: reason.to_owned(),
                metadata: HashMap::from_iter(metadata),
                message: String::new(),
                field: String::new(),
                retry_after: None,
            }))
        };
        let not_synced = ErrorReason::NotSynced.as_str();
        for (error, expected) in [
            (status(Code::Unavailable, "", None), Lost),
            (status(Code::Internal, "", None), Lost),
            (status(Code::Unavailable, not_synced, None), Busy),
            (status(Code::Unavailable, not_synced, Some("a webhook")), Answered),
            (status(Code::Unavailable, ErrorReason::Draining.as_str(), None), Unknown),
            (status(Code::ResourceExhausted, "", None), Busy),
            (status(Code::OutOfRange, ErrorReason::TooOld.as_str(), None), Answered),
            (status(Code::PermissionDenied, ErrorReason::Forbidden.as_str(), None), Answered),
            (ClientError::Unreachable { address: String::new(), message: String::new() }, Lost),
        ] {
            assert_eq!(Verdict::of_client_error(&error), expected, "{error:?}");
        }
    }
}
