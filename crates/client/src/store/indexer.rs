//! The store of an informer: objects by key, with named indexes, and snapshots that cost nothing.
//!
//! Readers and the one writer share a lock. A persistent map holds the objects, so a snapshot is a
//! clone of its root: a reader that iterates over 100,000 objects does not hold the lock meanwhile.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    ops::Bound,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use imbl::OrdMap;

use super::{Change, Replacement, Store};
use crate::{
    object::{Object, ObjectKey},
    queue::KnownObjects,
};

/// Returns the values under which an index has an object.
type IndexFn<K> = Arc<dyn Fn(&Object<K>) -> Vec<String> + Send + Sync>;

/// An index with this name cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IndexError {
    /// There is no index with this name.
    #[error("there is no index named {0:?}; add it with add_index")]
    Unknown(String),
    /// There is an index with this name already.
    #[error("there is an index named {0:?} already")]
    Exists(String),
}

/// Objects by key, with any number of named indexes: client-go's `Indexer` (`ThreadSafeStore`).
/// Clones share the objects. Objects are shared, and never change.
pub struct Indexer<K>(Arc<RwLock<IndexedObjects<K>>>);

struct IndexedObjects<K> {
    objects: OrdMap<ObjectKey, Arc<Object<K>>>,
    indexes: HashMap<String, Index<K>>,
    resource_version: String,
}

struct Index<K> {
    values: IndexFn<K>,
    keys: HashMap<String, BTreeSet<ObjectKey>>,
}

impl<K> Index<K> {
    /// The object's values. None if the function panics, whose message is printed by the panic
    /// hook: an object that another user of the cluster wrote must not end the informer.
    fn values(&self, object: &Object<K>) -> Vec<String> {
        catch_unwind(AssertUnwindSafe(|| (self.values)(object))).unwrap_or_default()
    }

    fn insert(&mut self, object: &Object<K>) {
        for value in self.values(object) {
            self.keys.entry(value).or_default().insert(object.key().clone());
        }
    }

    fn remove(&mut self, object: &Object<K>) {
        for value in self.values(object) {
            if let Some(keys) = self.keys.get_mut(&value) {
                keys.remove(object.key());
                if keys.is_empty() {
                    self.keys.remove(&value);
                }
            }
        }
    }
}

impl<K> IndexedObjects<K> {
    fn insert(&mut self, object: Arc<Object<K>>) -> Option<Arc<Object<K>>> {
        let before = self.objects.insert(object.key().clone(), object.clone());
        for index in self.indexes.values_mut() {
            if let Some(before) = &before {
                index.remove(before);
            }
            index.insert(&object);
        }
        before
    }

    fn remove(&mut self, key: &str) -> Option<Arc<Object<K>>> {
        let before = self.objects.remove(key)?;
        for index in self.indexes.values_mut() {
            index.remove(&before);
        }
        Some(before)
    }

    fn index(&self, name: &str) -> Result<&Index<K>, IndexError> {
        self.indexes.get(name).ok_or_else(|| IndexError::Unknown(name.to_owned()))
    }
}

impl<K> Indexer<K> {
    /// Returns an empty store without indexes.
    pub fn new() -> Self {
        let state = IndexedObjects { objects: OrdMap::new(), indexes: HashMap::new(), resource_version: String::new() };
        Self(Arc::new(RwLock::new(state)))
    }

    // An index function that panics leaves the lock poisoned and at worst one object missing in
    // that index. The objects themselves are complete, so readers continue.
    fn read(&self) -> RwLockReadGuard<'_, IndexedObjects<K>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, IndexedObjects<K>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an index. `values` returns the values under which it has an object: an `Option`, a
    /// `Vec` or any other iterator of strings. It must depend on nothing but the object, and must
    /// not use this store, which is locked meanwhile. Objects that are already stored are indexed
    /// now.
    ///
    /// # Errors
    /// [`IndexError::Exists`] if the name is taken.
    pub fn add_index<I>(
        &self,
        name: &str,
        values: impl Fn(&Object<K>) -> I + Send + Sync + 'static,
    ) -> Result<(), IndexError>
    where
        I: IntoIterator<Item = String>,
    {
        let mut state = self.write();
        if state.indexes.contains_key(name) {
            return Err(IndexError::Exists(name.to_owned()));
        }
        let mut index =
            Index { values: Arc::new(move |object| values(object).into_iter().collect()), keys: HashMap::new() };
        for object in state.objects.values() {
            index.insert(object);
        }
        state.indexes.insert(name.to_owned(), index);
        Ok(())
    }

    /// The objects that the index has under this value, in key order.
    ///
    /// # Errors
    /// [`IndexError::Unknown`] if there is no such index.
    pub fn by_index(&self, name: &str, value: &str) -> Result<Vec<Arc<Object<K>>>, IndexError> {
        let state = self.read();
        let keys = state.index(name)?.keys.get(value);
        Ok(keys.into_iter().flatten().filter_map(|key| state.objects.get(key).cloned()).collect())
    }

