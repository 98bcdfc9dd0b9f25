//! Fault injection: rules that make the next matching requests fail.

use std::sync::{Mutex, PoisonError};

use super::status::Status;
use kubefan_model::GroupVersionResource;

/// The kind of failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// 429 with a Status and `Retry-After`.
    TooManyRequests {
        /// The `Retry-After` header.
        retry_after_seconds: u16,
    },
    /// 429 with the plain-text body that kube-apiserver's request limit sends.
    TooManyRequestsText {
        /// The `Retry-After` header.
        retry_after_seconds: u16,
    },
    /// This Status, with its own code.
    Status(Box<Status>),
    /// 401.
    Unauthorized,
    /// 403 for the request's verb and resource.
    Forbidden,
    /// 500.
    InternalError,
    /// 503.
    ServiceUnavailable,
    /// Closes the connection without an answer.
    Disconnect,
    /// A half-open connection: a watch gets its response headers and then nothing, ever. Any other
    /// request gets no answer at all.
    Silence,
    /// A watch ends in the middle of its first event.
    TruncatedLine,
    /// The first line of a watch is this long, and is not JSON.
    OverlongLine {
        /// Length without the newline.
        bytes: usize,
    },
    /// A watch is sent as one gzip member per event, even if the client does not accept gzip.
    GzipMembers,
    /// A watch's events are written one byte at a time.
    OneByteWrites,
}

/// The kind of request that a fault applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// A list.
    List,
    /// A watch.
    Watch,
    /// A get of one object.
    Get,
    /// Any write.
    Write,
    /// Discovery, version and health.
    Discovery,
    /// A review of a caller.
    Review,
}

/// A fault, and the requests that it applies to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FaultRule {
    /// The failure.
    pub fault: Fault,
    /// `None` matches any verb.
    pub verb: Option<Verb>,
    /// `None` matches any resource.
    pub resource: Option<GroupVersionResource>,
    /// The number of requests that the rule still applies to.
    pub requests: usize,
}

#[derive(Debug, Default)]
pub(super) struct Faults {
    rules: Mutex<Vec<FaultRule>>,
}

impl Faults {
    pub(super) fn add(&self, rule: FaultRule) {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner).push(rule);
    }

    pub(super) fn clear(&self) {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The fault for this request: that of the oldest matching rule, whose remaining count drops by
    /// one.
    pub(super) fn take(&self, verb: Verb, resource: Option<&GroupVersionResource>) -> Option<Fault> {
        let mut rules = self.rules.lock().unwrap_or_else(PoisonError::into_inner);
        rules.retain(|rule| rule.requests > 0);
        let fits = |rule: &&mut FaultRule| {
            rule.verb.is_none_or(|v| v == verb) && rule.resource.as_ref().is_none_or(|r| Some(r) == resource)
        };
        let rule = rules.iter_mut().find(fits)?;
        rule.requests -= 1;
        Some(rule.fault.clone())
    }
}
