//! The bytes of caches that share a limit, and the choice of the cache that ends when there are too
//! many.
//!
//! The hazard is a reader that fills the limit with resources of its own: the cache that grows last
//! would end, although others read it. So each cache counts to the tenants that read it, in equal
//! parts. A tenant that has left no longer counts, and all caches without tenants count together.
//! The tenant with the most bytes loses the cache that counts most to it. A cache of a configured
//! resource ends only if no other is left.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The most tenants that a cache remembers. A cache with so many tenants is no tenant's largest.
const TENANTS_MAX: usize = 64;

/// Time for which a tenant counts after its last reader has left. Otherwise each break of its
/// connections would change the parts of the others.
const TENANT_IDLE_MAX: Duration = Duration::from_secs(300);

/// The caches that share a limit. Clones are the same caches.
#[derive(Clone, Default)]
pub(super) struct SharedBytes(Arc<Mutex<Members>>);

/// The tenants that read a cache, or have done so a short time ago: at most [`TENANTS_MAX`].
#[derive(Default)]
pub(super) struct ReadingTenants(Mutex<HashMap<Arc<str>, Readers>>);

/// The readers of one tenant.
struct Readers {
    count: usize,
    /// Time at which the last of them left.
    left: Instant,
}

/// A reader of a cache. Its tenant counts until this is dropped, and for [`TENANT_IDLE_MAX`] after.
pub(super) struct Reading {
    tenants: Arc<ReadingTenants>,
    tenant: Arc<str>,
}

impl ReadingTenants {
    /// Counts a reader's tenant. `None` if callers are not distinguished, or too many tenants read.
    pub(super) fn begin(self: &Arc<Self>, tenant: Option<&str>) -> Option<Reading> {
        let tenant = tenant?;
        let mut known = self.lock();
        let name = match known.get_key_value(tenant).map(|(name, _)| name.clone()) {
            Some(name) => name,
            None => {
                forget_idle(&mut known);
                if known.len() >= TENANTS_MAX {
                    return None;
                }
                tenant.into()
            }
        };
        known.entry(name.clone()).or_insert_with(|| Readers { count: 0, left: Instant::now() }).count += 1;
        drop(known);
        Some(Reading { tenants: self.clone(), tenant: name })
    }

