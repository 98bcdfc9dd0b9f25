//! The bytes of caches that share a limit, and which cache ends when there are too many.
//!
//! The hazard is a reader that fills the limit with resources of its own: the cache that grows last
//! would end, although others read it. So each cache counts to the tenants that read it, in equal
//! parts. The tenant with the most bytes loses the cache of which it has the largest part. A cache
//! of a configured resource ends only if no other is left.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

/// The most tenants that a cache remembers. Shared by so many, it is no tenant's largest.
const TENANTS_MAX: usize = 64;

/// The caches that share a limit. Clones are the same caches.
#[derive(Clone, Default)]
pub(super) struct SharedBytes(Arc<Mutex<Members>>);

/// The tenants that have read a cache, at most [`TENANTS_MAX`] of them.
#[derive(Default)]
pub(super) struct ReadingTenants(Mutex<HashSet<Arc<str>>>);

impl ReadingTenants {
    /// Remembers a reader's tenant. `None` if callers are not distinguished.
    pub(super) fn note(&self, tenant: Option<&str>) {
        let Some(tenant) = tenant else { return };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() < TENANTS_MAX && !known.contains(tenant) {
            known.insert(tenant.into());
        }
    }

    /// The names of the tenants; one empty name if none is known.
    fn names(&self) -> Vec<Arc<str>> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_empty() { vec!["".into()] } else { known.iter().cloned().collect() }
    }
}

#[derive(Default)]
struct Members {
    last: u64,
    by_number: BTreeMap<u64, Member>,
}

struct Member {
    bytes: usize,
    tenants: Arc<ReadingTenants>,
    is_configured: bool,
    ends: CancellationToken,
}

/// One cache among them. Dropping it gives its bytes back.
pub(super) struct Membership {
    all: SharedBytes,
    number: u64,
    ends: CancellationToken,
}

impl SharedBytes {
    /// Adds a cache without bytes. `is_configured` says that its resource is configured.
    pub(super) fn join(&self, is_configured: bool, tenants: Arc<ReadingTenants>) -> Membership {
        let ends = CancellationToken::new();
        let mut members = self.lock();
        members.last += 1;
        let number = members.last;
        members.by_number.insert(number, Member { bytes: 0, tenants, is_configured, ends: ends.clone() });
        drop(members);
        Membership { all: self.clone(), number, ends }
    }

    fn lock(&self) -> MutexGuard<'_, Members> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Membership {
    /// Records the size of this cache. While all together have more than `bytes_max`, ends one of
    /// them. Returns false if this cache has to end.
    pub(super) fn record(&self, bytes: usize, bytes_max: usize) -> bool {
        let mut members = self.all.lock();
        let Some(member) = members.by_number.get_mut(&self.number) else { return false };
        member.bytes = bytes;
        while members.bytes() > bytes_max {
            let number = members.to_end().unwrap_or(self.number);
            let Some(member) = members.by_number.remove(&number) else { return false };
            member.ends.cancel();
            if number == self.number {
                return false;
            }
        }
        true
    }

    /// Is cancelled when this cache has to end because of the others.
    pub(super) fn ends(&self) -> CancellationToken {
        self.ends.clone()
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.all.lock().by_number.remove(&self.number);
    }
}

impl Members {
    fn bytes(&self) -> usize {
        self.by_number.values().map(|member| member.bytes).sum()
    }

    /// The cache that ends because there are too many bytes.
    fn to_end(&self) -> Option<u64> {
        self.largest(false).or_else(|| self.largest(true))
    }

    /// Finds the largest cache of the tenant with the most bytes, among those of configured
    /// resources or among the others.
    fn largest(&self, is_configured: bool) -> Option<u64> {
        let mut of_tenants = HashMap::<Arc<str>, Vec<(usize, u64)>>::new();
        for (number, member) in &self.by_number {
            if member.is_configured != is_configured || member.bytes == 0 {
                continue;
            }
            let names = member.tenants.names();
            let part = member.bytes.div_ceil(names.len());
            for name in names {
                of_tenants.entry(name).or_default().push((part, *number));
            }
        }
        let sum = |caches: &[(usize, u64)]| caches.iter().map(|(part, _)| part).sum::<usize>();
        let largest = of_tenants.into_iter().max_by_key(|(name, caches)| (sum(caches), name.clone()));
        largest.and_then(|(_, caches)| caches.into_iter().max()).map(|(_, number)| number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join(all: &SharedBytes, is_configured: bool, tenants: &[&str]) -> Membership {
        let reading = ReadingTenants::default();
        tenants.iter().for_each(|tenant| reading.note(Some(tenant)));
        all.join(is_configured, Arc::new(reading))
    }

    #[test]
    fn the_cache_that_is_largest_for_each_of_its_tenants_ends_whoever_grows_last() {
        let all = SharedBytes::default();
        let (pods, filler, nodes) =
            (join(&all, false, &["a", "b"]), join(&all, false, &["greedy"]), join(&all, false, &["c"]));
        let small: Vec<_> = (0..15).map(|_| join(&all, false, &["greedy"])).collect();
        assert!(small.iter().all(|small| small.record(1, 100)), "they do not lower the share of others");
        assert!(pods.record(50, 100) && filler.record(30, 100));
        assert!(nodes.record(20, 100), "the filler makes room, although pods has more bytes");
        assert!(filler.ends().is_cancelled() && !pods.ends().is_cancelled());
        assert!(!filler.record(1, 100), "it has ended");
        assert!(!nodes.record(60, 100), "the largest itself");
        assert!(pods.record(85, 100));
    }

    #[test]
    fn the_bytes_of_a_tenant_count_together_however_many_caches_have_them() {
        let all = SharedBytes::default();
        let (pods, fillers) = (join(&all, false, &["honest"]), [(); 8].map(|()| join(&all, false, &["greedy"])));
        assert!(pods.record(20, 100) && fillers.iter().all(|filler| filler.record(10, 100)));
        assert!(!fillers[0].record(11, 100), "the largest of the greedy tenant, although pods is larger");
        assert!(pods.record(31, 100), "another one of the greedy tenant makes room");
        assert!(!pods.ends().is_cancelled());
    }

    #[test]
    fn a_configured_resource_does_not_end_for_one_on_demand() {
        let all = SharedBytes::default();
        let (configured, other, on_demand) = (join(&all, true, &[]), join(&all, true, &[]), join(&all, false, &["a"]));
        assert!(configured.record(80, 100) && on_demand.record(20, 100));
        assert!(!on_demand.record(21, 100), "although it is smaller");
        assert!(!configured.ends().is_cancelled());
        let on_demand = join(&all, false, &["a"]);
        assert!(on_demand.record(10, 100) && configured.record(95, 100));
        assert!(on_demand.ends().is_cancelled(), "it makes room for a configured one");
        assert!(other.record(10, 100) && configured.ends().is_cancelled(), "among configured ones the largest ends");
    }

    #[test]
    fn a_cache_that_is_gone_takes_no_bytes() {
        let all = SharedBytes::default();
        let (first, second) = (join(&all, false, &[]), join(&all, false, &[]));
        assert!(first.record(100, 100));
        drop(first);
        assert!(second.record(100, 100));
    }

    #[test]
    fn a_cache_remembers_a_limited_number_of_tenants() {
        let reading = ReadingTenants::default();
        (0..1000).for_each(|number| reading.note(Some(&number.to_string())));
        assert_eq!(reading.names().len(), TENANTS_MAX);
    }
}
