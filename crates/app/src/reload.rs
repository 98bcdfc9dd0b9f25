//! Applies changes of the configuration file while kubefan runs.
//!
//! The file's content is read at an interval: a ConfigMap is a link that is moved to another
//! directory, and neither the file's time nor a watch of it would show that. A change counts once
//! two reads in a row have found it, because a half-written file may be valid; a SIGHUP does not
//! wait for the second read.

use std::{sync::Arc, time::Duration};

use kubefan_telemetry::metrics::ReloadMetrics;
use tokio::{
    sync::Notify,
    task::spawn_blocking,
    time::{MissedTickBehavior, interval},
};
use tracing::{info, warn};

use crate::config::{ConfigError, ConfigFile, Configured, ServeConfig, reload::needs_restart};

/// Time between two reads of the file.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// Result of a read of the file: its content, or the error.
type Seen = Result<String, ConfigError>;

/// A configuration file, and its content in force.
pub struct WatchedFile {
    file: ConfigFile,
    in_force: Configured,
    /// The content that was applied or refused last.
    handled: Seen,
    /// A different content that was read once.
    unsettled: Option<Seen>,
}

/// The decision after a read of the file.
#[derive(Debug)]
enum FileChange {
    /// Nothing to do: the file has not changed, or is perhaps being written.
    Wait,
    /// The file has not changed. Only after a request to read it.
    Same,
    /// The file has changed back to the configuration in force.
    Restored,
    /// The file has changed in these settings.
    Apply(Box<Configured>, Vec<&'static str>),
    /// The file cannot be used.
    Refuse(String),
}

impl WatchedFile {
    /// Reads the file for the start.
    ///
    /// # Errors
    /// If it cannot be read or used.
    pub fn read(file: ConfigFile) -> Result<Self, ConfigError> {
        let content = file.content()?;
        let in_force = file.parse(&content)?;
        Ok(Self { file, in_force, handled: Ok(content), unsettled: None })
    }

    /// Returns the configuration in force.
    pub fn config(&self) -> &ServeConfig {
        &self.in_force.config
    }

    /// Decides after a read. `asked`: a SIGHUP has requested it.
    fn step(&mut self, seen: Seen, asked: bool) -> FileChange {
        if seen == self.handled {
            self.unsettled = None;
            // A request shows the reason of the refusal again.
            let refused = asked.then(|| self.judge(&seen).err()).flatten();
            return refused.map_or(if asked { FileChange::Same } else { FileChange::Wait }, FileChange::Refuse);
        }
        if !asked && self.unsettled.as_ref() != Some(&seen) {
            self.unsettled = Some(seen);
            return FileChange::Wait;
        }
        self.unsettled = None;
        let judged = self.judge(&seen);
        self.handled = seen;
        match judged {
            Err(why) => FileChange::Refuse(why),
            Ok((_, changed)) if changed.is_empty() => FileChange::Restored,
            Ok((configured, changed)) => FileChange::Apply(Box::new(configured), changed),
        }
    }

    fn judge(&self, seen: &Seen) -> Result<(Configured, Vec<&'static str>), String> {
        let content = seen.as_ref().map_err(ToString::to_string)?;
        let configured = self.file.parse(content).map_err(|error| error.to_string())?;
        let changed = configured.changed(&self.in_force);
        match needs_restart(&changed) {
            Some(why) => Err(format!("--config {}: {why}", self.file.path().display())),
            None => Ok((configured, changed)),
        }
    }

    /// Reads the file at an interval, without end. Each notification of `asked` reads it at once.
    /// `apply` gets the configuration before and after a change, and cannot fail. `now` is the time
    /// in seconds since 1970.
    pub async fn follow(
        mut self,
        asked: Arc<Notify>,
        metrics: ReloadMetrics,
        now: impl Fn() -> f64,
        mut apply: impl FnMut(&ServeConfig, &ServeConfig),
    ) {
        let mut looks = interval(LOOK_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_asked = tokio::select! {
                biased;
                () = asked.notified() => true,
                _ = looks.tick() => false,
            };
            let file = self.file.clone();
            // A file system may be slow.
            let Ok(seen) = spawn_blocking(move || file.content()).await else { continue };
            let path = self.file.path().display().to_string();
            match self.step(seen, is_asked) {
                FileChange::Wait => {}
                FileChange::Same => info!(path, "the configuration file was read again; it has not changed"),
                FileChange::Restored => {
                    metrics.succeeded(now());
                    info!(path, "the configuration file was read again; it says what is in force");
                }
                FileChange::Apply(configured, changed) => {
                    apply(&self.in_force.config, &configured.config);
                    self.in_force = *configured;
                    metrics.succeeded(now());
                    info!(path, changed = changed.join(", "), "the configuration file was read again and is in force");
                }
                FileChange::Refuse(why) => {
                    metrics.failed();
                    warn!("the configuration file was read again and is refused, so nothing has changed: {why}");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
