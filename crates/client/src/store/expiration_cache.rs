//! A store whose objects expire.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::{Change, Replacement, Store};
use crate::object::{Object, ObjectKey};

/// An object of an [`ExpirationCache`] with the time at which it was stored.
#[derive(Debug)]
pub struct TimestampedEntry<K> {
    /// The object.
    pub object: Arc<Object<K>>,
    /// Time at which this state was stored, by the local clock.
    pub timestamp: Instant,
}

impl<K> Clone for TimestampedEntry<K> {
    fn clone(&self) -> Self {
        Self { object: self.object.clone(), timestamp: self.timestamp }
    }
}

type Policy<K> = dyn Fn(&TimestampedEntry<K>) -> bool + Send + Sync;
type Entries<K> = BTreeMap<ObjectKey, TimestampedEntry<K>>;

/// A store whose objects expire: client-go's `ExpirationCache`.
///
/// A policy decides about each object when it is read. An expired object is removed then, not
/// before: objects that are never read stay in memory. A read takes the lock of the whole cache.
pub struct ExpirationCache<K> {
    entries: Mutex<Entries<K>>,
    is_expired: Box<Policy<K>>,
}

impl<K> ExpirationCache<K> {
    /// Returns an empty cache. `is_expired` is its policy, and decides about each object that is
    /// read. The cache calls it under its lock, so it must not call the cache.
    pub fn new(is_expired: impl Fn(&TimestampedEntry<K>) -> bool + Send + Sync + 'static) -> Self {
        Self { entries: Mutex::new(BTreeMap::new()), is_expired: Box::new(is_expired) }
    }

    /// Returns an empty cache whose objects expire when they are older than `ttl`: client-go's
    /// `NewTTLStore`. With zero they never expire.
    pub fn with_ttl(ttl: Duration) -> Self {
        Self::new(move |entry| !ttl.is_zero() && entry.timestamp.elapsed() > ttl)
    }

    // Only the policy can panic under the lock, and it does so between two changes of the map.
    fn lock(&self) -> MutexGuard<'_, Entries<K>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The object with this key, `namespace/name` or `name`, unless it is expired.
    pub fn get(&self, key: &str) -> Option<Arc<Object<K>>> {
        let mut entries = self.lock();
        let entry = entries.get(key)?;
        if (self.is_expired)(entry) {
            entries.remove(key);
            return None;
        }
        Some(entry.object.clone())
    }

    /// All objects that are not expired, in key order.
    pub fn list(&self) -> Vec<Arc<Object<K>>> {
        let mut entries = self.lock();
        entries.retain(|_, entry| !(self.is_expired)(entry));
        entries.values().map(|entry| entry.object.clone()).collect()
    }

    /// All keys, in order, with those of expired objects that were not read since.
    pub fn keys(&self) -> Vec<ObjectKey> {
        self.lock().keys().cloned().collect()
    }
}

fn apply<K>(entries: &mut Entries<K>, change: Change<K>, timestamp: Instant) {
    match change {
        Change::Added(object) | Change::Updated(object) => {
            entries.insert(object.key().clone(), TimestampedEntry { object, timestamp });
        }
        Change::Deleted(deleted) => {
            entries.remove(deleted.key());
        }
    }
}

impl<K: Send + Sync + 'static> Store<K> for ExpirationCache<K> {
    fn apply(&self, change: Change<K>) {
        apply(&mut self.lock(), change, Instant::now());
    }

    fn apply_batch(&self, changes: Vec<Change<K>>) {
        let mut entries = self.lock();
        let now = Instant::now();
        for change in changes {
            apply(&mut entries, change, now);
        }
    }

    fn replace(&self, new: Replacement<K>) {
        let mut entries = self.lock();
        let timestamp = Instant::now();
        let undecodable = new.undecodable.iter().filter_map(|key| entries.remove_entry(key));
        let mut replaced: Entries<K> = undecodable.collect();
        replaced.extend(
            new.objects.into_iter().map(|object| (object.key().clone(), TimestampedEntry { object, timestamp })),
        );
        *entries = replaced;
    }
}

