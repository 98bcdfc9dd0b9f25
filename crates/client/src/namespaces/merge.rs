//! From the events of each namespace to the events of one watch.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use bytes::Bytes;

use crate::{
    lister_watcher::{WatchEvent, WatchEventKind},
    object::{Decode, Object, ObjectKey, RawObject},
    reflector::ReflectorError,
    store::{Change, Deleted},
    streams::InformerEvent,
    version::number,
};

/// An object that is passed on as it came.
pub(super) struct Undecoded(Bytes);

impl Decode for Undecoded {
    fn decode(raw: &RawObject) -> Result<Self, serde_json::Error> {
        Ok(Self(raw.json.clone()))
    }
}

fn raw_object(object: &Object<Undecoded>) -> RawObject {
    RawObject {
        key: object.key().clone(),
        uid: object.uid().into(),
        resource_version: object.resource_version().into(),
        json: object.value().0.clone(),
    }
}

#[derive(Default)]
struct Namespace {
    /// The version of each object that was passed on.
    known: HashMap<ObjectKey, Box<str>>,
    /// Until all namespaces have their first state: the objects of this one.
    waiting: BTreeMap<ObjectKey, RawObject>,
    /// The objects of a state that has not ended.
    replacing: Vec<RawObject>,
    has_state: bool,
    /// The namespace is complete up to here. `None` if unknown, or not a number.
    version: Option<u64>,
}

pub(super) struct Merge {
    namespaces: Vec<Namespace>,
    /// The first state of all namespaces was passed on.
    is_complete: bool,
    /// The version that was passed on last.
    version: Option<u64>,
}

impl Merge {
    pub(super) fn new(namespaces: usize) -> Self {
        let namespaces = std::iter::repeat_with(Namespace::default).take(namespaces).collect();
        Self { namespaces, is_complete: false, version: None }
    }

    /// The events before the first one of any namespace.
    pub(super) fn start(&mut self) -> Vec<WatchEvent> {
        self.complete_first_state()
    }

    /// Converts the event of one namespace to events of the whole. The events of a snapshot or a
    /// batch are returned together.
    pub(super) fn accept(
        &mut self,
        index: usize,
        event: Result<InformerEvent<Undecoded>, ReflectorError>,
    ) -> Vec<WatchEvent> {
        let Some(namespace) = self.namespaces.get_mut(index) else { return Vec::new() };
        match event {
            Err(ReflectorError::Client(error)) => vec![WatchEventKind::Disconnected(error).into()],
            Err(error) => vec![WatchEventKind::Unreadable(error.to_string()).into()],
            Ok(InformerEvent::ReplaceBegin) => {
                namespace.replacing.clear();
                Vec::new()
            }
            Ok(InformerEvent::Replaced(object)) => {
                namespace.replacing.push(raw_object(&object));
                Vec::new()
            }
            Ok(InformerEvent::ReplaceEnd { resource_version, .. }) => {
                namespace.version = number(&resource_version);
                namespace.has_state = true;
                let objects = std::mem::take(&mut namespace.replacing);
                if self.is_complete {
                    let changes = namespace.replace(objects);
                    return self.batch(changes);
                }
                namespace.waiting = objects.into_iter().map(|object| (object.key.clone(), object)).collect();
                self.complete_first_state()
            }
            Ok(InformerEvent::Changed(change)) => {
                let event = namespace.change(change, self.is_complete);
                event.into_iter().map(WatchEvent::from).collect()
            }
            Ok(InformerEvent::Batch(changes)) => {
                let is_complete = self.is_complete;
                let changes = changes.into_iter().filter_map(|change| namespace.change(change, is_complete)).collect();
                self.batch(changes)
            }
            Ok(InformerEvent::Advanced { resource_version }) => {
                namespace.version = number(&resource_version);
                let version = self.moved_version();
                version.map(|version| WatchEventKind::Bookmark.at(&version)).into_iter().collect()
            }
        }
    }

    fn complete_first_state(&mut self) -> Vec<WatchEvent> {
        if !self.namespaces.iter().all(|namespace| namespace.has_state) {
            return Vec::new();
        }
        self.is_complete = true;
        let mut events = vec![WatchEventKind::SnapshotBegin.into()];
        for namespace in &mut self.namespaces {
            for (key, object) in std::mem::take(&mut namespace.waiting) {
                namespace.known.insert(key, object.resource_version.clone());
                events.push(WatchEventKind::Added(object).into());
            }
        }
        events.push(WatchEvent { kind: WatchEventKind::SnapshotEnd, resume_version: self.moved_version() });
        events
    }

    fn batch(&mut self, changes: Vec<WatchEventKind>) -> Vec<WatchEvent> {
        let version = self.moved_version();
        if changes.is_empty() {
            return version.map(|version| WatchEventKind::Bookmark.at(&version)).into_iter().collect();
        }
        let mut events = vec![WatchEventKind::BatchBegin.into()];
        events.extend(changes.into_iter().map(WatchEvent::from));
        events.push(WatchEvent { kind: WatchEventKind::BatchEnd, resume_version: version });
        events
    }

    /// The version up to which all namespaces are complete, if it is higher than before.
    fn moved_version(&mut self) -> Option<String> {
        let versions = self.namespaces.iter().map(|namespace| namespace.version);
        let lowest = versions.collect::<Option<Vec<_>>>()?.into_iter().min();
        if !self.is_complete || lowest <= self.version {
            return None;
        }
        self.version = lowest;
        lowest.map(|version| version.to_string())
    }
}

impl Namespace {
    /// The changes from the known state to this one.
    fn replace(&mut self, objects: Vec<RawObject>) -> Vec<WatchEventKind> {
        let mut before = std::mem::take(&mut self.known);
        let mut changes = Vec::new();
        for object in objects {
            let version = before.remove(&object.key);
            self.known.insert(object.key.clone(), object.resource_version.clone());
            match version {
                None => changes.push(WatchEventKind::Added(object)),
                Some(version) if version == object.resource_version && !version.is_empty() => {}
                Some(_) => changes.push(WatchEventKind::Modified(object)),
            }
        }
        let mut vanished: Vec<_> = before.into_keys().collect();
        vanished.sort();
        changes.extend(vanished.into_iter().map(WatchEventKind::DeletedFinalStateUnknown));
        changes
    }

    /// Notes a change. Returns it, unless the first state of all namespaces is not complete yet.
    fn change(&mut self, change: Change<Undecoded>, is_complete: bool) -> Option<WatchEventKind> {
        let raw = |object: Arc<Object<Undecoded>>| raw_object(&object);
        if !is_complete {
            match change {
                Change::Added(object) | Change::Updated(object) => {
                    drop(self.waiting.insert(object.key().clone(), raw(object)));
                }
                Change::Deleted(deleted) => drop(self.waiting.remove(deleted.key())),
            }
            return None;
        }
        match &change {
            Change::Added(object) | Change::Updated(object) => {
                self.known.insert(object.key().clone(), object.resource_version().into());
            }
            Change::Deleted(deleted) => drop(self.known.remove(deleted.key())),
        }
        Some(match change {
            Change::Added(object) => WatchEventKind::Added(raw(object)),
            Change::Updated(object) => WatchEventKind::Modified(raw(object)),
            Change::Deleted(Deleted::Known(object)) => WatchEventKind::Deleted(raw(object)),
            Change::Deleted(Deleted::FinalStateUnknown(unknown)) => {
                WatchEventKind::DeletedFinalStateUnknown(unknown.key)
            }
        })
    }
}
