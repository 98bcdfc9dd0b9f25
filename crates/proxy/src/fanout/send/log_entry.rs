//! The entries of a view's log: what a view sends for a record of history.
//!
//! An entry names the event that the ring holds and how it changes the view's membership. Its bytes
//! are made when it is sent.

use std::sync::Arc;

use tokio::time::Instant;

use crate::cache::{Gap, Record};
use kubefan_model::{
    ResourceVersion,
    event::{Transition, WatchEvent},
    selection::Selection,
};

/// What an entry sends.
#[derive(Debug, Clone)]
pub enum EntryKind {
    /// An event.
    Event(Arc<WatchEvent>, Transition),
    /// The start of a gap.
    GapBegin(Arc<Gap>),
    /// An event inside a gap.
    GapEvent(Arc<WatchEvent>, Transition),
    /// The end of a gap.
    GapEnd(Arc<Gap>),
}

/// One message of a view's log.
#[derive(Debug, Clone)]
pub struct LogEntry {
    /// The version that history reaches with the record that this is part of.
    pub version: ResourceVersion,
    /// What is sent.
    pub kind: EntryKind,
    /// When it was read from upstream; `None` if the entry was made from history.
    pub received: Option<Instant>,
}

impl LogEntry {
    /// The approximate length of its message, in bytes.
    pub fn estimate_bytes(&self) -> usize {
        const HEAD: usize = 128;
        match &self.kind {
            EntryKind::Event(event, _) | EntryKind::GapEvent(event, _) => HEAD + event.object().json_len(),
            EntryKind::GapBegin(_) | EntryKind::GapEnd(_) => HEAD,
        }
    }
}

/// An event inside a gap, and how it changes the membership of a selection.
pub type GapTransition = (Arc<WatchEvent>, Transition);

/// The entries of a record for a selection.
pub fn entries(record: &Record, selection: &Selection, received: Option<Instant>) -> Vec<LogEntry> {
    match record {
        Record::Event(event) => {
            event.transition(selection).map(|seen| entry(event, seen, received)).into_iter().collect()
        }
        Record::Gap(gap) => {
            let seen = gap.events.iter().filter_map(|event| Some((event.clone(), event.transition(selection)?)));
            gap_entries(gap, seen, received).collect()
        }
    }
}

/// The entry of an event.
pub fn entry(event: &Arc<WatchEvent>, seen: Transition, received: Option<Instant>) -> LogEntry {
    LogEntry { version: event.version(), kind: EntryKind::Event(event.clone(), seen), received }
}

/// The entries of a gap and the events inside it.
pub fn gap_entries(
    gap: &Arc<Gap>,
    inside: impl IntoIterator<Item = GapTransition>,
    received: Option<Instant>,
) -> impl Iterator<Item = LogEntry> {
    let version = gap.to;
    let inside = inside.into_iter().map(|(event, seen)| EntryKind::GapEvent(event, seen));
    let begin = std::iter::once(EntryKind::GapBegin(gap.clone()));
    let all = begin.chain(inside).chain(std::iter::once(EntryKind::GapEnd(gap.clone())));
    all.map(move |kind| LogEntry { version, kind, received })
}
