//! The map of all caches, with an index of the resources in it.
//!
//! A cache is found by its identity. But a request does not name all of that: whether the resource
//! is namespaced, and so its scope, is known from any cache of the resource. With a cache per
//! namespace, a search through all caches for each request would cost more than the request.

use std::sync::Arc;

use dashmap::DashMap;
use kubefan_model::{GroupVersionResource, Media};

use super::cache_entry::{Cache, CacheId};

/// All caches of one process.
#[derive(Default)]
pub(super) struct CacheMap {
    caches: DashMap<CacheId, Arc<Cache>>,
    /// The resources that have a cache.
    resources: DashMap<GroupVersionResource, Known>,
    /// The configured resources that have a cache, by their configured names.
    names: DashMap<String, Named>,
}

/// A resource with at least one cache.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    namespaced: bool,
    /// The number of caches, by medium.
    json: usize,
    protobuf: usize,
    tables: usize,
}

/// A configured name with at least one cache.
struct Named {
    gvr: GroupVersionResource,
    caches: usize,
}

impl Known {
    fn caches(&mut self, media: Media) -> &mut usize {
        match media {
            Media::Json => &mut self.json,
            Media::Protobuf => &mut self.protobuf,
            Media::Table => &mut self.tables,
        }
    }
}

fn in_order(mut caches: Vec<Arc<Cache>>) -> Vec<Arc<Cache>> {
    caches.sort_by_cached_key(|cache| {
        let CacheId { gvr, scope, media } = CacheId::of(&cache.served);
        (gvr.to_string(), scope.namespace().to_owned(), media.as_str())
    });
    caches
}

impl CacheMap {
    /// Returns the cache with this identity.
    pub(super) fn get(&self, id: &CacheId) -> Option<Arc<Cache>> {
        self.caches.get(id).map(|cache| cache.clone())
    }

    /// Returns all caches. No task may wait while it holds one of them from here.
    pub(super) fn iter(&self) -> dashmap::iter::Iter<'_, CacheId, Arc<Cache>> {
        self.caches.iter()
    }

    /// Returns all caches by name, for tasks that visit one after the other: the map has another
    /// order in each process, and a simulated run must repeat.
    pub(super) fn in_order(&self) -> Vec<Arc<Cache>> {
        in_order(self.caches.iter().map(|cache| cache.clone()).collect())
    }

    /// Adds a cache. Returns the one that it replaces.
    pub(super) fn insert(&self, cache: Arc<Cache>) -> Option<Arc<Cache>> {
        // Counted first: a cache in the map is always known.
        self.count(&cache);
        let replaced = self.caches.insert(CacheId::of(&cache.served), cache);
        if let Some(replaced) = &replaced {
            self.count_down(replaced);
        }
        replaced
    }

    /// Removes a cache, unless another one has replaced it. Returns whether it was removed.
    pub(super) fn remove(&self, cache: &Arc<Cache>) -> bool {
        let removed = self.caches.remove_if(&CacheId::of(&cache.served), |_, current| Arc::ptr_eq(current, cache));
        if let Some((_, removed)) = &removed {
            self.count_down(removed);
        }
        removed.is_some()
    }

    /// Removes the caches that fulfil `is_removed`, and returns them by name.
    pub(super) fn remove_all(&self, is_removed: impl Fn(&Cache) -> bool) -> Vec<Arc<Cache>> {
        let mut removed = Vec::new();
        self.caches.retain(|_, cache| {
            let stays = !is_removed(cache);
            if !stays {
                removed.push(cache.clone());
            }
            stays
        });
        for removed in &removed {
            self.count_down(removed);
        }
        in_order(removed)
    }

    /// Whether a resource has a cache of this medium, in any scope.
    pub(super) fn holds(&self, gvr: &GroupVersionResource, media: Media) -> bool {
        let known = self.resources.get(gvr).map(|known| *known);
        known.is_some_and(|mut known| *known.caches(media) > 0)
    }

    /// Whether a resource is namespaced; `None` if it has no cache.
    pub(super) fn is_namespaced(&self, gvr: &GroupVersionResource) -> Option<bool> {
        self.resources.get(gvr).map(|known| known.namespaced)
    }

    /// Returns the resource that is configured under this name, if it has a cache.
    pub(super) fn named(&self, name: &str) -> Option<GroupVersionResource> {
        self.names.get(name).map(|named| named.gvr.clone())
    }

    fn count(&self, cache: &Cache) {
        let served = &cache.served;
        let mut known = self.resources.entry(served.gvr.clone()).or_default();
        known.namespaced = served.namespaced;
        *known.caches(served.parser.media()) += 1;
        drop(known);
        if !cache.on_demand() {
            let new = || Named { gvr: served.gvr.clone(), caches: 0 };
            self.names.entry(cache.name.clone()).or_insert_with(new).caches += 1;
        }
    }

    fn count_down(&self, cache: &Cache) {
        let served = &cache.served;
        if let Some(mut known) = self.resources.get_mut(&served.gvr) {
            *known.caches(served.parser.media()) -= 1;
        }
        self.resources.remove_if(&served.gvr, |_, known| known.json + known.protobuf + known.tables == 0);
        if !cache.on_demand() {
            if let Some(mut named) = self.names.get_mut(&cache.name) {
                named.caches -= 1;
            }
            self.names.remove_if(&cache.name, |_, named| named.caches == 0);
        }
    }
}
