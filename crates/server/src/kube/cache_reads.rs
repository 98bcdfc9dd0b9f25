//! The caches as the Kubernetes API reads them, and which of them exist.

use std::sync::Arc;

use kubefan_model::{GroupVersionResource, Media, selector::FieldSelector};

use super::path::Path;
use crate::reader::Reader;

/// Reads from the caches.
pub struct CacheReads {
    /// Admission, and the catalog.
    pub reader: Arc<Reader>,
    /// A consistent list of at least this many bytes of JSON waits a second or two for a freshness
    /// proof.
    pub consistent_list_bytes_min: usize,
    /// The field selector of the caches; objects that it does not select are not cached.
    pub narrowed_by: FieldSelector,
}

impl CacheReads {
    /// Whether the resource of a path is cached in an encoding. Starts nothing.
    pub fn is_cached(&self, path: &Path, media: Media) -> bool {
        self.reader.holds(&gvr_of(path), media)
    }

    /// Returns the encodings in which the resource of a path is cached.
    pub fn cached(&self, path: &Path) -> Vec<Media> {
        let gvr = gvr_of(path);
        Media::ALL.into_iter().filter(|media| self.reader.holds(&gvr, *media)).collect()
    }

    /// Whether every object of the resource that a path names is cached, as JSON or protobuf.
    pub fn holds_all(&self, path: &Path) -> bool {
        let is_cached = self.is_cached(path, Media::Json) || self.is_cached(path, Media::Protobuf);
        is_cached && self.narrowed_by.is_everything()
    }

    /// Whether a limit has refused a cache of the resource that a path names.
    pub fn is_known_uncached(&self, path: &Path) -> bool {
        self.reader.is_known_uncached(&gvr_of(path))
    }
}

fn gvr_of(path: &Path) -> GroupVersionResource {
    GroupVersionResource::new(&path.group, &path.version, &path.resource)
}
