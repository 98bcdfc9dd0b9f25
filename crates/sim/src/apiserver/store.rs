//! The objects and their history. As in etcd, one revision counts the writes to all resources. Each
//! resource retains its most recent events.
//!
//! A write costs O(log n) in the number of objects. Readers take persistent snapshots and hold no
//! lock while they encode. A watcher that falls behind the retained events is ended, as
//! kube-apiserver does, so that a slow client costs no memory.

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

/// One retained event.
#[derive(Debug)]
pub(super) struct StoredEvent {
    pub(super) version: u64,
    pub(super) current: Option<Arc<Object>>,
    pub(super) previous: Option<Arc<Object>>,
    /// Whether an up-to-date watcher has already encoded the object. kube-apiserver shares that
    /// encoding among all such watchers.
    pub(super) encoded: AtomicBool,
}

/// The events after a watcher's position.
pub(super) enum Since {
    Events(Vec<Arc<StoredEvent>>),
    /// No events yet.
    UpToDate,
    /// The watcher has not read some events that are no longer retained.
    TooOld,
    /// The resource is no longer served, and the watcher has read every event.
    Closed,
}

/// One served resource, with its objects and retained events.
pub(super) struct Collection {
    pub(super) resource: SimResource,
    /// Number of schema changes. Part of the OpenAPI hash.
    pub(super) schema: AtomicU64,
    state: Mutex<CollectionState>,
    changed: watch::Sender<u64>,
}

struct CollectionState {
    objects: Snapshot,
    window: VecDeque<Arc<StoredEvent>>,
    /// The oldest version that watches can start from, as long as no event was dropped from the
    /// window.
    listed: u64,
    /// Version of the last event dropped from the window; 0 if none was.
    dropped: u64,
    /// States before this version cannot be read, even if their events are retained; 0 if unset.
    compacted: u64,
    /// The version that bookmarks carry: no event at or below it is missing. For a quiet resource
    /// it lags behind the revision, as in kube-apiserver.
    progress: u64,
    closed: bool,
}

pub(super) struct Store {
    shared: Mutex<StoreState>,
    revision: watch::Sender<u64>,
    window_events_max: usize,
}

struct StoreState {
    revision: u64,
    /// The revision of the transaction in progress.
    transaction: Option<u64>,
    collections: BTreeMap<GroupVersionResource, Arc<Collection>>,
}

