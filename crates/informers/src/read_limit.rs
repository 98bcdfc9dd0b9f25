//! Limits how often a cache is read again upstream for subscribers that resume.

use std::time::Duration;

use tokio::time::Instant;

/// Reads that a cache may start at once, after a time without any. A mass reconnect needs one.
pub(super) const READS_MAX: u32 = 4;
/// Time after which a cache may start one more.
const READ_INTERVAL: Duration = Duration::from_secs(15);

/// Limits how often reads start: a token bucket, stored as the time at which it is full again.
#[derive(Default)]
pub(super) struct ReadLimit {
    full_at: Option<Instant>,
}

impl ReadLimit {
    /// Takes one token. If there is none, fails with the time until there is.
    pub(super) fn take(&mut self, now: Instant) -> Result<(), Duration> {
        let full_at = self.full_at.map_or(now, |at| at.max(now)) + READ_INTERVAL;
        let wait = (full_at - now).saturating_sub(READS_MAX * READ_INTERVAL);
        if !wait.is_zero() {
            return Err(wait);
        }
        self.full_at = Some(full_at);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn reads_start_in_a_burst_and_then_one_per_interval() {
        let mut reads = ReadLimit::default();
        let start = Instant::now();
        for _ in 0..READS_MAX {
            assert_eq!(reads.take(start), Ok(()));
        }
        assert_eq!(reads.take(start), Err(READ_INTERVAL));
        assert_eq!(reads.take(start + READ_INTERVAL / 3), Err(READ_INTERVAL - READ_INTERVAL / 3));
        let later = start + READ_INTERVAL;
        assert_eq!((reads.take(later), reads.take(later)), (Ok(()), Err(READ_INTERVAL)));
        let idle = later + 100 * READ_INTERVAL;
        let taken = std::iter::from_fn(|| reads.take(idle).ok()).count();
        assert_eq!(taken, READS_MAX as usize, "no more than a burst after a long time");
    }
}
