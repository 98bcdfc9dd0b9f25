//! The errors of informers.

use std::time::Duration;

/// The reason why a call of an informer fails.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InformerError {
    /// The informer was started before. An informer runs once, as client-go's.
    #[error("the informer was started already; an informer runs once")]
    AlreadyStarted,
    /// The informer has stopped, and stays stopped.
    #[error("the informer has stopped")]
    Stopped,
    /// The handler gets no more calls.
    #[error("the event handler has ended: {0}")]
    HandlerEnded(HandlerEnd),
    /// The call needs a tokio runtime.
    #[error("handlers run on a tokio runtime; call this from inside one")]
    NoRuntime,
    /// The time ran out.
    #[error("version {wanted} has not arrived after {waited:?}; the store is at version {reached}")]
    Timeout {
        /// The version that was waited for.
        wanted: String,
        /// The version that the store has. Empty before the first list.
        reached: String,
        /// The limit.
        waited: Duration,
    },
    /// Versions can only be waited for if they are decimal numbers, as Kubernetes' are.
    #[error("{0:?} is not a resource version that can be compared")]
    IncomparableVersion(String),
}

/// The reason why a handler gets no more calls.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandlerEnd {
    /// [`Registration::remove`](super::Registration::remove) was called.
    #[error("it was removed")]
    Removed,
    /// The informer stopped.
    #[error("the informer has stopped")]
    Stopped,
    /// A call panicked, with this message.
    #[error("it panicked: {0}")]
    Panicked(String),
    /// The handler was this many calls behind
    /// ([`Backlog::StopWithReport`](super::Backlog::StopWithReport)).
    #[error("it was {0} calls behind, its limit")]
    Overflowed(usize),
}
