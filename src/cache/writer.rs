//! The sole mutator of a cache: turns what upstream says into commits.
//!
//! A commit is a new state and the one record that led to it; readers see all of it or none. A list after the first becomes adds,
//! changes and deletes, found here, off the readers' path. Objects that a list repeats unchanged keep their memory, so a relist
//! costs little more than its network buffers.

use std::sync::Arc;

use super::{
    ring::{Gap, Record},
    store::Store,
};
use crate::model::{
    ObjectKey, ResourceVersion,
    event::{EventType, WatchEvent},
    object::Object,
};

/// What the reflector tells, in upstream's order.
#[derive(Debug)]
pub enum Update {
    /// A list begins: the first, or another because of `reason`.
    ListBegin {
        /// Why; the label of `kubefan_relists_total`.
        reason: &'static str,
    },
    /// One object of the list.
    ListItem(Object),
    /// The list is complete, at this version.
    ListEnd(ResourceVersion),
    /// A change.
    Event(EventType, Object),
    /// Nothing at or below this version is still to come.
    Bookmark(ResourceVersion),
}

/// A new state of the cache.
pub struct Commit {
    /// The objects.
    pub store: Store,
    /// Their version.
    pub version: ResourceVersion,
    /// What led here.
    pub change: Change,
}

/// How a commit relates to the one before it.
pub enum Change {
    /// The first list, or versions went back: history starts here.
    Start,
    /// One more record.
    Record(Record),
    /// Only the version has moved.
    Version,
}

/// Upstream broke a rule of its own protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UpdateError {
    /// A change before the first list was complete.
    #[error("upstream sent a change before the first list was complete")]
    NotListed,
    /// A change at or below the version already reached: passing it on would repeat or reorder.
    #[error("upstream sent {key} at version {version}, after version {reached}")]
    OutOfOrder {
        /// The object.
        key: ObjectKey,
        /// Its version.
        version: ResourceVersion,
        /// What was reached before.
        reached: ResourceVersion,
    },
}

/// The writer of one cache.
#[derive(Default)]
pub struct CacheWriter {
    store: Store,
    version: Option<ResourceVersion>,
    listing: Option<Listing>,
}

struct Listing {
    store: Store,
    reason: &'static str,
}

impl CacheWriter {
    /// The version reached; `None` before the first list is complete.
    pub fn version(&self) -> Option<ResourceVersion> {
        self.version
    }

    /// Objects and JSON bytes held, those of a list under way included: what the limits of a first sync are checked against.
    pub fn held(&self) -> (usize, usize) {
        let listing = self.listing.as_ref().map(|listing| &listing.store);
        let most = |of: fn(&Store) -> usize| of(&self.store).max(listing.map_or(0, of));
        (most(Store::len), most(Store::json_bytes))
    }

    /// Takes one update; gives a commit where it completes one.
    pub fn apply(&mut self, update: Update) -> Result<Option<Commit>, UpdateError> {
        match update {
            Update::ListBegin { reason } => {
                self.listing = Some(Listing { store: Store::default(), reason });
                Ok(None)
            }
            Update::ListItem(object) => {
                let listing = self.listing.as_mut().ok_or(UpdateError::NotListed)?;
                let held = self.store.get(object.key().as_str());
                let same = held.filter(|held| held.version() == object.version() && held.bytes() == object.bytes());
                listing.store.insert(same.cloned().unwrap_or_else(|| Arc::new(object)));
                Ok(None)
            }
            Update::ListEnd(version) => {
                let listing = self.listing.take().ok_or(UpdateError::NotListed)?;
                Ok(Some(self.replace(listing, version)))
            }
            Update::Event(kind, object) => {
                let reached = self.version.ok_or(UpdateError::NotListed)?;
                let version = object.version();
                if version <= reached {
                    return Err(UpdateError::OutOfOrder { key: object.key().clone(), version, reached });
                }
                Ok(self.change(kind, Arc::new(object)))
            }
            Update::Bookmark(version) => {
                let reached = self.version.ok_or(UpdateError::NotListed)?;
                // A bookmark says that nothing is missing, so one at an older version says nothing new.
                Ok((version > reached).then(|| self.commit(version, Change::Version)))
            }
        }
    }

