//! Commits, and the wake-up that must follow them.
//!
//! A commit puts events into the logs of views; subscribers find them there only after a wake-up. A
//! forgotten wake-up is a stream that hangs until the next event. So [`CommitBatch`] is the only
//! way to commit, and it wakes when it is dropped, on every path.

use std::sync::Arc;

use kubefan_cache::Commit;
use tokio::time::Instant;

use super::core::Hub;

/// Commits that subscribers are woken for together: at the latest when this is dropped.
pub struct CommitBatch {
    hub: Arc<Hub>,
    /// Whether anything was committed since the last wake-up.
    is_pending: bool,
}

impl Hub {
    /// Starts a batch of commits. Only the one writer of a cache may do so.
    pub fn batch(self: &Arc<Self>) -> CommitBatch {
        CommitBatch { hub: self.clone(), is_pending: false }
    }
}

impl CommitBatch {
    /// Publishes a new state. Upstream's message was read at `received`.
    pub fn commit(&mut self, commit: Commit, received: Instant) {
        // Set first: if publishing panics half way, subscribers still read the appended events.
        self.is_pending = true;
        self.hub.publish(commit, received);
    }

    /// Wakes the subscribers that have something to read: at once, or a moment later if the last
    /// wave of wake-ups is still being worked off. The batch can be used again.
    pub fn wake(&mut self) {
        if std::mem::take(&mut self.is_pending) {
            self.hub.wake();
        }
    }
}

impl Drop for CommitBatch {
    fn drop(&mut self) {
        self.wake();
    }
}
