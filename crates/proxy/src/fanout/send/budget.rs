//! One budget for everything that views and formats retain for reuse. All of a cache share it,
//! because clients decide how many views and formats there are.
//!
//! What finds no room is not retained, and made again when it is needed: a full budget costs time,
//! never memory.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// Bytes that may be retained. Clones share it.
#[derive(Debug, Clone)]
pub struct Budget {
    used: Arc<AtomicUsize>,
    closed: Arc<AtomicBool>,
    bytes_max: usize,
}

/// A part of a budget; dropping it gives it back.
#[derive(Debug)]
pub struct Share {
    used: Arc<AtomicUsize>,
    bytes: usize,
}

impl Budget {
    /// A budget of so many bytes.
    pub fn new(bytes_max: usize) -> Self {
        Self { used: Arc::default(), closed: Arc::default(), bytes_max }
    }

    /// Takes so many bytes; `None` if there is no room.
    pub fn take(&self, bytes: usize) -> Option<Share> {
        if self.closed.load(Ordering::Relaxed) {
            return None;
        }
        let fits = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.bytes_max);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(Share { used: self.used.clone(), bytes })
    }

    /// The bytes that are taken.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The budgets of one cache.
#[derive(Debug, Clone)]
pub struct Budgets {
    /// Projected objects and deltas.
    pub projected: Budget,
    /// Compressed snapshots.
    pub chunks: Budget,
}

impl Budgets {
    /// Allows that more is retained, or forbids it.
    pub fn open(&self, open: bool) {
        self.projected.closed.store(!open, Ordering::Relaxed);
        self.chunks.closed.store(!open, Ordering::Relaxed);
    }
}

impl Default for Budgets {
    fn default() -> Self {
        Self { projected: Budget::new(64 << 20), chunks: Budget::new(256 << 20) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_refuses_what_is_over_it_and_dropped_shares_make_room() {
        let budget = Budget::new(100);
        let share = budget.take(60).unwrap();
        assert!(budget.clone().take(41).is_none());
        assert_eq!(budget.used(), 60);
        drop(share);
        assert!(budget.take(100).is_some() && budget.take(usize::MAX).is_none());
        assert_eq!(budget.used(), 0);
    }
}
