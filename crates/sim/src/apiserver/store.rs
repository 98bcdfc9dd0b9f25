//! The objects and their history: one revision for everything, as etcd has, and per resource a window of recent events.
//!
//! A write costs the logarithm of the number of objects; readers take persistent snapshots and hold no lock while they encode. A
//! watcher that is slower than the window loses its place and is cut, as upstream does.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use super::{object::Object, resource::SimResource, status::Status};
use imbl::OrdMap;
use kubefan_common::sync::watch;
use kubefan_model::{GroupVersionResource, ObjectKey};
use serde_json::Value;

/// The objects at one version, in key order.
pub(super) type Snapshot = OrdMap<ObjectKey, Arc<Object>>;

/// One event.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) version: u64,
    pub(super) current: Option<Arc<Object>>,
    pub(super) previous: Option<Arc<Object>>,
    /// Whether a live watcher has had the object encoded. kube-apiserver shares that encoding among all live watchers.
    pub(super) encoded: AtomicBool,
}

/// What a watcher finds after its place in the window.
pub(super) enum Since {
    Events(Vec<Arc<Entry>>),
    /// Nothing yet.
    UpToDate,
    /// Events it has not seen are gone.
    Lost,
    /// The resource is gone, and it has seen everything.
    Closed,
}

/// One resource.
pub(super) struct Cell {
    pub(super) resource: SimResource,
    /// Counts schema changes; part of the OpenAPI hash.
    pub(super) schema: AtomicU64,
    state: Mutex<CellState>,
    changed: watch::Sender<u64>,
}

struct CellState {
    objects: Snapshot,
    window: VecDeque<Arc<Entry>>,
    /// The version that watches can start from while no event was dropped from the window.
    listed: u64,
    /// The last event that was dropped; 0 for none.
    lost: u64,
    /// No state before this one can be read, whether there are events of it or not; 0 for none.
    compacted: u64,
    /// Up to here it is known that nothing was missed: what bookmarks carry. A quiet resource's lags the revision, as upstream's does.
    progress: u64,
    closed: bool,
}

pub(super) struct Store {
    shared: Mutex<Shared>,
    revision: watch::Sender<u64>,
    window_events_max: usize,
}

