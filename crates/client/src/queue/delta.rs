//! The elements of a delta queue.

use std::sync::Arc;

use crate::{
    object::{Object, ObjectKey},
    store::{Change, Deleted},
};

/// An element of a delta queue: client-go's `Delta`.
#[derive(Debug)]
pub enum Delta<K> {
    /// The object was added.
    Added(Arc<Object<K>>),
    /// The object was changed.
    Updated(Arc<Object<K>>),
    /// The object is part of a new complete state.
    Replaced(Arc<Object<K>>),
    /// The object is delivered again by a resync.
    Sync(Arc<Object<K>>),
    /// The object was deleted.
    Deleted(Deleted<K>),
}

impl<K> Delta<K> {
    /// The key of the object.
    pub fn key(&self) -> &ObjectKey {
        match self {
            Self::Added(object) | Self::Updated(object) | Self::Replaced(object) | Self::Sync(object) => object.key(),
            Self::Deleted(deleted) => deleted.key(),
        }
    }

    /// The object after this delta. `None` if it was deleted.
    pub fn live_object(&self) -> Option<&Arc<Object<K>>> {
        match self {
            Self::Added(object) | Self::Updated(object) | Self::Replaced(object) | Self::Sync(object) => Some(object),
            Self::Deleted(_) => None,
        }
    }
}

impl<K> From<Change<K>> for Delta<K> {
    fn from(change: Change<K>) -> Self {
        match change {
            Change::Added(object) => Self::Added(object),
            Change::Updated(object) => Self::Updated(object),
            Change::Deleted(deleted) => Self::Deleted(deleted),
        }
    }
}

impl<K> Clone for Delta<K> {
    fn clone(&self) -> Self {
        match self {
            Self::Added(object) => Self::Added(object.clone()),
            Self::Updated(object) => Self::Updated(object.clone()),
            Self::Replaced(object) => Self::Replaced(object.clone()),
            Self::Sync(object) => Self::Sync(object.clone()),
            Self::Deleted(deleted) => Self::Deleted(deleted.clone()),
        }
    }
}

/// The objects that the consumer of a delta queue has already processed: client-go's
/// `KeyListerGetter`. A queue compares them with a new complete state, to find deletions.
pub trait KnownObjects<K>: Send + Sync + 'static {
    /// The keys of all known objects.
    fn keys(&self) -> Vec<ObjectKey>;

    /// A known object.
    fn get(&self, key: &str) -> Option<Arc<Object<K>>>;
}
