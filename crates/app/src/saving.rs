//! The states on disk, by the configuration: where they are, and the task that saves them.

use std::{sync::Arc, time::Duration};

use kubefan_informers::{Registry, SaveLimits, SavedStates, StateSaver};
use kubefan_peer::saved::{StateDir, StateKey};
use tokio::{task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::{clock::wall_clock, failure::AppError, seed::seed};
use crate::config::ServeConfig;

/// Time for the last save of all caches, before the process ends.
const LAST_SAVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens the directory of the saved states. `None` without one, and if it cannot be used: a broken
/// disk must not keep kubefan from starting.
///
/// # Errors
/// The key cannot be read, without which nothing may be written.
pub(super) fn open(config: &ServeConfig) -> Result<Option<StateDir>, AppError> {
    let Some(parent) = &config.cache.state_dir else { return Ok(None) };
    let key = match &config.cache.state_key_file {
        None => None,
        Some(path) => {
            let read = StateKey::read(path);
            Some(read.map_err(|error| AppError::StateKey { path: path.clone(), message: error.to_string() })?)
        }
    };
    match StateDir::open(parent, key, seed) {
        Ok(dir) => {
            info!(directory = %dir.path().display(), encrypted = dir.is_encrypted(), "states are saved");
            Ok(Some(dir))
        }
        Err(error) => {
            error!(directory = %parent.display(), %error, "--state-dir cannot be used: nothing is saved, and caches start by listing");
            Ok(None)
        }
    }
}

/// Returns the states in a directory, of at most `bytes_max` uncompressed bytes each.
pub(super) fn saved_states(dir: StateDir, bytes_max: u64) -> Arc<SavedStates> {
    Arc::new(SavedStates::new(dir, bytes_max, wall_clock))
}

/// The task that saves the states of all caches.
pub(super) struct Saving {
    last: CancellationToken,
    task: JoinHandle<()>,
}

impl Saving {
    /// Saves the states of `registry` until [`Self::finish`]. `None` if none are saved.
    pub(super) fn build(config: &ServeConfig, registry: &Arc<Registry>) -> Option<Self> {
        let interval = config.cache.state_interval;
        let bytes_per_minute = config.cache.state_bytes_per_minute;
        let saver = StateSaver::new(registry, SaveLimits { interval, bytes_per_minute })?;
        let last = CancellationToken::new();
        let task = tokio::spawn(saver.run(last.clone()));
        Some(Self { last, task })
    }

    /// Saves what has changed since. The caches must not have stopped.
    pub(super) async fn finish(self) {
        self.last.cancel();
        if timeout(LAST_SAVE_TIMEOUT, self.task).await.is_err() {
            warn!(timeout = ?LAST_SAVE_TIMEOUT, "not every state was saved before the end");
        }
    }
}
