//! Budgets of the memory that caches hold beyond objects and history. All caches of the process
//! share them, because clients decide how many caches, views and formats there are.
//!
//! A budget for each cache would bound nothing with 200 caches, and a budget that the first cache
//! may use up would leave the others nothing. So half of a budget belongs to the caches in equal
//! parts, and the rest is for any cache that needs it. Data that finds no room is not retained, and
//! computed again when it is needed: it costs time, never memory. A selector that finds no room is
//! refused.
//!
//! Only a [`Share`] changes a count, so the counts match the memory held.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use super::compression_budget::{CompressionBudget, EVENTS_CORE_DIVISOR};
use super::tenant_bytes::{Tenant, TenantBytes, Tenants};

/// Limit of all caches together for one purpose.
#[derive(Debug, Clone)]
pub struct ProcessBudget(Arc<Whole>);

#[derive(Debug)]
struct Whole {
    bytes_max: usize,
    used: AtomicUsize,
    /// Number of caches.
    parts: AtomicUsize,
    /// The bytes of each tenant, if shares are charged to tenants.
    tenants: Tenants,
}

/// The part of one cache. Clones are the same part.
#[derive(Debug, Clone)]
pub struct Budget(Arc<Part>);

#[derive(Debug)]
struct Part {
    whole: Arc<Whole>,
    used: AtomicUsize,
    closed: AtomicBool,
}

/// Bytes that are counted in a budget until it is dropped.
#[derive(Debug)]
pub struct Share {
    budget: Budget,
    bytes: usize,
    /// The tenant that it is charged to.
    tenant: Option<Arc<TenantBytes>>,
}

impl ProcessBudget {
    /// Returns a budget of this many bytes.
    pub fn new(bytes_max: usize) -> Self {
        Self(Arc::new(Whole {
            bytes_max,
            used: AtomicUsize::new(0),
            parts: AtomicUsize::new(0),
            tenants: Tenants::default(),
        }))
    }

    /// The part of one more cache.
    #[must_use]
    pub fn part(&self) -> Budget {
        self.0.parts.fetch_add(1, Ordering::Relaxed);
        Budget(Arc::new(Part { whole: self.0.clone(), used: AtomicUsize::new(0), closed: AtomicBool::new(false) }))
    }

    /// The bytes that all caches hold.
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.whole.parts.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Budget {
    /// The budget of the only cache of a process.
    pub fn alone(bytes_max: usize) -> Self {
        ProcessBudget::new(bytes_max).part()
    }

    /// A share without bytes yet.
    pub fn share(&self) -> Share {
        Share { budget: self.clone(), bytes: 0, tenant: None }
    }

    /// Takes this many bytes; `None` if there is no room.
    pub fn take(&self, bytes: usize) -> Option<Share> {
        if self.0.closed.load(Ordering::Relaxed) || bytes > self.0.whole.bytes_max {
            return None;
        }
        let mut share = self.share();
        share.add(bytes);
        (!self.is_over()).then_some(share)
    }

    /// The most bytes that all caches may hold.
    pub fn bytes_max(&self) -> usize {
        self.0.whole.bytes_max
    }

    /// The bytes that this cache holds.
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Whether this cache must release something.
    pub fn is_over(&self) -> bool {
        self.is_over_part(1)
    }

    /// Whether this cache would have to release something if the budget were halved.
    pub fn is_over_half(&self) -> bool {
        self.is_over_part(2)
    }

    fn is_over_part(&self, divisor: usize) -> bool {
        let (own, lent) = self.limits(divisor);
        let used = self.used_by_all();
        used > self.0.whole.bytes_max / divisor || (used > lent && self.used() > own)
    }

    /// The share of its bytes, from 0 to 1, that this cache should retain.
    pub fn retained_share(&self) -> f64 {
        let (own, lent) = self.limits(1);
        // A cache within its part releases nothing, whatever the others hold.
        if self.is_over() && self.used() > own { lent as f64 / self.used_by_all().max(1) as f64 } else { 1.0 }
    }

    /// Returns the count of a tenant's bytes in all caches.
    pub fn bytes_of(&self, tenant: Tenant) -> Arc<TenantBytes> {
        self.0.whole.tenants.of(tenant)
    }

    /// Returns the most bytes that each tenant may have in all caches together: if none has more,
    /// this cache must release nothing. `None` if callers are not distinguished.
    pub fn tenant_max(&self) -> Option<usize> {
        let (_, lent) = self.limits(1);
        self.0.whole.tenants.each_max(lent)
    }

    /// Returns how many more bytes this cache may hold.
    pub fn room(&self) -> usize {
        let (own, lent) = self.limits(1);
        own.saturating_sub(self.used()).max(lent.saturating_sub(self.used_by_all()))
    }

    /// Returns the limits of a budget that is divided by `divisor`: the bytes that this cache may
    /// have in any case, and the bytes of all caches up to which it may have more.
    fn limits(&self, divisor: usize) -> (usize, usize) {
        let bytes_max = self.0.whole.bytes_max / divisor;
        let parts = self.0.whole.parts.load(Ordering::Relaxed).max(1);
        let own = bytes_max / 2 / parts;
        (own, bytes_max - (parts - 1) * own)
    }

    fn used_by_all(&self) -> usize {
        self.0.whole.used.load(Ordering::Relaxed)
    }

    fn open(&self, open: bool) {
        self.0.closed.store(!open, Ordering::Relaxed);
    }
}

impl Share {
    /// Counts more bytes. [`Budget::is_over`] says whether there is room for them.
    pub fn add(&mut self, bytes: usize) {
        let part = &*self.budget.0;
        self.bytes += bytes;
        part.used.fetch_add(bytes, Ordering::Relaxed);
        part.whole.used.fetch_add(bytes, Ordering::Relaxed);
        if let Some(tenant) = &self.tenant {
            tenant.add(bytes);
        }
    }

