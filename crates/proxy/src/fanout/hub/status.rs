//! What a hub tells of itself, to people, probes and Prometheus.

use std::{
    sync::atomic::Ordering,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

use crate::{
    fanout::{hub::core::Hub, send::budget::Budgets},
    telemetry::metrics::CacheGauges,
};
use kubefan_model::ResourceVersion;

/// Whether a resource is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The first list is not complete.
    Syncing,
    /// Served; the upstream watch is live.
    Synced,
    /// Served from the cache; the upstream watch is being started again.
    Stale,
    /// The apiserver does not serve it.
    NotFound,
    /// The apiserver denies it.
    Forbidden,
}

impl Phase {
    /// Whether readers are answered.
    pub fn serves(self) -> bool {
        matches!(self, Self::Synced | Self::Stale)
    }

    /// The name in logs, readyz and the status page.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Syncing => "syncing",
            Self::Synced => "synced",
            Self::Stale => "stale",
            Self::NotFound => "not found",
            Self::Forbidden => "forbidden",
        }
    }
}

/// The state of a hub, for people and probes.
#[derive(Debug, Clone)]
pub struct HubStatus {
    /// Whether it serves.
    pub phase: Phase,
    /// Why not, or the last error upstream.
    pub message: String,
    /// The version; `None` before the first list.
    pub version: Option<ResourceVersion>,
    /// The oldest version to resume from.
    pub oldest: Option<ResourceVersion>,
    /// Objects held.
    pub objects: usize,
    /// Their JSON bytes.
    pub object_bytes: usize,
    /// Since when it serves.
    pub synced_since: Option<SystemTime>,
    /// Subscribers now.
    pub subscribers: usize,
    /// When there was last a subscriber or a reader.
    pub used_at: Instant,
    /// How long ago upstream proved the version ([`Hub::proved`]); `None` where it never has.
    pub age: Option<Duration>,
}

impl Hub {
    /// The state, for people and probes.
    pub fn status(&self) -> HubStatus {
        let inner = self.inner();
        let cached = inner.cache.as_ref();
        HubStatus {
            phase: *self.phase.borrow(),
            message: inner.message.clone(),
            version: cached.map(|cached| cached.version),
            oldest: cached.map(|cached| cached.history.oldest()),
            objects: cached.map_or(0, |cached| cached.store.len()),
            object_bytes: cached.map_or(0, |cached| cached.store.json_bytes()),
            synced_since: inner.synced_since,
            subscribers: inner.subscribers,
            used_at: inner.used_at,
            age: inner.age(),
        }
    }

    /// The number of distinct selections.
    pub fn views(&self) -> usize {
        self.inner().views.len()
    }

    /// What the blocks of all views take, in bytes.
    pub fn segment_bytes(&self) -> usize {
        self.view_bytes.blocks.load(Ordering::Relaxed)
    }

    /// Brings the gauges up to date.
    pub fn refresh_gauges(&self) {
        let inner = self.inner();
        let mut gauges = CacheGauges {
            subscribers: inner.subscribers,
            views: inner.views.len(),
            synced: inner.cache.is_some(),
            ..CacheGauges::default()
        };
        if let Some(cached) = &inner.cache {
            let (ring, residue) = (cached.history.ring(), cached.history.conflated());
            gauges.ring_bytes = ring.bytes();
            gauges.residue_bytes = residue.bytes();
            let Budgets { projected, chunks } = &self.view_bytes.kept;
            gauges.log_bytes =
                self.view_bytes.logs.load(Ordering::Relaxed) + self.segment_bytes() + projected.used() + chunks.used();
            gauges.ring_events = ring.len();
            gauges.ring_age = ring.age(Instant::now());
            gauges.objects = cached.store.len();
            gauges.object_bytes = cached.store.json_bytes();
            gauges.object_memory_bytes = cached.store.cost_bytes();
            gauges.version = cached.version.get();
            gauges.staleness_seconds = inner.age().map_or(f64::INFINITY, |age| age.as_secs_f64());
        }
        drop(inner);
        self.metrics.set(gauges);
    }
}
