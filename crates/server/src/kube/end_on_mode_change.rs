//! The end of a forwarded watch whose resource changes its mode.

use std::sync::{Arc, OnceLock};

use kubefan_access::{
    Answerer, Caller, Mode, Switches,
    switches::{ModeWatch, ModeWatchGuard},
};
use tokio::sync::Notify;

use super::path::Path;

/// The registration of a forwarded watch, until another mode answers it. It is in the extensions of
/// the watch's response.
#[derive(Clone)]
pub(super) struct UntilSwitched {
    ended: Arc<Notify>,
    _open: Arc<ModeWatchGuard>,
}

impl UntilSwitched {
    /// Registers a forwarded watch. `None` if modes never change.
    pub(super) fn new(switches: &Arc<Switches>, path: &Path, caller: Option<Caller>, mode: Mode) -> Option<Self> {
        let by = if mode == Mode::Passthrough { Answerer::ApiserverByMode } else { Answerer::ApiserverWithoutCache };
        let ended = Arc::new(Notify::new());
        let notify = ended.clone();
        let watch = ModeWatch { group: path.group.clone(), resource: path.resource.clone(), caller, by };
        // One permit is kept, so an end before the body is polled is not lost.
        let open = switches.register(watch, Arc::new(OnceLock::new()), move || notify.notify_one())?;
        Some(Self { ended, _open: Arc::new(open) })
    }

    /// Completes when the watch must end.
    pub(super) async fn ended(self) {
        self.ended.notified().await;
    }
}