struct Shared {
    revision: u64,
    cells: BTreeMap<GroupVersionResource, Arc<Cell>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store {
    pub(super) fn new(window_events_max: usize) -> Self {
        let shared = Shared { revision: 1, cells: BTreeMap::new() };
        Self {
            shared: Mutex::new(shared),
            revision: watch::Sender::new(1),
            window_events_max: window_events_max.max(1),
        }
    }

    pub(super) fn revision(&self) -> u64 {
        *self.revision.borrow()
    }

    /// Told of every new revision.
    pub(super) fn revisions(&self) -> watch::Receiver<u64> {
        self.revision.subscribe()
    }

    pub(super) fn cell(&self, gvr: &GroupVersionResource) -> Option<Arc<Cell>> {
        lock(&self.shared).cells.get(gvr).cloned()
    }

    pub(super) fn cells(&self) -> Vec<Arc<Cell>> {
        lock(&self.shared).cells.values().cloned().collect()
    }

    /// Serves a resource, empty; one of that name that is there already stays.
    pub(super) fn add(&self, resource: SimResource) {
        let mut shared = lock(&self.shared);
        let revision = shared.revision;
        shared.cells.entry(resource.gvr.clone()).or_insert_with(|| {
            let state = CellState {
                objects: Snapshot::new(),
                window: VecDeque::new(),
                listed: revision,
                lost: 0,
                compacted: 0,
                progress: revision,
                closed: false,
            };
            let changed = watch::Sender::new(revision);
            Arc::new(Cell { resource, schema: AtomicU64::new(0), state: Mutex::new(state), changed })
        });
    }

    /// Deletes every object, each at a revision of its own, and serves the resource no longer.
    pub(super) fn remove(&self, gvr: &GroupVersionResource) {
        let mut shared = lock(&self.shared);
        let Some(cell) = shared.cells.remove(gvr) else { return };
        let mut state = lock(&cell.state);
        for (_, object) in state.objects.clone() {
            self.commit(&mut shared, &cell, &mut state, None, Some(object));
        }
        state.closed = true;
        cell.changed.send_replace(shared.revision);
    }

    /// Writes an object that is not there yet.
    pub(super) fn create(&self, cell: &Cell, value: Value) -> Result<Arc<Object>, Status> {
        let mut shared = lock(&self.shared);
        let mut state = lock(&cell.state);
        let object = Object::new(&cell.resource, value, shared.revision + 1);
        if state.closed {
            return Err(Status::no_such_resource());
        }
        if state.objects.contains_key(&object.key) {
            let gvr = &cell.resource.gvr;
            return Err(Status::already_exists(&gvr.group, &gvr.resource, object.key.name()));
        }
        let object = Arc::new(object);
        self.commit(&mut shared, cell, &mut state, Some(object.clone()), None);
        Ok(object)
    }

    /// Writes what `change` makes of an object. A write that changes nothing has no version of its own and no event.
    pub(super) fn update(
        &self,
        cell: &Cell,
        key: &ObjectKey,
        change: impl FnOnce(&Object) -> Result<Value, Status>,
    ) -> Result<Arc<Object>, Status> {
        let mut shared = lock(&self.shared);
        let mut state = lock(&cell.state);
        let previous = state.get(cell, key)?;
        let value = change(&previous)?;
        let object = Object::new(&cell.resource, value, previous.version);
        if object.bytes() == previous.bytes() {
            return Ok(previous);
        }
        let object = Arc::new(object.moved_to(shared.revision + 1));
        self.commit(&mut shared, cell, &mut state, Some(object.clone()), Some(previous));
        Ok(object)
    }

    /// Deletes an object and returns its last state.
    pub(super) fn delete(&self, cell: &Cell, key: &ObjectKey) -> Result<Arc<Object>, Status> {
        let mut shared = lock(&self.shared);
        let mut state = lock(&cell.state);
        let previous = state.get(cell, key)?;
        self.commit(&mut shared, cell, &mut state, None, Some(previous.clone()));
        Ok(previous)
    }

    fn commit(
        &self,
        shared: &mut Shared,
        cell: &Cell,
        state: &mut CellState,
        current: Option<Arc<Object>>,
        previous: Option<Arc<Object>>,
    ) {
        shared.revision += 1;
        let version = shared.revision;
        match (&current, &previous) {
            (Some(object), _) => drop(state.objects.insert(object.key.clone(), object.clone())),
            (None, Some(object)) => drop(state.objects.remove(&object.key)),
            (None, None) => {}
        }
        state.window.push_back(Arc::new(Entry { version, current, previous, encoded: AtomicBool::new(false) }));
        state.progress = version;
        if state.window.len() > self.window_events_max {
            state.lost = state.window.pop_front().map_or(state.lost, |entry| entry.version);
        }
        cell.changed.send_replace(version);
        self.revision.send_replace(version);
    }

    /// Moves a resource's progress to the present, as a consistent read does, and returns it.
    pub(super) fn make_consistent(&self, cell: &Cell) -> u64 {
        let shared = lock(&self.shared);
        lock(&cell.state).progress = shared.revision;
        shared.revision
    }

    /// Rewrites every object's bytes without a new version, as a changed schema or a newer server does.
    pub(super) fn rewrite(&self, cell: &Cell, rewrite: impl Fn(&mut Value)) {
        let mut state = lock(&cell.state);
        for (key, object) in state.objects.clone() {
            let mut value = object.value();
            rewrite(&mut value);
            state.objects.insert(key, Arc::new(Object::new(&cell.resource, value, object.version)));
        }
        cell.schema.fetch_add(1, Ordering::Relaxed);
    }

    /// Forgets all states but the present. What is in the window can be watched from all the same.
    pub(super) fn compact_states(&self) {
        let shared = lock(&self.shared);
        shared.cells.values().for_each(|cell| lock(&cell.state).compacted = shared.revision);
    }

    /// Forgets all history: what was before can be neither watched from nor read.
    pub(super) fn compact(&self) {
        let shared = lock(&self.shared);
        for cell in shared.cells.values() {
            let mut state = lock(&cell.state);
            if let Some(last) = state.window.back() {
                state.lost = last.version;
            }
            state.window.clear();
            state.listed = shared.revision;
            state.progress = shared.revision;
        }
    }
}

/// All objects at one version.
#[derive(Clone)]
pub(super) struct Backup {
    revision: u64,
    cells: BTreeMap<GroupVersionResource, Snapshot>,
}

impl Store {
    pub(super) fn backup(&self) -> Backup {
        let shared = lock(&self.shared);
        let objects =
            |(gvr, cell): (&GroupVersionResource, &Arc<Cell>)| (gvr.clone(), lock(&cell.state).objects.clone());
        Backup { revision: shared.revision, cells: shared.cells.iter().map(objects).collect() }
    }

