//! The status and gauges of a hub, for people, probes and Prometheus.

use std::time::{Duration, SystemTime};

use kubefan_cache::{Budgets, Phase, budget::Budget};
use kubefan_model::ResourceVersion;
use kubefan_telemetry::metrics::CacheGauges;
use tokio::time::Instant;

use crate::hub::core::Hub;

/// The state of a hub, for people and probes.
#[derive(Debug, Clone)]
pub struct HubStatus {
    /// Phase of the cache.
    pub phase: Phase,
    /// Reason why it does not serve, or the last error of upstream.
    pub message: String,
    /// The version; `None` before the first list.
    pub version: Option<ResourceVersion>,
    /// The oldest version to resume from.
    pub oldest: Option<ResourceVersion>,
    /// Objects held.
    pub objects: usize,
    /// JSON bytes of the objects.
    pub object_bytes: usize,
    /// Time since which it serves.
    pub synced_since: Option<SystemTime>,
    /// Subscribers now.
    pub subscribers: usize,
    /// Time of the last subscriber or reader.
    pub used_at: Instant,
    /// Time since upstream last proved the version ([`Hub::proved`]); `None` if it never has.
    pub age: Option<Duration>,
}

impl Hub {
    /// Returns the state, for people and probes.
    pub fn status(&self) -> HubStatus {
        let state = self.lock();
        let published = &state.published;
        let cached = published.state();
        HubStatus {
            phase: published.phase(),
            message: published.message().to_owned(),
            version: cached.map(|cached| cached.version),
            oldest: cached.map(|cached| cached.history.oldest()),
            objects: cached.map_or(0, |cached| cached.store.len()),
            object_bytes: cached.map_or(0, |cached| cached.store.json_bytes()),
            synced_since: published.synced_since(),
            subscribers: state.subscribers,
            used_at: state.used_at,
            age: published.age(Instant::now()),
        }
    }

    /// Returns the number of views.
    pub fn views(&self) -> usize {
        self.lock().views.len()
    }

    /// Returns the budgets of this cache.
    pub fn budgets(&self) -> &Budgets {
        &self.budgets
    }

    /// Brings the gauges up to date.
    pub fn refresh_gauges(&self) {
        let state = self.lock();
        let cached = state.published.state();
        let mut gauges = CacheGauges {
            subscribers: state.subscribers,
            views: state.views.len(),
            synced: cached.is_some(),
            ..CacheGauges::default()
        };
        if let Some(cached) = cached {
            let now = Instant::now();
            let ring = cached.history.ring();
            let conflated = cached.history.conflated();
            gauges.ring_bytes = ring.bytes();
            gauges.residue_bytes = conflated.bytes();
            let Budgets {
                projected,
                chunks,
                logs,
                segments,
                indexes,
                backfills,
                selectors,
                compression: _,
                chunk_compression: _,
            } = &self.budgets;
            let held = [projected, chunks, logs, segments, indexes, backfills, selectors].map(Budget::used);
            gauges.log_bytes = held.iter().sum();
            gauges.ring_events = ring.len();
            gauges.ring_age = ring.age(now);
            gauges.objects = cached.store.len();
            gauges.object_bytes = cached.store.json_bytes();
            gauges.object_memory_bytes = cached.store.cost_bytes();
            gauges.version = cached.version.get();
            gauges.staleness_seconds = state.published.age(now).map_or(f64::INFINITY, |age| age.as_secs_f64());
        }
        drop(state);
        self.metrics.set(gauges);
    }
}