    /// The keys of the objects that the index has under this value, in key order.
    ///
    /// # Errors
    /// [`IndexError::Unknown`] if there is no such index.
    pub fn index_keys(&self, name: &str, value: &str) -> Result<Vec<ObjectKey>, IndexError> {
        let state = self.read();
        Ok(state.index(name)?.keys.get(value).into_iter().flatten().cloned().collect())
    }

    /// The values that the index has, in no order: client-go's `ListIndexFuncValues`.
    ///
    /// # Errors
    /// [`IndexError::Unknown`] if there is no such index.
    pub fn index_values(&self, name: &str) -> Result<Vec<String>, IndexError> {
        Ok(self.read().index(name)?.keys.keys().cloned().collect())
    }

    /// The object with this key, `namespace/name` or `name`.
    pub fn get(&self, key: &str) -> Option<Arc<Object<K>>> {
        self.read().objects.get(key).cloned()
    }

    /// All objects, in key order.
    pub fn list(&self) -> Vec<Arc<Object<K>>> {
        self.read().objects.values().cloned().collect()
    }

    /// All keys, in order.
    pub fn keys(&self) -> Vec<ObjectKey> {
        self.read().objects.keys().cloned().collect()
    }

    /// The objects of one namespace, in key order. Takes time for these objects only.
    pub fn namespace(&self, namespace: &str) -> Vec<Arc<Object<K>>> {
        // The namespaces `a` and `a-b` have the keys `a/…` and `a-b/…`: only the slash ends a name.
        let first = format!("{namespace}/");
        let state = self.read();
        let later = state.objects.range::<_, str>((Bound::Included(first.as_str()), Bound::Unbounded));
        let here = later.take_while(|(key, _)| key.as_str().starts_with(&first));
        here.map(|(_, object)| object.clone()).collect()
    }

    /// The number of objects.
    pub fn len(&self) -> usize {
        self.read().objects.len()
    }

    /// Whether there are no objects.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The version up to which the store is complete. Empty before the first list.
    pub fn resource_version(&self) -> String {
        self.read().resource_version.clone()
    }

    /// The state at this moment, which later changes do not reach. Takes constant time and memory,
    /// but objects that it shares with no later state stay in memory as long as the snapshot.
    pub fn snapshot(&self) -> Snapshot<K> {
        let state = self.read();
        Snapshot { objects: state.objects.clone(), resource_version: state.resource_version.clone() }
    }

    /// Lets `write` make several changes that readers see in one step.
    pub(crate) fn write_batch<R>(&self, write: impl FnOnce(&mut IndexWriter<'_, K>) -> R) -> R {
        write(&mut IndexWriter(self.write()))
    }

    /// Stores an object. Returns the previous state.
    pub fn insert(&self, object: Arc<Object<K>>) -> Option<Arc<Object<K>>> {
        self.write().insert(object)
    }

    /// Removes an object. Returns its last state.
    pub fn remove(&self, key: &str) -> Option<Arc<Object<K>>> {
        self.write().remove(key)
    }
}

impl<K> Default for Indexer<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K> Clone for Indexer<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K> fmt::Debug for Indexer<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Indexer").field("objects", &self.len()).finish_non_exhaustive()
    }
}

impl<K: Send + Sync + 'static> Store<K> for Indexer<K> {
    fn apply(&self, change: Change<K>) {
        self.apply_batch(vec![change]);
    }

    fn apply_batch(&self, changes: Vec<Change<K>>) {
        let mut state = self.write();
        for change in changes {
            match change {
                Change::Added(object) | Change::Updated(object) => drop(state.insert(object)),
                Change::Deleted(deleted) => drop(state.remove(deleted.key().as_str())),
            }
        }
    }

    fn replace(&self, new: Replacement<K>) {
        let mut state = self.write();
        let undecodable = new.undecodable.iter().filter_map(|key| state.objects.get(key).cloned());
        let mut objects = OrdMap::new();
        for object in undecodable.chain(new.objects) {
            objects.insert(object.key().clone(), object);
        }
        let IndexedObjects { indexes, .. } = &mut *state;
        for index in indexes.values_mut() {
            index.keys.clear();
            for object in objects.values() {
                index.insert(object);
            }
        }
        state.objects = objects;
        state.resource_version = new.resource_version;
    }

    fn advance(&self, resource_version: &str) {
        let mut state = self.write();
        state.resource_version.clear();
        state.resource_version.push_str(resource_version);
    }
}

impl<K: Send + Sync + 'static> KnownObjects<K> for Indexer<K> {
    fn keys(&self) -> Vec<ObjectKey> {
        self.keys()
    }

    fn get(&self, key: &str) -> Option<Arc<Object<K>>> {
        self.get(key)
    }
}

/// The write lock of an indexer.
pub(crate) struct IndexWriter<'a, K>(RwLockWriteGuard<'a, IndexedObjects<K>>);

impl<K> IndexWriter<'_, K> {
    /// Stores an object. Returns the previous state.
    pub(crate) fn insert(&mut self, object: Arc<Object<K>>) -> Option<Arc<Object<K>>> {
        self.0.insert(object)
    }

    /// Removes an object. Returns its last state.
    pub(crate) fn remove(&mut self, key: &str) -> Option<Arc<Object<K>>> {
        self.0.remove(key)
    }
}

