//! The parts that all caches of one process share: the client of upstream, its discovery, and the
//! options of lists and watches.
//!
//! Everything that asks upstream on behalf of a cache builds its request here, so that the
//! informer, backfills, proofs and self-checks all select the same objects.

use std::{sync::Arc, time::Duration};

use kubefan_fanout::Served;
use kubefan_model::ResourceVersion;
use kubefan_peer::{
    Peers,
    saved::{Endpoint, StateName},
};
use kubefan_telemetry::metrics::WatchPurpose;
use kubefan_upstream::{
    Source, SourceReflector, TieredReflector, Upstream, UpstreamError,
    discovery::Discovery,
    identity::IdentityError,
    metadata::MetadataTarget,
    reflector::{ReflectorOptions, Target},
};
use rand::{SeedableRng, rngs::StdRng};

use super::{list_scheduler::ListScheduler, saved_states::SavedStates};

/// The reason why the version of the cluster is not known.
#[derive(Debug, thiserror::Error)]
pub(super) enum VersionError {
    /// The request failed.
    #[error(transparent)]
    Request(#[from] UpstreamError),
    /// Upstream is not confirmed to be the same cluster.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// Clients and options that all caches share. A clone is cheap.
#[derive(Clone)]
pub struct CacheContext {
    /// The apiserver: discovery, self-checks and the confirmation of a peer's state.
    pub upstream: Upstream,
    /// The source of lists and watches: the apiserver, or the next kubefan on the way to it.
    pub source: Source,
    /// The apiserver's resources.
    pub discovery: Arc<Discovery>,
    /// The scheduler of lists.
    pub lists: ListScheduler,
    /// Options of lists and watches.
    pub reflector: ReflectorOptions,
    /// The field selector of every list and watch; empty selects everything.
    pub upstream_field_selector: String,
    /// The interval between two checks of a resource's schema.
    pub schema_check_interval: Duration,
    /// Whether the current objects are stored compressed as well.
    pub cache_compression: bool,
    /// The peers that configured caches start from. `None` if every cache starts with a list.
    pub peers: Option<Peers>,
    /// The states on disk. `None` if none are saved.
    pub saved: Option<Arc<SavedStates>>,
    /// The seed of all jitter, for simulations. `None` draws it at random.
    pub seed: Option<u64>,
}

impl CacheContext {
    /// Returns a random generator for the jitter of one retry loop.
    #[expect(clippy::disallowed_methods, reason = "randomness enters here; code below takes it as a parameter")]
    pub(super) fn generator(&self) -> StdRng {
        self.seed.map_or_else(|| StdRng::from_rng(&mut rand::rng()), StdRng::seed_from_u64)
    }

    /// Returns the servers that a state must be of to be served without them.
    pub(super) fn endpoint(&self) -> Endpoint {
        Endpoint {
            apiserver: self.upstream.server().to_owned(),
            ca: self.upstream.trusted_ca().fingerprints(),
            source: self.source.name().to_owned(),
        }
    }

    /// Ends every stream of a saved state that is not confirmed, because another cluster answers.
    pub(super) async fn drop_unconfirmed(&self) {
        // The apiserver that stands in for a kubefan may be the wrong one.
        if self.source.is_fallen_back() {
            return;
        }
        if let Some(saved) = &self.saved {
            saved.drop_unconfirmed(&self.upstream).await;
        }
    }

    /// Removes the saved state of a cache, which must not be served after the next start.
    pub(super) async fn remove_saved(&self, served: &Served) {
        if let Some(saved) = &self.saved
            && let Ok(name) = StateName::of(&served.gvr, &served.scope)
        {
            saved.remove(name).await;
        }
    }

    /// Returns the list and watch target of a cache.
    pub(super) fn target(&self, served: &Served) -> Target {
        Target {
            gvr: served.gvr.clone(),
            kind: served.hub.resource().kind.clone(),
            namespaced: served.namespaced,
            scope: served.scope.clone(),
            field_selector: self.upstream_field_selector.clone(),
        }
    }

    /// Returns the reflector of a cache, which may move between the servers of a source.
    pub(super) fn standing_reflector_for(&self, served: &Served) -> TieredReflector {
        let hub = served.hub.clone();
        let parser = served.parser.clone();
        let open_watch = Arc::new(move || hub.metrics().upstream_watch(WatchPurpose::Standing));
        TieredReflector::new(&self.source, self.target(served), parser, self.reflector, open_watch, self.generator())
    }

    /// Returns a reflector for a short read of what a cache has, at the one server that the caller
    /// also confirms. Metrics count its watches by `purpose`.
    pub(super) fn reflector_for(&self, source: &Source, served: &Served, purpose: WatchPurpose) -> SourceReflector {
        let hub = served.hub.clone();
        let parser = served.parser.clone();
        let open_watch = Arc::new(move || hub.metrics().upstream_watch(purpose));
        source.reflector(self.target(served), parser, self.reflector, open_watch, self.generator())
    }

    /// Like [`target`](Self::target), for lists of metadata only.
    pub(super) fn metadata_target(&self, served: &Served) -> MetadataTarget {
        MetadataTarget {
            gvr: served.gvr.clone(),
            scope: served.scope.clone(),
            label_selector: String::new(),
            field_selector: self.upstream_field_selector.clone(),
        }
    }

    /// Returns the resource version that the cluster has reached. Fails if another cluster answers.
    pub(super) async fn cluster_version(&self, target: &Target) -> Result<ResourceVersion, VersionError> {
        let source = self.source.current();
        source.confirm_if_doubted().await?;
        let version = source.cluster_version(target).await?;
        source.confirm().await?;
        Ok(version)
    }
}
