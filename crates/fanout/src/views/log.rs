//! A view's log: its items in order, each with a sequence number that cursors point at. An item is
//! an event or a gap. If the view's selection is tested later, it is an event that was not tested
//! yet, or one that the selection does not see.
//!
//! A subscriber needs only a cursor, so a thousand subscribers of one view cost one log and a
//! thousand integers. A queue per subscriber would cost an append per delivery and memory that slow
//! readers decide about.
//!
//! The log covers history after its floor, which is never below the ring's: records that the ring
//! evicts are trimmed here too, and a cursor below the first entry is an error, never a silent
//! skip. The log can also grow at the old end, when a subscriber resumes from before the view was
//! made. So sequence numbers start in the middle of their range.
//!
//! If the logs of a tenant are too large, their oldest items are trimmed although the ring has
//! them. A log never grows at the old end after items were trimmed: an older item would get the
//! sequence number of a trimmed one, and a subscriber that is behind would read it in place of the
//! one that it missed. A resume from before such a log gets another view. If the number of views of
//! its selection and format is at the limit, it continues as a subscriber that is behind.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use kubefan_cache::{HistoryRecord, budget::Share};
use kubefan_model::{ResourceVersion, event::WatchEvent, selection::Selection};
use tokio::time::Instant;

use super::{log_bytes::LogBytes, view_gap::ViewGap};
use crate::send::log_entry::{EntryKind, LogEntry};

/// One item of the log.
#[derive(Debug)]
pub enum LogItem {
    /// An event.
    Event(LogEntry),
    /// A gap. A subscriber takes the events that the view selects.
    Gap(Arc<ViewGap>),
    /// An event that the selection has not tested yet, and when it was received. Subscribers wait
    /// in front of it.
    Untested(Arc<WatchEvent>, Instant),
    /// An event that the selection does not see, at this version. Subscribers pass it.
    Unseen(ResourceVersion),
}

impl LogItem {
    /// The item of a record in history; `None` if the selection does not see it.
    pub fn replayed(record: &HistoryRecord, selection: &Selection) -> Option<Self> {
        match record {
            HistoryRecord::Event(event) => LogEntry::replayed(event, selection).map(Self::Event),
            HistoryRecord::Gap(gap) => Some(Self::Gap(Arc::new(ViewGap::new(gap.clone(), None)))),
        }
    }

    /// Time at which the entry was read from upstream; `None` if it comes from history.
    fn received(&self) -> Option<Instant> {
        match self {
            Self::Event(entry) => entry.received,
            Self::Gap(gap) => gap.received(),
            Self::Untested(_, received) => Some(*received),
            Self::Unseen(_) => None,
        }
    }

    fn version(&self) -> ResourceVersion {
        match self {
            Self::Event(entry) => entry.version,
            Self::Gap(gap) => gap.version(),
            Self::Untested(event, _) => event.version(),
            Self::Unseen(version) => *version,
        }
    }
}

/// Items of the history after one version and up to another, in which a view may start.
#[derive(Debug)]
pub struct Replayed {
    /// Names the history.
    pub epoch: u64,
    /// Version after which the items start.
    pub after: ResourceVersion,
    /// Version up to which the items are complete.
    pub up_to: ResourceVersion,
    /// In order.
    pub items: Vec<LogItem>,
}

impl Replayed {
    /// Whether it is of this history, and starts after this version.
    pub fn starts_after(&self, epoch: u64, version: ResourceVersion) -> bool {
        (self.epoch, self.after) == (epoch, version)
    }

    /// Returns the items up to `floor`, and the version up to which they are complete.
    pub fn up_to(mut self, floor: ResourceVersion) -> (Vec<LogItem>, ResourceVersion) {
        self.items.truncate(self.items.partition_point(|item| item.version() <= floor));
        (self.items, self.up_to.min(floor))
    }
}

/// A place in a view's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cursor {
    /// The sequence number of the next item.
    item: u64,
    /// The place inside it, if it is a gap: see [`ViewGap::part`].
    place: usize,
}

impl Cursor {
    fn at(item: u64) -> Self {
        Self { item, place: 0 }
    }

    /// The sequence number of the next item.
    pub fn item(self) -> u64 {
        self.item
    }

    /// The place inside the item, if it is a gap.
    pub fn place(self) -> usize {
        self.place
    }

    /// The place after the item at this place.
    pub fn past_item(self) -> Self {
        Self::at(self.item + 1)
    }

    /// A place inside the same item, which is a gap.
    pub fn inside_at(self, place: usize) -> Self {
        Self { place, ..self }
    }

