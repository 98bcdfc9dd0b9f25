//! The delay before a retry, for connections to the apiserver and in the client library. The
//! defaults are those of client-go's reflector: 800 ms, doubled up to 30 s, each stretched at
//! random by up to its own length, and reset to 800 ms after two healthy minutes. Without the
//! jitter, all clients of a failed apiserver would reconnect at the same moment. The clock and the
//! random generator are arguments, so that a simulation controls both.

use std::time::Duration;

use rand::{Rng, RngExt};
use tokio::time::Instant;

/// Parameters of a backoff.
#[derive(Debug, Clone, PartialEq)]
pub struct BackoffOptions {
    /// The first delay, before jitter.
    pub initial: Duration,
    /// The longest delay, before jitter.
    pub max: Duration,
    /// The factor between two consecutive delays.
    pub factor: f64,
    /// The largest jitter, as a fraction of the delay: with 1.0 a delay of 30 s becomes 30 to 60 s.
    pub jitter: f64,
    /// A failure that follows this long after the end of the previous delay starts again with
    /// `initial`.
    pub reset_after: Duration,
}

impl Default for BackoffOptions {
    fn default() -> Self {
        Self {
            initial: Duration::from_millis(800),
            max: Duration::from_secs(30),
            factor: 2.0,
            jitter: 1.0,
            reset_after: Duration::from_secs(120),
        }
    }
}

/// The state of one retry loop.
#[derive(Debug)]
pub struct Backoff {
    options: BackoffOptions,
    next: Duration,
    healthy_since: Option<Instant>,
}

impl Backoff {
    /// Returns a backoff without failures.
    pub fn new(options: BackoffOptions) -> Self {
        Self { next: options.initial, options, healthy_since: None }
    }

    /// Returns the delay after a failure at `now`. It is never shorter than `retry_after`, the
    /// delay that the server asked for.
    ///
    /// The time from the end of the previous delay until `now` counts as healthy. If it is at least
    /// `reset_after`, this delay is the first one again.
    pub fn next_delay(&mut self, now: Instant, retry_after: Option<Duration>, rng: &mut impl Rng) -> Duration {
        if self.is_first(now) {
            self.next = self.options.initial;
        }
        let base = self.next;
        self.next = base.mul_f64(self.options.factor).min(self.options.max);
        let delay =
            (base + base.mul_f64(self.options.jitter * rng.random::<f64>())).max(retry_after.unwrap_or_default());
        self.healthy_since = Some(now + delay);
        delay
    }

    /// As [`Self::next_delay`], but the first failure of a series has no delay: for failures that
    /// another kind of request resolves at once.
    pub fn next_delay_after_first(&mut self, now: Instant, rng: &mut impl Rng) -> Duration {
        let is_first = self.is_first(now);
        let delay = self.next_delay(now, None, rng);
        if is_first { Duration::ZERO } else { delay }
    }

    /// Whether a failure at `now` is the first one, or the first after a healthy time.
    fn is_first(&self, now: Instant) -> bool {
        let is_healthy = |since| now.saturating_duration_since(since) >= self.options.reset_after;
        self.healthy_since.is_none_or(is_healthy)
    }

    /// Resets the delay to the first one.
    pub fn reset(&mut self) {
        self.next = self.options.initial;
        self.healthy_since = None;
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new(BackoffOptions::default())
    }
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::SmallRng};

    use super::*;

    fn plain() -> Backoff {
        Backoff::new(BackoffOptions { jitter: 0.0, ..BackoffOptions::default() })
    }

    #[tokio::test(start_paused = true)]
    async fn delays_double_from_800_ms_to_30_s() {
        let mut backoff = plain();
        let mut rng = SmallRng::seed_from_u64(1);
        let mut delays = Vec::new();
        for _ in 0..8 {
            let delay = backoff.next_delay(Instant::now(), None, &mut rng);
            tokio::time::sleep(delay).await;
            delays.push(delay.as_millis());
        }
        assert_eq!(delays, [800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000]);
    }

    #[tokio::test(start_paused = true)]
    async fn two_healthy_minutes_reset_the_delay() {
        let mut backoff = plain();
        let mut rng = SmallRng::seed_from_u64(1);
        for _ in 0..5 {
            let delay = backoff.next_delay(Instant::now(), None, &mut rng);
            tokio::time::sleep(delay).await;
        }
        tokio::time::sleep(Duration::from_secs(119)).await;
        let delay = backoff.next_delay(Instant::now(), None, &mut rng);
        assert_eq!(delay, Duration::from_millis(25_600), "119 healthy seconds are not enough");
        tokio::time::sleep(delay + Duration::from_secs(120)).await;
        assert_eq!(backoff.next_delay(Instant::now(), None, &mut rng), Duration::from_millis(800));
    }

    #[tokio::test(start_paused = true)]
    async fn a_delay_is_never_shorter_than_the_servers_retry_after() {
        let mut backoff = plain();
        let mut rng = SmallRng::seed_from_u64(1);
        let asked = Some(Duration::from_secs(20));
        assert_eq!(backoff.next_delay(Instant::now(), asked, &mut rng), Duration::from_secs(20));
        assert_eq!(backoff.next_delay(Instant::now(), None, &mut rng), Duration::from_millis(1600));
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_failure_of_a_series_can_be_free_of_delay() {
        let mut backoff = plain();
        let mut rng = SmallRng::seed_from_u64(1);
        let mut delay = || backoff.next_delay_after_first(Instant::now(), &mut rng).as_millis();
        assert_eq!([delay(), delay(), delay()], [0, 1600, 3200]);
        tokio::time::advance(Duration::from_secs(124)).await;
        assert_eq!([delay(), delay()], [0, 1600], "after two healthy minutes");
    }

    #[tokio::test(start_paused = true)]
    async fn jitter_at_most_doubles_a_delay_and_depends_on_the_seed() {
        let delays = |seed| {
            let mut backoff = Backoff::default();
            let mut rng = SmallRng::seed_from_u64(seed);
            (0..20).map(|_| backoff.next_delay(Instant::now(), None, &mut rng)).collect::<Vec<_>>()
        };
        assert_eq!(delays(7), delays(7));
        assert_ne!(delays(7), delays(8));
        let last = &delays(7)[6..];
        assert!(
            last.iter().all(|delay| (Duration::from_secs(30)..=Duration::from_secs(60)).contains(delay)),
            "{last:?}"
        );
    }
}
