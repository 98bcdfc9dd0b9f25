//! The reasons why an update is not applied.

use kubefan_model::{ObjectKey, ResourceVersion};

/// Upstream broke a rule of the watch protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UpdateError {
    /// A change before the first list was complete.
    #[error("upstream sent a change before the first list was complete")]
    NotListed,
    /// A change below the version already reached, or another one of an object at that version:
    /// passing it on would repeat or reorder.
    #[error("upstream sent {key} at version {version}, after version {reached}")]
    OutOfOrder {
        /// The object.
        key: ObjectKey,
        /// Version of the event.
        version: ResourceVersion,
        /// The version reached before.
        reached: ResourceVersion,
    },
    /// A list at a version that the cache had reached has other objects or versions. The next list
    /// starts a new history.
    #[error("upstream's list at version {version} differs from the state at that version")]
    Differs {
        /// The version.
        version: ResourceVersion,
    },
}
