//! The time of each change upstream, and the age of changes on receipt.
//!
//! Receivers record a million deliveries per second here, so ages go to a histogram of fixed size:
//! no allocation, no lock, buckets 1.6 % wide.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use tokio::time::Instant;

/// Number of changes whose times are retained. If a change is received after this many later
/// changes were made, its age is computed from a later change and too small.
const CHANGES_MAX: u64 = 1 << 17;
/// 64 buckets per doubling. Ages below 128 µs have a bucket each.
const STEP_BITS: u32 = 6;
/// Enough for ages up to 2^40 µs.
const BUCKETS: usize = 35 << STEP_BITS;

/// Times of the latest changes, in microseconds since `base`.
pub(super) struct ChangeTimes {
    base: Instant,
    made: Box<[AtomicU64]>,
    count: AtomicU64,
}

impl Default for ChangeTimes {
    fn default() -> Self {
        let made = (0..CHANGES_MAX).map(|_| AtomicU64::new(0)).collect();
        Self { base: Instant::now(), made, count: AtomicU64::new(0) }
    }
}

impl ChangeTimes {
    /// Notes that the next change is about to be made. Only one task may call this.
    pub(super) fn record_change(&self) {
        let count = self.count.load(Relaxed);
        self.made[(count % CHANGES_MAX) as usize].store(self.micros(Instant::now()), Relaxed);
        self.count.store(count + 1, Relaxed);
    }

    /// The age at `now` of the change with this number, counted from 0.
    pub(super) fn age_micros(&self, number: u64, now: Instant) -> u64 {
        let made = self.made[(number % CHANGES_MAX) as usize].load(Relaxed);
        self.micros(now).saturating_sub(made)
    }

    fn micros(&self, at: Instant) -> u64 {
        at.duration_since(self.base).as_micros() as u64
    }
}

/// Counts per age.
pub(super) struct Histogram {
    buckets: Box<[AtomicU64]>,
    max: AtomicU64,
}

/// The ages recorded in one interval.
pub(super) struct Ages {
    counts: Vec<u64>,
    max_micros: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(), max: AtomicU64::new(0) }
    }
}

impl Histogram {
    pub(super) fn record(&self, micros: u64) {
        self.buckets[bucket(micros)].fetch_add(1, Relaxed);
        self.max.fetch_max(micros, Relaxed);
    }

    /// Returns and clears the ages recorded since the last call.
    pub(super) fn take(&self) -> Ages {
        let counts = self.buckets.iter().map(|bucket| bucket.swap(0, Relaxed)).collect();
        Ages { counts, max_micros: self.max.swap(0, Relaxed) }
    }
}

impl Ages {
    /// The ages of both.
    pub(super) fn and(mut self, other: &Self) -> Self {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.max_micros = self.max_micros.max(other.max_micros);
        self
    }

    /// The age that `percent` of the deliveries do not exceed; `None` if there were none.
    pub(super) fn percentile(&self, percent: u64) -> Option<Duration> {
        let total: u64 = self.counts.iter().sum();
        let rank = (total * percent).div_ceil(100).max(1);
        let mut seen = 0;
        let at = self.counts.iter().position(|count| {
            seen += count;
            seen >= rank
        })?;
        Some(Duration::from_micros(upper_bound(at).min(self.max_micros)))
    }

    /// The highest age; `None` if there were none.
    pub(super) fn max(&self) -> Option<Duration> {
        self.percentile(100).map(|_| Duration::from_micros(self.max_micros))
    }
}

fn bucket(micros: u64) -> usize {
    let shift = (u64::BITS - micros.leading_zeros()).saturating_sub(STEP_BITS + 1);
    let index = (u64::from(shift) << STEP_BITS) + (micros >> shift);
    usize::try_from(index).unwrap_or(usize::MAX).min(BUCKETS - 1)
}

/// The highest age that falls into a bucket.
fn upper_bound(bucket: usize) -> u64 {
    let steps = 1u64 << STEP_BITS;
    let shift = (bucket as u64 >> STEP_BITS).saturating_sub(1);
    ((bucket as u64 - shift * steps + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_contains_the_values_up_to_its_bound() {
        for micros in (0..5_000).chain([100_000, 1_234_567, 60_000_000, 1 << 39]) {
            let at = bucket(micros);
            assert!(micros <= upper_bound(at), "{micros}");
            assert!(at == 0 || micros > upper_bound(at - 1), "{micros}");
            assert!(upper_bound(at) - micros <= micros / 64, "{micros}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_cover_only_the_ages_since_the_last_take() {
        let histogram = Histogram::default();
        for micros in 1..=1000 {
            histogram.record(micros * 1000);
        }
        let ages = histogram.take();
        let millis = |percent| ages.percentile(percent).unwrap().as_secs_f64() * 1e3;
        assert!((500.0..508.0).contains(&millis(50)) && (990.0..1000.1).contains(&millis(99)), "{}", millis(50));
        assert_eq!(ages.max(), Some(Duration::from_secs(1)));
        assert_eq!(histogram.take().percentile(50), None);
    }

    #[tokio::test(start_paused = true)]
    async fn the_age_of_a_change_is_counted_from_when_it_was_made() {
        let times = ChangeTimes::default();
        tokio::time::advance(Duration::from_millis(1)).await;
        times.record_change();
        tokio::time::advance(Duration::from_millis(5)).await;
        times.record_change();
        let now = Instant::now();
        assert_eq!((times.age_micros(0, now), times.age_micros(1, now)), (5_000, 0));
    }
}
