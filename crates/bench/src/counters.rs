//! Counters that all receivers share, and the wake-up once the expected number has arrived.
//!
//! Receivers run on threads of their own and touch only atomics here: counting must cost little
//! compared to receiving.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{
            AtomicU64, AtomicUsize,
            Ordering::{AcqRel, Acquire, Relaxed, Release},
        },
    },
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    BenchError,
    latency::{ChangeTimes, Histogram},
};

/// The counters of one set of receivers.
pub(super) struct Counters {
    /// Times of the changes of this load.
    pub(super) times: Arc<ChangeTimes>,
    pub(super) ages: Histogram,
    streams: Box<[StreamCounters]>,
    ready: AtomicUsize,
    /// The highest resource version of an initial state so far.
    version: AtomicU64,
    /// Live events received by all streams.
    received: AtomicU64,
    target: AtomicU64,
    reached: Notify,
    /// Objects received as part of initial states.
    objects: AtomicU64,
    /// Bytes read from the sockets.
    bytes: AtomicU64,
    /// Bytes of response bodies, as sent: without the framing of HTTP/2 and TLS, and compressed if
    /// the server has compressed them.
    body_bytes: AtomicU64,
    /// Number of reads that found live events.
    reads: AtomicU64,
    /// Cancelled at the first failure.
    failed: CancellationToken,
    failure: Mutex<String>,
    is_timed: bool,
}

#[derive(Default)]
struct StreamCounters {
    received: AtomicU64,
    age_micros: AtomicU64,
}

/// The totals at one moment.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) received: u64,
    pub(super) objects: u64,
    pub(super) bytes: u64,
    pub(super) body_bytes: u64,
    pub(super) reads: u64,
}

/// Events received and the sum of their ages (µs) per stream, at one moment.
pub(super) struct PerStream(Vec<(u64, u64)>);

impl Counters {
    /// `is_timed` requires that every subscriber receives every change, so that the n-th event of a
    /// stream is the n-th change.
    pub(super) fn new(subscribers: usize, is_timed: bool) -> Self {
        Self::with_times(subscribers, is_timed, Arc::default())
    }

    /// Like [`Self::new`], with the times of the changes shared between sets of receivers.
    pub(super) fn with_times(subscribers: usize, is_timed: bool, times: Arc<ChangeTimes>) -> Self {
        Self {
            times,
            ages: Histogram::default(),
            streams: (0..subscribers).map(|_| StreamCounters::default()).collect(),
            ready: AtomicUsize::new(0),
            version: AtomicU64::new(0),
            received: AtomicU64::new(0),
            target: AtomicU64::new(u64::MAX),
            reached: Notify::new(),
            objects: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            body_bytes: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            failed: CancellationToken::new(),
            failure: Mutex::default(),
            is_timed,
        }
    }

    pub(super) fn subscribers(&self) -> usize {
        self.streams.len()
    }

    pub(super) fn stream_ready(&self) {
        if self.ready.fetch_add(1, AcqRel) + 1 >= self.subscribers() {
            self.reached.notify_one();
        }
    }

    /// Notes the resource version of an initial state that a stream has completed.
    pub(super) fn set_version(&self, version: u64) {
        self.version.fetch_max(version, Relaxed);
    }

    /// The highest resource version of an initial state so far; 0 if there was none.
    pub(super) fn version(&self) -> u64 {
        self.version.load(Relaxed)
    }

    pub(super) fn add_objects(&self, count: u64) {
        self.objects.fetch_add(count, Relaxed);
    }

    pub(super) fn add_bytes(&self, count: u64) {
        self.bytes.fetch_add(count, Relaxed);
    }

    pub(super) fn add_body_bytes(&self, count: u64) {
        self.body_bytes.fetch_add(count, Relaxed);
    }

    /// Counts live events on one stream.
    pub(super) fn receive(&self, stream: usize, count: u64) {
        let own = &self.streams[stream];
        let first = own.received.fetch_add(count, Relaxed);
        if self.is_timed {
            let now = Instant::now();
            let mut sum = 0;
            for number in first..first + count {
                let age = self.times.age_micros(number, now);
                self.ages.record(age);
                sum += age;
            }
            own.age_micros.fetch_add(sum, Relaxed);
        }
        self.reads.fetch_add(1, Relaxed);
        let received = self.received.fetch_add(count, AcqRel) + count;
        if received >= self.target.load(Acquire) {
            self.reached.notify_one();
        }
    }

