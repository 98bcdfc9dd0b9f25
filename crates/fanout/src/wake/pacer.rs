//! Decides when subscribers are woken: at once if there is little to do, a moment later if the last
//! wave cannot be over yet.
//!
//! System calls dominate the cost of a delivery, so under load it pays to wait for more events and
//! send them together. The wait follows the estimated work of the last wave and is bounded; an idle
//! server sends at once. If events arrive in bursts, a long wave also starts a tenth of its length
//! later, so that it includes the whole burst.

use std::time::Duration;

use tokio::time::Instant;

use crate::wake::waker::Woken;

/// The approximate cost of a write to a connection, to estimate the length of a wave.
const WRITE: Duration = Duration::from_micros(10);
/// The approximate cost of each stream on it.
const STREAM: Duration = Duration::from_micros(1);

/// The longest time between bursts that belong together.
const BURST_GAP_MAX: Duration = Duration::from_millis(100);

/// The shortest wait: the resolution of the runtime's timers.
const TICK: Duration = Duration::from_millis(1);

/// Decides when the next wave of wake-ups starts.
pub struct Pacer {
    coalesce_max: Duration,
    busy_until: Option<Instant>,
    /// Wait for the rest of a burst, and the time until which one may follow.
    gather: Option<(Duration, Instant)>,
}

impl Pacer {
    /// Waits at most `coalesce_max`; zero: never.
    pub fn new(coalesce_max: Duration) -> Self {
        Self { coalesce_max, busy_until: None, gather: None }
    }

    /// Returns the time at which the next wave may start; `None`: now.
    pub fn hold(&self, now: Instant) -> Option<Instant> {
        let gather = self.gather.filter(|(_, until)| *until > now).map(|(gather, _)| now + gather);
        self.busy_until.filter(|until| *until > now).max(gather)
    }

    /// Records the start of a wave of `events` to those that were woken.
    pub fn begin(&mut self, woken: Woken, events: usize, now: Instant) {
        let times = |each: Duration, count: usize| each.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX));
        let work = times(WRITE, woken.connections).saturating_add(times(STREAM, woken.streams));
        self.busy_until = Some(now + work.min(self.coalesce_max));
        let gather = (work / 10).min(self.coalesce_max);
        let gathers = events > 1 && gather >= TICK;
        self.gather = gathers.then(|| (gather, now + work + BURST_GAP_MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alone(connections: usize) -> Woken {
        Woken { connections, streams: 0 }
    }

    #[tokio::test(start_paused = true)]
    async fn a_wave_waits_for_the_one_before_up_to_the_limit() {
        let now = Instant::now();
        let mut pacer = Pacer::new(Duration::from_millis(5));
        assert_eq!(pacer.hold(now), None, "idle: at once");
        pacer.begin(alone(100), 1, now);
        assert_eq!(pacer.hold(now), Some(now + Duration::from_millis(1)));
        assert_eq!(pacer.hold(now + Duration::from_millis(1)), None);
        pacer.begin(Woken { connections: 10, streams: 1000 }, 1, now);
        assert_eq!(pacer.hold(now), Some(now + Duration::from_micros(1100)), "one write for a hundred streams");
        pacer.begin(alone(1_000_000), 1, now);
        assert_eq!(pacer.hold(now), Some(now + Duration::from_millis(5)));
        let mut off = Pacer::new(Duration::ZERO);
        off.begin(alone(1000), 32, now);
        assert_eq!(off.hold(now), None);
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_long_wave_waits_for_the_rest_of_a_burst() {
        let now = Instant::now();
        let later = now + Duration::from_millis(50);
        let mut pacer = Pacer::new(Duration::from_millis(5));
        pacer.begin(alone(1000), 32, now);
        assert_eq!(pacer.hold(later), Some(later + Duration::from_millis(1)));
        assert_eq!(pacer.hold(now + Duration::from_secs(1)), None, "the burst is long over");
        pacer.begin(alone(1000), 1, now);
        assert_eq!(pacer.hold(later), None, "events come one by one");
        pacer.begin(alone(100), 32, now);
        assert_eq!(pacer.hold(later), None, "a wave that is over before a timer fires");
    }
}
