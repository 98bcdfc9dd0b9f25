//! Detects a client that has stopped reading a response that pins a snapshot.

use std::time::Duration;

use tokio::time::Instant;

use super::limits::PROGRESS_BYTES_MIN;

/// The progress of a client with one response. Only time counts in which the server waits for the
/// client.
#[derive(Debug)]
pub struct ReadProgress {
    stall_timeout: Duration,
    /// Bytes read in the current window.
    bytes: usize,
    /// Time waited for the client in the current window, finished waits only.
    waited: Duration,
    /// Start of the current wait, if the server is waiting.
    waiting_since: Option<Instant>,
}

impl ReadProgress {
    /// The client must read [`PROGRESS_BYTES_MIN`] bytes in each `stall_timeout`.
    pub fn new(stall_timeout: Duration) -> Self {
        Self { stall_timeout, bytes: 0, waited: Duration::ZERO, waiting_since: None }
    }

    /// Records that the server waits for the client. Returns the time at which the client has
    /// stalled.
    pub fn due_at(&mut self) -> Instant {
        *self.waiting_since.get_or_insert_with(Instant::now) + self.stall_timeout.saturating_sub(self.waited)
    }

    /// Records that the client has read `bytes`.
    pub fn advanced(&mut self, bytes: usize) {
        if let Some(since) = self.waiting_since.take() {
            self.waited += since.elapsed();
        }
        self.bytes += bytes;
        if self.bytes >= PROGRESS_BYTES_MIN {
            self.restart();
        }
    }

    /// The stall timeout.
    pub fn stall_timeout(&self) -> Duration {
        self.stall_timeout
    }

    /// Starts a new window.
    pub fn restart(&mut self) {
        *self = Self::new(self.stall_timeout);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    const STALL: Duration = Duration::from_secs(30);

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