    fn change(&mut self, kind: EventType, object: Arc<Object>) -> Option<Commit> {
        let version = object.version();
        let previous = match kind {
            EventType::Deleted => self.store.remove(object.key().as_str()),
            EventType::Added | EventType::Modified => self.store.insert(object.clone()),
        };
        // What the state says outranks what upstream called it: an apiserver that restarted may say ADDED for what is held.
        let kind = match (kind, &previous) {
            (EventType::Deleted, _) => EventType::Deleted,
            (_, Some(_)) => EventType::Modified,
            (_, None) => EventType::Added,
        };
        let event = WatchEvent::new(kind, version, object, previous);
        Some(self.commit(version, Change::Record(Record::Event(Arc::new(event)))))
    }

    fn replace(&mut self, listing: Listing, version: ResourceVersion) -> Commit {
        let Listing { store, reason } = listing;
        let before = std::mem::replace(&mut self.store, store);
        let change = match self.version {
            None => Change::Start,
            Some(reached) if version < reached => Change::Start,
            Some(from) => {
                let events = difference(&before, &self.store);
                if events.is_empty() && from == version {
                    Change::Version
                } else if from == version {
                    // The same version with other bytes: the schema has changed. Positions are versions, so there is no
                    // place in history for it.
                    Change::Start
                } else {
                    Change::Record(Record::Gap(Arc::new(Gap { from, to: version, reason, events })))
                }
            }
        };
        self.commit(version, change)
    }

    fn commit(&mut self, version: ResourceVersion, change: Change) -> Commit {
        self.version = Some(version);
        Commit { store: self.store.clone(), version, change }
    }
}

