//! The queue of keys between handlers and workers.
//!
//! Delays need no background task: a worker that waits for an item also waits for the next delayed
//! one, and every other call moves the items that are due. So a queue costs no task, and dropping
//! it leaves nothing behind.

use std::{
    fmt,
    hash::Hash,
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use super::{
    rate_limiter::{MaxOfRateLimiter, RateLimiter},
    work_state::WorkState,
};

/// A queue of work: client-go's `TypedRateLimitingQueue`. Clones share the queue.
///
/// - An item that is added several times before a worker takes it is processed once.
/// - No two workers process the same item at the same time. An item that is added while it is
///   processed is queued again afterwards.
/// - Items come in the order in which they were added.
///
/// The queue holds each item at most once as queued and once as delayed. Its size is limited by the
/// number of different items, which are usually [`ObjectKey`](crate::ObjectKey)s.
///
/// ```
/// # use kubefan_client::{ObjectKey, WorkQueue};
/// # async fn reconcile(_key: &ObjectKey) -> Result<(), ()> { Ok(()) }
/// # async fn worker(queue: WorkQueue<ObjectKey>) {
/// while let Some(key) = queue.get().await {
///     match reconcile(&key).await {
///         Ok(()) => queue.forget(&key),
///         Err(()) => queue.add_rate_limited(key.clone()),
///     }
/// }
/// # }
/// ```
pub struct WorkQueue<T: Clone + Eq + Hash>(Arc<Shared<T>>);

struct Shared<T> {
    state: Mutex<WorkState<T>>,
    /// Wakes one worker per item, or all of them when the next delay changes or the queue ends.
    changed: Notify,
    /// Wakes the calls that wait for the drain.
    drained: Notify,
    limiter: Box<dyn RateLimiter<T>>,
}

impl<T: Clone + Eq + Hash> Shared<T> {
    // A panic under the lock can only come from `T`'s own `Hash`, `Eq` or `Clone`.
    fn lock(&self) -> MutexGuard<'_, WorkState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues the items that are due, changes the state, and wakes a worker if there is work. A
    /// worker that takes an item wakes the next one in this way, so that no item waits while a
    /// worker is idle.
    fn update<R>(&self, change: impl FnOnce(&mut WorkState<T>, Instant) -> R) -> R {
        let mut state = self.lock();
        let now = Instant::now();
        state.add_due(now);
        let result = change(&mut state, now);
        if !state.queue.is_empty() {
            self.changed.notify_one();
        }
        result
    }
}

impl<T: Clone + Eq + Hash + Send + Sync + 'static> WorkQueue<T> {
    /// Returns an empty queue with [`MaxOfRateLimiter::for_controllers`].
    pub fn new() -> Self {
        Self::with_rate_limiter(MaxOfRateLimiter::for_controllers())
    }
}

impl<T: Clone + Eq + Hash> WorkQueue<T> {
    /// Returns an empty queue with a rate limiter for [`add_rate_limited`](Self::add_rate_limited).
    pub fn with_rate_limiter(limiter: impl RateLimiter<T> + 'static) -> Self {
        Self(Arc::new(Shared {
            state: Mutex::new(WorkState::new()),
            changed: Notify::new(),
            drained: Notify::new(),
            limiter: Box::new(limiter),
        }))
    }

    /// Queues an item, unless it is queued already. Ignored after a shutdown.
    pub fn add(&self, item: T) {
        self.0.update(|state, _| state.add(item));
    }

    /// Queues an item after a delay. If the item is delayed already, the earlier of both times
    /// applies. A delay of zero queues it now. Ignored after a shutdown.
    pub fn add_after(&self, item: T, delay: Duration) {
        let is_next = self.0.update(|state, now| {
            if state.shutting_down {
                return false;
            }
            if delay.is_zero() {
                state.add(item);
                return false;
            }
            let before = state.delayed.next_due();
            state.delayed.insert(item, now, delay);
            before != state.delayed.next_due()
        });
        if is_next {
            // All, because each waiting worker may end its wait before the new time.
            self.0.changed.notify_waiters();
        }
    }

    /// Queues an item after the delay that the rate limiter sets for it.
    pub fn add_rate_limited(&self, item: T) {
        let delay = self.0.limiter.when(&item);
        self.add_after(item, delay);
    }