    /// Counts fewer bytes.
    pub fn subtract(&mut self, bytes: usize) {
        let part = &*self.budget.0;
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        part.used.fetch_sub(bytes, Ordering::Relaxed);
        part.whole.used.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(tenant) = &self.tenant {
            tenant.subtract(bytes);
        }
    }

    /// Counts this many bytes.
    pub fn set(&mut self, bytes: usize) {
        match bytes.checked_sub(self.bytes) {
            Some(more) => self.add(more),
            None => self.subtract(self.bytes - bytes),
        }
    }

    /// Charges its bytes to another tenant, or to none.
    pub fn charge_to(&mut self, tenant: Option<Arc<TenantBytes>>) {
        if let Some(tenant) = &tenant {
            tenant.add(self.bytes);
        }
        if let Some(before) = std::mem::replace(&mut self.tenant, tenant) {
            before.subtract(self.bytes);
        }
    }

    /// Whether it is charged to this tenant.
    pub fn is_charged_to(&self, tenant: Tenant) -> bool {
        self.tenant.as_ref().is_some_and(|charged| charged.tenant() == tenant)
    }

    /// The bytes in all caches of the tenant that it is charged to; 0 if it is charged to none.
    pub fn tenant_bytes(&self) -> usize {
        self.tenant.as_ref().map_or(0, |tenant| tenant.get())
    }

    /// The bytes that it counts.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The budget that it is part of.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.subtract(self.bytes);
    }
}

/// Limits of all caches together, in bytes, and of the CPU time to compress events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetainedLimits {
    /// Projected objects and deltas.
    pub projected_bytes_max: usize,
    /// Compressed snapshots.
    pub chunks_bytes_max: usize,
    /// The logs of views. Beyond it, history is shortened.
    pub logs_bytes_max: usize,
    /// Segments of logs that several subscribers take. Half of it is for the newest of each view.
    pub segments_bytes_max: usize,
    /// Indexes of state and history. A column beyond it is not indexed.
    pub indexes_bytes_max: usize,
    /// Backfills that were read from upstream.
    pub backfills_bytes_max: usize,
    /// Selectors, and the index of views by their values. A selector beyond it is refused.
    pub selectors_bytes_max: usize,
    /// Events are compressed for few readers with one part in this many of one core.
    pub compression_core_divisor: u64,
}

/// [`RetainedLimits::selectors_bytes_max`], unless the configuration says otherwise: 50,000
/// selectors of 1 KiB, or 4,000 of the greatest length.
pub const SELECTOR_BYTES_MAX: usize = 256 << 20;

