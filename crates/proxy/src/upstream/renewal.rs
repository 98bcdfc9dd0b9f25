//! Reads the settings again when the apiserver does not accept what they gave: a client certificate, a CA or a credential may have been
//! replaced. Not more often than every [`INTERVAL`], because every request that is refused asks for it.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use kube_client::Config;
use tokio::time::Instant;

use super::settings::{SettingsError, UpstreamSettings};

/// The settings are read again at most this often.
const INTERVAL: Duration = Duration::from_secs(30);

/// Where the settings are, and when they were last read again.
pub(super) struct Renewal {
    settings: Option<UpstreamSettings>,
    last: Mutex<Option<Instant>>,
}

impl Renewal {
    /// Of these settings; `None`: there is nothing to read again.
    pub(super) fn new(settings: Option<UpstreamSettings>) -> Self {
        Self { settings, last: Mutex::new(None) }
    }

    /// The settings as they are now; `None` where there are none, or they have just been read.
    pub(super) async fn config(&self) -> Option<Result<Config, SettingsError>> {
        let settings = self.settings.as_ref()?;
        let now = Instant::now();
        {
            let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            if last.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL) {
                return None;
            }
            *last = Some(now);
        }
        Some(settings.load().await)
    }
}
