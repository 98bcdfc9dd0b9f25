//! The bytes of caches that share a limit, and which cache ends when there are too many.
//!
//! The hazard is a reader that fills the limit with a resource of its own: the cache that grows
//! last would end, although others read it. So each cache has an equal share. The largest of those
//! above it ends, and one of a configured resource only if no other cache is left.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

/// The caches that share a limit. Clones are the same caches.
#[derive(Clone, Default)]
pub(super) struct SharedBytes(Arc<Mutex<Members>>);

#[derive(Default)]
struct Members {
    last: u64,
    by_number: BTreeMap<u64, Member>,
}

struct Member {
    bytes: usize,
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
    pub(super) fn join(&self, is_configured: bool) -> Membership {
        let ends = CancellationToken::new();
        let mut members = self.lock();
        members.last += 1;
        let number = members.last;
        members.by_number.insert(number, Member { bytes: 0, is_configured, ends: ends.clone() });
        drop(members);
        Membership { all: self.clone(), number, ends }
    }

    fn lock(&self) -> MutexGuard<'_, Members> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Membership {
    /// Records the size of this cache. If all are larger than `bytes_max`, others end until they
    /// are not. Returns false if this cache has to end.
    pub(super) fn record(&self, bytes: usize, bytes_max: usize) -> bool {
        let mut members = self.all.lock();
        let Some(member) = members.by_number.get_mut(&self.number) else { return false };
        member.bytes = bytes;
        while members.bytes() > bytes_max {
            let number = members.to_end(self.number, bytes_max);
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

    /// The cache that ends because one of them grows.
    fn to_end(&self, growing: u64, bytes_max: usize) -> u64 {
        let sharing = self.by_number.values().filter(|member| member.bytes > 0).count();
        let share = bytes_max / sharing.max(1);
        let largest = |is_candidate: &dyn Fn(&Member) -> bool| {
            let candidates = self.by_number.iter().filter(|(_, member)| is_candidate(member));
            candidates.max_by_key(|(number, member)| (member.bytes, **number)).map(|(number, _)| *number)
        };
        let is_configured = self.by_number.get(&growing).is_some_and(|member| member.is_configured);
        largest(&|member| !member.is_configured && member.bytes > share)
            .or_else(|| {
                if is_configured { largest(&|member| !member.is_configured && member.bytes > 0) } else { Some(growing) }
            })
            .or_else(|| largest(&|_| true))
            .unwrap_or(growing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_that_grew_beyond_its_share_ends_whoever_grows_last() {
        let all = SharedBytes::default();
        let (pods, filler, nodes) = (all.join(false), all.join(false), all.join(false));
        assert!(pods.record(30, 100) && filler.record(60, 100));
        assert!(nodes.record(20, 100), "the filler makes room");
        assert!(filler.ends().is_cancelled() && !pods.ends().is_cancelled());
        assert!(!filler.record(1, 100), "it has ended");
        assert!(pods.record(70, 100));
        assert!(!pods.record(90, 100), "beyond its share itself");
        assert!(nodes.record(100, 100));
    }

    #[test]
    fn a_configured_resource_does_not_end_for_one_on_demand() {
        let all = SharedBytes::default();
        let (configured, other, on_demand) = (all.join(true), all.join(true), all.join(false));
        assert!(configured.record(80, 100) && on_demand.record(20, 100));
        assert!(!on_demand.record(21, 100), "although it is below its share");
        assert!(!configured.ends().is_cancelled());
        let on_demand = all.join(false);
        assert!(on_demand.record(10, 100) && configured.record(95, 100));
        assert!(on_demand.ends().is_cancelled(), "it makes room for a configured one");
        assert!(other.record(10, 100) && configured.ends().is_cancelled(), "among configured ones the largest ends");
    }

    #[test]
    fn a_cache_that_is_gone_takes_no_bytes() {
        let all = SharedBytes::default();
        let (first, second) = (all.join(false), all.join(false));
        assert!(first.record(100, 100));
        drop(first);
        assert!(second.record(100, 100));
    }
}
