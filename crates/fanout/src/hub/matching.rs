//! Tests events for the views whose tests take long, outside of the critical section.
//!
//! 300 views with thousands of negative terms each, or 500 that send only the changes of their own
//! projections, would hold up every commit, and with it every other subscriber. So a commit appends
//! the event to their logs untested, and one task per hub tests them: a slice of one view, then a
//! slice of the next, and other tasks run in between. The order within each log stays that of the
//! commits, and a subscriber waits in front of an untested event, so a view that is slow to test is
//! late and nothing else. Its subscribers miss the events that the ring evicts meanwhile, as if
//! they had been slow to read.

use std::{ops::ControlFlow, sync::Arc};

use super::{core::Hub, slices::SlicedWork};

/// The tests of one hub, of which only one task does slices at a time.
struct Matching;

impl Hub {
    /// Starts to test the untested events, unless a task does so already.
    pub(super) fn start_matching(self: &Arc<Self>) {
        {
            let mut state = self.lock();
            if !state.views.has_untested() || std::mem::replace(&mut state.is_matching, true) {
                return;
            }
        }
        self.in_background(Matching);
    }
}

impl SlicedWork for Matching {
    type Done = ();

    /// Tests a slice of the view that comes next. If none is left, the next commit starts again.
    fn slice(&mut self, hub: &Hub) -> ControlFlow<()> {
        let view = {
            let mut state = hub.lock();
            let Some(view) = state.views.next_untested() else {
                state.is_matching = false;
                return ControlFlow::Break(());
            };
            view
        };
        let tested = view.test_slice();
        hub.metrics.dispatched(tested.seen);
        if tested.wakes {
            view.wake();
        }
        if tested.has_more {
            hub.lock().views.queue_untested(view);
        }
        ControlFlow::Continue(())
    }
}
