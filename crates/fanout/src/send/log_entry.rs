//! The entries of a view's log: its messages for an event, or for a part of a gap.
//!
//! An entry names the event that the ring holds and how it changes the view's membership. Its bytes
//! are made when it is sent.

use std::sync::Arc;

use tokio::time::Instant;

use kubefan_cache::Gap;
use kubefan_model::{
    ResourceVersion,
    event::{Transition, WatchEvent},
    selection::Selection,
};

/// Content of an entry.
#[derive(Debug, Clone)]
pub enum EntryKind {
    /// An event.
    Event(Arc<WatchEvent>, Transition),
    /// The start of a gap.
    GapBegin(Arc<Gap>),
    /// An event inside a gap, at this position among the events of the gap.
    GapEvent(Arc<WatchEvent>, Transition, usize),
    /// The end of a gap.
    GapEnd(Arc<Gap>),
}

/// One message of a view's log.
#[derive(Debug, Clone)]
pub struct LogEntry {
    /// The version that history reaches with the record that this is part of.
    pub version: ResourceVersion,
    /// The content to send.
    pub kind: EntryKind,
    /// Time at which the event was read from upstream; `None` if the entry was made from history.
    pub received: Option<Instant>,
}

impl LogEntry {
    /// The entry of an event that a selection sees.
    pub fn of(event: &Arc<WatchEvent>, seen: Transition, received: Option<Instant>) -> Self {
        Self { version: event.version(), kind: EntryKind::Event(event.clone(), seen), received }
    }

    /// The entry of an event in history; `None` if the selection does not see it.
    pub fn replayed(event: &Arc<WatchEvent>, selection: &Selection) -> Option<Self> {
        event.transition(selection).map(|seen| Self::of(event, seen, None))
    }

    /// The approximate length of its message, in bytes.
    pub fn estimate_bytes(&self) -> usize {
        const HEAD: usize = 128;
        match &self.kind {
            EntryKind::Event(event, _) | EntryKind::GapEvent(event, ..) => HEAD + event.object().json_len(),
            EntryKind::GapBegin(_) | EntryKind::GapEnd(_) => HEAD,
        }
    }
}
