//! An event: one change of one object, and its effect on a selection.
//!
//! A new event refers to unpacked objects, because they are about to be encoded. An event in
//! history refers to packed ones. Packing is slow, so it is done before the hub's critical section,
//! in which only pointers are swapped.

use std::sync::Arc;

use arc_swap::{ArcSwap, ArcSwapOption};
use bytes::Bytes;

use super::{
    ResourceVersion,
    object::{LabelLookup, Object},
    packer::Packer,
    selection::Selection,
};

/// The type of an event (`watch.EventType` of apimachinery).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventType {
    /// The object is new to the watch.
    Added,
    /// The object has changed.
    Modified,
    /// The object was deleted.
    Deleted,
}

impl EventType {
    /// The name that Kubernetes uses, which is also the label value in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Added => "ADDED",
            Self::Modified => "MODIFIED",
            Self::Deleted => "DELETED",
        }
    }
}

/// One change of one object at one version.
#[derive(Debug)]
pub struct WatchEvent {
    kind: EventType,
    version: ResourceVersion,
    object: EventObject,
    previous: Option<EventObject>,
    /// The previous object's bytes at this event's version, shared by all selections that the
    /// object leaves. Only set while the event is new.
    leave_cache: ArcSwapOption<Bytes>,
}

/// An object of an event.
#[derive(Debug)]
struct EventObject {
    current: ArcSwap<Object>,
    /// The packed object that replaces it when the event becomes history.
    packed: Option<Arc<Object>>,
}

impl EventObject {
    fn new(object: Arc<Object>) -> Self {
        Self { current: ArcSwap::new(object), packed: None }
    }

    fn pack(&mut self, packer: &Arc<Packer>) {
        self.packed.get_or_insert_with(|| self.current.load().packed(packer));
    }

    fn use_packed(&self) {
        if let Some(packed) = &self.packed {
            self.current.store(packed.clone());
        }
    }

    fn is_new(&self) -> bool {
        self.packed.as_ref().is_some_and(|packed| !Arc::ptr_eq(&self.current.load(), packed))
    }
}

/// Effect of an event on a selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transition {
    /// The object becomes a member of the selection.
    Enter,
    /// The object was a member and still is.
    Change,
    /// The object exists but is not a member any more.
    Leave,
    /// The object was a member and was deleted.
    Delete,
}

impl WatchEvent {
    /// An event. `previous` is the object before it, if there was one.
    pub fn new(kind: EventType, version: ResourceVersion, object: Arc<Object>, previous: Option<Arc<Object>>) -> Self {
        let previous = previous.map(EventObject::new);
        Self { kind, version, object: EventObject::new(object), previous, leave_cache: ArcSwapOption::empty() }
    }

    /// Prepares [`Self::settle`]: packs the previous object, and the object itself if it was
    /// deleted. `current` is the object as the store caches it, if the store packs its objects.
    pub fn packing(mut self, packer: &Arc<Packer>, current: Option<Arc<Object>>) -> Self {
        if let Some(previous) = &mut self.previous {
            previous.pack(packer);
        }
        if let Some(current) = current {
            // If packing saved nothing, `current` is the same object. A reference here would keep
            // it alive, unpacked, after it was replaced.
            self.object.packed = Some(current).filter(|current| !Arc::ptr_eq(current, &self.object.current.load()));
        } else if self.kind == EventType::Deleted {
            let same =
                self.previous.as_ref().filter(|last| Arc::ptr_eq(&last.current.load(), &self.object.current.load()));
            self.object.packed = same.and_then(|same| same.packed.clone());
            self.object.pack(packer);
        }
        self
    }

    /// Uses `packed` for the previous object instead of packing it again.
    pub fn with_packed_previous(mut self, packed: Option<Arc<Object>>) -> Self {
        if let Some(previous) = &mut self.previous {
            previous.packed = packed;
        }
        self
    }

    /// Whether this event keeps an unpacked object alive that the store has in packed form.
    pub fn holds_unpacked(&self) -> bool {
        self.kind != EventType::Deleted && self.object.is_new()
    }

    /// Replaces the objects by their packed forms. Called when the event becomes history.
    pub fn settle(&self) {
        self.object.use_packed();
        if let Some(previous) = &self.previous {
            previous.use_packed();
        }
        self.leave_cache.store(None);
    }

    /// Replaces the object of this event by `packed`, its packed form. Called when the later event
    /// that replaced the object becomes history.
    pub fn replaced(&self, packed: &Arc<Object>) {
        self.object.current.store(packed.clone());
    }

    /// The type of the change.
    pub fn kind(&self) -> EventType {
        self.kind
    }

    /// The version of the change.
    pub fn version(&self) -> ResourceVersion {
        self.version
    }

    /// The object after the change. For a delete: its last state, at the version of the delete.
    pub fn object(&self) -> Arc<Object> {
        self.object.current.load_full()
    }

    /// The object before the change.
    pub fn previous(&self) -> Option<Arc<Object>> {
        self.previous.as_ref().map(|previous| previous.current.load_full())
    }