    /// The place after entries that were read here: of events, or of one gap.
    pub fn past(self, entries: &[LogEntry]) -> Self {
        match entries.last().map(|last| &last.kind) {
            None | Some(EntryKind::Event(..)) => Self::at(self.item + entries.len() as u64),
            Some(EntryKind::GapBegin(_)) => Self { place: 1, ..self },
            Some(EntryKind::GapEvent(_, _, position)) => Self { place: position + 2, ..self },
            Some(EntryKind::GapEnd(_)) => self.past_item(),
        }
    }

    /// Returns how many of the entries that were read here lie before `cursor`.
    pub fn skipped(self, entries: &[LogEntry], cursor: Self) -> usize {
        if cursor.place > self.place {
            entries.partition_point(|entry| self.past(std::slice::from_ref(entry)) <= cursor)
        } else {
            usize::try_from(cursor.item - self.item).unwrap_or(usize::MAX).min(entries.len())
        }
    }

    /// The number of items from here to `end`.
    pub fn items_before(self, end: Self) -> usize {
        usize::try_from(end.item.saturating_sub(self.item)).unwrap_or(usize::MAX)
    }
}

/// Lag of a subscription: events that its view has for it and that were not handed to its
/// connection yet. Bytes in the connection, the kernel and the network are not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Behind {
    /// Events. If the log has trimmed some of them, the rest.
    pub events: usize,
    /// Time that the first of them has waited; `None` if there is none, or if it was read from
    /// history.
    pub time: Option<Duration>,
    /// Some events are no longer retained: the subscription continues with a catch-up or a
    /// snapshot, or ends.
    pub is_expired: bool,
}

/// The items after `floor`.
#[derive(Debug)]
pub struct ViewLog {
    floor: ResourceVersion,
    first: u64,
    /// A cursor before it has missed something that was trimmed.
    missed_before: u64,
    items: VecDeque<LogItem>,
    /// Number of untested items. All of them are at or after `tested_to`.
    untested: usize,
    /// A sequence number. All items before it are tested.
    tested_to: u64,
    /// An untested item was trimmed since the last test: a subscriber that waited in front of it
    /// has missed it.
    has_trimmed_untested: bool,
    /// Whether items were ever trimmed. The log then no longer grows at the old end.
    has_trimmed: bool,
    bytes: LogBytes,
}

/// The first sequence number: in the middle, so that there is room for older history in front.
const MIDDLE: u64 = 1 << 62;

impl ViewLog {
    /// An empty log after `floor`; `share` counts its size.
    pub fn new(floor: ResourceVersion, share: Share) -> Self {
        Self {
            floor,
            first: MIDDLE,
            missed_before: 0,
            items: VecDeque::new(),
            untested: 0,
            tested_to: MIDDLE,
            has_trimmed_untested: false,
            has_trimmed: false,
            bytes: LogBytes::new(share),
        }
    }

    /// Bytes of the log, and the tenant that they are charged to.
    pub fn bytes_mut(&mut self) -> &mut LogBytes {
        &mut self.bytes
    }

    /// Whether a subscription can start after `version`: the log has all that follows, or can still
    /// grow at the old end.
    pub fn can_start_after(&self, version: ResourceVersion) -> bool {
        version >= self.floor || !self.has_trimmed
    }

    /// Returns the floor that leaves a `share` of the items, from 0 to 1, and at least the newest.
    pub fn floor_leaving(&self, share: f64) -> ResourceVersion {
        let left = ((self.items.len() as f64 * share) as usize).max(1);
        let newest_trimmed = self.items.len().checked_sub(left + 1).and_then(|at| self.items.get(at));
        newest_trimmed.map_or(self.floor, LogItem::version)
    }

    /// The version after which the log is complete.
    pub fn floor(&self) -> ResourceVersion {
        self.floor
    }

    /// Appends an item.
    pub fn push(&mut self, item: LogItem) {
        if matches!(item, LogItem::Untested(..)) {
            if self.untested == 0 {
                self.tested_to = self.first + self.items.len() as u64;
            }
            self.untested += 1;
        }
        self.bytes.add(size_of::<LogItem>());
        self.items.push_back(item);
    }

    /// Prepends older history, oldest first, so that the log is complete after `floor`. Nothing may
    /// have been trimmed: see [`Self::can_start_after`].
    pub fn extend_back(&mut self, floor: ResourceVersion, older: Vec<LogItem>) {
        debug_assert!(!self.has_trimmed);
        self.first -= older.len() as u64;
        self.bytes.add(older.len() * size_of::<LogItem>());
        for item in older.into_iter().rev() {
            self.items.push_front(item);
        }
        self.floor = floor;
    }

