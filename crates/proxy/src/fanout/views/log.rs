//! A view's log: its entries in order, each with a sequence number that cursors point at.
//!
//! A subscriber needs only a cursor, so a thousand subscribers of one view cost one log and a
//! thousand integers. A queue per subscriber would cost an append per delivery and memory that slow
//! readers decide about.
//!
//! The log covers history after its floor, which is never below the ring's: what the ring evicts is
//! trimmed here too, and a cursor below the first entry is an error, never a silent skip. The log
//! can also grow at the old end, when a subscriber resumes from before the view was made. So
//! sequence numbers start in the middle of their range.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::fanout::send::log_entry::LogEntry;
use kubefan_model::ResourceVersion;

/// The size of the logs of all views of one cache, in bytes.
pub type LogBytes = Arc<AtomicUsize>;

/// The entries after `floor`.
#[derive(Debug)]
pub struct ViewLog {
    floor: ResourceVersion,
    first: u64,
    entries: VecDeque<LogEntry>,
    bytes: LogBytes,
}

/// The first sequence number: in the middle, so that there is room for older history in front.
const MIDDLE: u64 = 1 << 62;

impl ViewLog {
    /// An empty log after `floor`; its size is counted in `bytes`.
    pub fn new(floor: ResourceVersion, bytes: LogBytes) -> Self {
        Self { floor, first: MIDDLE, entries: VecDeque::new(), bytes }
    }

    /// The version after which the log is complete.
    pub fn floor(&self) -> ResourceVersion {
        self.floor
    }

    /// Appends an entry.
    pub fn push(&mut self, entry: LogEntry) {
        self.bytes.fetch_add(size_of::<LogEntry>(), Ordering::Relaxed);
        self.entries.push_back(entry);
    }

    /// Prepends older history, oldest first. The log then covers history after `floor`.
    pub fn extend_back(&mut self, floor: ResourceVersion, older: Vec<LogEntry>) {
        self.first -= older.len() as u64;
        self.bytes.fetch_add(older.len() * size_of::<LogEntry>(), Ordering::Relaxed);
        older.into_iter().rev().for_each(|entry| self.entries.push_front(entry));
        self.floor = floor;
    }

    /// Drops every entry at or below `floor`.
    pub fn trim(&mut self, floor: ResourceVersion) {
        if floor <= self.floor {
            return;
        }
        self.floor = floor;
        let trimmed = self.entries.partition_point(|entry| entry.version <= floor);
        self.entries.drain(..trimmed);
        self.first += trimmed as u64;
        self.bytes.fetch_sub(trimmed * size_of::<LogEntry>(), Ordering::Relaxed);
        // After a burst the capacity is far too large.
        if self.entries.capacity() > 4 * self.entries.len().max(4) {
            self.entries.shrink_to(2 * self.entries.len());
        }
    }

    /// The sequence number of the first entry.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// The sequence number after the last entry.
    pub fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// The sequence number of the first entry after `version`, which is at or above the floor.
    pub fn after(&self, version: ResourceVersion) -> u64 {
        self.first + self.entries.partition_point(|entry| entry.version <= version) as u64
    }

    /// The entries from a sequence number on; `None` if it was trimmed.
    pub fn from(&self, sequence: u64) -> Option<impl Iterator<Item = &LogEntry>> {
        let skip = usize::try_from(sequence.checked_sub(self.first)?).ok()?;
        Some(self.entries.range(skip.min(self.entries.len())..))
    }
}

impl Drop for ViewLog {
    fn drop(&mut self) {
        self.bytes.fetch_sub(self.entries.len() * size_of::<LogEntry>(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cache::Gap, fanout::send::log_entry::EntryKind};

    fn version(number: u64) -> ResourceVersion {
        ResourceVersion::new(number).unwrap()
    }

    fn entry(number: u64) -> LogEntry {
        let gap = Gap { from: version(1), to: version(number), reason: "test", events: vec![] };
        LogEntry { version: version(number), kind: EntryKind::GapEnd(Arc::new(gap)), received: None }
    }

    fn from(log: &ViewLog, sequence: u64) -> Option<Vec<u64>> {
        log.from(sequence).map(|entries| entries.map(|entry| entry.version.get()).collect())
    }

    #[test]
    fn a_cursor_points_at_the_same_entry_while_the_log_grows_at_both_ends() {
        let mut log = ViewLog::new(version(10), LogBytes::default());
        let cursor = log.end();
        log.push(entry(12));
        log.extend_back(version(5), vec![entry(7), entry(9)]);
        assert_eq!(from(&log, cursor), Some(vec![12]));
        assert_eq!(from(&log, log.after(version(5))), Some(vec![7, 9, 12]));
        assert_eq!(from(&log, log.after(version(8))), Some(vec![9, 12]));
    }

    #[test]
    fn a_cursor_below_the_floor_is_an_error() {
        let mut log = ViewLog::new(version(10), LogBytes::default());
        let cursor = log.end();
        log.push(entry(12));
        log.push(entry(13));
        log.trim(version(12));
        assert_eq!(from(&log, cursor), None);
        assert_eq!(from(&log, cursor + 1), Some(vec![13]));
    }

    #[test]
    fn the_size_of_all_logs_is_counted_together() {
        let bytes = LogBytes::default();
        let mut one = ViewLog::new(version(10), bytes.clone());
        let mut other = ViewLog::new(version(10), bytes.clone());
        one.push(entry(11));
        other.push(entry(11));
        other.push(entry(12));
        assert_eq!(bytes.load(Ordering::Relaxed), 3 * size_of::<LogEntry>());
        other.trim(version(11));
        drop(one);
        assert_eq!(bytes.load(Ordering::Relaxed), size_of::<LogEntry>());
    }
}
