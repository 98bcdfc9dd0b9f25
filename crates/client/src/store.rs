//! Stores that a reflector writes to, and the changes that it writes.

mod expiration_cache;
mod indexer;
mod undelta_store;

use std::sync::Arc;

use crate::object::{Object, ObjectKey};

pub use expiration_cache::{ExpirationCache, TimestampedEntry};
pub(crate) use indexer::IndexWriter;
pub use indexer::{IndexError, Indexer, Snapshot};
pub use undelta_store::UndeltaStore;

/// An object that was deleted while the watch was interrupted: it is missing in a new list, or the
/// server no longer knows its last state.
///
/// client-go's `DeletedFinalStateUnknown`, which arrives there as an object of another type and is
/// often forgotten. Here [`Deleted`] makes the case visible.
#[derive(Debug)]
pub struct DeletedFinalStateUnknown<K> {
    /// The key of the deleted object.
    pub key: ObjectKey,
    /// The last state that was received. The object may have changed since. `None` if the receiver
    /// never had it.
    pub last_known: Option<Arc<Object<K>>>,
}

impl<K> Clone for DeletedFinalStateUnknown<K> {
    fn clone(&self) -> Self {
        Self { key: self.key.clone(), last_known: self.last_known.clone() }
    }
}

/// A deleted object.
#[derive(Debug)]
pub enum Deleted<K> {
    /// The state at the deletion, as the server sent it.
    Known(Arc<Object<K>>),
    /// The deletion was missed.
    FinalStateUnknown(DeletedFinalStateUnknown<K>),
}

impl<K> Deleted<K> {
    /// Returns a deletion that was missed.
    pub(crate) fn unknown(key: ObjectKey, last_known: Option<Arc<Object<K>>>) -> Self {
        Self::FinalStateUnknown(DeletedFinalStateUnknown { key, last_known })
    }

    /// The key of the deleted object.
    pub fn key(&self) -> &ObjectKey {
        match self {
            Self::Known(object) => object.key(),
            Self::FinalStateUnknown(unknown) => &unknown.key,
        }
    }

    /// The last state that was received, whether or not the object changed after it. An informer's
    /// handlers always get one.
    pub fn last_known(&self) -> Option<&Arc<Object<K>>> {
        match self {
            Self::Known(object) => Some(object),
            Self::FinalStateUnknown(unknown) => unknown.last_known.as_ref(),
        }
    }
}

impl<K> Clone for Deleted<K> {
    fn clone(&self) -> Self {
        match self {
            Self::Known(object) => Self::Known(object.clone()),
            Self::FinalStateUnknown(unknown) => Self::FinalStateUnknown(unknown.clone()),
        }
    }
}

/// A change of one object.
#[derive(Debug)]
pub enum Change<K> {
    /// The object is new.
    Added(Arc<Object<K>>),
    /// The object has a new state.
    Updated(Arc<Object<K>>),
    /// The object is gone.
    Deleted(Deleted<K>),
}

impl<K> Change<K> {
    /// The key of the object.
    pub fn key(&self) -> &ObjectKey {
        match self {
            Self::Added(object) | Self::Updated(object) => object.key(),
            Self::Deleted(deleted) => deleted.key(),
        }
    }
}

impl<K> Clone for Change<K> {
    fn clone(&self) -> Self {
        match self {
            Self::Added(object) => Self::Added(object.clone()),
            Self::Updated(object) => Self::Updated(object.clone()),
            Self::Deleted(deleted) => Self::Deleted(deleted.clone()),
        }
    }
}

/// A complete state, from a list or a snapshot.
#[derive(Debug)]
pub struct Replacement<K> {
    /// The objects.
    pub objects: Vec<Arc<Object<K>>>,
    /// Objects of the state that could not be decoded. A store keeps its last state of them.
    pub undecodable: Vec<ObjectKey>,
    /// The version of the state.
    pub resource_version: String,
}

/// The target of a [`Reflector`](crate::Reflector)'s writes: client-go's `ReflectorStore`.
///
/// The reflector is the only writer, and makes one call at a time.
pub trait Store<K>: Send + Sync + 'static {
    /// Applies one change.
    fn apply(&self, change: Change<K>);

    /// Replaces everything.
    fn replace(&self, state: Replacement<K>);

    /// Applies several changes that are only true together. A store with readers makes them visible
    /// in one step.
    fn apply_batch(&self, changes: Vec<Change<K>>) {
        for change in changes {
            self.apply(change);
        }
    }

    /// Everything at or below this version has been applied.
    fn advance(&self, resource_version: &str) {
        let _ = resource_version;
    }

    /// Delivers the known objects again. The reflector calls it once per resync period.
    fn resync(&self) {}
}

impl<K, S: Store<K> + ?Sized> Store<K> for Arc<S>
where
    K: Send + Sync + 'static,
{
    fn apply(&self, change: Change<K>) {
        (**self).apply(change);
    }

    fn replace(&self, state: Replacement<K>) {
        (**self).replace(state);
    }

    fn apply_batch(&self, changes: Vec<Change<K>>) {
        (**self).apply_batch(changes);
    }

    fn advance(&self, resource_version: &str) {
        (**self).advance(resource_version);
    }

    fn resync(&self) {
        (**self).resync();
    }
}
