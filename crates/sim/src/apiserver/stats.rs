//! Counters. The demo reads the cost of a load on the apiserver from them.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use kubefan_model::GroupVersionResource;

/// Counters of the simulated apiserver. All but `open_watches` only grow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SimStats {
    /// Watches open now, by resource.
    pub open_watches: BTreeMap<GroupVersionResource, u64>,
    /// Watches started.
    pub watches_started: u64,
    /// Watches ended by the server because the retained events no longer reached back to them.
    pub watches_cut: u64,
    /// Lists answered.
    pub lists: u64,
    /// Objects sent in lists.
    pub list_items: u64,
    /// Gets answered.
    pub gets: u64,
    /// Writes that created a new resource version.
    pub writes: u64,
    /// Events framed and sent, including bookmarks: one per watcher and event.
    pub events_encoded: u64,
    /// Objects encoded for watches. As in kube-apiserver, up-to-date watchers share one encoding of
    /// an event's object. An object is encoded per watcher if it belongs to the initial events, is
    /// replayed, or has left the selector.
    pub objects_encoded: u64,
    /// Selector tests against the objects of events and lists.
    pub selector_tests: u64,
    /// Bytes of response bodies sent.
    pub bytes_sent: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn inc(&self) {
        self.add(1);
    }

    pub(super) fn add(&self, count: usize) {
        self.0.fetch_add(count as u64, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    open_watches: Mutex<BTreeMap<GroupVersionResource, u64>>,
    pub(super) watches_started: Counter,
    pub(super) watches_cut: Counter,
    pub(super) lists: Counter,
    pub(super) list_items: Counter,
    pub(super) gets: Counter,
    pub(super) writes: Counter,
    pub(super) events_encoded: Counter,
    pub(super) objects_encoded: Counter,
    pub(super) selector_tests: Counter,
    pub(super) bytes_sent: Counter,
}

impl Counters {
    pub(super) fn snapshot(&self) -> SimStats {
        SimStats {
            open_watches: self.open_watches.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            watches_started: self.watches_started.get(),
            watches_cut: self.watches_cut.get(),
            lists: self.lists.get(),
            list_items: self.list_items.get(),
            gets: self.gets.get(),
            writes: self.writes.get(),
            events_encoded: self.events_encoded.get(),
            objects_encoded: self.objects_encoded.get(),
            selector_tests: self.selector_tests.get(),
            bytes_sent: self.bytes_sent.get(),
        }
    }

    fn change_open(&self, gvr: &GroupVersionResource, change: impl FnOnce(&mut u64)) {
        let mut open = self.open_watches.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(gvr.clone()).or_default();
        change(count);
        if *count == 0 {
            open.remove(gvr);
        }
    }
}

/// Counts one open watch until it is dropped.
pub(super) struct OpenWatch {
    counters: Arc<Counters>,
    gvr: GroupVersionResource,
}

impl OpenWatch {
    pub(super) fn new(counters: &Arc<Counters>, gvr: &GroupVersionResource) -> Self {
        counters.watches_started.inc();
        counters.change_open(gvr, |count| *count += 1);
        Self { counters: counters.clone(), gvr: gvr.clone() }
    }
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        self.counters.change_open(&self.gvr, |count| *count = count.saturating_sub(1));
    }
}
