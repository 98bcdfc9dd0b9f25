//! The items of a work queue that are queued, in process, or both.

use std::{
    collections::{HashSet, VecDeque},
    hash::Hash,
};

use tokio::time::Instant;

use super::delayed::Delayed;

/// State behind the lock of a work queue.
pub(super) struct WorkState<T> {
    /// The items to hand out. Each is in `dirty` and not in `processing`.
    pub(super) queue: VecDeque<T>,
    /// The items that need processing. Those in `processing` are queued again when they are done.
    dirty: HashSet<T>,
    pub(super) processing: HashSet<T>,
    pub(super) delayed: Delayed<T>,
    pub(super) shutting_down: bool,
    /// Whether a shutdown waits until all items are processed.
    pub(super) draining: bool,
}

impl<T: Clone + Eq + Hash> WorkState<T> {
    pub(super) fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            dirty: HashSet::new(),
            processing: HashSet::new(),
            delayed: Delayed::new(),
            shutting_down: false,
            draining: false,
        }
    }

    pub(super) fn add(&mut self, item: T) {
        if self.shutting_down || !self.dirty.insert(item.clone()) {
            return;
        }
        if !self.processing.contains(&item) {
            self.queue.push_back(item);
        }
    }

    /// Queues the delayed items that are due.
    pub(super) fn add_due(&mut self, now: Instant) {
        while let Some(item) = self.delayed.pop_due(now) {
            self.add(item);
        }
    }

    pub(super) fn take(&mut self) -> Option<T> {
        let item = self.queue.pop_front()?;
        self.dirty.remove(&item);
        self.processing.insert(item.clone());
        Some(item)
    }

    pub(super) fn done(&mut self, item: &T) {
        self.processing.remove(item);
        if let Some(item) = self.dirty.get(item) {
            self.queue.push_back(item.clone());
        }
    }

    pub(super) fn is_drained(&self) -> bool {
        !self.draining || (self.queue.is_empty() && self.processing.is_empty())
    }
}
