//! A gap in the log of one view: the part of the shared gap that the view sends.
//!
//! A view's log has one entry for a gap, whatever the size of the gap. A subscriber that reaches it
//! takes the gap in parts and remembers its place in it. The tests of the selection are made then,
//! in slices and never under a lock, because one gap can hold every object.

use std::sync::{Arc, OnceLock};

use kubefan_cache::{Expired, Gap};
use kubefan_common::planted::{self, Bug};
use kubefan_model::{ResourceVersion, selection::Selection};
use tokio::time::Instant;

use crate::send::log_entry::{EntryKind, LogEntry};

/// A gap as one view sends it.
#[derive(Debug)]
pub struct ViewGap {
    gap: Arc<Gap>,
    received: Option<Instant>,
    /// For a format that cannot express a gap. Made once for all subscribers of the view.
    crossing: OnceLock<Crossing>,
}

/// The way in which a view continues after a gap that its format cannot express.
#[derive(Debug, Clone)]
enum Crossing {
    /// Not at all: it would miss something.
    Ends,
    /// The view misses nothing: the gap has no object of the view, except in this exact event.
    Passes(Option<LogEntry>),
}

impl ViewGap {
    /// A gap that was read from upstream at `received`; `None` if it comes from history.
    pub fn new(gap: Arc<Gap>, received: Option<Instant>) -> Self {
        Self { gap, received, crossing: OnceLock::new() }
    }

    /// The version that history reaches with it.
    pub fn version(&self) -> ResourceVersion {
        self.gap.to
    }

    /// Time at which the gap was read from upstream; `None` if it comes from history.
    pub fn received(&self) -> Option<Instant> {
        self.received
    }

    /// Whether events may be missing in it.
    pub fn is_lossy(&self) -> bool {
        self.gap.is_lossy
    }

    /// Returns the entries from `place` on, about `bytes_max` bytes of them, and the place after
    /// them; no place after the end of the gap. Place 0 is the start of the gap, and place n + 1
    /// the event at position n. Each test is subtracted from `tests_left`. When none are left, the
    /// part may have no entries.
    pub fn part(
        &self,
        place: usize,
        selection: &Selection,
        bytes_max: usize,
        tests_left: &mut usize,
    ) -> (Vec<LogEntry>, Option<usize>) {
        let start = if planted::is(Bug::GapPartOmits) { place } else { place.saturating_sub(1) };
        let mut entries = Vec::new();
        if place == 0 {
            entries.push(self.entry(EntryKind::GapBegin(self.gap.clone())));
        }
        let mut bytes: usize = entries.iter().map(LogEntry::estimate_bytes).sum();
        let mut tested = self.gap.test_each(selection, start);
        let mut next = place.max(1);
        while *tests_left > 0 {
            let test = tested.next();
            // An event is two objects.
            *tests_left = tests_left.saturating_sub(2 * selection.tests());
            // The event at position `at` has the place `at + 1`.
            let (kind, after) = match test {
                Some((at, event, Some(seen))) => (EntryKind::GapEvent(event.clone(), seen, at), Some(at + 2)),
                Some((at, _, None)) => {
                    next = at + 2;
                    continue;
                }
                None => (EntryKind::GapEnd(self.gap.clone()), None),
            };
            let entry = self.entry(kind);
            bytes += entry.estimate_bytes();
            if bytes > bytes_max && !entries.is_empty() {
                break;
            }
            entries.push(entry);
            let Some(after) = after else { return (entries, None) };
            next = after;
        }
        (entries, Some(next))
    }

    /// Returns the event with which a subscriber continues after the gap, if its format cannot
    /// express the gap, and if there is one.
    ///
    /// # Errors
    /// If something is missing that the selection sees.
    pub fn crossing(&self, selection: &Selection) -> Result<Option<LogEntry>, Expired> {
        match self.crossing.get_or_init(|| self.find_crossing(selection)) {
            Crossing::Ends => Err(Expired { requested: self.gap.from, oldest: self.gap.to }),
            Crossing::Passes(entry) => Ok(entry.clone()),
        }
    }

    fn find_crossing(&self, selection: &Selection) -> Crossing {
        if self.gap.is_lossy && !planted::is(Bug::EmptyGapPasses) {
            return Crossing::Ends;
        }
        let mut exact = None;
        for (_, event, seen) in self.gap.select(selection, 0) {
            if self.gap.is_exact(event) {
                exact = Some(self.entry(EntryKind::Event(event.clone(), seen)));
            } else if !planted::is(Bug::ReencodedPasses) {
                return Crossing::Ends;
            }
        }
        Crossing::Passes(exact)
    }

    fn entry(&self, kind: EntryKind) -> LogEntry {
        LogEntry { version: self.gap.to, kind, received: self.received }
    }
}