impl Default for RetainedLimits {
    fn default() -> Self {
        Self {
            projected_bytes_max: 256 << 20,
            chunks_bytes_max: 512 << 20,
            logs_bytes_max: 128 << 20,
            segments_bytes_max: 128 << 20,
            indexes_bytes_max: 256 << 20,
            backfills_bytes_max: 256 << 20,
            selectors_bytes_max: SELECTOR_BYTES_MAX,
            compression_core_divisor: EVENTS_CORE_DIVISOR,
        }
    }
}

impl RetainedLimits {
    /// The limits of a process with this memory budget: an eighth of it each for snapshots and
    /// selectors, and a sixteenth for each of the others; except for selectors, no more than
    /// without one.
    pub fn of_memory(bytes_max: Option<usize>) -> Self {
        let most = Self::default();
        let bytes_max = bytes_max.unwrap_or(usize::MAX);
        Self {
            projected_bytes_max: most.projected_bytes_max.min(bytes_max / 16),
            chunks_bytes_max: most.chunks_bytes_max.min(bytes_max / 8),
            logs_bytes_max: most.logs_bytes_max.min(bytes_max / 16),
            segments_bytes_max: most.segments_bytes_max.min(bytes_max / 16),
            indexes_bytes_max: most.indexes_bytes_max.min(bytes_max / 16),
            backfills_bytes_max: most.backfills_bytes_max.min(bytes_max / 16),
            selectors_bytes_max: bytes_max / 8,
            compression_core_divisor: most.compression_core_divisor,
        }
    }

    /// Lowers the limit of selectors to this many bytes.
    #[must_use]
    pub fn with_selectors(self, bytes_max: usize) -> Self {
        Self { selectors_bytes_max: self.selectors_bytes_max.min(bytes_max), ..self }
    }
}

/// The budgets of a process.
#[derive(Debug, Clone)]
pub struct ProcessBudgets {
    projected: ProcessBudget,
    chunks: ProcessBudget,
    logs: ProcessBudget,
    segments: ProcessBudget,
    indexes: ProcessBudget,
    backfills: ProcessBudget,
    selectors: ProcessBudget,
    compression: CompressionBudget,
    chunk_compression: CompressionBudget,
}

/// The budgets of one cache.
#[derive(Debug, Clone)]
pub struct Budgets {
    /// Projected objects and deltas.
    pub projected: Budget,
    /// Compressed snapshots.
    pub chunks: Budget,
    /// The logs of views.
    pub logs: Budget,
    /// Segments of logs.
    pub segments: Budget,
    /// Indexes of state and history.
    pub indexes: Budget,
    /// Backfills.
    pub backfills: Budget,
    /// Selectors and their part of the index of views. Never closed: to refuse new ones frees
    /// nothing.
    pub selectors: Budget,
    /// CPU time to compress events that few readers take.
    pub compression: CompressionBudget,
    /// CPU time to compress the chunks of lists and initial states as gzip.
    pub chunk_compression: CompressionBudget,
}

impl ProcessBudgets {
    /// Budgets within these limits.
    pub fn new(limits: RetainedLimits) -> Self {
        Self {
            projected: ProcessBudget::new(limits.projected_bytes_max),
            chunks: ProcessBudget::new(limits.chunks_bytes_max),
            logs: ProcessBudget::new(limits.logs_bytes_max),
            segments: ProcessBudget::new(limits.segments_bytes_max),
            indexes: ProcessBudget::new(limits.indexes_bytes_max),
            backfills: ProcessBudget::new(limits.backfills_bytes_max),
            selectors: ProcessBudget::new(limits.selectors_bytes_max),
            compression: CompressionBudget::of_events(limits.compression_core_divisor),
            chunk_compression: CompressionBudget::of_chunks(),
        }
    }

    /// The part of one more cache.
    #[must_use]
    pub fn part(&self) -> Budgets {
        Budgets {
            projected: self.projected.part(),
            chunks: self.chunks.part(),
            logs: self.logs.part(),
            segments: self.segments.part(),
            indexes: self.indexes.part(),
            backfills: self.backfills.part(),
            selectors: self.selectors.part(),
            compression: self.compression.clone(),
            chunk_compression: self.chunk_compression.clone(),
        }
    }
}

impl Default for ProcessBudgets {
    fn default() -> Self {
        Self::new(RetainedLimits::default())
    }
}

impl Budgets {
    /// Allows or forbids that more is retained for reuse, or compressed for few readers.
    pub fn open(&self, open: bool) {
        self.projected.open(open);
        self.chunks.open(open);
        self.compression.open(open);
    }
}

