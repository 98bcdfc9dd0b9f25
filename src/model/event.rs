//! What happened to an object, and how one selection sees it.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use super::{ResourceVersion, object::Object, selection::Selection};

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
    object: Arc<Object>,
    previous: Option<Arc<Object>>,
    /// The previous object's bytes at this event's version: made once, for all selections that the object leaves.
    left: OnceLock<Bytes>,
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
        Self { kind, version, object, previous, left: OnceLock::new() }
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
    pub fn object(&self) -> &Arc<Object> {
        &self.object
    }

    /// The object before the change.
    pub fn previous(&self) -> Option<&Arc<Object>> {
        self.previous.as_ref()
    }

    /// The bytes sent to a selection that the object leaves: its previous state at this event's version.
    pub fn left_bytes(&self) -> Bytes {
        self.left.get_or_init(|| self.previous.as_ref().unwrap_or(&self.object).bytes_at(self.version)).clone()
    }

    /// How `selection` sees this event, by the rule of the apiserver's `convertToWatchEvent`: what counts is whether the object
    /// was selected before and is selected now. `None`: not at all.
    pub fn transition(&self, selection: &Selection) -> Option<Transition> {
        let was = match (&self.previous, self.kind) {
            (Some(previous), _) => selection.matches(previous),
            // A delete of an object that was never seen: its last state is all there is to go by.
            (None, EventType::Deleted) => selection.matches(&self.object),
            (None, _) => false,
        };
        let is = self.kind != EventType::Deleted && selection.matches(&self.object);
        match (was, is) {
            (false, true) => Some(Transition::Enter),
            (true, true) => Some(Transition::Change),
            (true, false) if self.kind == EventType::Deleted => Some(Transition::Delete),
            (true, false) => Some(Transition::Leave),
            (false, false) => None,
        }
    }
}
