//! Verdicts that are kept for a while: fresh until their time is over, and then for the grace of an
//! outage.
//!
//! The hazard is a flood of verdicts that pushes out those of others: refusals, such as those of
//! random tokens, or permissions to get one object after the other. So positive and negative
//! verdicts have places of their own, and tenants share them.

use std::{
    hash::Hash,
    num::NonZeroU64,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use kubefan_admission::Holder;
use tokio::time::Instant;

use super::fair_entries::FairEntries;

/// A verdict that can be kept.
pub trait Outcome: Clone + Send + Sync + 'static {
    /// Whether it lets the caller in.
    fn is_positive(&self) -> bool;

    /// The time at which it becomes void, also in an outage; `None` for no such time.
    fn ends_at(&self) -> Option<Instant>;

    /// Returns the holder whose share of the places it takes. `asker` asked for the verdict, which
    /// may name the holder's user.
    fn holder(&self, asker: Holder) -> Holder {
        asker
    }
}

/// A verdict in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kept<V> {
    /// The verdict counts.
    Fresh(V),
    /// The verdict counts only while the apiserver cannot be asked.
    InGrace(V),
}

struct Entry<V> {
    value: V,
    kept_at: Instant,
    fresh_until: Instant,
}

impl<V: Outcome> Entry<V> {
    /// Whether it counts no longer, not even in an outage with this grace.
    fn has_ended(&self, grace: Duration, now: Instant) -> bool {
        self.value.ends_at().is_some_and(|at| at <= now) || self.fresh_until + grace <= now
    }
}

/// The verdicts, by question.
pub(super) struct VerdictCache<K, V> {
    grace: Duration,
    kept: Mutex<Places<K, V>>,
}

struct Places<K, V> {
    positive: Entries<K, V>,
    negative: Entries<K, V>,
}

/// By tenant; those that are not known are one.
type Entries<K, V> = FairEntries<K, Option<NonZeroU64>, Entry<V>>;

impl<K: Hash + Eq + Copy, V: Outcome> VerdictCache<K, V> {
    /// Returns a cache for this many positive verdicts, and as many negative ones.
    pub(super) fn new(entries_max: usize, grace: Duration) -> Self {
        let places = Places { positive: FairEntries::new(entries_max), negative: FairEntries::new(entries_max) };
        Self { grace, kept: Mutex::new(places) }
    }

    /// The verdict that is kept for a key.
    pub(super) fn get(&self, key: &K) -> Option<Kept<V>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let Places { positive, negative } = &mut *kept;
        let entry = positive.get(key).or_else(|| negative.get(key))?;
        let now = Instant::now();
        if entry.has_ended(self.grace, now) {
            positive.remove(key);
            negative.remove(key);
            return None;
        }
        let value = entry.value.clone();
        Some(if now < entry.fresh_until { Kept::Fresh(value) } else { Kept::InGrace(value) })
    }

    /// The verdict that was put less than `age` ago.
    pub(super) fn younger_than(&self, key: &K, age: Duration) -> Option<V> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = kept.positive.get(key).or_else(|| kept.negative.get(key))?;
        (entry.kept_at.elapsed() < age).then(|| entry.value.clone())
    }

    /// Keeps a verdict that `asker` has asked for, which counts for `fresh_for`. It replaces the
    /// one before.
    pub(super) fn put(&self, key: K, asker: Holder, value: V, fresh_for: Duration) {
        let kept_at = Instant::now();
        let tenant = value.holder(asker).tenant();
        let entry = Entry { value, kept_at, fresh_until: kept_at + fresh_for };
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let Places { positive, negative } = &mut *kept;
        let (to, other) = if entry.value.is_positive() { (positive, negative) } else { (negative, positive) };
        other.remove(&key);
        to.insert(key, tenant, entry, |entry| entry.has_ended(self.grace, kept_at));
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Verdict(bool, Option<Instant>);

    impl Outcome for Verdict {
        fn is_positive(&self) -> bool {
            self.0
        }

        fn ends_at(&self) -> Option<Instant> {
            self.1
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    fn of(user: &str) -> Holder {
        Holder::new(1, None).identified(user, None)
    }

    #[tokio::test(start_paused = true)]
    async fn a_verdict_is_fresh_then_in_grace_then_gone() {
        let cache = VerdictCache::new(10, 60 * SECOND);
        let verdict = Verdict(true, None);
        cache.put(1, of("a"), verdict.clone(), 10 * SECOND);
        advance(9 * SECOND).await;
        assert_eq!(cache.get(&1), Some(Kept::Fresh(verdict.clone())));
        advance(SECOND).await;
        assert_eq!(cache.get(&1), Some(Kept::InGrace(verdict)));
        advance(60 * SECOND).await;
        assert_eq!(cache.get(&1), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_verdict_never_outlives_its_credential() {
        let cache = VerdictCache::new(10, 60 * SECOND);
        cache.put(1, of("a"), Verdict(true, Some(Instant::now() + 5 * SECOND)), 10 * SECOND);
        advance(4 * SECOND).await;
        assert!(matches!(cache.get(&1), Some(Kept::Fresh(_))));
        advance(SECOND).await;
        assert_eq!(cache.get(&1), None);
    }

    #[tokio::test(start_paused = true)]
    async fn many_denials_evict_no_cached_permission() {
        let cache = VerdictCache::new(2, SECOND);
        cache.put(1, of("a"), Verdict(true, None), SECOND);
        for key in 10..20 {
            cache.put(key, of("a"), Verdict(false, None), SECOND);
        }
        assert!(cache.get(&1).is_some() && cache.get(&10).is_none() && cache.get(&19).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenant_with_many_permissions_pushes_out_none_of_others() {
        let cache = VerdictCache::new(10, 60 * SECOND);
        let allow = |key, user| cache.put(key, of(user), Verdict(true, None), SECOND);
        for key in 0..3 {
            allow(key, "honest");
        }
        for key in 100..200 {
            allow(key, "greedy");
        }
        let kept = |keys: std::ops::Range<u8>| keys.filter(|key| cache.get(key).is_some()).count();
        assert_eq!((kept(0..3), kept(100..193), kept(193..200)), (3, 0, 7));
        advance(61 * SECOND).await;
        for key in 50..60 {
            allow(key, "other");
        }
        assert_eq!(kept(50..60), 10, "what has ended takes no places from others");
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_verdict_replaces_the_one_before() {
        let cache = VerdictCache::new(2, SECOND);
        for is_positive in [true, false, true] {
            cache.put(1, of("a"), Verdict(is_positive, None), SECOND);
            assert_eq!(cache.get(&1), Some(Kept::Fresh(Verdict(is_positive, None))));
        }
    }
}
