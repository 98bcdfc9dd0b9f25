//! The reads of a started subscription from its hub.

use std::{ops::Bound, sync::Arc};

use kubefan_cache::{CachedState, Expired, PriorStep, stream_end::StreamEnd, tenant_bytes::Tenant};
use kubefan_model::ResourceVersion;
use tokio::time::Instant;

use super::core::{Hub, HubState};
use crate::views::{log::Cursor, log_run::LogReadError, view::View, view_gap::ViewGap};

/// The reason why a part of history cannot be read.
pub(crate) enum HistoryError {
    /// The part is no longer retained.
    Expired(Expired),
    /// The view has ended.
    Ended(StreamEnd),
}

impl HubState {
    /// Returns the state of a view's history. Fails if the view has ended: versions of its history
    /// mean nothing in another one.
    pub(crate) fn state_of(&self, view: &View) -> Result<&CachedState, StreamEnd> {
        match (view.ended(), self.published.state()) {
            (Some(end), _) => Err(end),
            (None, Some(cached)) => Ok(cached),
            // A hub that forgets its state ends its views in the same critical section.
            (None, None) => Err(StreamEnd::Stopped(self.published.message().to_owned())),
        }
    }
}

impl Hub {
    /// Returns the place and the gaps of [`View::cursor_past`], and whether the cache has reached
    /// `floor`.
    ///
    /// # Errors
    /// [`LogReadError::Gap`] if `floor` is inside a gap.
    pub(crate) fn cursor_past(
        &self,
        view: &View,
        cursor: Cursor,
        floor: ResourceVersion,
    ) -> Result<(Cursor, Vec<Arc<ViewGap>>, bool), LogReadError> {
        let state = self.lock();
        let cached = state.state_of(view).map_err(LogReadError::Ended)?;
        let ring = cached.history.ring();
        if cached.version >= floor
            && floor >= ring.floor()
            && let Err(inside) = ring.since(floor)
        {
            return Err(LogReadError::Gap(inside));
        }
        let (past, gaps) = view.cursor_past(cursor, floor);
        Ok((past, gaps, cached.version >= floor))
    }

    /// Returns a part of [`History::prior_steps`](kubefan_cache::History::prior_steps), for a
    /// catch-up in this view.
    pub(crate) fn prior_steps(
        &self,
        view: &View,
        after: ResourceVersion,
        up_to: Bound<ResourceVersion>,
        steps_max: usize,
    ) -> Result<(Vec<PriorStep>, Option<ResourceVersion>), HistoryError> {
        let state = self.lock();
        let cached = state.state_of(view).map_err(HistoryError::Ended)?;
        cached.history.prior_steps(after, up_to, steps_max, view.selection()).map_err(HistoryError::Expired)
    }

    /// Unregisters a subscription of a tenant. A view without subscriptions is dropped.
    pub(crate) fn leave(&self, view: &Arc<View>, waker_id: usize, waited: Option<Cursor>, tenant: Tenant) {
        let mut state = self.lock();
        state.subscribers -= 1;
        state.used_at = Instant::now();
        if view.leave(waker_id, waited, tenant) == 0 {
            state.views.remove(view);
        }
    }
}
