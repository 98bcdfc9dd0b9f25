//! Applies the settings that may change while kubefan runs (`config::reload::LIVE`). This cannot
//! fail, because the settings were validated before.

use std::sync::Arc;

use kubefan_access::{Switches, switches::ENDS_PER_SECOND};
use kubefan_informers::Registry;
use kubefan_server::reader::Reader;
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use super::{clock::unix_time, component::Shared, mode_names, reload::WatchedFile, server_options};
use crate::config::ServeConfig;

/// The changes of the configuration while kubefan runs.
pub(super) struct LiveSettings {
    /// The file, and the requests to read it at once. `None` if the configuration never changes.
    pub(super) watched: Option<(WatchedFile, Arc<Notify>)>,
    /// The reads that the caches answer.
    pub(super) switches: Arc<Switches>,
    /// Limits streams and reads.
    pub(super) reader: Arc<Reader>,
}

impl LiveSettings {
    /// Applies the changes of the file until kubefan stops. Also warns of modes that concern no
    /// resource.
    pub(super) fn build(self, shared: Shared<'_>, registry: &Arc<Registry>) {
        let named = registry.clone();
        let modes = shared.config.modes.modes.clone();
        shared.spawn(async move { mode_names::warn_of_unmatched(&modes, named.discovery()).await });
        let metrics = shared.metrics.reload().clone();
        metrics.started(unix_time());
        let Self { watched, switches, reader } = self;
        if let Some((file, asked)) = watched {
            shared.spawn(file.follow(asked, metrics, unix_time, apply(switches, registry.clone(), reader)));
        }
    }
}

/// Returns a function that applies a change, given the configurations before and after it.
fn apply(
    switches: Arc<Switches>,
    registry: Arc<Registry>,
    reader: Arc<Reader>,
) -> impl FnMut(&ServeConfig, &ServeConfig) {
    // Dropping it ends the rest of the previous change.
    let mut _ending = None;
    move |before, after| {
        for option in after.without_effect.iter().filter(|option| !before.without_effect.contains(option)) {
            warn!("{option}");
        }
        reader.set_places(server_options::subscribers_max(after), server_options::reads_max(after));
        if before.serving.staleness_max != after.serving.staleness_max {
            registry.limit_staleness(after.serving.staleness_max);
        }
        if before.cache.resources != after.cache.resources {
            registry.configure(after.cache.resources.clone());
        }
        if before.modes != after.modes {
            switches.replace(after.modes.modes.clone());
            let switches = switches.clone();
            let modes = after.modes.modes.clone();
            let registry = registry.clone();
            _ending = Some(AbortOnDropHandle::new(tokio::spawn(async move {
                let ended = switches.end_concerned(ENDS_PER_SECOND).await;
                info!(ended, "the open watches that the new modes concern have ended");
                mode_names::warn_of_unmatched(&modes, registry.discovery()).await;
            })));
        }
    }
}
