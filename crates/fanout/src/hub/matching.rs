//! Tests the events of views that take long to test them, outside of the critical section.
//!
//! 300 views with thousands of negative terms each, or 500 that send only the changes of their own
//! projections, would hold up every commit, and with it every other subscriber. So a commit appends
//! the event to their logs untested, and one task per hub tests them: a slice of one view, then a
//! slice of the next, and other tasks run in between. The order within each log stays that of the
//! commits, and a subscriber waits in front of an untested event, so a view that is slow to test is
//! late and nothing else. What the ring evicts meanwhile, its subscribers have missed, as if they
//! had been slow to read.

use std::sync::{Arc, Weak};

use tokio::{runtime::Handle, task::yield_now};

use super::core::Hub;

impl Hub {
    /// Starts to test what is untested, unless that is under way.
    pub(super) fn start_matching(self: &Arc<Self>) {
        {
            let mut state = self.lock();
            if !state.views.has_untested() || std::mem::replace(&mut state.is_matching, true) {
                return;
            }
        }
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(test_in_slices(Arc::downgrade(self)))),
            // Outside of a runtime no other task waits.
            Err(_) => while self.test_slice() {},
        }
    }

    /// Tests a slice of the view that comes next. Returns false if none is left: then the next
    /// commit starts again.
    fn test_slice(&self) -> bool {
        let view = {
            let mut state = self.lock();
            let Some(view) = state.views.next_untested() else {
                state.is_matching = false;
                return false;
            };
            view
        };
        let tested = view.test_slice();
        self.metrics.dispatched(tested.seen);
        if tested.wakes {
            view.wake();
        }
        if tested.has_more {
            self.lock().views.queue_untested(view);
        }
        true
    }
}

async fn test_in_slices(hub: Weak<Hub>) {
    while hub.upgrade().is_some_and(|hub| hub.test_slice()) {
        yield_now().await;
    }
}
