//! Work of a hub that takes too long for the critical section.
//!
//! The section holds up every commit and every subscription, so such work is divided into slices. A
//! slice takes its input inside the section, works outside of it, and publishes its result inside
//! again. Other tasks run between two slices. The hazard is a change in between: a commit, a new
//! history, the end of a view. So each slice checks again that its subject still exists, and gives
//! up if it is gone.
//!
//! The same slices run in three ways: in the task of the caller that waits for their result, in a
//! task of their own, or at once, for callers that cannot wait.

use std::{ops::ControlFlow, sync::Arc};

use tokio::{runtime::Handle, task::yield_now};

use super::core::Hub;

/// Work in slices.
pub(super) trait SlicedWork {
    /// The result.
    type Done;

    /// Does a slice. Breaks with the result if nothing is left to do.
    fn slice(&mut self, hub: &Hub) -> ControlFlow<Self::Done>;
}

impl Hub {
    /// Does all slices. Other tasks run between them.
    pub(super) async fn in_slices<W: SlicedWork>(&self, mut work: W) -> W::Done {
        loop {
            match work.slice(self) {
                ControlFlow::Continue(()) => yield_now().await,
                ControlFlow::Break(done) => return done,
            }
        }
    }

    /// Does all slices without a break.
    pub(super) fn at_once<W: SlicedWork>(&self, mut work: W) -> W::Done {
        loop {
            if let ControlFlow::Break(done) = work.slice(self) {
                return done;
            }
        }
    }

    /// Does all slices in a task of their own, which also ends with the hub. Outside of a runtime
    /// no other task waits, so there they are done at once.
    pub(super) fn in_background<W: SlicedWork<Done = ()> + Send + 'static>(self: &Arc<Self>, mut work: W) {
        let Ok(runtime) = Handle::try_current() else { return self.at_once(work) };
        let hub = Arc::downgrade(self);
        runtime.spawn(async move {
            while hub.upgrade().is_some_and(|hub| work.slice(&hub).is_continue()) {
                yield_now().await;
            }
        });
    }
}
