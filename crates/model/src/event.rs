//! What happened to an object, and how one selection sees it.
//!
//! A new event holds its objects as they came, because they are about to be encoded; one that is history holds them as they rest,
//! packed. The hub turns the former into the latter by swapping pointers, so that nothing is packed inside its critical section.

use std::sync::Arc;

use arc_swap::{ArcSwap, ArcSwapOption};
use bytes::Bytes;

use super::{ResourceVersion, object::Object, packer::Packer, selection::Selection};

/// The type of an event, as Kubernetes' `watch.EventType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventType {
    /// New to the watch.
    Added,
    /// Changed.
    Modified,
    /// Gone.
    Deleted,
}

impl EventType {
    /// Kubernetes' name, which is also the label in metrics.
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
    object: Held,
    previous: Option<Held>,
    /// The previous object's bytes at this event's version: made once, for all selections that the object leaves while it is new.
    left: ArcSwapOption<Bytes>,
}

/// An object as an event holds it.
#[derive(Debug)]
struct Held {
    now: ArcSwap<Object>,
    /// What takes its place once the event is history.
    at_rest: Option<Arc<Object>>,
}

impl Held {
    fn new(object: Arc<Object>) -> Self {
        Self { now: ArcSwap::new(object), at_rest: None }
    }

    fn pack(&mut self, packer: &Arc<Packer>) {
        self.at_rest.get_or_insert_with(|| self.now.load().packed(packer));
    }

    fn settle(&self) {
        if let Some(at_rest) = &self.at_rest {
            self.now.store(at_rest.clone());
        }
    }

    fn is_new(&self) -> bool {
        self.at_rest.as_ref().is_some_and(|at_rest| !Arc::ptr_eq(&self.now.load(), at_rest))
    }
}

/// How a selection sees an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transition {
    /// The object is new to the selection.
    Enter,
    /// It was and is in the selection.
    Change,
    /// It exists but is in the selection no longer.
    Leave,
    /// It was in the selection and exists no longer.
    Delete,
}

impl WatchEvent {
    /// An event; `previous` is the object before it, where there was one.
    pub fn new(kind: EventType, version: ResourceVersion, object: Arc<Object>, previous: Option<Arc<Object>>) -> Self {
        let previous = previous.map(Held::new);
        Self { kind, version, object: Held::new(object), previous, left: ArcSwapOption::empty() }
    }

    /// Makes what [`Self::settle`] needs: packs the previous object, and one that was deleted. An object that is kept packed is
    /// given as `current`; one that is not rests as it is.
    pub fn packing(mut self, packer: &Arc<Packer>, current: Option<Arc<Object>>) -> Self {
        if let Some(previous) = &mut self.previous {
            previous.pack(packer);
        }
        if let Some(current) = current {
            // Not the same again: it would be held here, unpacked, after it was replaced.
            self.object.at_rest = Some(current).filter(|current| !Arc::ptr_eq(current, &self.object.now.load()));
        } else if self.kind == EventType::Deleted {
            let same = self.previous.as_ref().filter(|last| Arc::ptr_eq(&last.now.load(), &self.object.now.load()));
            self.object.at_rest = same.and_then(|same| same.at_rest.clone());
            self.object.pack(packer);
        }
        self
    }

    /// The previous object was packed before, as this.
    pub fn packing_previous_as(mut self, packed: Option<Arc<Object>>) -> Self {
        if let Some(previous) = &mut self.previous {
            previous.at_rest = packed;
        }
        self
    }

    /// Whether the object will rest as another than it is held as now.
    pub fn holds_plain(&self) -> bool {
        self.kind != EventType::Deleted && self.object.is_new()
    }

    /// The event is history: it holds its objects as they rest from now on.
    pub fn settle(&self) {
        self.object.settle();
        self.previous.iter().for_each(Held::settle);
        self.left.store(None);
    }

    /// The object that this event brought in was replaced; it rests as `packed`.
    pub fn replaced(&self, packed: &Arc<Object>) {
        self.object.now.store(packed.clone());
    }

    /// What happened.
    pub fn kind(&self) -> EventType {
        self.kind
    }

