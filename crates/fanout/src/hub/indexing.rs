//! Indexes of state and history by the labels and fields that selections use.
//!
//! A build takes as long as some scans. So it is done once for all readers that wait, in parts, and
//! outside of the critical section. A reader waits for an index that is being built: if thousands
//! start at once, their scans would otherwise take the time that the build needs.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use kubefan_admission::fair_share::Holder;
use kubefan_cache::{
    column_build::{ColumnBuild, NextPart},
    equality_term::Column,
};
use kubefan_common::sync::watch;
use kubefan_model::selection::Selection;
use tokio::time::{Instant, timeout};

use super::{
    core::{Hub, HubState},
    slices::SlicedWork,
};

/// Maximum wait of a reader for an index that is being built. Then it scans.
const INDEX_WAIT_MAX: Duration = Duration::from_secs(2);

/// Entries that a build processes at a time. Tests divide small builds too.
const PART: usize = if cfg!(test) { 8 } else { 4096 };

impl Hub {
    /// Counts a holder's use of a selection to read state or history. Starts to build an index for
    /// it if one is due, and waits for one that is being built.
    pub async fn index_for(self: &Arc<Self>, selection: &Selection, holder: Option<Holder>) {
        if let Some(mut built) = self.start_index(selection, holder) {
            // Without the index, the reader scans.
            let _ = timeout(INDEX_WAIT_MAX, built.wait_for(|is_built| *is_built)).await;
        }
    }

    /// Like [`Self::index_for`], without waiting. Returns a receiver that turns true when the build
    /// ends; `None` if there is no build.
    pub(crate) fn start_index(
        self: &Arc<Self>,
        selection: &Selection,
        holder: Option<Holder>,
    ) -> Option<watch::Receiver<bool>> {
        let mut state = self.lock();
        let HubState { published, builds, .. } = &mut *state;
        let column = published.column_for(selection)?;
        let tenant = holder.as_ref().and_then(Holder::tenant);
        let Some(build) = published.used(selection, tenant, Instant::now()) else {
            return builds.iter().find(|(building, _)| *building == column).map(|(_, built)| built.clone());
        };
        let ended = watch::Sender::new(false);
        let built = ended.subscribe();
        builds.retain(|(building, _)| *building != column);
        builds.push((column, built.clone()));
        drop(state);
        self.in_background(Indexing { build: Some(build.in_parts_of(PART)), ended });
        Some(built)
    }

    fn end_build(&self, column: &Column, build: Option<ColumnBuild>) {
        let mut state = self.lock();
        state.published.install(column, build, Instant::now());
        state.builds.retain(|(building, _)| building != column);
    }
}

/// The build of an index. Dropping it ends the wait of its readers.
struct Indexing {
    /// `None` after its end.
    build: Option<ColumnBuild>,
    ended: watch::Sender<bool>,
}

impl SlicedWork for Indexing {
    type Done = ();

    fn slice(&mut self, hub: &Hub) -> ControlFlow<()> {
        let Some(mut build) = self.build.take() else { return ControlFlow::Break(()) };
        match build.next() {
            NextPart::Work => build.work(),
            NextPart::History => {
                let copied = hub.lock().published.copy_for(&mut build);
                if copied.is_none() {
                    hub.end_build(&build.column().clone(), None);
                    return ControlFlow::Break(());
                }
            }
            NextPart::Install => {
                hub.end_build(&build.column().clone(), Some(build));
                return ControlFlow::Break(());
            }
        }
        self.build = Some(build);
        ControlFlow::Continue(())
    }
}

impl Drop for Indexing {
    fn drop(&mut self) {
        self.ended.send_replace(true);
    }
}
