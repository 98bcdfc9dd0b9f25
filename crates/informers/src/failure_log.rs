//! The failures of upstream in the log. A cache that fails tries again every few seconds, so each
//! kind of failure is logged at once and then once a minute, and a denial that lasts only once. All
//! configured resources often have the same error of discovery, which is logged for the first.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::Hash,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use kubefan_upstream::{UpstreamError, discovery::DiscoveryError, identity::IdentityError, reflector::ReflectorError};
use tokio::time::Instant;
use tracing::{debug, warn};

use kubefan_fanout::Served;

/// The time after which a failure that lasts is logged again.
const INTERVAL: Duration = Duration::from_secs(60);

/// The failures of one cache that were logged.
#[derive(Default)]
pub(super) struct FailureLog {
    /// The kinds of failures.
    kinds: Logged<&'static str>,
    /// Whether the denial that lasts was logged.
    denial_is_logged: bool,
}

impl FailureLog {
    /// Logs a failure of a cache. `is_denied` if upstream has denied the last request.
    pub(super) fn log(&mut self, served: &Served, error: &ReflectorError, is_kubefan: bool, is_denied: bool) {
        let resource = &served.gvr;
        let scope = served.scope.namespace();
        let media = served.parser.media().as_str();
        let reason = error.reason();
        // The errors are worded for the usual upstream.
        let mut text = error.to_string();
        if is_kubefan {
            text = text.replace("the apiserver", "the kubefan at --upstream");
        }
        if self.takes(error.upstream(), reason, is_denied) {
            warn!(%resource, scope, media, reason, error = text, "upstream failed");
        } else {
            debug!(%resource, scope, media, reason, error = text, "upstream still fails");
        }
    }

    /// Logs that upstream is not known to be the cluster of a cache.
    pub(super) fn log_unconfirmed(&mut self, served: &Served, error: &IdentityError) {
        let resource = &served.gvr;
        let scope = served.scope.namespace();
        let media = served.parser.media().as_str();
        if self.kinds.takes("unconfirmed") {
            warn!(%resource, scope, media, %error, "upstream is not confirmed to be the same cluster; reading again");
        } else {
            debug!(%resource, scope, media, %error, "upstream is still not confirmed");
        }
    }

    /// Whether to log a failure now; it counts as logged then. `is_denied` as in [`Self::log`].
    fn takes(&mut self, error: Option<&UpstreamError>, reason: &'static str, is_denied: bool) -> bool {
        match error {
            // A rollout of the next tier is planned, and ends every watch of every node.
            Some(UpstreamError::Draining { .. }) => false,
            Some(UpstreamError::Forbidden { .. }) if is_denied && self.denial_is_logged => false,
            Some(UpstreamError::Forbidden { .. }) => {
                self.denial_is_logged = self.kinds.takes(reason);
                self.denial_is_logged
            }
            _ => self.kinds.takes(reason),
        }
    }
}

/// The errors of discovery that were logged.
#[derive(Default)]
pub(super) struct DiscoveryLog(Mutex<Logged<String>>);

impl DiscoveryLog {
    /// Logs why a configured resource has no cache.
    pub(super) fn log(&self, resource: &str, error: &DiscoveryError) {
        if self.0.lock().unwrap_or_else(PoisonError::into_inner).takes(error.to_string()) {
            warn!(resource, %error, "not cached yet; the same error of other resources is not logged");
        } else {
            debug!(resource, %error, "not cached yet");
        }
    }
}

/// The kinds of lines that were logged in the last minute, and when.
#[derive(Default)]
struct Logged<K>(HashMap<K, Instant>);

impl<K: Eq + Hash> Logged<K> {
    /// Whether a kind was not logged for a minute; it counts as logged then.
    fn takes(&mut self, kind: K) -> bool {
        self.0.retain(|_, at| at.elapsed() < INTERVAL);
        match self.0.entry(kind) {
            Entry::Occupied(_) => false,
            Entry::Vacant(entry) => {
                entry.insert(Instant::now());
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_error_of_discovery_is_logged_once_for_all_resources() {
        let log = DiscoveryLog::default();
        let takes = |error: &str| log.0.lock().unwrap().takes(error.to_owned());
        assert!(takes("cannot reach the apiserver") && !takes("cannot reach the apiserver"));
        assert!(takes("no widgets") && takes("no gadgets"), "errors of single resources");
        tokio::time::advance(INTERVAL).await;
        assert!(takes("cannot reach the apiserver"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_rollout_of_the_next_tier_is_not_logged() {
        let draining = UpstreamError::Draining { message: "kubefan is shutting down".to_owned(), retry_after: None };
        assert!(!FailureLog::default().takes(Some(&draining), "draining", false));
    }

    #[tokio::test(start_paused = true)]
    async fn a_denial_that_lasts_is_logged_once_even_if_the_one_before_was_too() {
        let forbidden = UpstreamError::Forbidden { message: "no".to_owned() };
        let mut log = FailureLog::default();
        let mut is_logged = |is_denied| log.takes(Some(&forbidden), "forbidden", is_denied);
        assert!(is_logged(false) && !is_logged(true));
        // The right comes back, and goes again within a minute.
        tokio::time::advance(INTERVAL / 2).await;
        assert!(!is_logged(false) && !is_logged(true));
        tokio::time::advance(INTERVAL / 2).await;
        assert!(is_logged(true), "it lasts, and was not logged");
        tokio::time::advance(INTERVAL).await;
        assert!(!is_logged(true));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_that_lasts_is_logged_once_a_minute() {
        let mut log = FailureLog::default();
        assert!(log.kinds.takes("reset") && !log.kinds.takes("reset"));
        assert!(log.kinds.takes("unreachable"), "another one");
        tokio::time::advance(INTERVAL - Duration::from_secs(1)).await;
        assert!(!log.kinds.takes("unreachable"));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(log.kinds.takes("unreachable"));
    }

    #[tokio::test(start_paused = true)]
    async fn failures_that_take_turns_are_each_logged_once_a_minute() {
        let mut log = FailureLog::default();
        let due = (0..60).filter(|turn| log.kinds.takes(["reset", "unreachable"][turn % 2]));
        assert_eq!(due.count(), 2);
    }
}
