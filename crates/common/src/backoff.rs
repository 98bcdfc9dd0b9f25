//! How long to wait before the next try, by client-go's figures for a reflector, for upstream and for the client
//! library alike: 800 ms, doubled up to 30 s, each wait stretched
//! at random by up to its own length, and back to 800 ms after two healthy minutes. Without the jitter, all that lost one
//! apiserver would come back to it in step. Clock and chance are passed in, so that a simulation decides both.

use std::time::Duration;

use rand::{Rng, RngExt};
use tokio::time::Instant;

/// The figures of a backoff.
#[derive(Debug, Clone, PartialEq)]
pub struct BackoffOptions {
    /// The first wait, before jitter.
    pub initial: Duration,
    /// The longest wait, before jitter.
    pub max: Duration,
    /// What each wait is multiplied by for the next.
    pub factor: f64,
    /// A wait is stretched by a random part of this share of itself: with 1.0 a wait of 30 s becomes 30 to 60 s.
    pub jitter: f64,
    /// So long after a failure, the next one counts as the first again.
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
    /// A backoff that has seen no failure yet.
    pub fn new(options: BackoffOptions) -> Self {
        Self { next: options.initial, options, healthy_since: None }
    }

    /// The wait after a failure at `now`. It is never shorter than `retry_after`, what the server asked for.
    ///
    /// The time from the end of the previous wait until `now` counts as health: a watch that held longer than `reset_after`
    /// starts over with the first wait.
    pub fn next_delay(&mut self, now: Instant, retry_after: Option<Duration>, rng: &mut impl Rng) -> Duration {
        let healthy =
            self.healthy_since.is_some_and(|since| now.saturating_duration_since(since) >= self.options.reset_after);
        if healthy {
            self.next = self.options.initial;
        }
        let base = self.next;
        self.next = base.mul_f64(self.options.factor).min(self.options.max);
        let delay =
            (base + base.mul_f64(self.options.jitter * rng.random::<f64>())).max(retry_after.unwrap_or_default());
        self.healthy_since = Some(now + delay);
        delay
    }

    /// Forgets all failures.
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
    async fn waits_double_from_800_ms_to_30_s() {
        let (mut backoff, mut rng) = (plain(), SmallRng::seed_from_u64(1));
        let mut waits = Vec::new();
        for _ in 0..8 {
            let delay = backoff.next_delay(Instant::now(), None, &mut rng);
            tokio::time::sleep(delay).await;
            waits.push(delay.as_millis());
        }
        assert_eq!(waits, [800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000]);
    }

    #[tokio::test(start_paused = true)]
    async fn two_healthy_minutes_start_over() {
        let (mut backoff, mut rng) = (plain(), SmallRng::seed_from_u64(1));
        for _ in 0..5 {
            let delay = backoff.next_delay(Instant::now(), None, &mut rng);
            tokio::time::sleep(delay).await;
        }
        tokio::time::sleep(Duration::from_secs(119)).await;
        let delay = backoff.next_delay(Instant::now(), None, &mut rng);
        assert_eq!(delay, Duration::from_millis(25_600), "119 s are not health");
        tokio::time::sleep(delay + Duration::from_secs(120)).await;
        assert_eq!(backoff.next_delay(Instant::now(), None, &mut rng), Duration::from_millis(800));
    }

    #[tokio::test(start_paused = true)]
    async fn the_servers_word_is_the_least() {
        let (mut backoff, mut rng) = (plain(), SmallRng::seed_from_u64(1));
        let asked = Some(Duration::from_secs(20));
        assert_eq!(backoff.next_delay(Instant::now(), asked, &mut rng), Duration::from_secs(20));
        assert_eq!(backoff.next_delay(Instant::now(), None, &mut rng), Duration::from_millis(1600));
    }

    #[tokio::test(start_paused = true)]
    async fn jitter_stretches_a_wait_up_to_twice_and_by_seed() {
        let waits = |seed| {
            let (mut backoff, mut rng) = (Backoff::default(), SmallRng::seed_from_u64(seed));
            (0..20).map(|_| backoff.next_delay(Instant::now(), None, &mut rng)).collect::<Vec<_>>()
        };
        assert_eq!(waits(7), waits(7));
        assert_ne!(waits(7), waits(8));
        let last = &waits(7)[6..];
        assert!(last.iter().all(|wait| (Duration::from_secs(30)..=Duration::from_secs(60)).contains(wait)), "{last:?}");
    }
}
