//! Applies the settings that a running kubefan takes over (`config::reload::LIVE`). Nothing here
//! can fail: what could be wrong was checked before.

use std::sync::Arc;

use kubefan_access::Switches;
use kubefan_admission::PermitLimits;
use kubefan_informers::Registry;
use tokio_util::task::AbortOnDropHandle;
use tracing::info;

use super::{mode_names, server_options};
use crate::config::ServeConfig;

/// Changes how many streams, and how many reads, are served at a time.
pub(super) type SetPlaces = Box<dyn Fn(PermitLimits, PermitLimits) + Send>;

/// A function of the configurations before and after a change, which applies the change.
pub(super) fn apply(
    switches: Arc<Switches>,
    registry: Arc<Registry>,
    set_places: SetPlaces,
) -> impl FnMut(&ServeConfig, &ServeConfig) {
    // Dropping it ends what is left of the change before.
    let mut _ending = None;
    move |before, after| {
        set_places(server_options::subscribers_max(after), server_options::reads_max(after));
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
                let ended = switches.end_concerned().await;
                info!(ended, "the open watches that the new modes concern have ended");
                mode_names::warn_of_unmatched(&modes, registry.discovery()).await;
            })));
        }
    }
}
