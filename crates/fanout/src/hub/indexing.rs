//! Indexes of state and history by the labels and fields that selections use.
//!
//! To build one takes as long as some scans, so it is done once for all that wait, in parts, and
//! outside of the critical section. A reader waits for an index that is being built: if thousands
//! start at once, their scans would otherwise take the time that the build needs.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use kubefan_admission::fair_share::Holder;
use kubefan_cache::{
    column_build::{ColumnBuild, NextPart},
    equality_term::Column,
};
use kubefan_common::sync::watch;
use kubefan_model::selection::Selection;
use tokio::{
    runtime::Handle,
    task::yield_now,
    time::{Instant, timeout},
};

use super::core::{Hub, HubState};

/// How long a reader waits for an index that is being built, before it scans.
const INDEX_WAIT_MAX: Duration = Duration::from_secs(2);

/// How much of a build is done at a time. Tests divide small builds too.
const PART: usize = if cfg!(test) { 8 } else { 4096 };

impl Hub {
    /// Counts that a holder uses a selection to read state or history. Starts to build an index for
    /// it if that is due, and waits for one that is being built.
    pub async fn index_for(self: &Arc<Self>, selection: &Selection, holder: Option<Holder>) {
        if let Some(mut built) = self.start_index(selection, holder) {
            // Without the index everything is found by a scan.
            let _ = timeout(INDEX_WAIT_MAX, built.wait_for(|is_built| *is_built)).await;
        }
    }

    /// As [`Self::index_for`], without waiting. Returns what becomes true when the build has ended;
    /// `None` if there is none.
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
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(build_in_parts(Arc::downgrade(self), build.in_parts_of(PART), ended))),
            // Outside of a runtime no other task waits.
            Err(_) => {
                let mut build = Some(build.in_parts_of(PART));
                while let Some(next) = build.take() {
                    build = self.build_part(next);
                }
                ended.send_replace(true);
            }
        }
        Some(built)
    }

    /// Does a part of a build. Returns it if there is more to do.
    fn build_part(&self, mut build: ColumnBuild) -> Option<ColumnBuild> {
        match build.next() {
            NextPart::Work => build.work(),
            NextPart::History => {
                let copied = self.lock().published.copy_for(&mut build);
                if copied.is_none() {
                    self.end_build(&build.column().clone(), None);
                    return None;
                }
            }
            NextPart::Install => {
                self.end_build(&build.column().clone(), Some(build));
                return None;
            }
        }
        Some(build)
    }

    fn end_build(&self, column: &Column, build: Option<ColumnBuild>) {
        let mut state = self.lock();
        state.published.install(column, build, Instant::now());
        state.builds.retain(|(building, _)| building != column);
    }
}

async fn build_in_parts(hub: Weak<Hub>, build: ColumnBuild, ended: watch::Sender<bool>) {
    let mut build = Some(build);
    while let Some(next) = build.take() {
        let Some(hub) = hub.upgrade() else { break };
        build = hub.build_part(next);
        drop(hub);
        yield_now().await;
    }
    ended.send_replace(true);
}
