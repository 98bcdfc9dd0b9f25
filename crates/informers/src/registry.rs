//! The registry: the map of all caches, and the task that runs one cache until it ends.
//!
//! Readers look up caches in a concurrent map without waiting. No guard of the map is held across
//! an await, else a slow task could block all readers.
//!
//! `configured` and `on_demand` decide which caches exist. `lookup`, `readiness`, `self_check`,
//! `memory_pressure` and `offered_caches` read the map.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use dashmap::DashMap;
use kubefan_admission::{Gate, GateLimits};
use kubefan_cache::{Phase, ProcessBudgets, RetainedLimits, RingLimits, StreamEnd};
use kubefan_common::{proto::v1alpha1::ResolvedResource, sync::watch};
use kubefan_fanout::{Hub, HubOptions, Served};
use kubefan_model::{GroupVersionResource, Media, Scope, object::ObjectParser};
use kubefan_telemetry::metrics::Metrics;
use kubefan_upstream::discovery::{Discovery, DiscoveryError, SchemaFingerprint};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    backfiller::Backfiller,
    cache_entry::{Cache, CacheEnd, CacheId, StartedBy, UncachedReason},
    cache_map::CacheMap,
    cache_quota::{CacheQuota, EncodingLimits, OnDemandLimits},
    cached_schema::CachedSchema,
    consistency::Prover,
    discovered::DiscoveredResource,
    informer::{Informer, StartFrom},
    missing_right::MissingRight,
    resource_media::ConfiguredResource,
    schema::{follow_schema, schema_changes},
    shape::follow_shape,
    shared_bytes::SharedBytes,
    stop_reason::Stopped,
    upstream_context::CacheContext,
    version_lookup::ClusterVersion,
};

/// The first reason why a configured resource has no cache.
pub(super) const NOT_ASKED: &str = "the apiserver was not asked yet";

/// Options of all caches.
#[derive(Clone)]
pub struct RegistryOptions {
    /// Resources to cache from the start.
    pub resources: Vec<ConfiguredResource>,
    /// Namespaces to cache. Empty caches the whole cluster.
    pub namespaces: Vec<String>,
    /// History limits of each cache.
    pub ring: RingLimits,
    /// The longest delay of wake-ups under load.
    pub coalesce_max: Duration,
    /// Limits for requests that pin state: snapshots, lists, catch-ups and backfills.
    pub gate: GateLimits,
    /// `None` caches only the configured resources.
    pub on_demand: Option<OnDemandLimits>,
    /// `None` caches nothing as protobuf.
    pub protobuf: Option<EncodingLimits>,
    /// `None` caches no tables.
    pub tables: Option<EncodingLimits>,
    /// The greatest age of a state's last proof at which it may be read. `None` for no limit.
    pub staleness_max: Option<Duration>,
    /// Whether caches may answer consistent reads after a freshness proof.
    pub proves: bool,
    /// The interval of self-checks. `None` for no self-checks.
    pub self_check_interval: Option<Duration>,
    /// Memory that all caches together may hold beyond objects and history.
    pub retained: RetainedLimits,
}

/// A cache that a reader started and that failed.
pub(super) struct RefusedCache {
    /// The time of the failure.
    pub(super) at: Instant,
    /// Its reason.
    pub(super) message: String,
}

/// The reason why a resource cannot be cached.
struct NotCached {
    /// The end of its validity.
    until: Instant,
    message: String,
}

