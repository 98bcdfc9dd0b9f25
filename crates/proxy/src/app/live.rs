//! Applies the settings that a running kubefan takes over (`config::reload::LIVE`). Nothing here can
//! fail: what could be wrong was checked before.

use std::sync::Arc;

use tokio_util::task::AbortOnDropHandle;
use tracing::info;

use crate::{access::Switches, config::ServeConfig};

/// A function of the configurations before and after a change, which applies the change.
pub(super) fn apply(switches: Arc<Switches>) -> impl FnMut(&ServeConfig, &ServeConfig) {
    // Dropping it ends what is left of the change before.
    let mut _ending = None;
    move |before, after| {
        if before.modes != after.modes {
            switches.replace(after.modes.modes.clone());
            let switches = switches.clone();
            _ending = Some(AbortOnDropHandle::new(tokio::spawn(async move {
                let ended = switches.end_concerned().await;
                info!(ended, "the open watches that the new modes concern have ended");
            })));
        }
    }
}
