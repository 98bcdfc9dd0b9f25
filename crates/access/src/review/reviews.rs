//! The reviews of one kind: a verdict from the cache, from a review that is under way, or from a
//! new review, and in an outage from before it.
//!
//! An outage is a failure that says nothing about the caller: no connection, a timeout, a 5xx. Then
//! the last verdict counts for the time of the grace, so that a fleet that reconnects while the
//! apiserver restarts is not refused. A 401, 403 or 429 is an answer, and no outage.

use std::{
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::future::BoxFuture;
use kubefan_admission::Holder;
use kubefan_telemetry::{metrics::ReviewMetrics, traces};
use kubefan_upstream::UpstreamError;
use tokio::time::{Instant, timeout};

use super::{
    in_flight::{Flight, Flights},
    review_queue::{QueueLimits, ReviewQueue},
    verdict_cache::{Kept, Outcome, VerdictCache},
};

/// Time after a failure in which kubefan does not ask the apiserver for a verdict that the grace
/// covers.
const OUTAGE_PAUSE: Duration = Duration::from_secs(1);
/// Time that kubefan then waits for an answer before the last verdict counts. An apiserver that
/// hangs must not delay every request by the timeout of a review.
const RETURN_TIMEOUT: Duration = Duration::from_secs(1);
/// Time after a failed review for which the apiserver counts as one that does not answer.
const UNANSWERED_FOR: Duration = Duration::from_secs(60);

/// Options of the reviews of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReviewsOptions {
    /// Number of positive verdicts that are kept, and of negative ones.
    pub entries_max: usize,
    /// Time for which an expired verdict counts while the apiserver cannot be asked.
    pub outage_grace: Duration,
    /// Limits of the reviews that are sent.
    pub queue: QueueLimits,
}

/// The reason why there is no verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReviewError {
    /// A limit of kubefan is reached.
    Busy(String),
    /// The apiserver could not be asked.
    Outage,
    /// The apiserver does not answer kubefan.
    Refused,
}

/// The size, in bytes, from which a question waits with the other large ones. The apiserver needs
/// longer for these, and the small ones must not wait behind them.
const LARGE_BYTES: usize = 2 << 10;

/// A review to send.
pub struct Review<V> {
    /// Measures the question, in bytes. Only a question that is sent is measured, because that
    /// costs about as much as writing it.
    pub bytes: Box<dyn FnOnce() -> usize + Send>,
    /// The verdict, and how long it counts.
    pub answer: BoxFuture<'static, Result<(V, Duration), UpstreamError>>,
}

/// The reviews of one kind. `K` identifies the question completely.
pub struct Reviews<K, V: Clone> {
    flights: Flights<K, Result<V, ReviewError>>,
    shared: Arc<Shared<K, V>>,
}

struct Shared<K, V> {
    queue: ReviewQueue,
    /// For large questions.
    large: ReviewQueue,
    cache: VerdictCache<K, V>,
    /// Time at which the apiserver last failed to answer.
    away_at: Mutex<Option<Instant>>,
    metrics: ReviewMetrics,
}

