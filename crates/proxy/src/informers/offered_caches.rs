//! The registry as the sender to peers sees it: it offers its caches for their warm starts.

use std::sync::Arc;

use super::{cache_entry::CacheId, registry::Registry};
use crate::peer::{OfferedCache, OfferedCaches};
use kubefan_model::{GroupVersionResource, Media, Scope};

impl OfferedCaches for Arc<Registry> {
    fn offer(&self, gvr: &GroupVersionResource, scope: &Scope) -> Option<OfferedCache> {
        let id = CacheId { gvr: gvr.clone(), scope: scope.clone(), media: Media::Json };
        let cache = self.caches.get(&id)?.clone();
        Some(OfferedCache {
            hub: cache.served.hub.clone(),
            upstream_field_selector: self.context.upstream_field_selector.clone(),
            schema: cache.schema.text(&cache.served),
        })
    }

    fn cluster(&self) -> Option<String> {
        self.context.upstream.proven_identity()
    }
}
