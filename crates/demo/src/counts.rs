//! What is compared: counters of the simulated apiserver, of kubefan and of the subscribers, read together.

use std::{ops::Sub, sync::atomic::Ordering};

use prometheus::Registry;

use super::board::Board;
use kubefan_sim::apiserver::SimStats;

/// The counters at one moment, or the difference of two.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Changes made.
    pub changes: u64,
    /// Lists that the apiserver answered.
    pub lists: u64,
    /// Watches that the apiserver took.
    pub watches: u64,
    /// Events that the apiserver framed and sent, one for each watcher.
    pub events: u64,
    /// Objects that the apiserver encoded, for watches or in lists.
    pub objects: u64,
    /// Selectors that the apiserver tested.
    pub selector_tests: u64,
    /// Bytes that the apiserver sent.
    pub bytes: u64,
    /// Messages that kubefan encoded, each for all subscribers with the same selectors.
    pub messages: u64,
    /// Changes that subscribers received.
    pub deliveries: u64,
    /// Bytes of the objects in them.
    pub delivered_bytes: u64,
}

impl Counts {
    /// Reads all counters.
    pub(super) fn read(stats: &SimStats, kubefan: &Registry, board: &Board) -> Self {
        Self {
            changes: board.changes.load(Ordering::Relaxed),
            lists: stats.lists,
            watches: stats.watches_started,
            events: stats.events_encoded,
            objects: stats.objects_encoded + stats.list_items,
            selector_tests: stats.selector_tests,
            bytes: stats.bytes_sent,
            messages: counter(kubefan, "kubefan_events_dispatched_total"),
            deliveries: board.deliveries.load(Ordering::Relaxed),
            delivered_bytes: board.delivered_bytes.load(Ordering::Relaxed),
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

/// A counter's sum over its labels; 0 before its first use.
fn counter(registry: &Registry, name: &str) -> u64 {
    let families = registry.gather();
    let metrics = families.iter().filter(|family| family.name() == name).flat_map(|family| family.get_metric());
    metrics.map(|metric| metric.get_counter().get_value() as u64).sum()
}