impl<K> fmt::Debug for ExpirationCache<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ExpirationCache").field("entries", &self.lock().len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;
    use crate::store::{Deleted, DeletedFinalStateUnknown};

    const TTL: Duration = Duration::from_secs(30);

    fn object(name: &str, value: u32) -> Arc<Object<u32>> {
        Arc::new(Object::new(name.into(), "", "1", value))
    }

    fn values(cache: &ExpirationCache<u32>) -> Vec<u32> {
        cache.list().iter().map(|object| *object.value()).collect()
    }

    fn keys(cache: &ExpirationCache<u32>) -> Vec<String> {
        cache.keys().iter().map(ToString::to_string).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn an_object_expires_when_it_is_older_than_the_ttl() {
        let cache = ExpirationCache::with_ttl(TTL);
        cache.apply(Change::Added(object("a", 1)));
        advance(TTL).await;
        assert_eq!(*cache.get("a").unwrap().value(), 1);
        advance(Duration::from_millis(1)).await;
        assert!(cache.get("a").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_ttl_of_zero_expires_nothing() {
        let cache = ExpirationCache::with_ttl(Duration::ZERO);
        cache.apply(Change::Added(object("a", 1)));
        advance(Duration::from_secs(86400)).await;
        assert_eq!(values(&cache), [1]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_update_starts_the_ttl_over() {
        let cache = ExpirationCache::with_ttl(TTL);
        cache.apply(Change::Added(object("a", 1)));
        advance(TTL).await;
        cache.apply(Change::Updated(object("a", 2)));
        advance(TTL).await;
        assert_eq!(*cache.get("a").unwrap().value(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn an_expired_object_that_is_added_again_is_returned() {
        let cache = ExpirationCache::with_ttl(TTL);
        cache.apply(Change::Added(object("a", 1)));
        advance(TTL * 2).await;
        cache.apply(Change::Added(object("a", 2)));
        assert_eq!(values(&cache), [2]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_has_only_unexpired_objects_and_removes_the_others() {
        let cache = ExpirationCache::with_ttl(TTL);
        cache.apply_batch(vec![Change::Added(object("b", 2)), Change::Added(object("a", 1))]);
        advance(TTL).await;
        cache.apply(Change::Added(object("c", 3)));
        assert_eq!(values(&cache), [1, 2, 3]);
        advance(TTL).await;
        assert_eq!(values(&cache), [3]);
        assert_eq!(keys(&cache), ["c"]);
    }

    #[tokio::test(start_paused = true)]
    async fn keys_include_expired_objects_until_they_are_read() {
        let cache = ExpirationCache::with_ttl(TTL);
        cache.apply_batch(vec![Change::Added(object("a", 1)), Change::Added(object("b", 2))]);
        advance(TTL * 2).await;
        assert_eq!(keys(&cache), ["a", "b"]);
        assert!(cache.get("a").is_none());
        assert_eq!(keys(&cache), ["b"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_replacement_removes_all_others_and_stamps_its_objects() {
        let cache = ExpirationCache::with_ttl(TTL);
        cache.apply_batch(vec![Change::Added(object("a", 1)), Change::Added(object("b", 2))]);
        advance(TTL).await;
        let objects = vec![object("b", 3), object("c", 4)];
        cache.replace(Replacement { objects, undecodable: Vec::new(), resource_version: "9".to_owned() });
        assert_eq!(keys(&cache), ["b", "c"]);
        advance(TTL).await;
        assert_eq!(values(&cache), [3, 4]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_undecodable_object_keeps_its_state_and_its_age() {
        let cache = ExpirationCache::with_ttl(TTL);
        cache.apply(Change::Added(object("a", 1)));
        advance(TTL).await;
        let undecodable = vec!["a".into(), "unknown".into()];
        cache.replace(Replacement { objects: vec![object("b", 2)], undecodable, resource_version: "9".to_owned() });
        assert_eq!(values(&cache), [1, 2]);
        advance(Duration::from_secs(1)).await;
        assert_eq!(values(&cache), [2]);
    }

    #[test]
    fn a_deletion_removes_the_object_whether_its_final_state_is_known_or_not() {
        let cache = ExpirationCache::with_ttl(TTL);
        cache.apply_batch(vec![Change::Added(object("a", 1)), Change::Added(object("b", 2))]);
        cache.apply(Change::Deleted(Deleted::Known(object("a", 1))));
        let unknown = DeletedFinalStateUnknown { key: "b".into(), last_known: None };
        cache.apply(Change::Deleted(Deleted::FinalStateUnknown(unknown)));
        assert!(cache.keys().is_empty());
    }

    #[test]
    fn a_policy_decides_which_objects_expire() {
        let cache = ExpirationCache::new(|entry: &TimestampedEntry<u32>| *entry.object.value() > 1);
        cache.apply_batch(vec![Change::Added(object("a", 1)), Change::Added(object("b", 2))]);
        assert_eq!(values(&cache), [1]);
    }
}