impl StoreState {
    /// The revision of the next write.
    fn next(&self) -> u64 {
        self.transaction.unwrap_or(self.revision + 1)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store {
    pub(super) fn new(window_events_max: usize) -> Self {
        let shared = StoreState { revision: 1, transaction: None, collections: BTreeMap::new() };
        Self {
            shared: Mutex::new(shared),
            revision: watch::Sender::new(1),
            window_events_max: window_events_max.max(1),
        }
    }

    pub(super) fn revision(&self) -> u64 {
        *self.revision.borrow()
    }

    /// Receives every new revision.
    pub(super) fn revisions(&self) -> watch::Receiver<u64> {
        self.revision.subscribe()
    }

    pub(super) fn collection(&self, gvr: &GroupVersionResource) -> Option<Arc<Collection>> {
        lock(&self.shared).collections.get(gvr).cloned()
    }

    pub(super) fn collections(&self) -> Vec<Arc<Collection>> {
        lock(&self.shared).collections.values().cloned().collect()
    }

    /// Starts to serve an empty resource. Does nothing if the resource is already served.
    pub(super) fn add(&self, resource: SimResource) {
        let mut shared = lock(&self.shared);
        let revision = shared.revision;
        shared.collections.entry(resource.gvr.clone()).or_insert_with(|| {
            let state = CollectionState {
                objects: Snapshot::new(),
                window: VecDeque::new(),
                listed: revision,
                dropped: 0,
                compacted: 0,
                progress: revision,
                closed: false,
            };
            let changed = watch::Sender::new(revision);
            Arc::new(Collection { resource, schema: AtomicU64::new(0), state: Mutex::new(state), changed })
        });
    }

    /// Deletes every object, each at its own revision, and stops serving the resource.
    pub(super) fn remove(&self, gvr: &GroupVersionResource) {
        let mut shared = lock(&self.shared);
        let Some(collection) = shared.collections.remove(gvr) else { return };
        let mut state = lock(&collection.state);
        for (_, object) in state.objects.clone() {
            self.commit(&mut shared, &collection, &mut state, None, Some(object));
        }
        state.closed = true;
        collection.changed.send_replace(shared.revision);
    }

    /// Makes all writes at one revision, as a transaction of etcd does. They must be of different
    /// keys, and no other task may write meanwhile.
    pub(super) fn in_one_revision<T>(&self, writes: impl FnOnce() -> T) -> T {
        let next = lock(&self.shared).next();
        lock(&self.shared).transaction = Some(next);
        let result = writes();
        lock(&self.shared).transaction = None;
        result
    }

    /// Creates an object.
    pub(super) fn create(&self, collection: &Collection, value: Value) -> Result<Arc<Object>, Status> {
        let mut shared = lock(&self.shared);
        let mut state = lock(&collection.state);
        let object = Object::new(&collection.resource, value, shared.next());
        if state.closed {
            return Err(Status::no_such_resource());
        }
        if state.objects.contains_key(&object.key) {
            let gvr = &collection.resource.gvr;
            return Err(Status::already_exists(&gvr.group, &gvr.resource, object.key.name()));
        }
        let object = Arc::new(object);
        self.commit(&mut shared, collection, &mut state, Some(object.clone()), None);
        Ok(object)
    }

    /// Replaces an object by the result of `change`. A write that changes nothing creates no
    /// version and no event.
    pub(super) fn update(
        &self,
        collection: &Collection,
        key: &ObjectKey,
        change: impl FnOnce(&Object) -> Result<Value, Status>,
    ) -> Result<Arc<Object>, Status> {
        let mut shared = lock(&self.shared);
        let mut state = lock(&collection.state);
        let previous = state.get(collection, key)?;
        let value = change(&previous)?;
        let object = Object::new(&collection.resource, value, previous.version);
        if object.bytes() == previous.bytes() {
            return Ok(previous);
        }
        let object = Arc::new(object.moved_to(shared.next()));
        self.commit(&mut shared, collection, &mut state, Some(object.clone()), Some(previous));
        Ok(object)
    }

    /// Deletes an object and returns its last state.
    pub(super) fn delete(&self, collection: &Collection, key: &ObjectKey) -> Result<Arc<Object>, Status> {
        let mut shared = lock(&self.shared);
        let mut state = lock(&collection.state);
        let previous = state.get(collection, key)?;
        self.commit(&mut shared, collection, &mut state, None, Some(previous.clone()));
        Ok(previous)
    }

    fn commit(
        &self,
        shared: &mut StoreState,
        collection: &Collection,
        state: &mut CollectionState,
        current: Option<Arc<Object>>,
        previous: Option<Arc<Object>>,
    ) {
        let version = shared.next();
        shared.revision = version;
        match (&current, &previous) {
            (Some(object), _) => drop(state.objects.insert(object.key.clone(), object.clone())),
            (None, Some(object)) => drop(state.objects.remove(&object.key)),
            (None, None) => {}
        }
        state.window.push_back(Arc::new(StoredEvent { version, current, previous, encoded: AtomicBool::new(false) }));
        state.progress = version;
        // Never a part of a version.
        if state.window.len() > self.window_events_max
            && let Some(oldest) = state.window.front().map(|oldest| oldest.version).filter(|oldest| *oldest < version)
        {
            state.window.drain(..state.window.partition_point(|entry| entry.version <= oldest));
            state.dropped = oldest;
        }
        collection.changed.send_replace(version);
        self.revision.send_replace(version);
    }

    /// Advances a collection's progress to the current revision, as a consistent read does, and
    /// returns the revision.
    pub(super) fn make_consistent(&self, collection: &Collection) -> u64 {
        let shared = lock(&self.shared);
        lock(&collection.state).progress = shared.revision;
        shared.revision
    }

    /// Rewrites the bytes of every object without a new version, as a changed schema or a newer
    /// server does, and those in the retained events.
    pub(super) fn rewrite(&self, collection: &Collection, rewrite: impl Fn(&mut Value)) {
        let mut state = lock(&collection.state);
        let rewritten = |object: &Arc<Object>| {
            let mut value = object.value();
            rewrite(&mut value);
            Arc::new(Object::new(&collection.resource, value, object.version))
        };
        for (key, object) in state.objects.clone() {
            state.objects.insert(key, rewritten(&object));
        }
        for event in &mut state.window {
            let current = event.current.as_ref().map(rewritten);
            let previous = event.previous.as_ref().map(rewritten);
            *event =
                Arc::new(StoredEvent { version: event.version, current, previous, encoded: AtomicBool::new(false) });
        }
        collection.schema.fetch_add(1, Ordering::Relaxed);
    }

    /// Drops all states but the current one. Retained events can still be watched.
    pub(super) fn compact_states(&self) {
        let shared = lock(&self.shared);
        for collection in shared.collections.values() {
            lock(&collection.state).compacted = shared.revision;
        }
    }

    /// Drops all history: earlier versions can be neither watched from nor read.
    pub(super) fn compact(&self) {
        let shared = lock(&self.shared);
        for collection in shared.collections.values() {
            let mut state = lock(&collection.state);
            if let Some(last) = state.window.back() {
                state.dropped = last.version;
            }
            state.window.clear();
            state.listed = shared.revision;
            state.progress = shared.revision;
        }
    }
}

/// All objects at one resource version.
#[derive(Clone)]
pub(super) struct Backup {
    revision: u64,
    collections: BTreeMap<GroupVersionResource, Snapshot>,
}

impl Store {
    pub(super) fn backup(&self) -> Backup {
        let shared = lock(&self.shared);
        let objects = |(gvr, collection): (&GroupVersionResource, &Arc<Collection>)| {
            (gvr.clone(), lock(&collection.state).objects.clone())
        };
        Backup { revision: shared.revision, collections: shared.collections.iter().map(objects).collect() }
    }

    /// Restores the objects and the revision, and drops all history.
    pub(super) fn restore(&self, backup: &Backup) {
        let mut shared = lock(&self.shared);
        shared.revision = backup.revision;
        for (gvr, collection) in &shared.collections {
            let mut state = lock(&collection.state);
            state.objects = backup.collections.get(gvr).cloned().unwrap_or_default();
            state.window.clear();
            state.listed = backup.revision;
            state.dropped = 0;
            state.compacted = 0;
            state.progress = backup.revision;
            collection.changed.send_replace(backup.revision);
        }
        self.revision.send_replace(backup.revision);
    }
}

impl Collection {
    /// The state at a version, which must not be in the future. `None` if it is no longer
    /// available.
    pub(super) fn at(&self, version: u64) -> Option<Snapshot> {
        let state = lock(&self.state);
        if version < state.listed.max(state.dropped).max(state.compacted) {
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

    /// The current state, and the version that it represents.
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
            Some(first) if state.dropped > state.listed => first.version - 1,
            _ => state.listed,
        }
    }

    /// Up to `count_max` events after a version, or more if the last of them share theirs.
    pub(super) fn since(&self, version: u64, count_max: usize) -> Since {
        let state = lock(&self.state);
        if version < state.dropped {
            return Since::TooOld;
        }
        let start = state.window.partition_point(|entry| entry.version <= version);
        let mut events: Vec<_> = state.window.range(start..).take(count_max).cloned().collect();
        let last = events.last().map(|event| event.version);
        let rest = state.window.range(start + events.len()..).take_while(|event| Some(event.version) == last);
        events.extend(rest.cloned());
        if !events.is_empty() {
            Since::Events(events)
        } else if state.closed {
            Since::Closed
        } else {
            Since::UpToDate
        }
    }

    /// Receives a notification of every event, and of the end of the resource.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }
}

impl CollectionState {
    fn get(&self, collection: &Collection, key: &ObjectKey) -> Result<Arc<Object>, Status> {
        let gvr = &collection.resource.gvr;
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
        fn every_state_in_the_window_can_be_read_and_no_older_one(
            writes in prop::collection::vec((0..3u8, 0..4u8), 1..40),
            window_events_max in 1..20usize,
            compact_at in 0..60usize,
        ) {
            let store = Store::new(window_events_max);
            let widgets = SimResource::custom("example.com", "v1", "widgets", "Widget");
            let gvr = widgets.gvr.clone();
            store.add(widgets);
            let collection = store.collection(&gvr).unwrap();
            let mut states = BTreeMap::from([(store.revision(), Vec::new())]);
            let mut oldest = 0;
            for (i, (write, name)) in writes.into_iter().enumerate() {
                let object = json!({"metadata": {"name": format!("w{name}")}, "spec": {"write": i}});
                let key = ObjectKey::new("", &format!("w{name}"));
                // Some writes fail. They create no version.
                let _ = match write {
                    0 => store.create(&collection, object),
                    1 => store.update(&collection, &key, |_| Ok(object)),
                    _ => store.delete(&collection, &key),
                };
                states.insert(store.revision(), keys(&collection.snapshot().0));
                if i == compact_at {
                    store.compact();
                    oldest = store.revision();
                }
            }
            let newest = store.revision();
            let oldest = oldest.max(newest.saturating_sub(window_events_max as u64));
            for (version, state) in states {
                let read = collection.at(version).map(|objects| keys(&objects));
                prop_assert_eq!(read, (version >= oldest).then_some(state));
            }
            prop_assert!(collection.oldest() >= oldest);
            prop_assert!(matches!(collection.since(newest, 1), Since::UpToDate));
        }
    }

    #[test]
    fn the_writes_of_one_revision_are_never_split() {
        let store = Store::new(2);
        let widgets = SimResource::custom("example.com", "v1", "widgets", "Widget");
        let gvr = widgets.gvr.clone();
        store.add(widgets);
        let collection = store.collection(&gvr).unwrap();
        let create = |name: &str| store.create(&collection, json!({ "metadata": { "name": name } })).unwrap().version;
        let before = ["a", "b", "c"].map(create)[2];
        let delete = |name: &str| drop(store.delete(&collection, &ObjectKey::new("", name)).unwrap());
        store.in_one_revision(|| ["a", "b", "c"].map(delete));
        assert_eq!(store.revision(), before + 1);
        let versions = |since: Since| -> Vec<u64> {
            match since {
                Since::Events(events) => events.iter().map(|event| event.version).collect(),
                Since::UpToDate | Since::TooOld | Since::Closed => vec![],
            }
        };
        assert_eq!(versions(collection.since(before, 1)), [before + 1; 3], "in one batch, and longer than the window");
        assert!(matches!(collection.since(before + 1, 1), Since::UpToDate));
        let after = create("d");
        assert_eq!((after, collection.oldest()), (before + 2, before + 1), "dropped as a whole");
        assert!(matches!(collection.since(before, 1), Since::TooOld));
    }
}