/// What leads from one state to another: deletes first (a key whose uid changed is deleted, then added), then adds and changes in
/// the order of their versions. An object with the same version and other bytes has changed: its schema has.
fn difference(before: &Store, after: &Store) -> Vec<Arc<WatchEvent>> {
    let event = |kind, object: &Arc<Object>, previous: Option<&Arc<Object>>| {
        Arc::new(WatchEvent::new(kind, object.version(), object.clone(), previous.cloned()))
    };
    let mut deletes = Vec::new();
    for old in before.iter() {
        if after.get(old.key().as_str()).is_none_or(|new| new.uid() != old.uid()) {
            deletes.push(event(EventType::Deleted, old, Some(old)));
        }
    }
    let mut changes = Vec::new();
    for new in after.iter() {
        match before.get(new.key().as_str()) {
            Some(old) if Arc::ptr_eq(old, new) => {}
            Some(old) if old.uid() == new.uid() => changes.push(event(EventType::Modified, new, Some(old))),
            _ => changes.push(event(EventType::Added, new, None)),
        }
    }
    changes.sort_by_key(|event| event.version());
    deletes.append(&mut changes);
    deletes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{fields::FieldTable, object::ObjectParser};

    fn version(number: u64) -> ResourceVersion {
        ResourceVersion::new(number).unwrap()
    }

    fn object(name: &str, uid: &str, number: u64) -> Object {
        let json = format!(r#"{{"metadata":{{"name":"{name}","uid":"{uid}","resourceVersion":"{number}"}}}}"#);
        ObjectParser::new(&FieldTable::default()).parse(json.as_bytes()).unwrap()
    }

    fn list(writer: &mut CacheWriter, objects: Vec<Object>, number: u64) -> Commit {
        writer.apply(Update::ListBegin { reason: "test" }).unwrap();
        for object in objects {
            writer.apply(Update::ListItem(object)).unwrap();
        }
        writer.apply(Update::ListEnd(version(number))).unwrap().unwrap()
    }

    fn told(commit: &Commit) -> Vec<(EventType, String, u64)> {
        let line = |event: &WatchEvent| (event.kind(), event.object().key().to_string(), event.version().get());
        match &commit.change {
            Change::Record(Record::Event(event)) => vec![line(event)],
            Change::Record(Record::Gap(gap)) => gap.events.iter().map(|event| line(event)).collect(),
            Change::Start | Change::Version => vec![],
        }
    }

    use EventType::{Added, Deleted, Modified};

    #[test]
    fn a_relist_becomes_deletes_then_changes_in_order() {
        let mut writer = CacheWriter::default();
        let first = vec![object("a", "1", 5), object("b", "2", 6), object("c", "3", 7), object("d", "4", 8)];
        assert!(matches!(list(&mut writer, first, 10).change, Change::Start));
        let second = vec![object("a", "1", 19), object("b", "9", 12), object("d", "4", 8), object("e", "5", 15)];
        let commit = list(&mut writer, second, 20);
        assert_eq!(
            told(&commit),
            [
                (Deleted, "b".into(), 6),
                (Deleted, "c".into(), 7),
                (Added, "b".into(), 12),
                (Added, "e".into(), 15),
                (Modified, "a".into(), 19),
            ]
        );
        assert_eq!((commit.version.get(), commit.store.len()), (20, 4));
    }

    #[test]
    fn a_relist_keeps_the_memory_of_unchanged_objects() {
        let mut writer = CacheWriter::default();
        let before = list(&mut writer, vec![object("a", "1", 5)], 10).store;
        let after = list(&mut writer, vec![object("a", "1", 5)], 11).store;
        assert!(Arc::ptr_eq(before.get("a").unwrap(), after.get("a").unwrap()));
    }

    #[test]
    fn an_empty_difference_is_a_gap_all_the_same() {
        let mut writer = CacheWriter::default();
        list(&mut writer, vec![], 10);
        assert!(matches!(list(&mut writer, vec![], 12).change, Change::Record(Record::Gap(_))));
        assert!(matches!(list(&mut writer, vec![], 12).change, Change::Version), "nothing can have happened");
    }

    #[test]
    fn versions_that_went_back_upstream_start_history_again() {
        let mut writer = CacheWriter::default();
        list(&mut writer, vec![object("a", "1", 5)], 10);
        assert!(matches!(list(&mut writer, vec![], 9).change, Change::Start));
        assert_eq!(writer.version(), Some(version(9)));
    }

    #[test]
    fn a_repeated_or_reordered_event_is_not_passed_on() {
        let mut writer = CacheWriter::default();
        assert_eq!(writer.apply(Update::Bookmark(version(3))).err(), Some(UpdateError::NotListed));
        list(&mut writer, vec![object("a", "1", 5)], 10);
        writer.apply(Update::Event(Modified, object("a", "1", 12))).unwrap();
        let error = writer.apply(Update::Event(Modified, object("a", "1", 12))).err().unwrap();
        assert_eq!(error.to_string(), "upstream sent a at version 12, after version 12");
    }

    #[test]
    fn the_state_decides_whether_an_object_is_new() {
        let mut writer = CacheWriter::default();
        list(&mut writer, vec![object("a", "1", 5)], 10);
        let commit = writer.apply(Update::Event(Added, object("a", "1", 11))).unwrap().unwrap();
        assert_eq!(told(&commit), [(Modified, "a".into(), 11)]);
        let commit = writer.apply(Update::Event(Deleted, object("a", "1", 12))).unwrap().unwrap();
        assert!(commit.store.is_empty());
        assert!(writer.apply(Update::Bookmark(version(11))).unwrap().is_none());
        assert_eq!(writer.apply(Update::Bookmark(version(30))).unwrap().unwrap().version.get(), 30);
    }
}
