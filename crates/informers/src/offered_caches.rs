//! The registry as the sender to peers sees it: it offers its caches for their warm starts.

use kubefan_model::{GroupVersionResource, Media, Scope};
use kubefan_peer::{OfferedCache, OfferedCaches};

use super::{cache_entry::CacheId, lookup::CacheCatalog};

impl OfferedCaches for CacheCatalog {
    fn offer(&self, gvr: &GroupVersionResource, scope: &Scope) -> Option<OfferedCache> {
        let id = CacheId { gvr: gvr.clone(), scope: scope.clone(), media: Media::Json };
        let cache = self.0.caches.get(&id)?.clone();
        Some(OfferedCache {
            hub: cache.served.hub.clone(),
            upstream_field_selector: self.0.context.upstream_field_selector.clone(),
            schema: cache.schema.text(&cache.served),
        })
    }

    fn cluster(&self) -> Option<String> {
        self.0.context.upstream.proven_identity()
    }
}
