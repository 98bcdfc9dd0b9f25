//! Errors of a reflector's step.

use std::time::Duration;

use kubefan_model::{object::ObjectError, version::InvalidVersion};

use crate::error::UpstreamError;

/// A watch that ends earlier than this without a new version is an error, so that the caller backs
/// off. Otherwise a broken server would be asked in a tight loop. This corresponds to client-go's
/// `VeryShortWatchError`, but a bookmark without a new version does not suppress it.
pub(crate) const WATCH_SHORT: Duration = Duration::from_secs(1);

/// The delay before a failed page is requested again, unless upstream asks for another.
const PAGE_RETRY_DELAY: Duration = Duration::from_secs(1);

/// The error of a step. The variants name the phase that failed.
#[derive(Debug, thiserror::Error)]
pub enum ReflectorError {
    /// Listing failed.
    #[error("list: {0}")]
    List(#[source] UpstreamError),
    /// Opening or reading a watch failed.
    #[error("watch: {0}")]
    Watch(#[source] UpstreamError),
    /// An object could not be parsed.
    #[error("upstream sent a broken object: {0}")]
    Object(#[from] ObjectError),
    /// A list has no version that compares with others.
    #[error("list: {0}")]
    Version(#[from] InvalidVersion),
    /// The watch ended at once, without a new version.
    #[error("the watch ended within {WATCH_SHORT:?} without a new version")]
    VeryShortWatch,
}

impl ReflectorError {
    /// Returns the upstream error, if there is one.
    pub fn upstream(&self) -> Option<&UpstreamError> {
        match self {
            Self::List(error) | Self::Watch(error) => Some(error),
            Self::Object(_) | Self::Version(_) | Self::VeryShortWatch => None,
        }
    }

    /// Returns the delay before a page that failed with this error is requested again.
    pub fn page_retry_delay(&self) -> Duration {
        self.upstream().and_then(UpstreamError::retry_after).unwrap_or(PAGE_RETRY_DELAY)
    }

    /// Whether upstream writes versions that do not compare: text, nothing, or more than 64 bits.
    pub fn is_of_versions(&self) -> bool {
        matches!(self, Self::Version(_) | Self::Object(ObjectError::Version(_)))
    }

    /// Returns the label in metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::List(error) | Self::Watch(error) => error.reason(),
            Self::Object(_) => "broken_object",
            Self::Version(_) => "invalid_version",
            Self::VeryShortWatch => "very_short_watch",
        }
    }

    pub(crate) fn into_list(self) -> Self {
        match self {
            Self::Watch(error) => Self::List(error),
            other => other,
        }
    }
}
