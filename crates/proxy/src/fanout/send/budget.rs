//! The budgets for what clients decide the number of: what views and formats retain for reuse, and
//! selectors. All caches of the process share them, because clients decide how many caches, views,
//! formats and selectors there are.
//!
//! What could be reused and finds no room is not retained, and made again when it is needed: it
//! costs time, never memory. A selector that finds no room is refused.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// Bytes that may be retained. Clones share it, and so do its parts, which count their own bytes.
#[derive(Debug, Clone)]
pub struct Budget {
    used: Arc<AtomicUsize>,
    closed: Arc<AtomicBool>,
    /// What this part and all others have taken.
    used_by_all: Arc<AtomicUsize>,
    bytes_max: usize,
}

/// What was taken from a budget; dropping it gives it back.
#[derive(Debug)]
pub struct Share {
    used: Arc<AtomicUsize>,
    used_by_all: Arc<AtomicUsize>,
    bytes: usize,
}

impl Budget {
    /// A budget of so many bytes.
    pub fn new(bytes_max: usize) -> Self {
        Self { used: Arc::default(), closed: Arc::default(), used_by_all: Arc::default(), bytes_max }
    }

    /// Another part of the same budget, which can be closed on its own.
    #[must_use]
    pub fn part(&self) -> Self {
        Self {
            used: Arc::default(),
            closed: Arc::default(),
            used_by_all: self.used_by_all.clone(),
            bytes_max: self.bytes_max,
        }
    }

    /// Takes so many bytes; `None` if there is no room.
    pub fn take(&self, bytes: usize) -> Option<Share> {
        if self.closed.load(Ordering::Relaxed) {
            return None;
        }
        let fits = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.bytes_max);
        self.used_by_all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        self.used.fetch_add(bytes, Ordering::Relaxed);
        Some(Share { used: self.used.clone(), used_by_all: self.used_by_all.clone(), bytes })
    }

    /// The most bytes that all parts may take.
    pub fn bytes_max(&self) -> usize {
        self.bytes_max
    }

    /// The bytes that are taken from this part.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
        self.used_by_all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// How much all caches together may retain of what clients decide the number of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetainedLimits {
    /// Bytes of projected objects and deltas.
    pub projected_bytes_max: usize,
    /// Bytes of compressed snapshots.
    pub chunks_bytes_max: usize,
    /// Bytes of selectors, and of the index of views by their values.
    pub selector_bytes_max: usize,
}

/// [`RetainedLimits::selector_bytes_max`], unless the configuration says otherwise: 50,000
/// selectors of 1 KiB, or 4,000 of the greatest length.
pub const SELECTOR_BYTES_MAX: usize = 256 << 20;

impl Default for RetainedLimits {
    fn default() -> Self {
        Self { projected_bytes_max: 256 << 20, chunks_bytes_max: 512 << 20, selector_bytes_max: SELECTOR_BYTES_MAX }
    }
}

impl RetainedLimits {
    /// The limits of a process with this memory budget: a sixteenth, an eighth and an eighth of it,
    /// and, but for selectors, no more than without one.
    pub fn of_memory(bytes_max: Option<usize>) -> Self {
        let most = Self { selector_bytes_max: usize::MAX, ..Self::default() };
        let bytes_max = bytes_max.unwrap_or(usize::MAX);
        Self {
            projected_bytes_max: most.projected_bytes_max.min(bytes_max / 16),
            chunks_bytes_max: most.chunks_bytes_max.min(bytes_max / 8),
            selector_bytes_max: most.selector_bytes_max.min(bytes_max / 8),
        }
    }

    /// With at most so many bytes of selectors.
    #[must_use]
    pub fn with_selectors(self, bytes_max: usize) -> Self {
        Self { selector_bytes_max: self.selector_bytes_max.min(bytes_max), ..self }
    }
}

/// The budgets of the process, or the part of one cache.
#[derive(Debug, Clone)]
pub struct Budgets {
    /// Projected objects and deltas.
    pub projected: Budget,
    /// Compressed snapshots.
    pub chunks: Budget,
    /// Selectors and their part of the index of views. Never closed: to refuse new ones frees
    /// nothing.
    pub selectors: Budget,
}

impl Budgets {
    /// The budgets of a process.
    pub fn new(limits: RetainedLimits) -> Self {
        Self {
            projected: Budget::new(limits.projected_bytes_max),
            chunks: Budget::new(limits.chunks_bytes_max),
            selectors: Budget::new(limits.selector_bytes_max),
        }
    }

    /// The part of one more cache.
    #[must_use]
    pub fn part(&self) -> Self {
        Self { projected: self.projected.part(), chunks: self.chunks.part(), selectors: self.selectors.part() }
    }

    /// Allows that more is retained for reuse, or forbids it.
    pub fn open(&self, open: bool) {
        self.projected.closed.store(!open, Ordering::Relaxed);
        self.chunks.closed.store(!open, Ordering::Relaxed);
    }
}

impl Default for Budgets {
    fn default() -> Self {
        Self::new(RetainedLimits::default())
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

    #[test]
    fn the_parts_of_a_budget_share_its_bytes_and_count_their_own() {
        let whole =
            Budgets::new(RetainedLimits { projected_bytes_max: 100, chunks_bytes_max: 0, selector_bytes_max: 0 });
        let (one, other) = (whole.part(), whole.part());
        let share = one.projected.take(60).unwrap();
        assert!(other.projected.take(41).is_none(), "caches share what the process has");
        let _rest = other.projected.take(40).unwrap();
        assert_eq!((one.projected.used(), other.projected.used(), whole.projected.used()), (60, 40, 0));
        one.open(false);
        drop(share);
        assert!(one.projected.take(1).is_none() && other.projected.take(60).is_some());
    }

    #[test]
    fn a_small_process_retains_little() {
        let limits = RetainedLimits::of_memory(Some(128 << 20));
        let (projected_bytes_max, chunks_bytes_max, selector_bytes_max) = (8 << 20, 16 << 20, 16 << 20);
        assert_eq!(limits, RetainedLimits { projected_bytes_max, chunks_bytes_max, selector_bytes_max });
        let default = RetainedLimits::of_memory(None).with_selectors(SELECTOR_BYTES_MAX);
        assert_eq!(default, RetainedLimits::default());
    }
}
