//! Reads an informer's store by namespace and name.

use std::sync::Arc;

use crate::{
    object::Object,
    store::{IndexError, Indexer},
};

/// Reads an informer's store: client-go's `GenericLister`. Clones share the store.
#[derive(Debug)]
pub struct Lister<K>(Indexer<K>);

impl<K> Lister<K> {
    pub(super) fn new(indexer: Indexer<K>) -> Self {
        Self(indexer)
    }

    /// All objects, in key order.
    pub fn list(&self) -> Vec<Arc<Object<K>>> {
        self.0.list()
    }

    /// A cluster-scoped object by its name.
    pub fn get(&self, name: &str) -> Option<Arc<Object<K>>> {
        self.0.get(name)
    }

    /// The objects that an index has under a value: see [`Indexer::by_index`].
    ///
    /// # Errors
    /// [`IndexError::Unknown`] if there is no such index.
    pub fn by_index(&self, name: &str, value: &str) -> Result<Vec<Arc<Object<K>>>, IndexError> {
        self.0.by_index(name, value)
    }

    /// The objects of one namespace.
    pub fn namespace<'a>(&'a self, namespace: &'a str) -> NamespaceLister<'a, K> {
        NamespaceLister { indexer: &self.0, namespace }
    }
}

impl<K> Clone for Lister<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// Reads the objects of one namespace.
#[derive(Debug)]
pub struct NamespaceLister<'a, K> {
    indexer: &'a Indexer<K>,
    namespace: &'a str,
}

impl<K> NamespaceLister<'_, K> {
    /// The objects, in key order. Takes time for this namespace's objects only.
    pub fn list(&self) -> Vec<Arc<Object<K>>> {
        self.indexer.namespace(self.namespace)
    }

    /// An object by its name.
    pub fn get(&self, name: &str) -> Option<Arc<Object<K>>> {
        self.indexer.get(&format!("{}/{name}", self.namespace))
    }
}
