//! Reasons for which an informer stops by itself.

use super::cache_quota::TooLarge;

/// The reason why an informer stopped by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stopped {
    /// The apiserver does not serve the resource, or no longer does.
    NotFound(String),
    /// The cache exceeds its quota.
    TooLarge(String),
    /// The apiserver does not serve this encoding, or not in a form that can be cached.
    NotAcceptable(String),
    /// The resource cannot be cached in any encoding.
    NotCached(String),
    /// The encoding of the cached objects has changed, so subscribers must start over.
    Rewritten(String),
}

impl From<TooLarge> for Stopped {
    fn from(TooLarge(message): TooLarge) -> Self {
        Self::TooLarge(message)
    }
}
