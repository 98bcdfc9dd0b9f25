//! Delays of a work queue's retries.

use std::{
    collections::HashMap,
    fmt,
    hash::Hash,
    num::NonZeroU32,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

const NANOS_PER_SECOND: u128 = 1_000_000_000;

/// Sets the delay of each retry of a work queue: client-go's `TypedRateLimiter`.
pub trait RateLimiter<T>: Send + Sync {
    /// Counts a retry of the item. Returns the delay until it.
    fn when(&self, item: &T) -> Duration;

    /// Ends the retries of an item, after a success or before giving up.
    fn forget(&self, item: &T);

    /// The retries of the item since the last [`forget`](Self::forget).
    fn num_requeues(&self, item: &T) -> u32;
}

impl<T> fmt::Debug for dyn RateLimiter<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("RateLimiter")
    }
}

/// Delays that double with each retry of the same item: client-go's
/// `TypedItemExponentialFailureRateLimiter`. It remembers each item until
/// [`forget`](RateLimiter::forget).
#[derive(Debug)]
pub struct ItemExponentialFailureRateLimiter<T> {
    retries: Mutex<HashMap<T, u32>>,
    base: Duration,
    max: Duration,
}

impl<T> ItemExponentialFailureRateLimiter<T> {
    /// The first delay is `base`. Each further one is twice as long, up to `max`.
    pub fn new(base: Duration, max: Duration) -> Self {
        Self { retries: Mutex::new(HashMap::new()), base, max }
    }

    fn retries(&self) -> MutexGuard<'_, HashMap<T, u32>> {
        self.retries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Clone + Eq + Hash + Send> RateLimiter<T> for ItemExponentialFailureRateLimiter<T> {
    fn when(&self, item: &T) -> Duration {
        let exponent = {
            let mut retries = self.retries();
            let retries = retries.entry(item.clone()).or_default();
            let exponent = *retries;
            *retries = exponent.saturating_add(1);
            exponent
        };
        // In integers, so that long delays are exact. An overflow is longer than any `max`.
        let factor = 1_u128.checked_shl(exponent).unwrap_or(u128::MAX);
        let max = self.max.as_nanos();
        let nanos = self.base.as_nanos().checked_mul(factor).unwrap_or(max).min(max);
        let seconds = nanos / NANOS_PER_SECOND;
        let nanos = nanos % NANOS_PER_SECOND;
        // Both fit: the delay is at most `max`, which is a `Duration`.
        Duration::new(seconds as u64, nanos as u32)
    }

    fn forget(&self, item: &T) {
        self.retries().remove(item);
    }

    fn num_requeues(&self, item: &T) -> u32 {
        self.retries().get(item).copied().unwrap_or_default()
    }
}

/// One limit for all items, a token bucket: client-go's `TypedBucketRateLimiter` over
/// `golang.org/x/time/rate`. Each retry takes a token, if need be one of the future.
#[derive(Debug)]
pub struct BucketRateLimiter {
    interval: Duration,
    /// The time in which an empty bucket fills.
    capacity: Duration,
    /// Time at which the bucket is full again.
    full_at: Mutex<Option<Instant>>,
}

impl BucketRateLimiter {
    /// A full bucket of `burst` tokens, which gets a token per `interval`.
    pub fn new(interval: Duration, burst: NonZeroU32) -> Self {
        Self { interval, capacity: interval.saturating_mul(burst.get()), full_at: Mutex::new(None) }
    }
}

impl<T> RateLimiter<T> for BucketRateLimiter {
    fn when(&self, _item: &T) -> Duration {
        let mut full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let start = full_at.map_or(now, |full_at| full_at.max(now));
        // At the end of the clock's range, the bucket takes no more tokens.
        let next = start.checked_add(self.interval).unwrap_or(start);
        *full_at = Some(next);
        next.duration_since(now).saturating_sub(self.capacity)
    }

    fn forget(&self, _item: &T) {}

    fn num_requeues(&self, _item: &T) -> u32 {
        0
    }
}

/// The longest delay of several limiters: client-go's `TypedMaxOfRateLimiter`. Each of them counts
/// each retry.
#[derive(Debug)]
pub struct MaxOfRateLimiter<T>(Vec<Box<dyn RateLimiter<T>>>);

impl<T> MaxOfRateLimiter<T> {
    /// The longest delay of these limiters; none if there are none.
    pub fn new(limiters: Vec<Box<dyn RateLimiter<T>>>) -> Self {
        Self(limiters)
    }
}

impl<T: Clone + Eq + Hash + Send + 'static> MaxOfRateLimiter<T> {
    /// client-go's `DefaultTypedControllerRateLimiter`: 5 ms to 1000 s per item, and for all items
    /// 10 per second after a burst of 100.
    pub fn for_controllers() -> Self {
        let per_item = ItemExponentialFailureRateLimiter::new(Duration::from_millis(5), Duration::from_secs(1000));
        let overall = BucketRateLimiter::new(Duration::from_millis(100), NonZeroU32::MIN.saturating_add(99));
        Self::new(vec![Box::new(per_item), Box::new(overall)])
    }
}

impl<T> RateLimiter<T> for MaxOfRateLimiter<T> {
    fn when(&self, item: &T) -> Duration {
        self.0.iter().map(|limiter| limiter.when(item)).max().unwrap_or_default()
    }