impl Default for Budgets {
    fn default() -> Self {
        ProcessBudgets::default().part()
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;

    #[test]
    fn a_full_budget_refuses_and_a_dropped_share_makes_room() {
        let budget = Budget::alone(100);
        let share = budget.take(60).unwrap();
        assert!(budget.clone().take(41).is_none());
        assert_eq!((budget.used(), budget.room()), (60, 40));
        drop(share);
        assert!(budget.take(100).is_some() && budget.take(usize::MAX).is_none());
        assert_eq!(budget.used(), 0);
        budget.open(false);
        assert!(budget.take(1).is_none());
    }

    #[test]
    fn the_sum_of_many_caches_is_bounded_and_each_has_its_part() {
        const CACHES: usize = 200;
        let whole = ProcessBudget::new(100 * CACHES);
        let parts: Vec<_> = (0..CACHES).map(|_| whole.part()).collect();
        let mut shares = Vec::new();
        // The first cache takes all that it can get.
        shares.extend(std::iter::from_fn(|| parts[0].take(10)));
        let greedy = parts[0].used();
        assert!((90 * CACHES / 2..=110 * CACHES / 2).contains(&greedy), "{greedy}");
        for part in &parts[1..] {
            let before = part.used();
            shares.extend(std::iter::from_fn(|| part.take(10)));
            assert_eq!((before, part.used()), (0, 50), "its part is there, whatever the others have");
        }
        assert!(whole.used() <= 100 * CACHES, "{}", whole.used());
        assert!(parts[0].take(1).is_none());
        drop(shares);
        assert_eq!(whole.used(), 0);
        drop(parts);
        let only = whole.part();
        assert!(only.take(100 * CACHES).is_some(), "caches that are gone have no part");
    }

    #[test]
    fn parts_above_their_share_release_bytes_that_cannot_be_refused() {
        let whole = ProcessBudget::new(800);
        let one = whole.part();
        let other = whole.part();
        let mut large = one.share();
        let mut small = other.share();
        large.set(600);
        assert_eq!(one.retained_share(), 1.0);
        small.set(150);
        assert_eq!((one.retained_share(), other.retained_share()), (0.8, 1.0), "600 of 750 may be used");
        assert_eq!((one.room(), other.room()), (0, 50));
        small.set(1400);
        assert_eq!((one.retained_share(), other.retained_share()), (0.3, 0.3));
        small.set(150);
        large.set(1000);
        assert_eq!((one.retained_share(), other.retained_share()), (600.0 / 1150.0, 1.0), "all have too much");
        small.set(0);
        large.set(600);
        assert_eq!((one.is_over_half(), other.is_over_half()), (true, true));
        large.set(300);
        assert_eq!((one.is_over_half(), one.is_over()), (false, false));
    }

    #[test]
    fn bytes_are_charged_to_one_tenant_and_the_largest_makes_room_for_all_caches() {
        let whole = ProcessBudget::new(800);
        let one = whole.part();
        let other = whole.part();
        let [greedy, honest] = [1, 2].map(|key| one.bytes_of(NonZeroU64::new(key)));
        let mut large = one.share();
        let mut small = other.share();
        large.set(500);
        large.charge_to(Some(greedy.clone()));
        small.charge_to(Some(greedy.clone()));
        small.set(250);
        assert_eq!((greedy.get(), large.tenant_bytes()), (750, 750));
        small.charge_to(Some(honest.clone()));
        assert_eq!((greedy.get(), honest.get()), (500, 250));
        assert!(one.is_over() && other.is_over());
        assert_eq!((one.tenant_max(), other.tenant_max()), (Some(350), Some(350)), "600 of 800 may be lent");
        large.set(350);
        assert!(!one.is_over() && !other.is_over());
        assert_eq!(one.tenant_max(), Some(usize::MAX));
        drop(large);
        drop(small);
        assert_eq!((greedy.get(), honest.get()), (0, 0));
    }

    #[test]
    fn a_small_process_retains_little() {
        let small = RetainedLimits::of_memory(Some(128 << 20));
        assert_eq!((small.chunks_bytes_max, small.logs_bytes_max), (16 << 20, 8 << 20));
        let default = RetainedLimits::of_memory(None).with_selectors(SELECTOR_BYTES_MAX);
        assert_eq!(default, RetainedLimits::default());
    }
}
