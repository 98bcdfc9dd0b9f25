//! The facts by which a read is routed.

use kubefan_access::Denial;
use kubefan_cache::Refusal;
use kubefan_model::{GroupVersionResource, Media, ResourceVersion, selector::FieldSelector};

use super::{fallback::Fallback, http_read::HttpRead, read_error::ReadError, status::Failure};
use crate::reader::NotReached;

/// The facts by which a read is routed, as far as they were fetched.
#[derive(Debug, Clone)]
pub struct CacheFacts<'a> {
    /// The answer if the cache has none.
    pub fallback: Fallback,
    /// The field selector of the caches; objects that it does not select are not cached.
    pub narrowed_by: &'a FieldSelector,
    /// The verdict about the caller.
    pub verdict: Option<Result<(), NotAllowed>>,
    /// Whether the read is admitted: there is a place for it.
    pub admission: Option<Result<(), Refusal>>,
    /// The encodings in which the resource was cached when the read got its place. Empty if the
    /// decision does not depend on them.
    pub cached: Vec<Media>,
    /// The cache in each format of the read.
    pub formats: Vec<FormatFacts>,
    /// Whether a list is large.
    pub is_large: Option<bool>,
    /// Whether the cache is as fresh as the read demands.
    pub freshness: Option<Result<(), NotFresh>>,
    /// The snapshot to answer from.
    pub snapshot: Option<Result<SnapshotFacts, Refusal>>,
    /// Whether a watch was subscribed.
    pub subscription: Option<Result<(), Refusal>>,
}

/// The reason why a caller may not read.
#[derive(Debug, Clone, PartialEq)]
pub enum NotAllowed {
    /// The caller is denied.
    Denied(Denial),
    /// The caller is denied, and only a certificate names it.
    DeniedByCertificate(Denial),
    /// A page of another site may not open a websocket.
    ForeignOrigin(Failure),
}

/// The reason why a cache is not known to be as fresh as a read demands.
#[derive(Debug, Clone)]
pub enum NotFresh {
    /// Nothing proved that the cache is not older than the read.
    NotProved(Refusal),
    /// The cache is below the version that the read names.
    NotReached(NotReached),
}

impl NotFresh {
    /// The refusal of the read.
    pub fn refusal(&self) -> &Refusal {
        match self {
            Self::NotProved(refusal) | Self::NotReached(NotReached { refusal, .. }) => refusal,
        }
    }
}

/// Facts about the cache in one format.
#[derive(Debug, Clone, Default)]
pub struct FormatFacts {
    /// Whether the cache was started for later reads.
    pub is_started: bool,
    /// The cache.
    pub cache: Option<Result<FoundCacheFacts, Refusal>>,
}

/// Facts about a cache that was found.
#[derive(Debug, Clone)]
pub struct FoundCacheFacts {
    /// Resource of the cache.
    pub gvr: GroupVersionResource,
    /// The encoding of its objects.
    pub media: Media,
    /// Whether its objects are namespaced.
    pub namespaced: bool,
    /// Reason why it refuses readers now.
    pub refusal: Option<Refusal>,
    /// Whether it was listed after the request had arrived.
    pub is_listed_since: bool,
    /// The number of its objects; `None` before the first list.
    pub objects: Option<usize>,
}

/// Facts about a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotFacts {
    /// Version of the snapshot; `None` if the snapshot of a later page is not retained.
    pub version: Option<ResourceVersion>,
    /// Whether it has the object that a get names.
    pub has_object: bool,
}

impl<'a> CacheFacts<'a> {
    /// Creates the facts of a read that has just arrived: nothing was fetched yet.
    pub fn new(fallback: Fallback, narrowed_by: &'a FieldSelector, read: &HttpRead<'_>) -> Self {
        Self {
            fallback,
            narrowed_by,
            verdict: None,
            admission: None,
            cached: Vec::new(),
            formats: vec![FormatFacts::default(); read.formats.len()],
            is_large: None,
            freshness: None,
            snapshot: None,
            subscription: None,
        }
    }
}

impl From<NotAllowed> for ReadError {
    fn from(not_allowed: NotAllowed) -> Self {
        match not_allowed {
            NotAllowed::Denied(denial) => denial.into(),
            NotAllowed::DeniedByCertificate(denial) => Self::denied_by_certificate(denial),
            NotAllowed::ForeignOrigin(failure) => failure.into(),
        }
    }
}
