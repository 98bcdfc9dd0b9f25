//! The counters that the demo compares: those of the simulated apiserver, of kubefan and of the
//! subscribers, read at the same time.

use std::{ops::Sub, sync::atomic::Ordering};

use prometheus::Registry;

use super::progress::Progress;
use kubefan_sim::apiserver::SimStats;

/// Counter values at one moment, or the difference of two moments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Changes made to objects.
    pub changes: u64,
    /// Lists answered by the apiserver.
    pub lists: u64,
    /// Watches started at the apiserver.
    pub watches: u64,
    /// Events framed and sent by the apiserver: one per watcher and event.
    pub events: u64,
    /// Objects encoded by the apiserver, for watches and lists.
    pub objects: u64,
    /// Selector tests by the apiserver.
    pub selector_tests: u64,
    /// Bytes sent by the apiserver.
    pub bytes: u64,
    /// Messages encoded by kubefan. Subscribers with the same selectors share a message.
    pub messages: u64,
    /// Changes received by subscribers.
    pub deliveries: u64,
    /// Bytes of the objects in those changes.
    pub delivered_bytes: u64,
}

impl Counts {
    /// Reads all counters.
    pub(super) fn read(stats: &SimStats, kubefan: &Registry, progress: &Progress) -> Self {
        Self {
            changes: progress.changes.load(Ordering::Relaxed),
            lists: stats.lists,
            watches: stats.watches_started,
            events: stats.events_encoded,
            objects: stats.objects_encoded + stats.list_items,
            selector_tests: stats.selector_tests,
            bytes: stats.bytes_sent,
            messages: counter(kubefan, "kubefan_events_dispatched_total"),
            deliveries: progress.deliveries.load(Ordering::Relaxed),
            delivered_bytes: progress.delivered_bytes.load(Ordering::Relaxed),
        }
    }
}

impl Sub for Counts {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            changes: self.changes.saturating_sub(before.changes),
            lists: self.lists.saturating_sub(before.lists),
            watches: self.watches.saturating_sub(before.watches),
            events: self.events.saturating_sub(before.events),
            objects: self.objects.saturating_sub(before.objects),
            selector_tests: self.selector_tests.saturating_sub(before.selector_tests),
            bytes: self.bytes.saturating_sub(before.bytes),
            messages: self.messages.saturating_sub(before.messages),
            deliveries: self.deliveries.saturating_sub(before.deliveries),
            delivered_bytes: self.delivered_bytes.saturating_sub(before.delivered_bytes),
        }
    }
}

/// The sum of a counter over all its labels; 0 before its first use.
fn counter(registry: &Registry, name: &str) -> u64 {
    let families = registry.gather();
    let metrics = families.iter().filter(|family| family.name() == name).flat_map(|family| family.get_metric());
    metrics.map(|metric| metric.get_counter().get_value() as u64).sum()
}
