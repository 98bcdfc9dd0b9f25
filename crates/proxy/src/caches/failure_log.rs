//! The failures of upstream in the log: each kind at once, and then again after a while. In an
//! outage a cache tries every two seconds.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;
use tracing::{debug, warn};

use crate::{
    fanout::Served,
    upstream::{UpstreamError, identity::IdentityError, reflector::ReflectorError},
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
        if !is_expected(error.upstream(), is_denied) && self.is_due(reason) {
            warn!(%resource, scope, media, reason, error = text, "upstream failed");
        } else {
            debug!(%resource, scope, media, reason, error = text, "upstream still fails");
        }
    }

    /// Logs that upstream is not known to be the cluster of a cache.
    pub(super) fn log_unconfirmed(&mut self, served: &Served, error: &IdentityError) {
        let (resource, scope) = (&served.gvr, served.scope.namespace());
        if self.is_due("unconfirmed") {
            warn!(%resource, scope, %error, "upstream is not confirmed to be the same cluster; reading again");
        } else {
            debug!(%resource, scope, %error, "upstream is still not confirmed");
        }
    }

    /// Whether a failure for this reason is logged now.
    fn is_due(&mut self, reason: &'static str) -> bool {
        let is_due = self.0.get(reason).is_none_or(|at| at.elapsed() >= INTERVAL);
        if is_due {
            self.0.insert(reason, Instant::now());
        }
        is_due
    }
}

/// Whether an operator knows of a failure already: a denial that was logged, or a rollout of the
/// next tier, which ends every watch of every node.
fn is_expected(error: Option<&UpstreamError>, is_denied: bool) -> bool {
    match error {
        Some(UpstreamError::Forbidden { .. }) => is_denied,
        Some(UpstreamError::Draining { .. }) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollout_of_the_next_tier_and_a_denial_that_was_logged_are_expected() {
        let message = || "a message".to_owned();
        let draining = UpstreamError::Draining { message: message(), retry_after: None };
        let forbidden = UpstreamError::Forbidden { message: message() };
        let reset = UpstreamError::Reset { message: message() };
        assert!(is_expected(Some(&draining), false));
        assert!(is_expected(Some(&forbidden), true) && !is_expected(Some(&forbidden), false));
        assert!(!is_expected(Some(&reset), true) && !is_expected(None, true));
    }

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
