//! The failures of upstream in the log: each kind at once, and then again after a while. In an
//! outage a cache tries every two seconds.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;
use tracing::{debug, warn};

use crate::{
    fanout::Served,
    upstream::{UpstreamError, reflector::ReflectorError},
};

/// The time after which a failure that lasts is logged again.
const INTERVAL: Duration = Duration::from_secs(60);

/// When each kind of failure of one cache was logged last.
#[derive(Default)]
pub(super) struct FailureLog(HashMap<&'static str, Instant>);

impl FailureLog {
    /// Logs a failure of a cache. `is_denied` if upstream has denied the last request.
    pub(super) fn log(&mut self, served: &Served, error: &ReflectorError, is_kubefan: bool, is_denied: bool) {
        let (resource, scope, media) = (&served.gvr, served.scope.namespace(), served.parser.media().as_str());
        let reason = error.reason();
        // The errors are worded for the usual upstream.
        let mut text = error.to_string();
        if is_kubefan {
            text = text.replace("the apiserver", "the kubefan at --upstream");
        }
        let is_known = is_denied && matches!(error.upstream(), Some(UpstreamError::Forbidden { .. }));
        if !is_known && self.is_due(reason) {
            warn!(%resource, scope, media, reason, error = text, "upstream failed");
        } else {
            debug!(%resource, scope, media, reason, error = text, "upstream still fails");
        }
    }

    /// Whether a failure for this reason is logged now.
    pub(super) fn is_due(&mut self, reason: &'static str) -> bool {
        let is_due = self.0.get(reason).is_none_or(|at| at.elapsed() >= INTERVAL);
        if is_due {
            self.0.insert(reason, Instant::now());
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_failure_that_lasts_is_logged_once_a_minute() {
        let mut log = FailureLog::default();
        assert!(log.is_due("reset") && !log.is_due("reset"));
        assert!(log.is_due("unreachable"), "another one");
        tokio::time::advance(INTERVAL - Duration::from_secs(1)).await;
        assert!(!log.is_due("unreachable"));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(log.is_due("unreachable"));
    }

    #[tokio::test(start_paused = true)]
    async fn failures_that_take_turns_are_each_logged_once_a_minute() {
        let mut log = FailureLog::default();
        let due = (0..60).filter(|turn| log.is_due(["reset", "unreachable"][turn % 2]));
        assert_eq!(due.count(), 2);
    }
}