    /// The bytes sent to a selection that the object leaves: its previous state with this event's
    /// version.
    pub fn leave_bytes(&self) -> Bytes {
        if let Some(cached) = &*self.leave_cache.load() {
            return Bytes::clone(cached);
        }
        let last = self.previous.as_ref().unwrap_or(&self.object);
        let bytes = last.current.load().bytes_at(self.version);
        // For an event in history the bytes are not cached, because that would keep them alive.
        if last.is_new() {
            self.leave_cache.store(Some(Arc::new(bytes.clone())));
        }
        bytes
    }

    /// Returns the effect of this event on `selection`, by the rule of the apiserver's
    /// `convertToWatchEvent`: it compares whether the object was selected before and is selected
    /// now. `None` if neither.
    pub fn transition(&self, selection: &Selection) -> Option<Transition> {
        let matches = |object: &EventObject| selection.matches(&object.current.load());
        self.transition_by(|| matches(&self.object), || self.previous.as_ref().map(matches))
    }

    fn transition_by(&self, now: impl Fn() -> bool, before: impl Fn() -> Option<bool>) -> Option<Transition> {
        let was = match (before(), self.kind) {
            (Some(was), _) => was,
            // The object was not seen before its delete, so its last state decides.
            (None, EventType::Deleted) => now(),
            (None, _) => false,
        };
        let is = self.kind != EventType::Deleted && now();
        match (was, is) {
            (false, true) => Some(Transition::Enter),
            (true, true) => Some(Transition::Change),
            (true, false) if self.kind == EventType::Deleted => Some(Transition::Delete),
            (true, false) => Some(Transition::Leave),
            (false, false) => None,
        }
    }
}

/// An event that several selections test: the labels of its objects are decoded once.
pub struct TestedEvent<'a> {
    event: &'a WatchEvent,
    object: LabelLookup<'a>,
    previous: Option<LabelLookup<'a>>,
}

impl<'a> TestedEvent<'a> {
    /// An event with its object and the one before it.
    pub fn new(event: &'a WatchEvent, object: &'a Object, previous: Option<&'a Object>) -> Self {
        Self { event, object: LabelLookup::new(object), previous: previous.map(LabelLookup::new) }
    }

    /// As [`WatchEvent::transition`].
    pub fn transition(&self, selection: &Selection) -> Option<Transition> {
        let before = || self.previous.as_ref().map(|previous| selection.matches_decoded(previous));
        self.event.transition_by(|| selection.matches_decoded(&self.object), before)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        GroupVersionResource,
        fields::FieldTable,
        object::ObjectParser,
        selector::{FieldSelector, LabelSelector},
    };

    const LABELS: [&str; 7] = ["", "app=web", "app!=web", "app in (web,db)", "app notin (web)", "app", "!app"];
    const FIELDS: [&str; 4] = ["", "spec.nodeName=n1", "spec.nodeName!=n1", "metadata.namespace=ns"];

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn transitions_keep_track_of_the_members_of_a_selection(
            states in prop::collection::vec(prop::option::weighted(0.8, (0..3usize, 0..2usize)), 1..20),
            settles: bool,
        ) {
            let gvr = GroupVersionResource::new("", "v1", "pods");
            let table = FieldTable::new(&gvr, true, &[]);
            let parser = Arc::new(ObjectParser::new(&table));
            let mut selections = Vec::new();
            for labels in LABELS {
                for fields in FIELDS {
                    let labels = LabelSelector::parse(labels).unwrap();
                    let fields = FieldSelector::parse(fields).unwrap();
                    selections.push(Selection::bind("", "", labels, &fields, &table, parser.clone(), &gvr).unwrap());
                }
            }
            let mut members = vec![false; selections.len()];
            let mut cached: Option<Arc<Object>> = None;
            for (version, state) in (1..).zip(states) {
                let (app, node) = state.unwrap_or_default();
                let labels = ["", r#""app":"web""#, r#""app":"db""#][app];
                let json = format!(
                    r#"{{"metadata":{{"namespace":"ns","name":"a","uid":"u","resourceVersion":"{version}","labels":{{{labels}}}}},"spec":{{"nodeName":"n{node}"}}}}"#
                );
                let object = Arc::new(parser.parse(json.as_bytes()).unwrap());
                // The last state of a deleted object may differ from the state before.
                let kind = match (&cached, state) {
                    (None, None) => continue,
                    (None, Some(_)) => EventType::Added,
                    (Some(_), Some(_)) => EventType::Modified,
                    (Some(_), None) => EventType::Deleted,
                };
                let at = ResourceVersion::new(version).unwrap();
                let event = WatchEvent::new(kind, at, object.clone(), cached.take()).packing(&Arc::default(), None);
                if settles {
                    event.settle();
                }
                cached = state.map(|_| object);
                for (selection, member) in selections.iter().zip(&mut members) {
                    let was = *member;
                    let is = cached.as_ref().is_some_and(|object| selection.matches(object));
                    let expected = match (was, is) {
                        (false, true) => Some(Transition::Enter),
                        (true, true) => Some(Transition::Change),
                        (true, false) if cached.is_some() => Some(Transition::Leave),
                        (true, false) => Some(Transition::Delete),
                        (false, false) => None,
                    };
                    prop_assert_eq!(event.transition(selection), expected, "at {}", version);
                    *member = is;
                }
            }
        }
    }
}