    fn forget(&self, item: &T) {
        for limiter in &self.0 {
            limiter.forget(item);
        }
    }

    fn num_requeues(&self, item: &T) -> u32 {
        self.0.iter().map(|limiter| limiter.num_requeues(item)).max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(delays: impl IntoIterator<Item = Duration>) -> Vec<u128> {
        delays.into_iter().map(|delay| delay.as_millis()).collect()
    }

    #[test]
    fn delays_of_an_item_double_up_to_the_maximum() {
        let limiter = ItemExponentialFailureRateLimiter::new(Duration::from_millis(1), Duration::from_millis(10));
        assert_eq!(millis((0..6).map(|_| limiter.when(&"a"))), [1, 2, 4, 8, 10, 10]);
        assert_eq!(limiter.num_requeues(&"a"), 6);
    }

    #[test]
    fn each_item_has_its_own_exponential_delay() {
        let limiter = ItemExponentialFailureRateLimiter::new(Duration::from_millis(1), Duration::from_secs(1));
        assert_eq!(millis((0..3).map(|_| limiter.when(&"a"))), [1, 2, 4]);
        assert_eq!(millis((0..2).map(|_| limiter.when(&"b"))), [1, 2]);
        assert_eq!((limiter.num_requeues(&"a"), limiter.num_requeues(&"b")), (3, 2));
    }

    #[test]
    fn forget_starts_the_exponential_delay_over() {
        let limiter = ItemExponentialFailureRateLimiter::new(Duration::from_millis(1), Duration::from_secs(1));
        assert_eq!(millis((0..3).map(|_| limiter.when(&"a"))), [1, 2, 4]);
        limiter.forget(&"a");
        assert_eq!(limiter.num_requeues(&"a"), 0);
        assert_eq!(limiter.when(&"a"), Duration::from_millis(1));
    }

    #[test]
    fn the_exponential_delay_never_overflows() {
        let max = Duration::from_secs(1000 * 60 * 60);
        let limiter = ItemExponentialFailureRateLimiter::new(Duration::from_nanos(1), max);
        let delays: Vec<_> = (0..1000).map(|_| limiter.when(&"a")).collect();
        assert!(delays.is_sorted());
        assert_eq!(delays[40], Duration::from_nanos(1 << 40));
        assert_eq!(delays[999], max);
        let longest = ItemExponentialFailureRateLimiter::new(Duration::MAX, Duration::MAX);
        assert_eq!([longest.when(&"a"), longest.when(&"a")], [Duration::MAX; 2]);
        let none = ItemExponentialFailureRateLimiter::new(Duration::ZERO, max);
        assert!((0..200).all(|_| none.when(&"a").is_zero()));
    }

    #[tokio::test(start_paused = true)]
    async fn the_bucket_delays_nothing_before_its_burst_is_used() {
        let bucket = BucketRateLimiter::new(Duration::from_millis(100), NonZeroU32::new(3).unwrap());
        assert_eq!(millis((0..6).map(|_| bucket.when(&"a"))), [0, 0, 0, 100, 200, 300]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_bucket_fills_with_time_up_to_its_burst() {
        let bucket = BucketRateLimiter::new(Duration::from_millis(100), NonZeroU32::new(2).unwrap());
        assert_eq!(millis((0..3).map(|_| bucket.when(&"a"))), [0, 0, 100]);
        tokio::time::advance(Duration::from_millis(250)).await;
        // 2.5 tokens for a debt of 1.
        assert_eq!(millis((0..2).map(|_| bucket.when(&"a"))), [0, 50]);
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!(millis((0..3).map(|_| bucket.when(&"a"))), [0, 0, 100]);
        RateLimiter::<&str>::forget(&bucket, &"a");
        assert_eq!(bucket.num_requeues(&"a"), 0);
    }

    #[test]
    fn the_longest_delay_and_count_of_several_limiters_apply() {
        let slow = ItemExponentialFailureRateLimiter::new(Duration::from_millis(3), Duration::from_millis(3));
        let fast = ItemExponentialFailureRateLimiter::new(Duration::from_millis(1), Duration::from_secs(1));
        fast.when(&"a");
        let limiter = MaxOfRateLimiter::new(vec![Box::new(slow), Box::new(fast)]);
        assert_eq!(limiter.num_requeues(&"a"), 1);
        assert_eq!(millis((0..3).map(|_| limiter.when(&"a"))), [3, 4, 8]);
        assert_eq!(limiter.num_requeues(&"a"), 4);
        limiter.forget(&"a");
        assert_eq!(limiter.num_requeues(&"a"), 0);
        assert_eq!(limiter.when(&"a"), Duration::from_millis(3));
    }

    #[tokio::test(start_paused = true)]
    async fn controllers_get_5_ms_per_item_and_10_per_second_overall() {
        let limiter = MaxOfRateLimiter::for_controllers();
        assert_eq!(millis((0..4).map(|_| limiter.when(&0))), [5, 10, 20, 40]);
        assert!((1..=96).all(|item| limiter.when(&item) == Duration::from_millis(5)));
        assert_eq!(millis((97..=99).map(|item| limiter.when(&item))), [100, 200, 300]);
        tokio::time::advance(Duration::from_secs(60)).await;
        let delays: Vec<_> = (0..30).map(|_| limiter.when(&0)).collect();
        assert_eq!(delays[29], Duration::from_secs(1000));
    }
}
