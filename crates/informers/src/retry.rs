//! The waits before a cache asks upstream again after a failure.
//!
//! Two rules conflict: an outage should end for readers when it ends upstream, and a broken or
//! busy apiserver must not be asked in a tight loop. So each kind of failure has its own wait:
//!
//! - No connection: over gRPC a short backoff. Over HTTP a backoff too, and then until the probe
//!   that all caches share succeeds ([`Upstream::until_available`]). The probe finds the end of an
//!   outage within about a second, so the backoff does not grow while it lasts.
//! - A connection to another kubefan that ends after it has served: almost none, because another
//!   replica can serve at once.
//! - No complete answer, 429 and 5xx: a backoff, at least as long as the apiserver asks for. After
//!   502, 503, 504 and no answer in time, the end of an outage that the probe observes cuts it: a
//!   gateway may have been in between ([`Upstream::until_outage_ends`]).
//! - Any other refusal, or an answer that makes no sense: a backoff of its own. Such an answer
//!   shows that upstream is there, so the backoff of the kinds above starts over.
//! - 410: none. The list that follows brings a new version, and the scheduler of lists spreads the
//!   load. If the next 410 comes although no event or bookmark was received since, a backoff of
//!   its own.
//!
//! After an outage the apiserver is starting for a while, and answers 403, 404, 429 and 5xx until
//! it has read its rules and filled its watch caches. Long delays would outlast that, so they are
//! cut.

use std::time::Duration;

use rand::{RngExt, rngs::StdRng};
use tokio::time::{Instant, sleep};

use kubefan_common::{
    backoff::{Backoff, BackoffOptions},
    planted::{self, Bug},
};
use kubefan_upstream::{Upstream, UpstreamError};

/// The longest delay while the apiserver is starting, unless it asks for a longer one.
const STARTING_DELAY_MAX: Duration = Duration::from_secs(2);

/// The longest delay before another replica is asked. The caches and machines that a replica has
/// served do not come at the same moment.
const MOVE_DELAY_MAX: Duration = Duration::from_millis(200);

/// The least time between two such moves. A replica that ends connections as soon as it has served
/// is not asked in a tight loop.
const MOVE_INTERVAL_MIN: Duration = Duration::from_secs(10);

/// The retries of one task.
pub(super) struct Retry {
    /// The client whose probe finds the end of an outage; `None` if caches list and watch over
    /// gRPC, or at several servers.
    upstream: Option<Upstream>,
    /// For requests without an answer, and for 429 and 5xx.
    unserved: Backoff,
    /// For versions that are too old.
    expired: Backoff,
    /// For all other failures.
    refused: Backoff,
    random: StdRng,
    /// Whether upstream may have replicas that take over at once.
    has_replicas: bool,
    /// Whether upstream has served something since the last failure.
    has_served: bool,
    moved_at: Option<Instant>,
}

impl Retry {
    pub(super) fn new(upstream: Option<Upstream>, random: StdRng) -> Self {
        let backoff = || Backoff::new(BackoffOptions::default());
        Self {
            upstream,
            unserved: backoff(),
            expired: backoff(),
            refused: backoff(),
            random,
            has_replicas: false,
            has_served: false,
            moved_at: None,
        }
    }

    /// Sets whether upstream may have replicas that take over at once: another kubefan may.
    pub(super) fn with_replicas(self, has_replicas: bool) -> Self {
        Self { has_replicas, ..self }
    }

    /// Notes that upstream has served a request.
    pub(super) fn served(&mut self) {
        self.has_served = true;
        self.unserved.reset();
    }

    /// Notes that a watch has delivered an event or a bookmark: its version was not too old.
    pub(super) fn watched(&mut self) {
        self.has_served = true;
        self.expired.reset();
    }

    /// Forgets all failures.
    pub(super) fn reset(&mut self) {
        self.unserved.reset();
        self.expired.reset();
        self.refused.reset();
    }

