//! The errors of a reflector, and the functions that observe them.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError},
};

use crate::{error::ClientError, object::ObjectKey};

/// An error that the reflector reports. It continues after each of them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReflectorError {
    /// A list or a watch failed, or the connection broke. It is retried.
    #[error("{0}")]
    Client(ClientError),
    /// An object does not fit the type, or the transform refused it. The store keeps the previous
    /// state of that object until an event brings one that fits.
    #[error("{key} at version {resource_version}: {message}")]
    Undecodable {
        /// The object.
        key: ObjectKey,
        /// Version of the object.
        resource_version: String,
        /// The decoder's or the transform's reason.
        message: String,
    },
    /// An event without readable metadata. It had no effect.
    #[error("an event without readable metadata: {0}")]
    Unreadable(String),
    /// A handler of an informer panicked, and gets no more calls.
    #[error("an event handler panicked, and gets no more calls: {0}")]
    HandlerPanicked(String),
    /// A handler of an informer fell behind its limit, and gets no more calls.
    #[error("an event handler was {0} calls behind, its limit, and gets no more calls")]
    HandlerOverflowed(usize),
}

type Observer = Arc<dyn Fn(&ReflectorError) + Send + Sync>;

/// Functions that are called with each error, on the task where it occurred, so they must be quick.
/// Clones share them.
#[derive(Clone, Default)]
pub struct Observers(Arc<Mutex<Vec<Observer>>>);

impl Observers {
    /// Adds an observer.
    pub fn add(&self, observer: impl Fn(&ReflectorError) + Send + Sync + 'static) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(observer));
    }

    /// Calls all observers.
    pub(crate) fn report(&self, error: &ReflectorError) {
        // Called without the lock: an observer may add another one.
        let observers = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for observer in observers {
            // The panic is printed by its hook. It must not end the informer.
            let _ = catch_unwind(AssertUnwindSafe(|| observer(error)));
        }
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Observers").finish_non_exhaustive()
    }
}