    /// The version of the change.
    pub fn version(&self) -> ResourceVersion {
        self.version
    }

    /// The object after the change; for a delete, its last state at the version of the delete.
    pub fn object(&self) -> Arc<Object> {
        self.object.now.load_full()
    }

    /// The object before the change.
    pub fn previous(&self) -> Option<Arc<Object>> {
        self.previous.as_ref().map(|previous| previous.now.load_full())
    }

    /// The bytes sent to a selection that the object leaves: its previous state at this event's version.
    pub fn left_bytes(&self) -> Bytes {
        if let Some(made) = &*self.left.load() {
            return Bytes::clone(made);
        }
        let last = self.previous.as_ref().unwrap_or(&self.object);
        let bytes = last.now.load().bytes_at(self.version);
        // History is packed, and must not keep what it was asked for once.
        if last.is_new() {
            self.left.store(Some(Arc::new(bytes.clone())));
        }
        bytes
    }

    /// How `selection` sees this event, by the rule of the apiserver's `convertToWatchEvent`: what counts is whether the object
    /// was selected before and is selected now. `None`: not at all.
    pub fn transition(&self, selection: &Selection) -> Option<Transition> {
        let matches = |held: &Held| selection.matches(&held.now.load());
        let was = match (&self.previous, self.kind) {
            (Some(previous), _) => matches(previous),
            // A delete of an object that was never seen: its last state is all there is to go by.
            (None, EventType::Deleted) => matches(&self.object),
            (None, _) => false,
        };
        let is = self.kind != EventType::Deleted && matches(&self.object);
        match (was, is) {
            (false, true) => Some(Transition::Enter),
            (true, true) => Some(Transition::Change),
            (true, false) if self.kind == EventType::Deleted => Some(Transition::Delete),
            (true, false) => Some(Transition::Leave),
            (false, false) => None,
        }
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
        fn what_a_selection_is_told_keeps_its_members(
            states in prop::collection::vec(prop::option::weighted(0.8, (0..3usize, 0..2usize)), 1..20),
            settles: bool,
        ) {
            let gvr = GroupVersionResource::new("", "v1", "pods");
            let table = FieldTable::new(&gvr, true, &[]);
            let parser = Arc::new(ObjectParser::new(&table));
            let mut selections = Vec::new();
            for labels in LABELS {
                for fields in FIELDS {
                    let (labels, fields) = (LabelSelector::parse(labels).unwrap(), FieldSelector::parse(fields).unwrap());
                    selections.push(Selection::bind("", "", labels, &fields, &table, parser.clone(), &gvr).unwrap());
                }
            }
            let mut members = vec![false; selections.len()];
            let mut held: Option<Arc<Object>> = None;
            for (version, state) in (1..).zip(states) {
                let (app, node) = state.unwrap_or_default();
                let labels = ["", r#""app":"web""#, r#""app":"db""#][app];
                let json = format!(
                    r#"{{"metadata":{{"namespace":"ns","name":"a","uid":"u","resourceVersion":"{version}","labels":{{{labels}}}}},"spec":{{"nodeName":"n{node}"}}}}"#
                );
                let object = Arc::new(parser.parse(json.as_bytes()).unwrap());
                // The last state of what is deleted may be another than the one before.
                let kind = match (&held, state) {
                    (None, None) => continue,
                    (None, Some(_)) => EventType::Added,
                    (Some(_), Some(_)) => EventType::Modified,
                    (Some(_), None) => EventType::Deleted,
                };
                let at = ResourceVersion::new(version).unwrap();
                let event = WatchEvent::new(kind, at, object.clone(), held.take()).packing(&Arc::default(), None);
                if settles {
                    event.settle();
                }
                held = state.map(|_| object);
                for (selection, member) in selections.iter().zip(&mut members) {
                    let was = *member;
                    let is = held.as_ref().is_some_and(|object| selection.matches(object));
                    let expected = match (was, is) {
                        (false, true) => Some(Transition::Enter),
                        (true, true) => Some(Transition::Change),
                        (true, false) if held.is_some() => Some(Transition::Leave),
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
