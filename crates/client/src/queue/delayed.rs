//! Items, each with the time at which it is due.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    time::Duration,
};

use tokio::time::Instant;

/// Stands for a delay that no clock can represent.
const LONGEST_DELAY: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Waiting items, each once, ordered by the time at which it is due. Items that are due at the same
/// time keep their order of arrival.
pub(super) struct Delayed<T> {
    order: BTreeMap<(Instant, u64), T>,
    positions: HashMap<T, (Instant, u64)>,
    arrivals: u64,
}

impl<T: Clone + Eq + Hash> Delayed<T> {
    pub(super) fn new() -> Self {
        Self { order: BTreeMap::new(), positions: HashMap::new(), arrivals: 0 }
    }

    /// Adds an item. If it waits already, the earlier of both times applies.
    pub(super) fn insert(&mut self, item: T, now: Instant, delay: Duration) {
        let due = now.checked_add(delay).unwrap_or_else(|| now + LONGEST_DELAY);
        if let Some(position) = self.positions.get(&item) {
            if position.0 <= due {
                return;
            }
            self.order.remove(position);
        }
        self.arrivals += 1;
        let position = (due, self.arrivals);
        self.order.insert(position, item.clone());
        self.positions.insert(item, position);
    }

    /// Removes the next item that is due.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<T> {
        let first = self.order.first_entry().filter(|first| first.key().0 <= now)?;
        let item = first.remove();
        self.positions.remove(&item);
        Some(item)
    }

    /// Returns the time at which the next item is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.order.first_key_value().map(|((due, _), _)| *due)
    }

    pub(super) fn clear(&mut self) {
        self.order.clear();
        self.positions.clear();
    }
}
