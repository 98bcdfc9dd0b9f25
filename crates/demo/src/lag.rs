//! The lag of a delivery: from just before the write at the apiserver to the receipt by a
//! subscriber.
//!
//! Both ends are in this process, so one clock measures both routes. Memory is bounded: the times
//! of the most recent writes, and a histogram of fixed size.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use tokio::time::Instant;

/// Number of recent writes whose times are stored.
const WRITES_MAX: u64 = 1 << 16;
/// Histogram buckets per power of two. Each bucket is at most 1/8 of its value wide.
const BUCKETS_PER_DOUBLING: u64 = 8;
const BUCKETS: usize = 320;

/// The write times of the most recent versions.
pub(super) struct WriteTimes {
    base: Instant,
    newest: AtomicU64,
    micros: Box<[AtomicU64]>,
}

impl Default for WriteTimes {
    fn default() -> Self {
        let micros = (0..WRITES_MAX).map(|_| AtomicU64::new(0)).collect();
        Self { base: Instant::now(), newest: AtomicU64::new(0), micros }
    }
}

impl WriteTimes {
    /// Records that `version` is about to be written.
    pub(super) fn record(&self, version: u64) {
        self.slot(version).store(self.now(), Ordering::Relaxed);
        self.newest.store(version, Ordering::Release);
    }

    /// The time since the write of `version`. `None` if its write time is not stored.
    pub(super) fn age(&self, version: u64) -> Option<Duration> {
        let newest = self.newest.load(Ordering::Acquire);
        let known = version <= newest && newest - version < WRITES_MAX;
        let written = self.slot(version).load(Ordering::Relaxed);
        (known && written > 0).then(|| Duration::from_micros(self.now().saturating_sub(written)))
    }

    fn slot(&self, version: u64) -> &AtomicU64 {
        &self.micros[(version % WRITES_MAX) as usize]
    }

    fn now(&self) -> u64 {
        u64::try_from(self.base.elapsed().as_micros()).unwrap_or(u64::MAX).max(1)
    }
}

/// A histogram of the lags since the last [`Self::take`], with buckets of logarithmic width.
pub(super) struct Lags {
    buckets: Box<[AtomicU64]>,
}

/// Quantiles of lags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantiles {
    /// The median.
    pub p50: Duration,
    /// The 99th percentile.
    pub p99: Duration,
}

impl Default for Lags {
    fn default() -> Self {
        Self { buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl Lags {
    pub(super) fn record(&self, lag: Duration) {
        let micros = u64::try_from(lag.as_micros()).unwrap_or(u64::MAX);
        self.buckets[bucket(micros)].fetch_add(1, Ordering::Relaxed);
    }

    /// The quantiles of the lags since the last call; `None` if there were none.
    pub(super) fn take(&self) -> Option<Quantiles> {
        let counts: Vec<u64> = self.buckets.iter().map(|bucket| bucket.swap(0, Ordering::Relaxed)).collect();
        let total: u64 = counts.iter().sum();
        let quantile = |percent: u64| {
            let rank = (total * percent).div_ceil(100);
            let mut seen = 0;
            let at = counts.iter().position(|count| {
                seen += count;
                seen >= rank
            });
            Duration::from_micros(upper_bound(at.unwrap_or(0)))
        };
        (total > 0).then(|| Quantiles { p50: quantile(50), p99: quantile(99) })
    }
}

fn bucket(micros: u64) -> usize {
    let index = match micros.checked_ilog2() {
        Some(doubling) if micros >= BUCKETS_PER_DOUBLING => {
            let shift = u64::from(doubling) - 3;
            (shift + 1) * BUCKETS_PER_DOUBLING + ((micros >> shift) - BUCKETS_PER_DOUBLING)
        }
        _ => micros,
    };
    usize::try_from(index).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// The largest value of a bucket, in microseconds.
fn upper_bound(bucket: usize) -> u64 {
    let doubling = bucket as u64 / BUCKETS_PER_DOUBLING;
    let step = bucket as u64 % BUCKETS_PER_DOUBLING;
    match doubling {
        0 => step,
        doubling => ((BUCKETS_PER_DOUBLING + step + 1) << (doubling - 1)) - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_falls_into_the_bucket_whose_bounds_contain_it() {
        for micros in (0..5_000).chain([100_000, 1_234_567, 60_000_000]) {
            let at = bucket(micros);
            assert!(micros <= upper_bound(at), "{micros}");
            assert!(at == 0 || micros > upper_bound(at - 1), "{micros}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_cover_only_the_lags_since_the_last_call() {
        let lags = Lags::default();
        for millis in 1..=100 {
            lags.record(Duration::from_millis(millis));
        }
        let Quantiles { p50, p99 } = lags.take().unwrap();
        assert!((50..58).contains(&p50.as_millis()) && (99..112).contains(&p99.as_millis()), "{p50:?} {p99:?}");
        assert_eq!(lags.take(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_time_is_known_until_newer_writes_overwrite_it() {
        let times = WriteTimes::default();
        tokio::time::advance(Duration::from_millis(1)).await;
        times.record(7);
        tokio::time::advance(Duration::from_millis(5)).await;
        assert_eq!(times.age(7), Some(Duration::from_millis(5)));
        assert_eq!(times.age(8), None);
        times.record(7 + WRITES_MAX);
        assert_eq!(times.age(7), None);
    }
}
