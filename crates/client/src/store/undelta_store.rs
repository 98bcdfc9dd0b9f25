//! A store that hands out the complete state after every change.

use std::{fmt, sync::Arc};

use super::{Change, Indexer, Replacement, Store};
use crate::object::Object;

/// Calls a function with the complete state after every change: client-go's `UndeltaStore`.
///
/// The kubelet receives its pods in this way: each call is a SET that replaces the previous one, so
/// the receiver cannot miss a deletion. A replacement or a batch makes one call. With `n` objects a
/// call takes `n` reference counts, so this fits small sets, such as the pods of one node.
pub struct UndeltaStore<K, F> {
    indexer: Indexer<K>,
    push: F,
}

impl<K, F> UndeltaStore<K, F>
where
    K: Send + Sync + 'static,
    F: Fn(Vec<Arc<Object<K>>>) + Send + Sync + 'static,
{
    /// Returns an empty store. `push` gets all objects in key order. It runs on the task of the
    /// reflector, which waits for it.
    pub fn new(push: F) -> Self {
        Self { indexer: Indexer::new(), push }
    }

    /// The objects, for reading.
    pub fn indexer(&self) -> &Indexer<K> {
        &self.indexer
    }

    fn push(&self) {
        (self.push)(self.indexer.list());
    }
}

impl<K, F> Store<K> for UndeltaStore<K, F>
where
    K: Send + Sync + 'static,
    F: Fn(Vec<Arc<Object<K>>>) + Send + Sync + 'static,
{
    fn apply(&self, change: Change<K>) {
        self.indexer.apply(change);
        self.push();
    }

    fn apply_batch(&self, changes: Vec<Change<K>>) {
        self.indexer.apply_batch(changes);
        self.push();
    }

    fn replace(&self, state: Replacement<K>) {
        self.indexer.replace(state);
        self.push();
    }

    fn advance(&self, resource_version: &str) {
        self.indexer.advance(resource_version);
    }
}

impl<K, F> fmt::Debug for UndeltaStore<K, F> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("UndeltaStore").field("indexer", &self.indexer).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::store::Deleted;

    #[test]
    fn every_change_pushes_the_complete_state_once() {
        let pushed = Arc::new(Mutex::new(Vec::new()));
        let push = {
            let pushed = pushed.clone();
            move |objects: Vec<Arc<Object<()>>>| {
                let keys: Vec<_> = objects.iter().map(|object| object.name().to_owned()).collect();
                pushed.lock().unwrap().push(keys.join(" "));
            }
        };
        let store = UndeltaStore::new(push);
        let object = |name: &str| Arc::new(Object::new(name.into(), "", "1", ()));
        store.replace(Replacement {
            objects: vec![object("b"), object("a")],
            undecodable: Vec::new(),
            resource_version: "1".to_owned(),
        });
        store.apply(Change::Added(object("c")));
        store.apply(Change::Updated(object("c")));
        store.apply_batch(vec![Change::Deleted(Deleted::Known(object("a"))), Change::Added(object("d"))]);
        assert_eq!(*pushed.lock().unwrap(), ["a b", "a b c", "a b c", "b c d"]);
    }
}
