//! A relist that a check asked for, while the cache is being watched: the self-check found a
//! difference, or the schema has changed.
//!
//! A check must not interrupt the watch. It notes here when the cache should be listed again, and
//! the informer continues to watch until that moment and until there is a permit for the list.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kubefan_cache::RelistReason;
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use super::list_scheduler::{ListPermit, ListPriority, ListScheduler};

/// The relist of one cache that is planned, if there is one.
#[derive(Default)]
pub(super) struct PlannedRelist {
    plan: Mutex<Option<Plan>>,
    changed: Notify,
}

#[derive(Clone, Copy)]
struct Plan {
    at: Instant,
    reason: RelistReason,
    /// Time of the last request for a relist.
    requested: Instant,
}

/// Completes when a planned relist is due and has a permit.
pub(super) type DueRelist = Pin<Box<dyn Future<Output = (RelistReason, ListPermit)> + Send>>;

impl PlannedRelist {
    fn plan(&self) -> MutexGuard<'_, Option<Plan>> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Plans a relist, unless an earlier one is planned.
    pub(super) fn request(&self, at: Instant, reason: RelistReason) {
        let mut plan = self.plan();
        let requested = Instant::now();
        *plan = match *plan {
            Some(planned) if planned.at <= at => Some(Plan { requested, ..planned }),
            _ => Some(Plan { at, reason, requested }),
        };
        drop(plan);
        self.changed.notify_one();
    }

    /// Cancels the plan, because a list was requested upstream at `at`. A plan that was asked for
    /// later stays: the list may show the state before the change that was found.
    pub(super) fn list_begun(&self, at: Instant) {
        self.plan().take_if(|plan| plan.requested <= at);
    }

    /// Whether a relist is planned.
    pub(super) fn is_planned(&self) -> bool {
        self.plan().is_some()
    }

    /// Waits until a planned relist is due and has a permit. For one task only.
    pub(super) fn due_with_permit(self: Arc<Self>, lists: ListScheduler) -> DueRelist {
        Box::pin(async move {
            let reason = self.due().await;
            let priority =
                if reason == RelistReason::SchemaChanged { ListPriority::Upkeep } else { ListPriority::Relist };
            (reason, lists.acquire(priority).await)
        })
    }

    async fn due(&self) -> RelistReason {
        loop {
            let plan = *self.plan();
            let Some(Plan { at, reason, .. }) = plan else {
                self.changed.notified().await;
                continue;
            };
            tokio::select! {
                biased;
                () = self.changed.notified() => {}
                () = sleep_until(at) => return reason,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_list_that_was_requested_before_a_change_was_found_does_not_cancel_the_relist() {
        let relist = PlannedRelist::default();
        let list = Instant::now();
        tokio::time::advance(Duration::from_secs(1)).await;
        relist.request(Instant::now(), RelistReason::SchemaChanged);
        relist.list_begun(list);
        assert!(relist.is_planned());
        relist.list_begun(Instant::now());
        assert!(!relist.is_planned());
    }

    #[tokio::test(start_paused = true)]
    async fn the_earlier_of_two_plans_is_kept_and_counts_as_asked_for_by_both() {
        let relist = PlannedRelist::default();
        let list = Instant::now();
        relist.request(list, RelistReason::SelfCheck);
        tokio::time::advance(Duration::from_secs(1)).await;
        relist.request(Instant::now() + Duration::from_secs(60), RelistReason::SchemaChanged);
        relist.list_begun(list);
        assert!(relist.is_planned());
        assert_eq!(relist.due().await, RelistReason::SelfCheck);
    }
}
