//! The objects of a view or of a list at one version, found once for all its readers.
//!
//! The store is scanned in slices, each by the next subscriber: a subscriber that finds another one
//! scanning waits for at most one slice.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use kubefan_cache::{Store, sliced_scan::SLICE_TESTS};
use kubefan_model::{ObjectKey, object::Object, selection::Selection};

/// The selected objects of a state, as far as they were found.
pub struct SelectedObjects {
    store: Store,
    page: Page,
    scanned: Mutex<Scanned>,
    selected: OnceLock<Vec<Arc<Object>>>,
}

/// The part of a list that one response has.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Page {
    /// The last key of the page before.
    pub after: Option<ObjectKey>,
    /// The most objects of the page.
    pub limit: Option<usize>,
}

#[derive(Default)]
struct Scanned {
    found: Vec<Arc<Object>>,
    last: Option<ObjectKey>,
}

impl SelectedObjects {
    /// Returns a page of the objects of this state. Nothing is scanned yet.
    pub fn new(store: Store, page: Page) -> Self {
        let scanned = Scanned { found: Vec::new(), last: page.after.clone() };
        Self { store, page, scanned: Mutex::new(scanned), selected: OnceLock::new() }
    }

    /// Whether they are the objects of this state.
    pub fn is_of(&self, store: &Store) -> bool {
        self.store.is_same(store)
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
                let left = self.page.limit.map_or(usize::MAX, |limit| limit - found.len());
                found.extend(scan.by_ref().take(left).cloned());
                *last = scan.tested().cloned().or_else(|| before.clone());
                if scan.is_complete() || self.page.limit == Some(found.len()) {
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