impl<K, V> Reviews<K, V>
where
    K: Hash + Eq + Copy + Send + Sync + 'static,
    V: Outcome,
{
    /// Reviews without any verdict yet.
    pub fn new(options: ReviewsOptions, metrics: ReviewMetrics) -> Self {
        let cache = VerdictCache::new(options.entries_max, options.outage_grace);
        let queue = ReviewQueue::new(options.queue);
        let large = ReviewQueue::new(options.queue.for_large());
        let shared = Shared { queue, large, cache, away_at: Mutex::default(), metrics };
        Self { flights: Flights::default(), shared: Arc::new(shared) }
    }

    /// The verdict that is in the cache and counts.
    pub fn known(&self, key: &K) -> Option<V> {
        match self.shared.cache.get(key)? {
            Kept::Fresh(verdict) => Some(verdict),
            Kept::InGrace(_) => None,
        }
    }

    /// Returns the cached verdict, also one that counts only in an outage.
    pub fn kept(&self, key: &K) -> Option<V> {
        match self.shared.cache.get(key)? {
            Kept::Fresh(verdict) | Kept::InGrace(verdict) => Some(verdict),
        }
    }

    /// Keeps a verdict that `asker` needed no review for.
    pub fn keep(&self, key: K, asker: Holder, verdict: V, fresh_for: Duration) {
        self.shared.cache.put(key, asker, verdict, fresh_for);
    }

    /// Whether the apiserver could not be asked a moment ago.
    pub fn is_away(&self) -> bool {
        self.shared.is_away()
    }

    /// Whether the apiserver could be asked when it last had to be. A failure counts for a minute:
    /// without callers nothing is asked.
    pub fn is_answered(&self) -> bool {
        self.shared.away_at().is_none_or(|at| at.elapsed() >= UNANSWERED_FOR)
    }

    /// Counts the use of a verdict that counts only because of an outage.
    pub fn count_in_grace(&self) {
        self.shared.metrics.in_grace.inc();
    }

    /// The verdict from the cache, or from `review`. One review serves all that ask the same.
    pub async fn verdict(&self, key: K, holder: Holder, review: Review<V>) -> Result<V, ReviewError> {
        match self.shared.cache.get(&key) {
            Some(Kept::Fresh(verdict)) => Ok(verdict),
            Some(Kept::InGrace(verdict)) if self.shared.is_away() => Ok(self.shared.in_grace(verdict)),
            Some(Kept::InGrace(_)) if self.shared.has_failed_last() => self.in_outage(key, holder, review).await,
            _ => self.new_verdict(key, holder, review).await,
        }
    }

    /// A new verdict if it comes soon, or the last one.
    async fn in_outage(&self, key: K, holder: Holder, review: Review<V>) -> Result<V, ReviewError> {
        let _wait = traces::wait(self.shared.metrics.kind);
        let (asked, is_new) = self.ask(key, holder, review);
        if is_new {
            // The answer of a review that is only slow must count for later requests.
            tokio::spawn(asked.clone());
        }
        let verdict = match timeout(RETURN_TIMEOUT, asked.clone()).await {
            Ok(verdict) => verdict,
            Err(_) if self.shared.extend_outage() => return self.last(&key),
            // Another review has shown that the outage is over.
            Err(_) => asked.await,
        };
        match verdict {
            Err(ReviewError::Busy(_)) => self.last(&key),
            verdict => self.or_last(&key, verdict),
        }
    }

    /// A new verdict, which replaces the one in the cache. In an outage the last one counts.
    pub async fn new_verdict(&self, key: K, holder: Holder, review: Review<V>) -> Result<V, ReviewError> {
        let wait = traces::wait(self.shared.metrics.kind);
        let verdict = self.ask(key, holder, review).0.await;
        drop(wait);
        self.or_last(&key, verdict)
    }

    /// The review that is under way for this key, or a new one, which keeps its verdict; and
    /// whether it is new.
    fn ask(&self, key: K, holder: Holder, review: Review<V>) -> (Flight<Result<V, ReviewError>>, bool) {
        let shared = self.shared.clone();
        self.flights.join(key, async move {
            let (verdict, fresh_for) = shared.ask(holder, review).await?;
            shared.cache.put(key, holder, verdict.clone(), fresh_for);
            Ok(verdict)
        })
    }

    fn or_last(&self, key: &K, verdict: Result<V, ReviewError>) -> Result<V, ReviewError> {
        match verdict {
            Err(ReviewError::Outage) => self.last(key),
            verdict => verdict,
        }
    }

    /// The verdict from before an outage.
    fn last(&self, key: &K) -> Result<V, ReviewError> {
        match self.shared.cache.get(key) {
            Some(Kept::Fresh(verdict)) => Ok(verdict),
            Some(Kept::InGrace(verdict)) => Ok(self.shared.in_grace(verdict)),
            None => Err(ReviewError::Outage),
        }
    }

    /// A verdict that is not older than `age`, from the cache or from `review`. In an outage the
    /// last one counts.
    pub async fn recent(&self, key: K, holder: Holder, age: Duration, review: Review<V>) -> Result<V, ReviewError> {
        match self.shared.cache.younger_than(&key, age) {
            Some(verdict) => Ok(verdict),
            // The reviews of all streams must not hold up those of new callers.
            None if self.shared.is_away() => self.last(&key),
            None => self.new_verdict(key, holder, review).await,
        }
    }
}

impl<K, V> Shared<K, V> {
    fn away_at(&self) -> MutexGuard<'_, Option<Instant>> {
        self.away_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_away(&self) -> bool {
        self.away_at().is_some_and(|at| at.elapsed() < OUTAGE_PAUSE)
    }

    /// Whether the last review had no answer because the apiserver could not be asked.
    fn has_failed_last(&self) -> bool {
        self.away_at().is_some()
    }

    /// Records whether the apiserver could not be asked. Returns true if it could before.
    fn begins_outage(&self, is_outage: bool) -> bool {
        let before = std::mem::replace(&mut *self.away_at(), is_outage.then(Instant::now));
        is_outage && before.is_none()
    }

    /// Lets an outage last from now on, so that the apiserver is not asked again at once. Returns
    /// false if a review has succeeded since: an outage that is over must not come back.
    fn extend_outage(&self) -> bool {
        self.away_at().as_mut().map(|at| *at = Instant::now()).is_some()
    }

    fn in_grace(&self, verdict: V) -> V {
        self.metrics.in_grace.inc();
        verdict
    }

    async fn ask(&self, holder: Holder, Review { bytes, answer }: Review<V>) -> Result<(V, Duration), ReviewError> {
        let queue = if bytes() < LARGE_BYTES { &self.queue } else { &self.large };
        let _turn = queue.turn(holder).await.map_err(ReviewError::Busy)?;
        let answer = answer.await;
        self.metrics.answered(answer.as_ref().err().map(UpstreamError::reason));
        let is_outage = answer.as_ref().is_err_and(is_outage);
        let is_news = self.begins_outage(is_outage) || !is_outage;
        answer.map_err(|error| {
            let kind = self.metrics.kind;
            if is_news {
                tracing::warn!(%error, kind, "a caller was not reviewed");
            } else {
                tracing::debug!(%error, kind, "callers are still not reviewed");
            }
            if is_outage { ReviewError::Outage } else { ReviewError::Refused }
        })
    }
}

/// Whether a failure says only that the apiserver could not be asked.
fn is_outage(error: &UpstreamError) -> bool {
    error.is_away() || matches!(error, UpstreamError::Server { .. })
}

#[cfg(test)]
mod tests;
