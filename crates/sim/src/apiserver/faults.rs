//! Faults on demand: what a client must survive, made to happen to the next requests.

use std::sync::{Mutex, PoisonError};

use super::status::Status;
use kubefan_model::GroupVersionResource;

/// What goes wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// 429 with a Status and `Retry-After`.
    TooManyRequests {
        /// When to come back.
        retry_after_seconds: u16,
    },
    /// 429 with the plain text that kube-apiserver's request limit sends.
    TooManyRequestsText {
        /// When to come back.
        retry_after_seconds: u16,
    },
    /// Any Status, with its code.
    Status(Box<Status>),
    /// 401.
    Unauthorized,
    /// 403 for the request's verb and resource.
    Forbidden,
    /// 500.
    InternalError,
    /// 503.
    ServiceUnavailable,
    /// The connection is closed without an answer.
    Disconnect,
    /// Half-open: a watch's head is sent and then nothing, ever; another request is never answered.
    Silence,
    /// A watch ends in the middle of its first event.
    TruncatedLine,
    /// A watch's first line is this long, and no JSON.
    OverlongLine {
        /// Without the line's end.
        bytes: usize,
    },
    /// A watch is sent with one gzip member per event, whether the client takes gzip or not.
    GzipMembers,
    /// A watch's events come one byte per write.
    OneByteWrites,
}

/// Which requests a fault is for.
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
}

/// A fault and the requests it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FaultRule {
    /// What goes wrong.
    pub fault: Fault,
    /// `None`: any verb.
    pub verb: Option<Verb>,
    /// `None`: any resource.
    pub resource: Option<GroupVersionResource>,
    /// How many more requests it is for.
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

    /// The fault for this request; the oldest rule that fits, which it uses up by one.
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
