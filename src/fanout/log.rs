//! A view's log: its frames in order, each with a sequence number that a cursor points at.
//!
//! It covers history from its floor, which never lies below the ring's. It can grow at the old end too, when somebody resumes from
//! before the view was made.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::frame::Frame;
use crate::model::ResourceVersion;

/// One frame in its place.
#[derive(Clone, Debug)]
pub struct LogEntry {
    /// The version that the stream has reached with the record that this frame is part of.
    pub version: ResourceVersion,
    /// What is sent.
    pub frame: Frame,
    /// When upstream's line was read; `None` where the frame was made from history.
    pub received: Option<Instant>,
}

impl LogEntry {
    fn cost_bytes(&self) -> usize {
        size_of::<Self>() + self.frame.head_len()
    }
}

/// The entries after `floor`.
#[derive(Debug)]
pub struct ViewLog {
    floor: ResourceVersion,
    first: u64,
    entries: VecDeque<LogEntry>,
    bytes: usize,
}

/// Sequence numbers start in the middle, so that there is room for older history in front.
const MIDDLE: u64 = 1 << 62;

impl ViewLog {
    /// An empty log that covers what comes after `floor`.
    pub fn new(floor: ResourceVersion) -> Self {
        Self { floor, first: MIDDLE, entries: VecDeque::new(), bytes: 0 }
    }

    /// The version after which the log is complete.
    pub fn floor(&self) -> ResourceVersion {
        self.floor
    }

    /// What the entries take beyond the objects that they share with the cache.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Appends an entry.
    pub fn push(&mut self, entry: LogEntry) {
        self.bytes += entry.cost_bytes();
        self.entries.push_back(entry);
    }

    /// Puts older history in front, oldest first; the log now covers what comes after `floor`.
    pub fn extend_back(&mut self, floor: ResourceVersion, older: Vec<LogEntry>) {
        self.first -= older.len() as u64;
        for entry in older.into_iter().rev() {
            self.bytes += entry.cost_bytes();
            self.entries.push_front(entry);
        }
        self.floor = floor;
    }

    /// Lets go of everything at or below `floor`.
    pub fn trim(&mut self, floor: ResourceVersion) {
        if floor <= self.floor {
            return;
        }
        self.floor = floor;
        while let Some(entry) = self.entries.front().filter(|entry| entry.version <= floor) {
            self.bytes -= entry.cost_bytes();
            self.entries.pop_front();
            self.first += 1;
        }
    }

    /// The sequence number after the last entry.
    pub fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// The sequence number of the first entry after `version`, which is at or above the floor.
    pub fn after(&self, version: ResourceVersion) -> u64 {
        self.first + self.entries.partition_point(|entry| entry.version <= version) as u64
    }

    /// The entries from a sequence number on; `None` if it has been let go of.
    pub fn from(&self, sequence: u64) -> Option<impl Iterator<Item = &LogEntry>> {
        let skip = usize::try_from(sequence.checked_sub(self.first)?).ok()?;
        Some(self.entries.range(skip.min(self.entries.len())..))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(number: u64) -> ResourceVersion {
        ResourceVersion::new(number).unwrap()
    }

    fn entry(number: u64) -> LogEntry {
        LogEntry { version: version(number), frame: Frame::bookmark(version(number)), received: None }
    }

    fn from(log: &ViewLog, sequence: u64) -> Option<Vec<u64>> {
        log.from(sequence).map(|entries| entries.map(|entry| entry.version.get()).collect())
    }

    #[test]
    fn a_cursor_keeps_its_place_while_history_grows_at_both_ends() {
        let mut log = ViewLog::new(version(10));
        let cursor = log.end();
        log.push(entry(12));
        log.extend_back(version(5), vec![entry(7), entry(9)]);
        assert_eq!(from(&log, cursor), Some(vec![12]));
        assert_eq!(from(&log, log.after(version(5))), Some(vec![7, 9, 12]));
        assert_eq!(from(&log, log.after(version(8))), Some(vec![9, 12]));
    }

    #[test]
    fn a_cursor_below_the_floor_is_told() {
        let mut log = ViewLog::new(version(10));
        let cursor = log.end();
        log.push(entry(12));
        log.push(entry(13));
        log.trim(version(12));
        assert_eq!(from(&log, cursor), None);
        assert_eq!(from(&log, cursor + 1), Some(vec![13]));
    }
}