    /// Returns the names of the tenants; one empty name if there are none.
    fn names(&self) -> Vec<Arc<str>> {
        let mut known = self.lock();
        forget_idle(&mut known);
        if known.is_empty() { vec!["".into()] } else { known.keys().cloned().collect() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, Readers>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn forget_idle(known: &mut HashMap<Arc<str>, Readers>) {
    let now = Instant::now();
    known.retain(|_, readers| readers.count > 0 || now.duration_since(readers.left) < TENANT_IDLE_MAX);
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut known = self.tenants.lock();
        if let Some(readers) = known.get_mut(&self.tenant) {
            readers.count -= 1;
            readers.left = Instant::now();
        }
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
    end_token: CancellationToken,
}

/// One of the caches that share a limit. Dropping it gives its bytes back.
pub(super) struct Membership {
    all: SharedBytes,
    number: u64,
    end_token: CancellationToken,
}

impl SharedBytes {
    /// Adds a cache without bytes. `is_configured` says that its resource is configured.
    pub(super) fn join(&self, is_configured: bool, tenants: Arc<ReadingTenants>) -> Membership {
        let end_token = CancellationToken::new();
        let mut members = self.lock();
        members.last += 1;
        let number = members.last;
        members.by_number.insert(number, Member { bytes: 0, tenants, is_configured, end_token: end_token.clone() });
        drop(members);
        Membership { all: self.clone(), number, end_token }
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
            member.end_token.cancel();
            if number == self.number {
                return false;
            }
        }
        true
    }

    /// Returns a token that is cancelled when this cache has to end because of the others.
    pub(super) fn end_token(&self) -> CancellationToken {
        self.end_token.clone()
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

    /// Returns the cache that ends because there are too many bytes.
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
    use tokio::time::advance;

    use super::*;

    fn join(all: &SharedBytes, is_configured: bool, tenants: &[&str]) -> Membership {
        let reading = Arc::<ReadingTenants>::default();
        for tenant in tenants {
            reading.begin(Some(tenant));
        }
        all.join(is_configured, reading)
    }

    #[test]
    fn the_largest_cache_of_the_largest_tenant_ends_not_the_last_to_grow() {
        let all = SharedBytes::default();
        let pods = join(&all, false, &["a", "b"]);
        let filler = join(&all, false, &["greedy"]);
        let nodes = join(&all, false, &["c"]);
        let small: Vec<_> = (0..15).map(|_| join(&all, false, &["greedy"])).collect();
        assert!(small.iter().all(|small| small.record(1, 100)), "they do not lower the share of others");
        assert!(pods.record(50, 100) && filler.record(30, 100));
        assert!(nodes.record(20, 100), "the filler makes room, although pods has more bytes");
        assert!(filler.end_token().is_cancelled() && !pods.end_token().is_cancelled());
        assert!(!filler.record(1, 100), "it has ended");
        assert!(!nodes.record(60, 100), "the largest itself");
        assert!(pods.record(85, 100));
    }

    #[test]
    fn the_bytes_of_a_tenant_count_together_however_many_caches_have_them() {
        let all = SharedBytes::default();
        let pods = join(&all, false, &["honest"]);
        let fillers = [(); 8].map(|()| join(&all, false, &["greedy"]));
        assert!(pods.record(20, 100) && fillers.iter().all(|filler| filler.record(10, 100)));
        assert!(!fillers[0].record(11, 100), "the largest of the greedy tenant, although pods is larger");
        assert!(pods.record(31, 100), "another one of the greedy tenant makes room");
        assert!(!pods.end_token().is_cancelled());
    }

    #[test]
    fn a_configured_resource_does_not_end_for_one_on_demand() {
        let all = SharedBytes::default();
        let configured = join(&all, true, &[]);
        let other = join(&all, true, &[]);
        let on_demand = join(&all, false, &["a"]);
        assert!(configured.record(80, 100) && on_demand.record(20, 100));
        assert!(!on_demand.record(21, 100), "although it is smaller");
        assert!(!configured.end_token().is_cancelled());
        let on_demand = join(&all, false, &["a"]);
        assert!(on_demand.record(10, 100) && configured.record(95, 100));
        assert!(on_demand.end_token().is_cancelled(), "it makes room for a configured one");
        assert!(
            other.record(10, 100) && configured.end_token().is_cancelled(),
            "among configured ones the largest ends"
        );
    }

    #[test]
    fn a_cache_that_is_gone_takes_no_bytes() {
        let all = SharedBytes::default();
        let first = join(&all, false, &[]);
        let second = join(&all, false, &[]);
        assert!(first.record(100, 100));
        drop(first);
        assert!(second.record(100, 100));
    }

    #[test]
    fn a_cache_remembers_a_limited_number_of_tenants() {
        let reading = Arc::<ReadingTenants>::default();
        for number in 0..1000 {
            reading.begin(Some(&number.to_string()));
        }
        assert_eq!(reading.names().len(), TENANTS_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenant_counts_while_it_reads_and_for_a_few_minutes_after() {
        let reading = Arc::<ReadingTenants>::default();
        let names = || {
            let mut names = reading.names();
            names.sort_unstable();
            names.join(" ")
        };
        let one = reading.begin(Some("one"));
        let two = reading.begin(Some("two"));
        let other_of_two = reading.begin(Some("two"));
        advance(Duration::from_secs(3600)).await;
        drop(two);
        drop(other_of_two);
        advance(TENANT_IDLE_MAX - Duration::from_secs(1)).await;
        assert_eq!(names(), "one two", "it may come back");
        advance(Duration::from_secs(1)).await;
        assert_eq!(names(), "one");
        drop(one);
        advance(TENANT_IDLE_MAX).await;
        assert_eq!(names(), "");
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenant_that_has_left_takes_no_part_of_a_cache_and_no_place() {
        let all = SharedBytes::default();
        let reading = Arc::<ReadingTenants>::default();
        let _greedy = reading.begin(Some("greedy"));
        for number in 1..TENANTS_MAX {
            reading.begin(Some(&number.to_string()));
        }
        assert!(reading.begin(Some("new")).is_none());
        let shared = all.join(false, reading.clone());
        assert!(shared.record(60, 100));
        advance(TENANT_IDLE_MAX).await;
        let honest = join(&all, false, &["honest"]);
        assert!(honest.record(41, 100), "the cache of the greedy tenant makes room");
        assert!(shared.end_token().is_cancelled() && reading.begin(Some("new")).is_some());
    }
}
