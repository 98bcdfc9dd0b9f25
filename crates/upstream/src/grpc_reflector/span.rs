//! The events of a marked span, until its end.

use kubefan_cache::{ConflatedChange, RelistReason};
use kubefan_common::proto::v1alpha1::{self, Event};
use kubefan_model::{
    ObjectKey,
    event::EventType,
    object::{Object, ObjectParser},
};

use crate::{error::UpstreamError, reflector::ReflectorError};

/// The most changes of one span. A longer one is read as a snapshot, which the limits of a cache
/// apply to while it is received.
const CHANGES_MAX: usize = 1 << 20;
/// The most bytes of the objects of one span.
const BYTES_MAX: usize = 1 << 30;

/// The changes of a marked span so far.
pub(super) struct Span {
    pub(super) reason: RelistReason,
    pub(super) changes: Vec<ConflatedChange>,
    bytes: usize,
}

impl Span {
    pub(super) fn catch_up() -> Self {
        Self { reason: RelistReason::CatchUp, changes: Vec::new(), bytes: 0 }
    }

    pub(super) fn gap(reason: &str) -> Self {
        Self { reason: RelistReason::parse(reason), changes: Vec::new(), bytes: 0 }
    }

    /// Adds a change. An error if there are too many.
    pub(super) fn push(&mut self, change: Change) -> Result<(), ReflectorError> {
        if let Change::Event(_, object) = &change {
            self.bytes += object.json_len();
        }
        self.changes.push(change.conflated());
        if self.changes.len() > CHANGES_MAX || self.bytes > BYTES_MAX {
            return Err(invalid(&format!("more than {CHANGES_MAX} changes or {BYTES_MAX} bytes in one marked span")));
        }
        Ok(())
    }
}

/// Content of an event.
pub(super) enum Change {
    Event(EventType, Object),
    Gone(ObjectKey),
}

impl Change {
    pub(super) fn read(event: &Event, parser: &ObjectParser) -> Result<Self, ReflectorError> {
        let kind = match event.r#type() {
            v1alpha1::EventType::Added => EventType::Added,
            v1alpha1::EventType::Modified => EventType::Modified,
            v1alpha1::EventType::Deleted => EventType::Deleted,
            v1alpha1::EventType::Unspecified => return Err(invalid("an event without a type")),
        };
        // The known part of its last state, which may be too little to be parsed.
        if event.delete_reason() == v1alpha1::DeleteReason::FinalStateUnknown {
            return Ok(Self::Gone(ObjectKey::new(&event.namespace, &event.name)));
        }
        Ok(Self::Event(kind, parser.parse(&event.object)?))
    }

    fn conflated(self) -> ConflatedChange {
        match self {
            Self::Event(EventType::Deleted, object) => ConflatedChange::Remove(object.key().clone()),
            Self::Event(_, object) => ConflatedChange::Put(object),
            Self::Gone(key) => ConflatedChange::Remove(key),
        }
    }
}

/// The failure of a stream that breaks the contract.
pub(super) fn invalid(message: &str) -> ReflectorError {
    ReflectorError::Watch(UpstreamError::invalid(message))
}