    /// Drops every item at or below `floor`.
    pub fn trim(&mut self, floor: ResourceVersion) {
        if floor <= self.floor {
            return;
        }
        self.floor = floor;
        let trimmed = self.items.partition_point(|item| item.version() <= floor);
        for (seq, item) in (self.first..).zip(self.items.drain(..trimmed)) {
            if matches!(item, LogItem::Untested(..)) {
                self.untested -= 1;
                self.has_trimmed_untested = true;
            }
            if !matches!(item, LogItem::Unseen(_)) {
                self.missed_before = seq + 1;
            }
        }
        self.first += trimmed as u64;
        self.has_trimmed |= trimmed > 0;
        self.bytes.subtract(trimmed * size_of::<LogItem>());
        // After a burst the capacity is far too large.
        if self.items.capacity() > 4 * self.items.len().max(4) {
            self.items.shrink_to(2 * self.items.len());
        }
    }

    /// Returns the lag of a subscription at this item.
    pub fn behind(&self, item: u64, now: Instant) -> Behind {
        let is_expired = item < self.missed_before;
        let next = Cursor::at(item.max(self.missed_before));
        let Some(next) = self.seek(next) else { return Behind { is_expired, ..Behind::default() } };
        let received = self.item(next).and_then(LogItem::received);
        let time = received.map(|received| now.saturating_duration_since(received));
        Behind { events: next.items_before(self.end()), time, is_expired }
    }

    /// The place of the first item.
    pub fn first(&self) -> Cursor {
        Cursor::at(self.first)
    }

    /// The place after the last item.
    pub fn end(&self) -> Cursor {
        Cursor::at(self.first + self.items.len() as u64)
    }

    /// The place of the first item after `version`, which is at or above the floor.
    pub fn after(&self, version: ResourceVersion) -> Cursor {
        Cursor::at(self.first + self.items.partition_point(|item| item.version() <= version) as u64)
    }

    /// The items from a place on; `None` if the first of them was trimmed.
    pub fn from(&self, cursor: Cursor) -> Option<impl Iterator<Item = &LogItem>> {
        let skip = usize::try_from(cursor.item.checked_sub(self.first)?).ok()?;
        Some(self.items.range(skip.min(self.items.len())..))
    }

    /// The place at or after `cursor` that has something to read or to wait for, or the end. `None`
    /// if something in between was trimmed.
    pub fn seek(&self, cursor: Cursor) -> Option<Cursor> {
        if cursor.item < self.missed_before {
            return None;
        }
        let mut from = if cursor.item < self.first { self.first() } else { cursor };
        // Every delivery comes here. An iterator costs more than the one item that it mostly reads.
        while let Some(LogItem::Unseen(_)) = self.item(from) {
            from = from.past_item();
        }
        Some(from)
    }

    /// The item at a place; `None` at the end, or if it was trimmed.
    fn item(&self, cursor: Cursor) -> Option<&LogItem> {
        self.items.get(usize::try_from(cursor.item.checked_sub(self.first)?).ok()?)
    }

    /// Whether the item at a place was not tested yet.
    pub fn is_untested(&self, cursor: Cursor) -> bool {
        self.has_untested() && matches!(self.item(cursor), Some(LogItem::Untested(..)))
    }

    /// Whether any item was not tested yet.
    pub fn has_untested(&self) -> bool {
        self.untested > 0
    }

    /// The first events that were not tested yet, up to a gap, and the place of the first of them.
    pub fn untested(&self, events_max: usize) -> (Cursor, Vec<(Arc<WatchEvent>, Instant)>) {
        let mut from = Cursor::at(self.tested_to.max(self.first));
        let others =
            self.from(from).map_or(0, |items| items.take_while(|item| !matches!(item, LogItem::Untested(..))).count());
        from = Cursor::at(from.item + others as u64);
        let untested = self.from(from).into_iter().flatten().map_while(|item| match item {
            LogItem::Untested(event, received) => Some((event.clone(), *received)),
            LogItem::Event(_) | LogItem::Gap(_) | LogItem::Unseen(_) => None,
        });
        (from, untested.take(events_max).collect())
    }

    /// Replaces untested events from a place on by the results of their tests; those that were
    /// trimmed meanwhile stay away. Returns whether a subscriber that waited in front of them can
    /// read on now, or has missed one.
    pub fn tested(&mut self, from: Cursor, found: Vec<LogItem>) -> bool {
        let mut is_seen = false;
        self.tested_to = from.item + found.len() as u64;
        for (seq, found) in (from.item..).zip(found) {
            let at = seq.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
            if let Some(item @ LogItem::Untested(..)) = at.and_then(|at| self.items.get_mut(at)) {
                is_seen |= matches!(found, LogItem::Event(_));
                *item = found;
                self.untested -= 1;
            }
        }
        let has_missed = std::mem::take(&mut self.has_trimmed_untested);
        is_seen || has_missed || self.gap_at(Cursor::at(self.tested_to)).is_some()
    }

