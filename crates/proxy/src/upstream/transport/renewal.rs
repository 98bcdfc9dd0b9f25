//! Reads the settings again after the apiserver refuses kubefan's credentials: a client
//! certificate, a CA or a token may have been replaced.
//!
//! Every refused request triggers this, so the settings are read at most once per [`INTERVAL`].

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use kube_client::Config;
use tokio::time::Instant;

use crate::upstream::transport::settings::{SettingsError, UpstreamSettings};

/// The minimum time between two reads.
const INTERVAL: Duration = Duration::from_secs(30);

/// The settings' source, and the time of the last read.
pub(in crate::upstream) struct Renewal {
    settings: Option<UpstreamSettings>,
    last: Mutex<Option<Instant>>,
}

impl Renewal {
    /// `settings` is `None` if there is nothing to read again.
    pub(in crate::upstream) fn new(settings: Option<UpstreamSettings>) -> Self {
        Self { settings, last: Mutex::new(None) }
    }

    /// The current settings; `None` if there is no source, or if they were read less than
    /// [`INTERVAL`] ago.
    pub(in crate::upstream) async fn config(&self) -> Option<Result<Config, SettingsError>> {
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
