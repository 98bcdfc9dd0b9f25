//! The caches, by the configuration.

use std::sync::Arc;

use kubefan_admission::GateLimits;
use kubefan_cache::{RetainedLimits, RingLimits};
use kubefan_informers::{
    CacheContext, EncodingLimits, ListScheduler, OnDemandLimits, Registry, RegistryOptions, SavedStates, SizeLimits,
};
use kubefan_peer::Peers;
use kubefan_upstream::{
    Source,
    discovery::{Discovery, DiscoveryOptions},
    lines::LINE_BYTES_MAX,
    reflector::ReflectorOptions,
};
use tokio::task::JoinHandle;

use super::component::Shared;
use crate::config::{CacheCompression, ConsistentReads, FormConfig, WatchListMode};

/// The caches of the configured resources, before they are built.
pub(super) struct Caches {
    /// The server of their lists and watches.
    pub(super) source: Source,
    /// The replicas to start from.
    pub(super) peers: Option<Peers>,
    /// The states on disk to start from.
    pub(super) saved: Option<Arc<SavedStates>>,
    /// The memory budget.
    pub(super) memory_bytes_max: Option<usize>,
}

/// The caches that are filled.
pub(super) struct CachesHandle {
    pub(super) registry: Arc<Registry>,
    /// Ends when kubefan stops.
    pub(super) informers: JoinHandle<()>,
}

impl Caches {
    /// Fills the caches until kubefan stops.
    pub(super) fn build(self, shared: Shared<'_>) -> CachesHandle {
        let registry = self.registry(shared);
        let informers = tokio::spawn(registry.clone().run());
        CachesHandle { registry, informers }
    }

    fn registry(self, Shared { config, upstream, metrics, stops }: Shared<'_>) -> Arc<Registry> {
        let Self { source, peers, saved, memory_bytes_max } = self;
        let limit = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let encoding = |config: FormConfig| EncodingLimits {
            bytes_max: limit(config.bytes_max),
            idle_timeout: config.idle_timeout,
        };
        let context = CacheContext {
            upstream: upstream.clone(),
            source,
            discovery: Arc::new(Discovery::new(upstream.clone(), DiscoveryOptions::default())),
            lists: ListScheduler::new(config.upstream.lists_max, metrics.lists()),
            reflector: ReflectorOptions {
                page_size: config.upstream.page_size,
                watch_list: config.upstream.watch_list == WatchListMode::Auto,
                upstream_idle_timeout: config.upstream.idle_timeout,
                line_bytes_max: LINE_BYTES_MAX,
            },
            upstream_field_selector: config
                .upstream
                .field_selector
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
            schema_check_interval: config.upstream.schema_check_interval,
            cache_compression: config.cache.compression == CacheCompression::Zstd,
            peers,
            saved,
            seed: None,
        };
        let options = RegistryOptions {
            resources: config.cache.resources.clone(),
            namespaces: config.cache.namespaces.clone(),
            ring: RingLimits {
                ring_bytes_max: config.cache.ring_bytes_max.map(limit),
                ring_events_max: config.cache.ring_events_max,
                ring_age_max: config.cache.ring_age_max,
                conflated_bytes_max: config.cache.conflated_bytes_max.map(limit),
            },
            coalesce_max: config.serving.coalesce_max,
            gate: GateLimits {
                snapshots_max: config.serving.snapshots_max,
                snapshot_queue_timeout: config.serving.snapshot_queue_timeout,
            },
            staleness_max: config.serving.staleness_max,
            proves: config.serving.consistent_reads == ConsistentReads::Probe,
            self_check_interval: config.upstream.self_check_interval,
            on_demand: config.on_demand.is_on.then(|| OnDemandLimits {
                on_demand_resources_max: config.on_demand.resources_max,
                size: SizeLimits {
                    on_demand_objects_max: config.on_demand.objects_max,
                    on_demand_bytes_max: limit(config.on_demand.bytes_max),
                },
                on_demand_idle_timeout: config.on_demand.idle_timeout,
            }),
            protobuf: config.on_demand.protobuf().map(encoding),
            tables: config.on_demand.tables().map(encoding),
            retained: RetainedLimits::of_memory(memory_bytes_max).with_selectors(config.serving.selector_bytes_max),
        };
        Registry::new(context, options, metrics.clone(), stops.stop.clone())
    }
}