/// The objects at one moment. Cloning takes constant time.
pub struct Snapshot<K> {
    objects: OrdMap<ObjectKey, Arc<Object<K>>>,
    resource_version: String,
}

impl<K> Snapshot<K> {
    /// The object with this key, `namespace/name` or `name`.
    pub fn get(&self, key: &str) -> Option<&Arc<Object<K>>> {
        self.objects.get(key)
    }

    /// All objects, in key order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Object<K>>> {
        self.objects.values()
    }

    /// The number of objects.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether there are no objects.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// The version up to which the state is complete. Empty before the first list.
    pub fn resource_version(&self) -> &str {
        &self.resource_version
    }
}

impl<K> Clone for Snapshot<K> {
    fn clone(&self) -> Self {
        Self { objects: self.objects.clone(), resource_version: self.resource_version.clone() }
    }
}

impl<K> fmt::Debug for Snapshot<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Snapshot").field("objects", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Deleted, DeletedFinalStateUnknown};

    type Labels = &'static [&'static str];

    fn object(key: &str, labels: Labels) -> Arc<Object<Labels>> {
        Arc::new(Object::new(key.into(), "", "1", labels))
    }

    fn indexer() -> Indexer<Labels> {
        let indexer: Indexer<Labels> = Indexer::new();
        indexer
            .add_index("label", |object| object.iter().map(|label| (*label).to_owned()).collect::<Vec<_>>())
            .unwrap();
        indexer
    }

    fn keys(indexer: &Indexer<Labels>, value: &str) -> String {
        indexer.index_keys("label", value).unwrap().iter().map(ObjectKey::as_str).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn an_object_has_several_values_in_an_index_and_moves_between_them() {
        let indexer = indexer();
        indexer.insert(object("a/1", &["red", "big"]));
        indexer.insert(object("a/2", &["red"]));
        assert_eq!((keys(&indexer, "red"), keys(&indexer, "big")), ("a/1 a/2".to_owned(), "a/1".to_owned()));
        indexer.insert(object("a/1", &["blue"]));
        assert_eq!((keys(&indexer, "red"), keys(&indexer, "big")), ("a/2".to_owned(), String::new()));
        indexer.remove("a/1");
        assert_eq!(indexer.index_values("label").unwrap(), ["red"], "a value without objects is gone");
        assert_eq!(indexer.by_index("label", "red").unwrap()[0].key().as_str(), "a/2");
    }

    #[test]
    fn an_index_added_later_has_the_objects_stored_before() {
        let indexer = Indexer::new();
        indexer.insert(object("a/1", &["red"]));
        indexer
            .add_index("label", |object| object.iter().map(|label| (*label).to_owned()).collect::<Vec<_>>())
            .unwrap();
        assert_eq!(keys(&indexer, "red"), "a/1");
        assert_eq!(indexer.add_index("label", |_| None), Err(IndexError::Exists("label".to_owned())));
        assert_eq!(indexer.by_index("size", "x").unwrap_err(), IndexError::Unknown("size".to_owned()));
    }

    #[test]
    fn the_objects_of_a_namespace_are_only_those() {
        let indexer = Indexer::<Labels>::new();
        for key in ["a/1", "a/2", "a-b/3", "ab/4", "node"] {
            indexer.insert(object(key, &[]));
        }
        let keys: Vec<_> = indexer.namespace("a").iter().map(|object| object.key().to_string()).collect();
        assert_eq!(keys, ["a/1", "a/2"]);
    }

    #[test]
    fn a_snapshot_stays_as_it_was() {
        let indexer = indexer();
        indexer.insert(object("a/1", &[]));
        let snapshot = indexer.snapshot();
        indexer.insert(object("a/2", &[]));
        indexer.remove("a/1");
        assert_eq!((snapshot.len(), snapshot.get("a/1").is_some(), indexer.len()), (1, true, 1));
    }

    #[test]
    fn a_replacement_keeps_the_last_state_of_undecodable_objects() {
        let indexer = indexer();
        indexer.insert(object("a/1", &["red"]));
        indexer.insert(object("a/2", &["red"]));
        indexer.replace(Replacement {
            objects: vec![object("a/3", &["red"])],
            undecodable: vec!["a/1".into(), "a/9".into()],
            resource_version: "7".to_owned(),
        });
        assert_eq!((keys(&indexer, "red").as_str(), indexer.resource_version().as_str()), ("a/1 a/3", "7"));
    }

    #[test]
    fn a_reader_sees_all_changes_of_a_batch_or_none() {
        let indexer = indexer();
        indexer.insert(object("a/1", &[]));
        let batch = || {
            let unknown = DeletedFinalStateUnknown { key: "a/1".into(), last_known: None };
            vec![Change::Added(object("a/2", &[])), Change::Deleted(Deleted::FinalStateUnknown(unknown))]
        };
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                loop {
                    let snapshot = indexer.snapshot();
                    assert_eq!(snapshot.len(), 1);
                    if snapshot.get("a/2").is_some() {
                        break;
                    }
                }
            });
            indexer.apply_batch(batch());
            reader.join().unwrap();
        });
    }
}
