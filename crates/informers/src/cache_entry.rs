//! One cache as the registry stores it.

use std::{any::Any, sync::Arc};

use kubefan_cache::Phase;
use kubefan_fanout::Served;
use kubefan_model::{GroupVersionResource, Media, Scope};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    backfiller::Backfiller, cached_schema::CachedSchema, consistency::Prover, missing_right::MissingRight,
    planned_relist::PlannedRelist, shared_bytes::ReadingTenants, version_lookup::ClusterVersion,
};

/// The identity of a cache. The registry has at most one cache per identity.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct CacheId {
    pub(super) gvr: GroupVersionResource,
    pub(super) scope: Scope,
    pub(super) media: Media,
}

impl CacheId {
    pub(super) fn of(served: &Served) -> Self {
        Self { gvr: served.gvr.clone(), scope: served.scope.clone(), media: served.parser.media() }
    }
}

/// One cache, and the services that need upstream on its behalf.
pub(super) struct Cache {
    /// The name in the configuration, or the full name if a reader started the cache.
    pub(super) name: String,
    pub(super) served: Served,
    pub(super) backfiller: Arc<Backfiller>,
    pub(super) cluster_version: ClusterVersion,
    pub(super) prover: Arc<Prover>,
    pub(super) started_by: StartedBy,
    /// The tenants that read it.
    pub(super) tenants: Arc<ReadingTenants>,
    /// Cancelled to stop the cache, and when it has stopped.
    pub(super) stop: CancellationToken,
    /// The schema that all cached objects were read with.
    pub(super) schema: Arc<CachedSchema>,
    /// The relist that a check has asked for.
    pub(super) planned_relist: Arc<PlannedRelist>,
    /// The right that kubefan lacks, in words; `None` if the last request had it.
    pub(super) missing_right: Arc<MissingRight>,
}

/// The reason why a cache exists.
pub(super) enum StartedBy {
    /// The configuration names the resource.
    Configuration,
    /// A reader. The cache is dropped when it has no readers.
    Reader {
        /// The tenant of the reader, if callers are distinguished.
        tenant: Option<Arc<str>>,
        /// Time at which it started the cache.
        at: Instant,
    },
}

impl Cache {
    /// Returns the cache for a reader of this tenant.
    pub(super) fn read_by(&self, tenant: Option<&str>) -> Served {
        // Only caches that readers started share a limit.
        let reading = if self.on_demand() { self.tenants.begin(tenant) } else { None };
        let reading = reading.map(|reading| Arc::new(reading) as Arc<dyn Any + Send + Sync>);
        Served { reading, ..self.served.clone() }
    }

    /// Whether a reader started the cache.
    pub(super) fn on_demand(&self) -> bool {
        matches!(self.started_by, StartedBy::Reader { .. })
    }
}

/// The reason why a resource has no cache.
#[derive(Clone)]
pub(super) struct UncachedReason {
    pub(super) phase: Phase,
    pub(super) message: String,
}

/// The end of a cache.
pub(super) struct CacheEnd {
    pub(super) reason: UncachedReason,
    /// Whether a new attempt would end the same way.
    pub(super) refused: bool,
}
