//! A state of the process before, which is served before upstream has confirmed it.

use std::time::Duration;

use kubefan_cache::Commit;
use kubefan_model::ResourceVersion;
use tokio::time::Instant;

use super::core::Hub;

/// A state that the process before has saved.
pub struct SavedState {
    /// The state and its history.
    pub commit: Commit,
    /// Time of upstream's last proof; `None` if it is unknown.
    pub proven_at: Option<Instant>,
    /// The reason why it is served as stale.
    pub message: String,
}

/// Age of a saved state that upstream has not confirmed; `None` if it is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedAge(pub Option<Duration>);

impl Hub {
    /// Starts with a saved state, as stale. Only for a hub without state, which has no views that
    /// would have to be woken.
    pub fn start_unconfirmed(&self, SavedState { commit, proven_at, message }: SavedState) {
        let version = commit.version;
        let mut state = self.lock();
        state.published.start_unconfirmed(commit, proven_at, message);
        self.head.send_replace(Some(version));
        self.publish_phase(&state.published);
    }

    /// Notes that upstream has confirmed the state. It stays stale until its watch is live. Returns
    /// false if it was dropped meanwhile.
    pub fn confirmed(&self) -> bool {
        self.lock().published.confirmed()
    }

    /// Returns the version of the last change in the history, with its epoch. `None` without a
    /// state.
    pub fn last_change(&self) -> Option<(u64, ResourceVersion)> {
        self.lock().published.state().map(|state| (state.epoch, state.history.ring().last()))
    }

    /// Returns the time of upstream's last proof. `None` if there was none.
    pub fn proven_at(&self) -> Option<Instant> {
        self.lock().published.proven_at()
    }

    /// Whether upstream has not confirmed the state, which the process before has saved.
    pub fn is_unconfirmed(&self) -> bool {
        self.lock().published.is_unconfirmed()
    }

    /// Returns the age of a state that upstream has not confirmed. `None` if it has.
    pub fn unconfirmed_age(&self) -> Option<SavedAge> {
        let state = self.lock();
        state.published.is_unconfirmed().then(|| SavedAge(state.published.age(Instant::now())))
    }
}
