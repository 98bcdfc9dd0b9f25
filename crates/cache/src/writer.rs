//! The one writer of a cache: turns upstream's lists and events into commits.
//!
//! A commit is a new state and the one record that led to it; readers see all of it or nothing. A
//! list after the first becomes adds, changes and deletes, which are computed here, outside of the
//! readers' lock. Objects that a list repeats unchanged stay where they are in memory, so a relist
//! costs little more than its network buffers. Replaced objects are packed here too, before the
//! commit is published. The hazard is a list or event that contradicts what was sent before: it
//! starts a new history, and is never passed on.
//!
//! A list at the version that the cache had reached when it began can differ from that state only
//! in bytes: the schema has changed. Events may come during such a list. An object that they have
//! changed has a version of its own since, so only the others can differ. History is ordered by
//! versions, so such a difference has no place at its own version. It waits for the next one and
//! becomes the step to it.

mod contradiction;
mod difference;
mod packing;
mod update_error;

use std::{collections::HashMap, sync::Arc};

use kubefan_common::{
    planted::{self, Bug},
    unless_planted, when_planted,
};
use kubefan_model::{
    ObjectKey, ResourceVersion,
    event::{EventType, WatchEvent},
    object::Object,
    packer::Packer,
    sampler::Sampler,
};

pub use self::update_error::UpdateError;
use self::{
    contradiction::{contradiction, differs_at, may_be_missing},
    difference::{difference, is_reencoded, new_object, same},
    packing::Packing,
};
use crate::{gap::Gap, history::History, relist_reason::RelistReason, ring::HistoryRecord, store::Store};

/// The reflector's results, in upstream's order.
#[derive(Debug)]
pub enum Update {
    /// A list starts: the first, or another because of `reason`.
    ListBegin {
        /// Reason of the relist.
        reason: RelistReason,
    },
    /// One object of the list.
    ListItem(Object),
    /// The list is complete, at this version.
    ListEnd(ResourceVersion),
    /// A change.
    Event(EventType, Object),
    /// Every event at or below this version was sent.
    Bookmark(ResourceVersion),
    /// The difference between the state reached and a later one, which upstream has marked: it does
    /// not know the single changes in between either.
    Conflated {
        /// Reason why upstream does not know the changes.
        reason: RelistReason,
        /// In an order in which they lead to the later state.
        changes: Vec<ConflatedChange>,
        /// Version of the later state.
        version: ResourceVersion,
    },
    /// The cluster's version is below one that it sent before: its state was restored. A list
    /// follows.
    WentBack {
        /// The cluster's version.
        reached: ResourceVersion,
    },
}

/// A part of [`Update::Conflated`].
#[derive(Debug)]
pub enum ConflatedChange {
    /// The object exists, in this state.
    Put(Object),
    /// No object has this key.
    Remove(ObjectKey),
}

/// A new state of the cache.
pub struct Commit {
    /// The objects.
    pub store: Store,
    /// Version of the commit. Unless it is at the end of its revision, more events of that revision
    /// may come.
    pub version: ResourceVersion,
    /// Relation of the commit to the state before.
    pub change: Change,
}

/// Relation of a commit to the one before it.
pub enum Change {
    /// A new history: the first list, or a state that does not follow from the one before.
    Start {
        /// Reason for subscribers of the history before.
        because: String,
    },
    /// A state with its history, from a peer.
    Restored(Box<History>),
    /// One more record.
    Record(HistoryRecord),
    /// Only the version has moved.
    Version,
}

/// The writer of one cache.
#[derive(Default)]
pub struct CacheWriter {
    store: Store,
    version: Option<ResourceVersion>,
    listing: Option<Listing>,
    packing: Packing,
    /// Reason why the next complete list starts a new history.
    rewritten: Option<String>,
    /// Waits for the next version.
    reencoded: Option<Reencoded>,
}

/// The state at the version reached, with the bytes of another schema.
struct Reencoded {
    store: Store,
    reason: RelistReason,
    /// The objects that differ, in the order of their versions.
    events: Vec<Arc<WatchEvent>>,
}

struct Listing {
    store: Store,
    reason: RelistReason,
    /// The cached state when the list began, and its version.
    before: Store,
    from: Option<ResourceVersion>,
    /// An item that cannot exist if the cached state is an earlier state of the same history.
    contradiction: Option<String>,
    /// The objects that the list replaces or deletes, packed in advance: to pack them all at its
    /// end would take seconds.
    history: HashMap<ObjectKey, Arc<Object>>,
    /// The last key that [`CacheWriter::prepare`] has compared.
    prepared: Option<ObjectKey>,
}