    /// Puts everything back as it was, its version too, and forgets all history.
    pub(super) fn restore(&self, backup: &Backup) {
        let mut shared = lock(&self.shared);
        shared.revision = backup.revision;
        for (gvr, cell) in &shared.cells {
            let mut state = lock(&cell.state);
            state.objects = backup.cells.get(gvr).cloned().unwrap_or_default();
            state.window.clear();
            (state.listed, state.lost, state.compacted) = (backup.revision, 0, 0);
            state.progress = backup.revision;
            cell.changed.send_replace(backup.revision);
        }
        self.revision.send_replace(backup.revision);
    }
}

impl Cell {
    /// The state at a version that is not in the future; `None` when it is no longer held.
    pub(super) fn at(&self, version: u64) -> Option<Snapshot> {
        let state = lock(&self.state);
        if version < state.listed.max(state.lost).max(state.compacted) {
            return None;
        }
        let mut objects = state.objects.clone();
        for entry in state.window.iter().rev().take_while(|entry| entry.version > version) {
            match (&entry.previous, &entry.current) {
                (Some(previous), _) => drop(objects.insert(previous.key.clone(), previous.clone())),
                (None, Some(current)) => drop(objects.remove(&current.key)),
                (None, None) => {}
            }
        }
        Some(objects)
    }

    /// The state as it is, and the version it stands for.
    pub(super) fn snapshot(&self) -> (Snapshot, u64) {
        let state = lock(&self.state);
        (state.objects.clone(), state.progress)
    }

    pub(super) fn get(&self, key: &ObjectKey) -> Option<Arc<Object>> {
        lock(&self.state).objects.get(key).cloned()
    }

    pub(super) fn progress(&self) -> u64 {
        lock(&self.state).progress
    }

    /// The oldest version a watch can start from.
    pub(super) fn oldest(&self) -> u64 {
        let state = lock(&self.state);
        match state.window.front() {
            Some(first) if state.lost > state.listed => first.version - 1,
            _ => state.listed,
        }
    }

    /// At most `count_max` events after a version.
    pub(super) fn since(&self, version: u64, count_max: usize) -> Since {
        let state = lock(&self.state);
        if version < state.lost {
            return Since::Lost;
        }
        let start = state.window.partition_point(|entry| entry.version <= version);
        let events: Vec<_> = state.window.range(start..).take(count_max).cloned().collect();
        match (events.is_empty(), state.closed) {
            (false, _) => Since::Events(events),
            (true, false) => Since::UpToDate,
            (true, true) => Since::Closed,
        }
    }

    /// Told of every event, and of the end.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }
}

impl CellState {
    fn get(&self, cell: &Cell, key: &ObjectKey) -> Result<Arc<Object>, Status> {
        let gvr = &cell.resource.gvr;
        self.objects.get(key).cloned().ok_or_else(|| Status::not_found(&gvr.group, &gvr.resource, key.name()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// Keys and versions.
    fn keys(objects: &Snapshot) -> Vec<(String, u64)> {
        objects.iter().map(|(key, object)| (key.to_string(), object.version)).collect()
    }

    proptest! {
        #[test]
        fn every_state_in_the_window_can_be_read_again(
            writes in prop::collection::vec((0..3u8, 0..4u8), 1..40),
            window_events_max in 1..20usize,
            compact_at in 0..60usize,
        ) {
            let store = Store::new(window_events_max);
            let widgets = SimResource::custom("example.com", "v1", "widgets", "Widget");
            let gvr = widgets.gvr.clone();
            store.add(widgets);
            let cell = store.cell(&gvr).unwrap();
            let mut states = BTreeMap::from([(store.revision(), Vec::new())]);
            let mut forgotten = 0;
            for (i, (write, name)) in writes.into_iter().enumerate() {
                let object = json!({"metadata": {"name": format!("w{name}")}, "spec": {"write": i}});
                let key = ObjectKey::new("", &format!("w{name}"));
                // Some writes fail; those make no version.
                let _ = match write {
                    0 => store.create(&cell, object),
                    1 => store.update(&cell, &key, |_| Ok(object)),
                    _ => store.delete(&cell, &key),
                };
                states.insert(store.revision(), keys(&cell.snapshot().0));
                if i == compact_at {
                    store.compact();
                    forgotten = store.revision();
                }
            }
            let newest = store.revision();
            let forgotten = forgotten.max(newest.saturating_sub(window_events_max as u64));
            for (version, state) in states {
                let held = cell.at(version).map(|objects| keys(&objects));
                prop_assert_eq!(held, (version >= forgotten).then_some(state));
            }
            prop_assert!(cell.oldest() >= forgotten);
            prop_assert!(matches!(cell.since(newest, 1), Since::UpToDate));
        }
    }
}
