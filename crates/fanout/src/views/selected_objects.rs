//! The objects of a view at one version, found once for all subscribers that start together.
//!
//! The store is scanned in slices, each by the next subscriber: a subscriber that finds another one
//! scanning waits for at most one slice.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use kubefan_cache::{Store, sliced_scan::SLICE_TESTS};
use kubefan_model::{ObjectKey, object::Object, selection::Selection};

/// The selected objects of a state, as far as they were found.
pub struct SelectedObjects {
    store: Store,
    scanned: Mutex<Scanned>,
    selected: OnceLock<Vec<Arc<Object>>>,
}

#[derive(Default)]
struct Scanned {
    found: Vec<Arc<Object>>,
    last: Option<ObjectKey>,
}

impl SelectedObjects {
    /// Returns the objects of this state. Nothing is scanned yet.
    pub fn new(store: Store) -> Self {
        Self { store, scanned: Mutex::default(), selected: OnceLock::new() }
    }

    /// Scans a slice, unless all objects are found. Returns them, in key order, once they are.
    pub fn scan(&self, selection: &Selection) -> Option<&[Arc<Object>]> {
        if self.selected.get().is_none() {
            let mut scanned = self.scanned.lock().unwrap_or_else(PoisonError::into_inner);
            // Another subscriber may have found the last of them meanwhile.
            if self.selected.get().is_none() {
                let Scanned { found, last } = &mut *scanned;
                let before = last.take();
                let mut scan = self.store.scan(selection, before.as_ref(), SLICE_TESTS);
                found.extend(scan.by_ref().cloned());
                *last = scan.tested().cloned().or_else(|| before.clone());
                if scan.is_complete() {
                    let _ = self.selected.set(std::mem::take(found));
                }
            }
        }
        self.selected.get().map(Vec::as_slice)
    }

    /// The selected objects from one key to another, both included; none before all were found.
    pub fn range(&self, first: &ObjectKey, last: &ObjectKey) -> &[Arc<Object>] {
        let selected = self.selected.get().map(Vec::as_slice).unwrap_or_default();
        let from = selected.partition_point(|object| object.key() < first);
        let to = selected.partition_point(|object| object.key() <= last);
        &selected[from..to.max(from)]
    }
}