impl Listing {
    /// A list into `store`, for a cache that had the state `before` at the version `from`.
    fn new(store: Store, reason: RelistReason, before: Store, from: Option<ResourceVersion>) -> Self {
        Self { store, reason, before, from, contradiction: None, history: HashMap::new(), prepared: None }
    }
}

impl CacheWriter {
    /// A writer of an empty cache. Replaced objects are always packed; with `pack_current` the
    /// current ones are too.
    pub fn new(pack_current: bool) -> Self {
        Self { packing: Packing { pack_current, ..Packing::default() }, ..Self::default() }
    }

    /// A writer of a cache beside another one. Objects that are in both are in memory once.
    pub fn sharing(store: Store) -> Self {
        Self { store, ..Self::new(false) }
    }

    /// The version reached; `None` before the first list is complete.
    pub fn version(&self) -> Option<ResourceVersion> {
        self.version
    }

    /// Whether a list is in progress.
    pub fn is_listing(&self) -> bool {
        self.listing.is_some()
    }

    /// Whether a new encoding of the objects waits for the next version.
    pub fn awaits_version(&self) -> bool {
        self.reencoded.is_some() && !planted::is(Bug::EncodingNotAwaited)
    }

    /// The packer of objects.
    pub fn packer(&self) -> &Arc<Packer> {
        &self.packing.packer
    }

    /// The number of objects and their JSON bytes, including a list in progress: the limits of a
    /// first sync apply to them.
    pub fn size_with_list(&self) -> (usize, usize) {
        let listing = self.listing.as_ref().map(|listing| &listing.store);
        let most = |of: fn(&Store) -> usize| of(&self.store).max(listing.map_or(0, of));
        (most(Store::len), most(Store::json_bytes))
    }

    /// Takes one update. Returns a commit if the update completes one.
    pub fn apply(&mut self, update: Update) -> Result<Option<Commit>, UpdateError> {
        match update {
            Update::ListBegin { reason } => {
                self.listing = Some(Listing::new(Store::default(), reason, self.store.clone(), self.version));
                self.packing.sampler = Some(Sampler::default());
                Ok(None)
            }
            Update::ListItem(object) => {
                let listing = self.listing.as_mut().ok_or(UpdateError::NotListed)?;
                let cached = listing.before.get(object.key().as_str());
                if listing.contradiction.is_none()
                    && let Some(reached) = listing.from
                {
                    // The watch may not have brought this change yet.
                    let is_unreceived = !reached.is_end() && object.version().is_at(reached);
                    if !is_unreceived {
                        listing.contradiction = contradiction(cached, &object, reached, listing.reason);
                    }
                }
                let object = match cached {
                    Some(cached) if same(cached, &object) => cached.clone(),
                    cached => new_object(object, cached),
                };
                if let Some(cached) = cached.filter(|cached| !Arc::ptr_eq(cached, &object)) {
                    listing.history.insert(cached.key().clone(), cached.packed(&self.packing.packer));
                }
                let object = self.packing.list_item(object, &mut listing.store);
                listing.store.insert(object);
                Ok(None)
            }
            Update::ListEnd(version) => {
                let mut listing = self.listing.take().ok_or(UpdateError::NotListed)?;
                self.packing.list_end(&mut listing.store);
                self.replace(listing, version)
            }
            Update::Event(kind, object) => {
                let reached = self.version.ok_or(UpdateError::NotListed)?;
                let Some(version) = self.place_of(kind, &object, reached)? else { return Ok(None) };
                let key = object.key().clone();
                let commit = match self.reencoded.take() {
                    None => self.change(version, kind, object),
                    Some(reencoded) => self.reencode(reencoded, version, Some((kind, object))),
                };
                // The state that a list at this version is compared with has the change.
                if let Some(listing) = &mut self.listing
                    && listing.from == Some(reached)
                    && version.is_at(reached)
                {
                    listing.before = self.store.clone();
                    listing.from = Some(version);
                    listing.history.remove(&key);
                }
                Ok(Some(commit))
            }
            Update::WentBack { reached } => {
                // Without a state, nothing of it was sent.
                let because = |was: ResourceVersion| {
                    format!("version {} was sent before, and the cluster is at {}", was.whole(), reached.whole())
                };
                self.rewritten = self.version.map(because);
                Ok(None)
            }
            Update::Conflated { reason, changes, version } => self.conflated(reason, changes, version),
            Update::Bookmark(version) => {
                let reached = self.version.ok_or(UpdateError::NotListed)?;
                // A bookmark at an older version says nothing new.
                Ok((version > reached).then(|| match self.reencoded.take() {
                    None => self.commit(version, Change::Version),
                    Some(reencoded) => self.reencode(reencoded, version, None),
                }))
            }
        }
    }