    /// Waits until the next attempt makes sense. `error` is `None` for a failure that is not a
    /// request's.
    pub(super) async fn wait_after(&mut self, error: Option<&UpstreamError>) {
        let delay = self.delay_after(error, Instant::now());
        if !delay.is_zero() {
            let asked = error.and_then(UpstreamError::retry_after).unwrap_or_default();
            let outage_ends = async {
                match (error, &self.upstream) {
                    (Some(error), Some(upstream)) if error.may_be_of_a_gateway() => {
                        tokio::join!(sleep(asked), upstream.until_outage_ends());
                    }
                    _ => std::future::pending().await,
                }
            };
            tokio::select! {
                () = sleep(delay) => {}
                () = outage_ends => {}
            }
        }
        if let (Some(UpstreamError::Unreachable { .. }), Some(upstream)) = (error, &self.upstream) {
            upstream.until_available().await;
        }
    }

    fn delay_after(&mut self, error: Option<&UpstreamError>, now: Instant) -> Duration {
        let has_served = std::mem::take(&mut self.has_served);
        if has_served && self.may_move_after(error, now) {
            self.moved_at = Some(now);
            return self.random.random_range(Duration::ZERO..=MOVE_DELAY_MAX);
        }
        let asked = error.and_then(UpstreamError::retry_after).filter(|_| !planted::is(Bug::RetryAfterIgnored));
        let delay = match error {
            Some(error) if error.is_passing() => self.unserved.next_delay(now, asked, &mut self.random),
            other => {
                self.unserved.reset();
                match other {
                    Some(UpstreamError::Gone { .. }) => self.expired.next_delay_after_first(now, &mut self.random),
                    _ => self.refused.next_delay(now, asked, &mut self.random),
                }
            }
        };
        let is_starting = self
            .upstream
            .as_ref()
            .map_or_else(|| matches!(error, Some(UpstreamError::Unreachable { .. })), Upstream::is_starting);
        if is_starting { delay.min(STARTING_DELAY_MAX.max(asked.unwrap_or_default())) } else { delay }
    }

    /// Whether another replica can be asked at once after this failure.
    fn may_move_after(&self, error: Option<&UpstreamError>, now: Instant) -> bool {
        let is_of_connection = matches!(
            error,
            Some(UpstreamError::Unreachable { .. } | UpstreamError::Reset { .. } | UpstreamError::Unread { .. })
        );
        let is_soon = self.moved_at.is_some_and(|at| now.saturating_duration_since(at) < MOVE_INTERVAL_MIN);
        self.has_replicas && is_of_connection && !is_soon
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use tokio::time::advance;

    use super::*;

    const FIRST: Duration = Duration::from_millis(800);

    fn retry() -> Retry {
        Retry::new(None, StdRng::seed_from_u64(1))
    }

    fn reset() -> UpstreamError {
        UpstreamError::Reset { message: "closed".to_owned() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_replica_that_is_lost_is_replaced_at_once_and_one_that_serves_nothing_is_not() {
        let mut retry = retry().with_replicas(true);
        let server = "http://kubefan".to_owned();
        let unreachable = UpstreamError::Unreachable { server, message: "refused".to_owned() };
        let busy = UpstreamError::Server { code: 503, message: "busy".to_owned(), retry_after: None };
        for error in [reset(), unreachable] {
            assert!(retry.delay_after(Some(&error), Instant::now()) >= FIRST, "nothing was served");
            retry.served();
            assert!(retry.delay_after(Some(&error), Instant::now()) <= MOVE_DELAY_MAX, "{error}");
            assert!(retry.delay_after(Some(&error), Instant::now()) >= FIRST, "the other one is lost too");
            retry.watched();
            assert!(retry.delay_after(Some(&error), Instant::now()) >= FIRST, "soon again");
            advance(MOVE_INTERVAL_MIN).await;
            retry.served();
            assert!(retry.delay_after(Some(&busy), Instant::now()) >= FIRST, "a replica that answers");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_apiserver_that_is_lost_is_not_asked_at_once() {
        let mut retry = retry();
        retry.served();
        assert!(retry.delay_after(Some(&reset()), Instant::now()) >= FIRST);
    }
}