/// All caches of one process.
pub struct Registry {
    pub(super) context: CacheContext,
    pub(super) options: RegistryOptions,
    metrics: Arc<Metrics>,
    gate: Arc<Gate>,
    /// The memory that all caches together may hold beyond objects and history.
    budgets: ProcessBudgets,
    pub(super) caches: CacheMap,
    /// The resources to cache.
    pub(super) configured: watch::Sender<Vec<ConfiguredResource>>,
    /// The limit in force: see [`RegistryOptions::staleness_max`].
    pub(super) staleness_max: watch::Sender<Option<Duration>>,
    /// The names of configured resources that were not configured at the start.
    pub(super) added: DashMap<String, ()>,
    /// The configured resources without a cache, by their configured names.
    pub(super) uncached: DashMap<String, UncachedReason>,
    /// The caches that readers started and that failed.
    pub(super) refused: DashMap<CacheId, RefusedCache>,
    /// The resources that cannot be cached. Each is a resource that upstream has.
    not_cached: DashMap<GroupVersionResource, NotCached>,
    /// The resources that a limit of the caches that readers start has left without a cache. Its
    /// size is limited: see `on_demand`.
    pub(super) without_room: DashMap<GroupVersionResource, ()>,
    /// The bytes of all JSON caches that readers started.
    pub(super) on_demand_bytes: SharedBytes,
    /// The bytes of all protobuf caches that readers started.
    pub(super) protobuf_bytes: SharedBytes,
    /// The bytes of all table caches.
    pub(super) tables_bytes: SharedBytes,
    /// Locked while caches start, so that their number stays within its limit and no two caches
    /// have the same identity.
    pub(super) starting: Mutex<()>,
    /// Locked while a cache that readers start is discovered, so that they share the requests for
    /// it. Its keys are resources that upstream has, in configured scopes.
    pub(super) discovering: DashMap<CacheId, Arc<tokio::sync::Mutex<()>>>,
    changes: watch::Sender<u64>,
    pub(super) stop: CancellationToken,
}

impl Registry {
    /// Creates a registry without caches. Cancelling `stop` ends all its tasks.
    pub fn new(
        context: CacheContext,
        options: RegistryOptions,
        metrics: Arc<Metrics>,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let uncached = options.resources.iter().map(|resource| {
            let message = NOT_ASKED.to_owned();
            (resource.name.clone(), UncachedReason { phase: Phase::Syncing, message })
        });
        let uncached = uncached.collect();
        let gate = Gate::new(options.gate, metrics.gate());
        Arc::new(Self {
            context,
            budgets: ProcessBudgets::new(options.retained),
            configured: watch::Sender::new(options.resources.clone()),
            staleness_max: watch::Sender::new(options.staleness_max),
            options,
            gate,
            metrics,
            caches: CacheMap::default(),
            added: DashMap::new(),
            uncached,
            refused: DashMap::new(),
            not_cached: DashMap::new(),
            without_room: DashMap::new(),
            on_demand_bytes: SharedBytes::default(),
            protobuf_bytes: SharedBytes::default(),
            tables_bytes: SharedBytes::default(),
            starting: Mutex::new(()),
            discovering: DashMap::new(),
            changes: watch::Sender::new(0),
            stop,
        })
    }

    /// Replaces the resources to cache. New ones are cached as at the start; the streams of removed
    /// ones end.
    pub fn configure(&self, resources: Vec<ConfiguredResource>) {
        self.configured.send_replace(resources);
    }

    /// Replaces the greatest age of a state's last proof at which it may be read.
    pub fn limit_staleness(&self, staleness_max: Option<Duration>) {
        self.staleness_max.send_replace(staleness_max);
        for cache in self.caches.iter() {
            cache.served.hub.limit_staleness(staleness_max);
        }
    }

    fn hub_options(&self) -> HubOptions {
        let RegistryOptions { ring: limits, coalesce_max, .. } = self.options;
        let upstream = self.context.upstream.clone();
        HubOptions {
            limits,
            coalesce_max,
            gate: self.gate.clone(),
            budgets: self.budgets.clone(),
            cluster: Arc::new(move || upstream.cluster()),
        }
    }

    /// Returns the gate for requests that pin state.
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Records why a configured resource has no cache. Returns true if the message has changed.
    pub(super) fn set_uncached(&self, name: &str, reason: UncachedReason) -> bool {
        let message = reason.message.clone();
        let before = self.uncached.insert(name.to_owned(), reason);
        let has_changed = before.is_none_or(|before| before.message != message);
        if has_changed {
            self.changed();
        }
        has_changed
    }

