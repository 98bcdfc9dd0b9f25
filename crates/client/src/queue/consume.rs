//! Takes deltas from a queue: one consumer at a time, without stopping the producers.
//!
//! client-go calls the consumer under the queue's lock. So the queue and the known objects are
//! always consistent: a delta is queued, or its effect is known. But a slow consumer blocks the
//! reflector. Here the lock is released during the call. The queue retains the deltas in process
//! instead, and producers treat them as still queued. Otherwise a `replace` during the call could
//! find a new object neither in the queue nor among the known objects, and would miss its deletion.

use std::{
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use super::delta::Delta;

/// The waiting deltas of a queue, grouped in units that are consumed at once.
pub(super) trait Waiting<K>: Default {
    /// Removes the next unit. It has at least one delta.
    fn pop(&mut self) -> Option<Vec<Delta<K>>>;

    /// The number of units.
    fn units(&self) -> usize;
}

/// State behind the lock of a queue.
pub(super) struct ConsumerState<K, W> {
    pub(super) waiting: W,
    /// The unit that a consumer processes at this moment.
    pub(super) in_process: Option<Vec<Delta<K>>>,
    /// Whether any change or complete state was queued.
    populated: bool,
    /// Number of waiting and processed units that belong to the first complete state.
    initial_units: usize,
    closed: bool,
}

impl<K, W: Waiting<K>> ConsumerState<K, W> {
    /// Records that single changes were queued. If they come before the first complete state, the
    /// queue counts as synced, as client-go's does.
    pub(super) fn set_populated(&mut self) {
        self.populated = true;
    }

    /// Records that a complete state was queued. All that waits then belongs to the initial list.
    pub(super) fn set_replaced(&mut self) {
        if !self.populated {
            self.populated = true;
            self.initial_units = self.waiting.units();
        }
    }

    fn has_synced(&self) -> bool {
        self.populated && self.initial_units == 0
    }
}

/// A queue with its lock and the wakeup of its consumers.
pub(super) struct Consumable<K, W> {
    state: Mutex<ConsumerState<K, W>>,
    changed: Notify,
}

/// Result of a consumer's request for the next unit.
enum Next<K> {
    Unit { deltas: Vec<Delta<K>>, is_in_initial_list: bool, counted: bool },
    Busy,
    Empty,
    Closed,
}

impl<K, W: Waiting<K>> Consumable<K, W> {
    pub(super) fn new() -> Self {
        let state = ConsumerState {
            waiting: W::default(),
            in_process: None,
            populated: false,
            initial_units: 0,
            closed: false,
        };
        Self { state: Mutex::new(state), changed: Notify::new() }
    }

    // Only `KnownObjects` can panic under the lock, before or between changes of the queue. At
    // worst a part of a complete state is queued.
    pub(super) fn lock(&self) -> MutexGuard<'_, ConsumerState<K, W>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the queue and wakes its consumers.
    pub(super) fn produce(&self, change: impl FnOnce(&mut ConsumerState<K, W>)) {
        change(&mut self.lock());
        self.changed.notify_waiters();
    }

    fn next(&self) -> Next<K> {
        let mut state = self.lock();
        if state.in_process.is_some() {
            return Next::Busy;
        }
        let is_in_initial_list = !state.has_synced();
        let Some(deltas) = state.waiting.pop() else {
            return if state.closed { Next::Closed } else { Next::Empty };
        };
        state.in_process = Some(deltas.clone());
        Next::Unit { deltas, is_in_initial_list, counted: state.initial_units > 0 }
    }

    pub(super) fn try_pop(&self, process: impl FnOnce(Vec<Delta<K>>, bool)) -> bool {
        let Next::Unit { deltas, is_in_initial_list, counted } = self.next() else { return false };
        let _finish = Finish { queue: self, counted };
        process(deltas, is_in_initial_list);
        true
    }

    pub(super) async fn pop(&self, process: impl FnOnce(Vec<Delta<K>>, bool)) -> bool {
        let (deltas, is_in_initial_list, counted) = loop {
            // Created before the look at the queue, so that a change in between wakes it.
            let changed = self.changed.notified();
            match self.next() {
                Next::Unit { deltas, is_in_initial_list, counted } => break (deltas, is_in_initial_list, counted),
                Next::Closed => return false,
                Next::Busy | Next::Empty => changed.await,
            }
        };
        let _finish = Finish { queue: self, counted };
        process(deltas, is_in_initial_list);
        true
    }

    pub(super) fn has_synced(&self) -> bool {
        self.lock().has_synced()
    }

    pub(super) async fn synced(&self) -> bool {
        loop {
            let changed = self.changed.notified();
            {
                let state = self.lock();
                if state.has_synced() {
                    return true;
                }
                if state.closed && state.waiting.units() == 0 && state.in_process.is_none() {
                    return false;
                }
            }
            changed.await;
        }
    }

    pub(super) fn close(&self) {
        self.produce(|state| state.closed = true);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    pub(super) fn debug(&self, name: &str, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        formatter
            .debug_struct(name)
            .field("waiting", &state.waiting.units())
            .field("has_synced", &state.has_synced())
            .field("closed", &state.closed)
            .finish_non_exhaustive()
    }
}

/// Ends the processing of a unit, also when the consumer panics.
struct Finish<'a, K, W: Waiting<K>> {
    queue: &'a Consumable<K, W>,
    counted: bool,
}

impl<K, W: Waiting<K>> Drop for Finish<'_, K, W> {
    fn drop(&mut self) {
        let mut in_process = None;
        self.queue.produce(|state| {
            in_process = state.in_process.take();
            if self.counted {
                state.initial_units -= 1;
            }
        });
        // Dropped after the lock: the last reference to a large state takes a while to free.
        drop(in_process);
    }
}
