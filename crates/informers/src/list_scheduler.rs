//! The scheduler of lists: decides which cache may list upstream now.
//!
//! A list is the most expensive request there is. When an apiserver restarts, every cache needs one
//! at the same moment, and the same happens when kubefan starts. So a limited number of lists runs
//! at a time, and the others wait by priority ([`ListPriority`]). Within one priority, the order is
//! that of their arrival.
//!
//! It covers the lists that caches consist of: the first list, relists, the confirmation of a warm
//! start and the state of a backfill. Other lists do not wait here. Look-ups of a single name are
//! cheap. The self-check and freshness proofs list metadata only: the self-check one page at a
//! time, and a proof at most 1,000 objects, which its reader would have listed. Forwarded requests
//! are those of their callers.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;

use kubefan_telemetry::metrics::ListMetrics;

/// The purpose of a list, the most urgent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ListPriority {
    /// A cache without a state: readiness or readers wait for it.
    First,
    /// A cache whose state is not current: its readers get old objects.
    Relist,
    /// A subscriber that resumes. It could start over instead.
    Backfill,
    /// A cache that is current, and is read again only because of a new schema.
    Upkeep,
}

/// The permits for lists. A clone shares them.
#[derive(Clone)]
pub struct ListScheduler(Arc<Shared>);

struct Shared {
    lists_max: usize,
    queue: Mutex<Queue>,
    metrics: ListMetrics,
}

#[derive(Default)]
struct Queue {
    running: usize,
    /// The waiting caches, by priority and arrival. Bounded by the number of caches: each waits for
    /// at most one list and one backfill.
    waiting: BTreeMap<Ticket, oneshot::Sender<()>>,
    arrivals: u64,
}

type Ticket = (ListPriority, u64);

/// Permission to list, returned when it is dropped.
pub(super) struct ListPermit(Arc<Shared>);

/// A waiting cache. Dropping it removes it from the queue, or returns the permit that it was given
/// meanwhile.
struct Waiter<'a> {
    shared: &'a Shared,
    ticket: Ticket,
    done: bool,
}

impl ListScheduler {
    /// Creates a scheduler that allows `lists_max` lists at a time, at least one.
    pub fn new(lists_max: usize, metrics: ListMetrics) -> Self {
        Self(Arc::new(Shared { lists_max: lists_max.max(1), queue: Mutex::default(), metrics }))
    }

    /// Waits for a permit.
    ///
    /// Cancel-safe, but the caller then queues again at the end.
    pub(super) async fn acquire(&self, priority: ListPriority) -> ListPermit {
        let shared = &self.0;
        let (mut waiter, turn) = {
            let mut queue = shared.queue();
            if queue.running < shared.lists_max {
                queue.running += 1;
                shared.publish(&queue);
                return ListPermit(shared.clone());
            }
            let (sender, turn) = oneshot::channel();
            queue.arrivals += 1;
            let ticket = (priority, queue.arrivals);
            queue.waiting.insert(ticket, sender);
            shared.publish(&queue);
            (Waiter { shared, ticket, done: false }, turn)
        };
        // The sender is in the queue until it is used.
        let _ = turn.await;
        waiter.done = true;
        ListPermit(shared.clone())
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes a permit on to the first cache that waits.
    fn release(&self, queue: &mut Queue) {
        // A waiter removes its ticket when it is dropped, so the first one takes the permit.
        match queue.waiting.pop_first() {
            Some((_, sender)) => drop(sender.send(())),
            None => queue.running -= 1,
        }
        self.publish(queue);
    }

    fn publish(&self, queue: &Queue) {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.running.set(number(queue.running));
        self.metrics.waiting.set(number(queue.waiting.len()));
    }
}

impl Drop for ListPermit {
    fn drop(&mut self) {
        let mut queue = self.0.queue();
        self.0.release(&mut queue);
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let mut queue = self.shared.queue();
        match queue.waiting.remove(&self.ticket) {
            Some(_) => self.shared.publish(&queue),
            None => self.shared.release(&mut queue),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use futures::FutureExt;
    use kubefan_telemetry::metrics::Metrics;
    use prometheus::Registry;

    use super::*;

    fn scheduler(lists_max: usize) -> ListScheduler {
        ListScheduler::new(lists_max, Metrics::new(Registry::new()).unwrap().lists())
    }

    fn counts(scheduler: &ListScheduler) -> (i64, i64) {
        (scheduler.0.metrics.running.get(), scheduler.0.metrics.waiting.get())
    }

    #[tokio::test]
    async fn the_most_urgent_list_is_next_and_equal_ones_keep_their_order() {
        use ListPriority::{Backfill, First, Relist, Upkeep};
        let lists = scheduler(1);
        let running = lists.acquire(Upkeep).await;
        let order = Arc::new(Mutex::new(Vec::new()));
        let waiters: Vec<_> = [(Upkeep, 1), (Relist, 2), (Backfill, 3), (First, 4), (Relist, 5), (First, 6)]
            .into_iter()
            .map(|(priority, name)| {
                let lists = lists.clone();
                let order = order.clone();
                async move {
                    let _permit = lists.acquire(priority).await;
                    order.lock().unwrap().push(name);
                }
            })
            .map(tokio::spawn)
            .collect();
        tokio::task::yield_now().await;
        assert_eq!(counts(&lists), (1, 6));
        drop(running);
        futures::future::join_all(waiters).await;
        assert_eq!(*order.lock().unwrap(), [4, 6, 2, 5, 3, 1]);
        assert_eq!(counts(&lists), (0, 0));
    }

    #[tokio::test]
    async fn no_permit_is_lost_however_a_wait_ends() {
        let lists = scheduler(2);
        let mut running = vec![lists.acquire(ListPriority::Relist).await, lists.acquire(ListPriority::First).await];
        let mut leaves = Box::pin(lists.acquire(ListPriority::First));
        let mut has_a_permit = Box::pin(lists.acquire(ListPriority::Relist));
        let mut stays = Box::pin(lists.acquire(ListPriority::Upkeep));
        for waiter in [&mut leaves, &mut has_a_permit, &mut stays] {
            assert!(waiter.now_or_never().is_none());
        }
        assert_eq!(counts(&lists), (2, 3));
        drop(leaves);
        assert_eq!(counts(&lists), (2, 2));
        running.pop();
        assert_eq!(counts(&lists), (2, 1), "the permit was given to a waiter that has not looked yet");
        drop(has_a_permit);
        assert_eq!(counts(&lists), (2, 0), "and is passed on when that waiter is dropped");
        running.push(stays.now_or_never().expect("a permit"));
        running.clear();
        assert_eq!(counts(&lists), (0, 0));
    }
}
