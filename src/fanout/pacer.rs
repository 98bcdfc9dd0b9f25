//! When to wake subscribers: at once where there is little to do, a moment later where the wave before cannot be over yet.
//!
//! System calls dominate the cost of a delivery, so under load it pays to wait for more and send it together. The wait follows the work
//! that is known to be under way and is bounded; an idle server sends at once.

use std::time::Duration;

use tokio::time::Instant;

/// About what one delivery costs, so that a wave's length can be told from its subscribers.
const DELIVERY: Duration = Duration::from_micros(10);

/// Decides when the next wave of wake-ups begins.
pub struct Pacer {
    coalesce_max: Duration,
    busy_until: Option<Instant>,
}

impl Pacer {
    /// Waits at most `coalesce_max`; zero: never.
    pub fn new(coalesce_max: Duration) -> Self {
        Self { coalesce_max, busy_until: None }
    }

    /// When the next wave may begin; `None`: now.
    pub fn hold(&self, now: Instant) -> Option<Instant> {
        self.busy_until.filter(|until| *until > now)
    }

    /// A wave of `woken` subscribers begins.
    pub fn begin(&mut self, woken: usize, now: Instant) {
        let work = DELIVERY.saturating_mul(u32::try_from(woken).unwrap_or(u32::MAX));
        self.busy_until = Some(now + work.min(self.coalesce_max));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_wave_waits_for_the_one_before_and_no_longer_than_it_may() {
        let now = Instant::now();
        let mut pacer = Pacer::new(Duration::from_millis(5));
        assert_eq!(pacer.hold(now), None, "idle: at once");
        pacer.begin(100, now);
        assert_eq!(pacer.hold(now), Some(now + Duration::from_millis(1)));
        assert_eq!(pacer.hold(now + Duration::from_millis(1)), None);
        pacer.begin(1_000_000, now);
        assert_eq!(pacer.hold(now), Some(now + Duration::from_millis(5)));
        let mut off = Pacer::new(Duration::ZERO);
        off.begin(1000, now);
        assert_eq!(off.hold(now), None);
    }
}