    /// Does a part of the work before the commit of a complete list, for up to `objects_max`
    /// objects. Returns whether there is more. Optional: for callers that have to yield to other
    /// tasks.
    pub fn prepare(&mut self, objects_max: usize) -> bool {
        let Some(listing) = &mut self.listing else { return false };
        let prepared = listing.prepared.take();
        let mut after = listing.before.after(prepared.as_ref());
        for old in after.by_ref().take(objects_max) {
            listing.prepared = Some(old.key().clone());
            if listing.store.get(old.key().as_str()).is_none() {
                listing.history.insert(old.key().clone(), old.packed(&self.packing.packer));
            }
        }
        let more = after.next().is_some();
        drop(after);
        listing.prepared = listing.prepared.take().or(prepared);
        more
    }

    /// Returns the place of a change after the version reached; `None` if the state has it.
    /// Upstream may send several changes at one version, of different objects. A watch that starts
    /// again sends those of the version reached once more.
    fn place_of(
        &self,
        kind: EventType,
        object: &Object,
        reached: ResourceVersion,
    ) -> Result<Option<ResourceVersion>, UpdateError> {
        let key = object.key();
        let version = object.version();
        let is_again = version.is_at(reached);
        if is_again && self.store.has_applied(kind, object) && !planted::is(Bug::OutOfOrderPassedOn) {
            return Ok(None);
        }
        when_planted!(SecondOfVersionDropped => if is_again { return Ok(None) });
        // Upstream changed and deleted one object at one version.
        let is_twice = is_again && self.store.get(key.as_str()).is_some_and(|cached| cached.version() == version);
        let place = reached.followed_by(version).filter(|_| !is_twice);
        match place {
            None if planted::is(Bug::OutOfOrderPassedOn) => Ok(Some(version)),
            None => Err(UpdateError::OutOfOrder { key: key.clone(), version, reached }),
            Some(_) => Ok(place),
        }
    }

    fn change(&mut self, version: ResourceVersion, kind: EventType, object: Object) -> Commit {
        let event = self.event(version, kind, object);
        self.commit(version, Change::Record(HistoryRecord::Event(event)))
    }

    /// Applies a change to the state.
    fn event(&mut self, version: ResourceVersion, kind: EventType, object: Object) -> Arc<WatchEvent> {
        let cached = self.store.get(object.key().as_str());
        let object = new_object(object, cached);
        self.packing.event(&object);
        let current = (kind != EventType::Deleted).then(|| self.packing.current(&object));
        let previous = match &current {
            None => self.store.remove(object.key().as_str()),
            Some(current) => self.store.insert(current.clone()),
        };
        // The cached state decides: an apiserver that restarted may send ADDED for an object that
        // is cached.
        let kind = match (kind, &previous) {
            (EventType::Deleted, _) => EventType::Deleted,
            (_, Some(_)) => EventType::Modified,
            (_, None) => EventType::Added,
        };
        Arc::new(WatchEvent::new(kind, version, object, previous).packing(&self.packing.packer, current))
    }

    /// The step to `version` that brings the new encoding, and the change at that version if there
    /// is one.
    fn reencode(
        &mut self,
        reencoded: Reencoded,
        version: ResourceVersion,
        change: Option<(EventType, Object)>,
    ) -> Commit {
        let Reencoded { mut store, reason, mut events } = reencoded;
        if let Some((kind, object)) = change {
            // Subscribers have the old bytes, so those come before the change.
            let event = self.event(version, kind, object);
            let key = event.object().key().clone();
            let place = events.len();
            match self.store.get(key.as_str()) {
                Some(current) => store.insert(current.clone()),
                None => store.remove(key.as_str()),
            };
            events.insert(if event.kind() == EventType::Deleted { 0 } else { place }, event.clone());
            let stays = |other: &Arc<WatchEvent>| Arc::ptr_eq(other, &event) || *other.object().key() != key;
            unless_planted!(ReencodedTwice => events.retain(stays));
            if events.len() == 1 {
                self.store = store;
                return self.commit(version, Change::Record(HistoryRecord::Event(event)));
            }
        }
        self.store = store;
        let reached = self.version.unwrap_or(version);
        self.commit(
            version,
            Change::Record(HistoryRecord::Gap(Arc::new(Gap::reencoded(reached, version, reason, events)))),
        )
    }