    /// Wakes the receivers of [`Self::changes`].
    pub(super) fn changed(&self) {
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// Returns a receiver of a number that changes when a cache is added, is removed or enters
    /// another phase.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Returns the discovery of the apiserver.
    pub fn discovery(&self) -> &Discovery {
        &self.context.discovery
    }

    /// [`DiscoveredResource::find`] with this registry's discovery.
    pub(super) async fn discover(
        &self,
        group: &str,
        version: &str,
        resource: &str,
    ) -> Result<DiscoveredResource, DiscoveryError> {
        DiscoveredResource::find(&self.context, group, version, resource).await
    }

    /// Adds a cache. Its informer does not run yet: see [`Self::supervise`].
    pub(super) fn insert(
        self: &Arc<Self>,
        name: &str,
        discovered: &DiscoveredResource,
        scope: Scope,
        parser: ObjectParser,
        started_by: StartedBy,
    ) -> Arc<Cache> {
        let DiscoveredResource { info, fields, list_kind, .. } = discovered;
        let gvr = &info.gvr;
        let resource = ResolvedResource {
            group: gvr.group.clone(),
            version: gvr.version.clone(),
            resource: gvr.resource.clone(),
            kind: info.kind.clone(),
            namespaced: info.namespaced,
        };
        let parser = Arc::new(parser.of(&info.kind, &gvr.api_version()));
        let metrics = self.metrics.cache(gvr, &scope, parser.media(), &kubefan_cache::StreamEnd::ALL);
        let served = Served {
            gvr: gvr.clone(),
            namespaced: info.namespaced,
            fields: fields.clone(),
            list_kind: list_kind.clone(),
            hub: Hub::new(resource, parser.clone(), self.hub_options(), metrics),
            parser,
            scope: scope.clone(),
            reading: None,
        };
        let backfiller = Backfiller::new(self.context.clone(), served.clone());
        let cluster_version = ClusterVersion::new(self.context.clone(), &served);
        let schema = Arc::new(CachedSchema::new(discovered.schema.clone()));
        let missing_right = Arc::<MissingRight>::default();
        let prover = Prover::new(
            self.context.clone(),
            served.clone(),
            schema.clone(),
            missing_right.clone(),
            self.options.proves,
        );
        let cache = Arc::new(Cache {
            name: name.to_owned(),
            served,
            backfiller,
            cluster_version,
            prover,
            started_by,
            tenants: Arc::default(),
            stop: self.stop.child_token(),
            schema,
            planned_relist: Arc::default(),
            missing_right,
        });
        if let Some(before) = self.caches.insert(cache.clone()) {
            // A configured resource replaces the cache that a reader had started.
            before.stop.cancel();
        }
        // Only now: a change of the limit finds the cache, or happened before.
        cache.served.hub.limit_staleness(*self.staleness_max.borrow());
        let registry = Arc::downgrade(self);
        let mut phase = cache.served.hub.phase();
        tokio::spawn(async move {
            // Ends when the hub is dropped.
            while phase.changed().await.is_ok() {
                let Some(registry) = registry.upgrade() else { return };
                registry.changed();
            }
        });
        self.changed();
        cache
    }

    /// Runs one cache until it ends, and returns the reason. `known` is the schema of the cache's
    /// fields, and `start` the state that it begins with.
    pub(super) async fn supervise(
        self: Arc<Self>,
        cache: Arc<Cache>,
        quota: Option<CacheQuota>,
        known: Option<SchemaFingerprint>,
        start: StartFrom,
    ) -> CacheEnd {
        let served = &cache.served;
        let hub = &served.hub;
        let ended = |phase, message, refused| CacheEnd { reason: UncachedReason { phase, message }, refused };
        let schema = cache.schema.clone();
        let prover = cache.prover.clone();
        let planned = cache.planned_relist.clone();
        let end = quota.as_ref().map(|quota| (quota.end_token(), quota.too_many_bytes(&served.gvr)));
        let needed_by_others = async {
            let Some((end_token, message)) = end else { return std::future::pending().await };
            end_token.cancelled().await;
            Stopped::TooLarge(message)
        };
        let informer = Informer::new(self.context.clone(), served.clone(), schema, prover, planned, quota, start);
        let stopped = tokio::select! {
            biased;
            () = cache.stop.cancelled() => {
                let message = format!("{} is no longer cached on demand", served.gvr);
                hub.close(Phase::Syncing, StreamEnd::Stopped(message.clone()));
                return ended(Phase::Syncing, message, false);
            }
            stopped = informer.run() => stopped,
            stopped = needed_by_others => stopped,
            message = follow_schema(&self.context, served, &cache.schema, &cache.planned_relist, known) => {
                Stopped::Rewritten(message)
            }
            message = follow_shape(&self.context, served, &cache.schema) => Stopped::Rewritten(message),
        };
        match stopped {
            Stopped::NotFound(message) => {
                info!(resource = %served.gvr, "no longer served by the apiserver");
                hub.close(Phase::NotFound, StreamEnd::NotFound(message.clone()));
                self.context.remove_saved(served).await;
                ended(Phase::NotFound, message, false)
            }
            Stopped::Rewritten(message) => {
                info!(resource = %served.gvr, message, "no longer cached");
                hub.close(Phase::Syncing, StreamEnd::Rewritten(message.clone()));
                ended(Phase::Syncing, message, false)
            }
            Stopped::NotCached(message) => {
                warn!(resource = %served.gvr, message, "cannot be cached");
                let until = Instant::now() + self.context.source.not_cached_ttl();
                self.not_cached.insert(served.gvr.clone(), NotCached { until, message: message.clone() });
                hub.close(Phase::NotCached, StreamEnd::Stopped(message.clone()));
                ended(Phase::NotCached, message, false)
            }
            Stopped::TooLarge(message) | Stopped::NotAcceptable(message) => {
                warn!(resource = %served.gvr, message, "not cached");
                hub.close(Phase::Syncing, StreamEnd::Stopped(message.clone()));
                ended(Phase::Syncing, message, true)
            }
        }
    }

    /// Returns the reason why a resource cannot be cached; `None` if it may be.
    pub(super) fn not_cached(&self, gvr: &GroupVersionResource) -> Option<String> {
        let found = self.not_cached.get(gvr).filter(|found| Instant::now() < found.until)?;
        Some(found.message.clone())
    }

    /// Waits until a resource that cannot be cached may have become one that can: its schema or the
    /// server's version is no longer `known`, or the reason was found long ago.
    pub(super) async fn until_it_may_be_cached(&self, gvr: &GroupVersionResource, known: Option<SchemaFingerprint>) {
        let changes = timeout(self.context.source.not_cached_ttl(), schema_changes(&self.context, gvr, known));
        let _ = self.stop.run_until_cancelled(changes).await;
        self.not_cached.remove(gvr);
        self.changed();
    }

    /// Returns the name and hub of every cache, for logs and debugging.
    pub fn hubs(&self) -> Vec<(String, Arc<Hub>)> {
        let title = |Served { gvr, scope, parser, .. }: &Served| cache_title(&gvr.to_string(), scope, parser.media());
        self.caches.iter().map(|cache| (title(&cache.served), cache.served.hub.clone())).collect()
    }

    /// Limits the history of all caches to a share (0 to 1) of its usual size. If
    /// `keep_derived` is false, also drops data that can be made again: see [`Hub::shed`].
    pub(super) fn shed(&self, history_share: f64, keep_derived: bool) {
        for cache in self.caches.in_order() {
            cache.served.hub.shed(history_share, keep_derived);
            if !keep_derived {
                cache.backfiller.forget();
            }
        }
    }

    /// Updates the gauges of all caches, and those of the readiness.
    pub fn refresh_gauges(&self) {
        for (_, hub) in self.hubs() {
            hub.refresh_gauges();
        }
        let (is_ready, _) = self.readiness();
        self.metrics.set_readiness(is_ready, self.unsynced());
    }
}

/// Returns a cache's name for people: the resource, the namespace if it has one, and the encoding
/// if it is not JSON.
pub(super) fn cache_title(name: &str, scope: &Scope, media: Media) -> String {
    let title = match scope {
        Scope::Cluster => name.to_owned(),
        Scope::Namespace(namespace) => format!("{name}/{namespace}"),
    };
    match media {
        Media::Json => title,
        media => format!("{title} ({})", media.as_str()),
    }
}