    /// The gaps between two places in which no event is missing: objects have other bytes.
    pub fn reencoded_between(&self, from: Cursor, to: Cursor) -> Vec<Arc<ViewGap>> {
        let items = self.from(from.max(self.first())).into_iter().flatten();
        let gaps = items.take(from.max(self.first()).items_before(to)).filter_map(|item| match item {
            LogItem::Gap(gap) if !gap.is_lossy() => Some(gap.clone()),
            _ => None,
        });
        gaps.collect()
    }

    /// The gap at a place.
    pub fn gap_at(&self, cursor: Cursor) -> Option<&Arc<ViewGap>> {
        match self.item(cursor)? {
            LogItem::Gap(gap) => Some(gap),
            LogItem::Event(_) | LogItem::Untested(..) | LogItem::Unseen(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use kubefan_cache::{Gap, RelistReason, budget::Budget};

    use super::*;

    fn version(number: u64) -> ResourceVersion {
        ResourceVersion::new(number).unwrap()
    }

    fn item(number: u64) -> LogItem {
        let gap = Gap::new(version(1), version(number), RelistReason::Expired, vec![]);
        LogItem::Gap(Arc::new(ViewGap::new(Arc::new(gap), None)))
    }

    fn from(log: &ViewLog, cursor: Cursor) -> Option<Vec<u64>> {
        log.from(cursor).map(|items| items.map(|item| item.version().get()).collect())
    }

    #[test]
    fn a_cursor_points_at_the_same_entry_while_the_log_grows_at_both_ends() {
        let mut log = ViewLog::new(version(10), Budget::alone(0).share());
        let cursor = log.end();
        log.push(item(12));
        log.extend_back(version(5), vec![item(7), item(9)]);
        assert_eq!(from(&log, cursor), Some(vec![12]));
        assert_eq!(from(&log, log.after(version(5))), Some(vec![7, 9, 12]));
        assert_eq!(from(&log, log.after(version(8))), Some(vec![9, 12]));
    }

    #[test]
    fn a_cursor_below_the_floor_is_an_error() {
        let mut log = ViewLog::new(version(10), Budget::alone(0).share());
        let cursor = log.end();
        log.push(item(12));
        log.push(item(13));
        log.trim(version(12));
        assert_eq!(from(&log, cursor), None);
        assert_eq!(from(&log, cursor.past_item()), Some(vec![13]));
    }

    #[test]
    fn a_shortened_log_has_a_share_of_its_newest_items_and_at_least_one() {
        for (share, left) in [(1.0, 10), (0.75, 7), (0.1, 1), (0.0, 1)] {
            let mut log = ViewLog::new(version(10), Budget::alone(0).share());
            for number in 11..=20 {
                log.push(item(number));
            }
            log.trim(log.floor_leaving(share));
            assert_eq!(from(&log, log.first()), Some((21 - left..=20).collect::<Vec<u64>>()), "{share}");
        }
        let empty = ViewLog::new(version(10), Budget::alone(0).share());
        assert_eq!(empty.floor_leaving(0.5), version(10));
    }

    /// Otherwise older history would get the sequence numbers of trimmed items.
    #[test]
    fn a_subscription_can_start_before_a_log_only_if_nothing_was_trimmed() {
        let mut log = ViewLog::new(version(10), Budget::alone(0).share());
        log.trim(version(11));
        assert!(log.can_start_after(version(5)), "there was no item to trim");
        for number in 12..=14 {
            log.push(item(number));
        }
        log.extend_back(version(5), vec![item(7)]);
        log.trim(version(12));
        let can_start = [5, 11, 12, 14].map(|number| log.can_start_after(version(number)));
        assert_eq!(can_start, [false, false, true, true]);
    }

    #[test]
    fn the_size_of_all_logs_is_counted_together() {
        let budget = Budget::alone(0);
        let mut one = ViewLog::new(version(10), budget.share());
        let mut other = ViewLog::new(version(10), budget.share());
        one.push(item(11));
        other.push(item(11));
        other.push(item(12));
        assert_eq!(budget.used(), 3 * size_of::<LogItem>());
        other.trim(version(11));
        drop(one);
        assert_eq!(budget.used(), size_of::<LogItem>());
    }
}