    pub(super) fn fail(&self, message: String) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.is_empty() {
            *failure = message;
        }
        drop(failure);
        self.failed.cancel();
    }

    pub(super) fn counts(&self) -> Counts {
        Counts {
            received: self.received.load(Acquire),
            objects: self.objects.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            body_bytes: self.body_bytes.load(Relaxed),
            reads: self.reads.load(Relaxed),
        }
    }

    pub(super) fn per_stream(&self) -> PerStream {
        let read = |stream: &StreamCounters| (stream.received.load(Relaxed), stream.age_micros.load(Relaxed));
        PerStream(self.streams.iter().map(read).collect())
    }

    /// Sets the total of live events that [`Self::all_received`] waits for. Must be called before
    /// the changes are made.
    pub(super) fn expect_received(&self, received: u64) {
        self.target.store(received, Release);
    }

    /// Waits until every stream is open and has its initial state.
    pub(super) async fn all_ready(&self, limit: Duration) -> Result<(), BenchError> {
        let done = || self.ready.load(Acquire) >= self.subscribers();
        self.wait("connecting", limit, done, || (self.ready.load(Acquire) as u64, self.subscribers() as u64)).await
    }

    /// Waits until the expected number of live events has arrived.
    pub(super) async fn all_received(&self, limit: Duration) -> Result<(), BenchError> {
        let state = || (self.received.load(Acquire), self.target.load(Acquire));
        self.wait("receiving", limit, || state().0 >= state().1, state).await
    }

    async fn wait(
        &self,
        doing: &'static str,
        limit: Duration,
        done: impl Fn() -> bool,
        state: impl Fn() -> (u64, u64),
    ) -> Result<(), BenchError> {
        let waiting = async {
            while !done() {
                tokio::select! {
                    () = self.reached.notified() => {}
                    () = self.failed.cancelled() => {
                        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
                        return Err(BenchError::Subscriber(failure));
                    }
                }
            }
            Ok(())
        };
        timeout(limit, waiting).await.unwrap_or_else(|_| {
            let (reached, expected) = state();
            Err(BenchError::Stuck { doing, limit, reached, expected })
        })
    }
}

impl PerStream {
    /// Events that the slowest subscriber has received since `before`, as a share of the mean.
    pub(super) fn slowest_share(&self, before: &Self) -> f64 {
        let received: Vec<u64> = self.0.iter().zip(&before.0).map(|(now, then)| now.0 - then.0).collect();
        let mean = received.iter().sum::<u64>() as f64 / received.len() as f64;
        received.iter().min().map_or(f64::NAN, |slowest| *slowest as f64 / mean)
    }

    /// The mean age at receipt since `before`, in milliseconds: over all deliveries, and of the
    /// subscriber with the largest mean.
    pub(super) fn ages(&self, before: &Self) -> (f64, f64) {
        let since = self.0.iter().zip(&before.0).map(|(now, then)| (now.0 - then.0, (now.1 - then.1) as f64 / 1e3));
        let mut count = 0;
        let mut sum = 0.0;
        let mut slowest = f64::NAN;
        for (received, millis) in since {
            count += received;
            sum += millis;
            slowest = slowest.max(millis / received as f64);
        }
        (sum / count as f64, slowest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_with_the_last_delivery_or_reports_how_many_arrived() {
        let counters = Counters::new(2, true);
        counters.expect_received(4);
        counters.receive(0, 2);
        counters.receive(1, 1);
        let error = counters.all_received(Duration::from_secs(1)).await.unwrap_err().to_string();
        assert!(error.contains("3 of 4"), "{error}");
        counters.receive(1, 1);
        counters.all_received(Duration::from_secs(1)).await.unwrap();
        assert_eq!((counters.counts().received, counters.counts().reads), (4, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_failure_ends_every_wait() {
        let counters = Counters::new(1, true);
        counters.fail("first".to_owned());
        counters.fail("second".to_owned());
        let error = counters.all_ready(Duration::from_secs(1)).await.unwrap_err().to_string();
        assert!(error.contains("first"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_slowest_subscriber_is_reported_beside_the_mean() {
        let counters = Counters::new(2, true);
        let before = counters.per_stream();
        counters.times.record_change();
        tokio::time::advance(Duration::from_millis(4)).await;
        counters.receive(0, 1);
        tokio::time::advance(Duration::from_millis(4)).await;
        counters.receive(1, 1);
        let after = counters.per_stream();
        assert_eq!((after.slowest_share(&before), after.ages(&before)), (1.0, (6.0, 8.0)));
    }
}