    /// Ends the retries of an item in the rate limiter: its next delay is the shortest again. Call
    /// it after a success, and before giving up. It does not mark the item as done.
    pub fn forget(&self, item: &T) {
        self.0.limiter.forget(item);
    }

    /// Returns how often [`add_rate_limited`](Self::add_rate_limited) has queued the item since the
    /// last [`forget`](Self::forget).
    pub fn num_requeues(&self, item: &T) -> u32 {
        self.0.limiter.num_requeues(item)
    }

    /// The next item, waiting for it as long as needed. `None` after a shutdown, when no items are
    /// queued.
    ///
    /// The item counts as in process until the returned guard is dropped, also by a panic.
    /// Cancelling the wait loses nothing.
    pub async fn get(&self) -> Option<WorkItem<T>> {
        loop {
            // Created before the look at the queue, so that a change in between wakes it.
            let changed = self.0.changed.notified();
            let (item, shutting_down, due) =
                self.0.update(|state, _| (state.take(), state.shutting_down, state.delayed.next_due()));
            if let Some(item) = item {
                return Some(WorkItem { queue: self.clone(), item });
            }
            if shutting_down {
                return None;
            }
            match due {
                None => changed.await,
                Some(due) => tokio::select! {
                    () = changed => {}
                    () = sleep_until(due) => {}
                },
            }
        }
    }

    /// The number of items that wait for a worker, without delayed ones and those in process.
    pub fn len(&self) -> usize {
        self.0.update(|state, _| state.queue.len())
    }

    /// Whether no items wait for a worker.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ends the queue. It ignores new items and drops delayed ones. Workers still get the queued
    /// items, and then `None`. A call of [`shut_down_with_drain`](Self::shut_down_with_drain) stops
    /// waiting.
    pub fn shut_down(&self) {
        self.end(false);
    }

    /// Ends the queue as [`shut_down`](Self::shut_down) does, when first polled, and waits until no
    /// items are queued or in process.
    ///
    /// The wait has no limit of its own: it needs workers that take the items, and guards that are
    /// dropped. client-go only waits for the items in process; queued ones that no worker has taken
    /// at that moment are not waited for, although its documentation promises that.
    pub async fn shut_down_with_drain(&self) {
        self.end(true);
        loop {
            let drained = self.0.drained.notified();
            if self.0.lock().is_drained() {
                return;
            }
            drained.await;
        }
    }

    /// Whether the queue was shut down.
    pub fn is_shutting_down(&self) -> bool {
        self.0.lock().shutting_down
    }

    fn end(&self, draining: bool) {
        self.0.update(|state, _| {
            state.shutting_down = true;
            state.draining = draining;
            state.delayed.clear();
        });
        self.0.changed.notify_waiters();
        self.0.drained.notify_waiters();
    }
}

impl<T: Clone + Eq + Hash + Send + Sync + 'static> Default for WorkQueue<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Clone + Eq + Hash> Clone for WorkQueue<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Clone + Eq + Hash> fmt::Debug for WorkQueue<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.lock();
        formatter
            .debug_struct("WorkQueue")
            .field("queued", &state.queue.len())
            .field("processing", &state.processing.len())
            .field("shutting_down", &state.shutting_down)
            .finish_non_exhaustive()
    }
}

/// An item in process. Dereferences to it. Dropping it marks it as done: if it was added meanwhile,
/// it is queued again.
#[must_use = "dropping it marks the item as done"]
pub struct WorkItem<T: Clone + Eq + Hash> {
    queue: WorkQueue<T>,
    item: T,
}

impl<T: Clone + Eq + Hash> WorkItem<T> {
    /// Marks the item as done, as dropping does.
    pub fn done(self) {}
}

impl<T: Clone + Eq + Hash> Deref for WorkItem<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.item
    }
}

impl<T: Clone + Eq + Hash> Drop for WorkItem<T> {
    fn drop(&mut self) {
        let drained = self.queue.0.update(|state, _| {
            state.done(&self.item);
            state.shutting_down && state.is_drained()
        });
        if drained {
            self.queue.0.drained.notify_waiters();
        }
    }
}

impl<T: Clone + Eq + Hash + fmt::Debug> fmt::Debug for WorkItem<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("WorkItem").field(&self.item).finish()
    }
}

#[cfg(test)]
mod tests;