    /// Applies a marked difference at once, as if the state that it leads to had been listed. A
    /// reader never sees a part of it, and every view marks it as a gap.
    fn conflated(
        &mut self,
        reason: RelistReason,
        changes: Vec<ConflatedChange>,
        version: ResourceVersion,
    ) -> Result<Option<Commit>, UpdateError> {
        let from = self.version.ok_or(UpdateError::NotListed)?;
        let before = self.store.clone();
        // A new encoding that waits for the next version comes with this one.
        let mut store = self.reencoded.take().map_or_else(|| before.clone(), |reencoded| reencoded.store);
        for change in changes {
            match change {
                ConflatedChange::Put(object) => {
                    let cached = store.get(object.key().as_str());
                    if !cached.is_some_and(|cached| same(cached, &object)) {
                        let object = new_object(object, cached);
                        self.packing.event(&object);
                        store.insert(self.packing.current(&object));
                    }
                }
                ConflatedChange::Remove(key) => drop(store.remove(key.as_str())),
            }
        }
        let mut commit = self.replace(Listing::new(store, reason, before, Some(from)), version)?;
        // No event is lost if only the encoding has changed.
        if let Some(Commit { change: Change::Record(HistoryRecord::Gap(gap)), .. }) = &mut commit
            && reason == RelistReason::SchemaChanged
            && gap.events.iter().all(|event| is_reencoded(event))
        {
            *gap = Arc::new(Gap::reencoded(from, version, reason, gap.events.clone()));
        }
        Ok(commit)
    }

    fn replace(&mut self, listing: Listing, version: ResourceVersion) -> Result<Option<Commit>, UpdateError> {
        if self.version != listing.from {
            return self.read_again(listing, version);
        }
        let Listing { store, reason, contradiction, mut history, .. } = listing;
        unless_planted!(OldEncodingReturns => self.reencoded = None);
        let before = std::mem::replace(&mut self.store, store);
        let start = |because: String| Change::Start { because };
        // Another kubefan may have only a part of the version that was reached.
        let is_part = self.version.is_some_and(|from| version.is_at(from) && version < from);
        let rewritten = self.rewritten.take().or(contradiction.filter(|_| !is_part));
        let mut reached = version;
        let change = match (self.version, rewritten) {
            (None, _) => start("the first list".to_owned()),
            (Some(before), _) if version.whole() < before.whole() => {
                start(format!("version {} was followed by a list at {}", before.whole(), version.whole()))
            }
            (Some(_), Some(because)) => start(because),
            (Some(from), None) => {
                let events = difference(&before, &self.store, &mut history, &self.packing.packer);
                if !from.is_at(version) {
                    Change::Record(HistoryRecord::Gap(Arc::new(Gap::new(from, version, reason, events))))
                } else if events.is_empty() {
                    reached = version.max(from);
                    Change::Version
                } else if is_part {
                    self.store = before;
                    return Err(UpdateError::Differs { version: version.whole() });
                } else if (version == from || version.is_end()) && events.iter().all(|event| is_reencoded(event)) {
                    let store = std::mem::replace(&mut self.store, before);
                    self.reencoded = Some(Reencoded { store, reason, events });
                    return Ok(None);
                } else if !from.is_end() && events.iter().all(|event| may_be_missing(event, version)) {
                    // The watch has ended between the changes at this version. A list may not know
                    // their places.
                    reached = if from < version { version } else { version.end() };
                    Change::Record(HistoryRecord::Gap(Arc::new(Gap::new(from, reached, reason, events))))
                } else {
                    start(differs_at(version))
                }
            }
        };
        Ok(Some(self.commit(reached, change)))
    }

    /// Applies a list at the version that the cache had when the list began. Later events stay; the
    /// other objects get the bytes of the list.
    fn read_again(&mut self, listing: Listing, version: ResourceVersion) -> Result<Option<Commit>, UpdateError> {
        let Listing { store: listed, reason, before, from, mut history, .. } = listing;
        let is_same = |old: &Arc<Object>, new: &Arc<Object>| {
            (old.key(), old.uid(), old.version()) == (new.key(), new.uid(), new.version())
        };
        if !from.is_some_and(|from| from.is_at(version))
            || before.len() != listed.len()
            || !before.iter().zip(listed.iter()).all(|(old, new)| is_same(old, new))
        {
            self.rewritten = Some(differs_at(version));
            return Err(UpdateError::Differs { version: version.whole() });
        }
        let mut store = self.store.clone();
        for object in listed.iter() {
            let key = object.key().as_str();
            let now = self.store.get(key);
            if now.is_some_and(|now| is_same(now, object) && !Arc::ptr_eq(now, object) && !same(now, object)) {
                store.insert(object.clone());
            }
            // An object that was packed in advance is the object of that time.
            if !now.is_some_and(|now| before.get(key).is_some_and(|old| Arc::ptr_eq(old, now))) {
                history.remove(object.key());
            }
        }
        let events = difference(&self.store, &store, &mut history, &self.packing.packer);
        self.reencoded = (!events.is_empty()).then_some(Reencoded { store, reason, events });
        Ok(None)
    }

    fn commit(&mut self, version: ResourceVersion, change: Change) -> Commit {
        self.version = Some(version);
        Commit { store: self.store.clone(), version, change }
    }
}

#[cfg(test)]
mod tests;
