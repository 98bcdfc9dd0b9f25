//! Detects a client that has stopped reading a response that pins a snapshot, or reads it so slowly
//! that it keeps others from reading.

use std::time::Duration;

use tokio::time::Instant;

use super::limits::{PROGRESS_BYTES_MIN, time_for};

/// The progress of a client with one response. Only time counts in which the server waits for the
/// client.
#[derive(Debug)]
pub struct ReadProgress {
    stall_timeout: Duration,
    /// The least to read per stall timeout, in bytes.
    bytes_min: usize,
    /// Bytes read in the current window.
    bytes: usize,
    /// Time waited for the client in the current window, finished waits only.
    waited: Duration,
    /// Bytes read of the whole response.
    all_bytes: usize,
    all_waited: Duration,
    /// Start of the current wait, if the server is waiting.
    waiting_since: Option<Instant>,
}

impl ReadProgress {
    /// The client must read [`PROGRESS_BYTES_MIN`] bytes in each `stall_timeout`, and all within
    /// [`time_for`] it.
    pub fn new(stall_timeout: Duration) -> Self {
        let bytes = 0;
        let waited = Duration::ZERO;
        let bytes_min = PROGRESS_BYTES_MIN;
        Self { stall_timeout, bytes_min, bytes, waited, all_bytes: 0, all_waited: waited, waiting_since: None }
    }

    /// The client must only read anything at all in each `stall_timeout`.
    pub fn of_live_stream(stall_timeout: Duration) -> Self {
        Self { bytes_min: 1, ..Self::new(stall_timeout) }
    }

    /// Records that the server waits for the client. Returns the time at which the client has
    /// stalled.
    pub fn due_at(&mut self) -> Instant {
        let since = *self.waiting_since.get_or_insert_with(Instant::now);
        let of_window = self.stall_timeout.saturating_sub(self.waited);
        if self.bytes_min < PROGRESS_BYTES_MIN {
            return since + of_window;
        }
        let of_all = time_for(self.all_bytes, self.stall_timeout).saturating_sub(self.all_waited);
        since + of_window.min(of_all)
    }

    /// Records that the client has read `bytes`.
    pub fn advanced(&mut self, bytes: usize) {
        if let Some(since) = self.waiting_since.take() {
            self.waited += since.elapsed();
            self.all_waited += since.elapsed();
        }
        self.bytes += bytes;
        self.all_bytes = self.all_bytes.saturating_add(bytes);
        if self.bytes >= self.bytes_min {
            self.restart();
        }
    }

    /// Starts a new window.
    pub fn restart(&mut self) {
        if let Some(since) = self.waiting_since.take() {
            self.all_waited += since.elapsed();
        }
        self.bytes = 0;
        self.waited = Duration::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;
    use crate::transport::limits::AVERAGE_BYTES_MIN;

    const STALL: Duration = Duration::from_secs(30);

    /// Returns how long a client holds a place if it reads `bytes` after each wait of `wait`.
    async fn held_for(mut progress: ReadProgress, bytes: usize, wait: Duration) -> Duration {
        let start = Instant::now();
        while start.elapsed() < 100 * STALL {
            let due_at = progress.due_at();
            if due_at <= Instant::now() + wait {
                tokio::time::sleep_until(due_at).await;
                break;
            }
            sleep(wait).await;
            progress.advanced(bytes);
        }
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_just_enough_to_count_is_ended_and_a_slow_one_is_not() {
        let dripping = held_for(ReadProgress::new(STALL), PROGRESS_BYTES_MIN, STALL * 9 / 10).await;
        assert!(dripping < 3 * STALL, "{dripping:?}");
        let slow = held_for(ReadProgress::new(STALL), AVERAGE_BYTES_MIN / 10, STALL / 10).await;
        assert_eq!(slow, 100 * STALL, "as long as the test lasts");
        let live = held_for(ReadProgress::of_live_stream(STALL), 1, STALL * 9 / 10).await;
        assert!(live >= 100 * STALL, "a live stream pins no state: {live:?}");
        assert_eq!(held_for(ReadProgress::of_live_stream(STALL), 0, STALL).await, STALL);
    }

    #[tokio::test(start_paused = true)]
    async fn only_time_spent_waiting_for_the_client_counts() {
        let mut progress = ReadProgress::new(STALL);
        for _ in 0..10 {
            // There was nothing to read.
            sleep(STALL).await;
            assert_eq!(progress.due_at(), Instant::now() + STALL, "the wait has only started");
            progress.advanced(1);
        }
        progress.due_at();
        sleep(STALL / 2).await;
        progress.advanced(PROGRESS_BYTES_MIN / 2);
        assert_eq!(progress.due_at(), Instant::now() + STALL / 2);
        progress.advanced(PROGRESS_BYTES_MIN / 2);
        assert_eq!(progress.due_at(), Instant::now() + STALL);
    }
}
