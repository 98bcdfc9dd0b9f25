//! The segments of one view.
//!
//! The problem is to encode each message once per view and not once per subscriber, without
//! deciding in advance which messages belong together. Segments are cut where a subscriber takes:
//! one that is behind finds the same segments in the same order, because the others took them
//! before. They are retained only while some subscriber still has to take them, within a limit per
//! view and a budget of the process, and made again from the log if they are missing.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use kubefan_cache::budget::Share;

use super::{
    log::{Cursor, LogItem, ViewLog},
    plain_position::SegmentEnd,
    segment::{GzipSegment, Segment},
};
use crate::send::log_entry::LogEntry;

/// The approximate size of one segment, in bytes; a larger message is a segment of its own.
pub const SEGMENT_BYTES: usize = 64 << 10;
/// The segments that one view retains, in bytes.
const VIEW_SEGMENT_BYTES_MAX: usize = 4 << 20;

/// The segments of one view.
pub struct Segments {
    segments: BTreeMap<Cursor, Arc<Segment>>,
    share: Share,
    /// For gzip bodies.
    gzip: Option<GzipSegments>,
}

/// The part that only gzip bodies need.
#[derive(Default)]
struct GzipSegments {
    /// The end of the newest segment, where the next one continues. It stays when all segments are
    /// dropped because every subscriber has taken them.
    newest: Option<(Cursor, SegmentEnd)>,
    /// The end of the last segment that was cut again for a subscriber far behind.
    recut: Option<(Cursor, SegmentEnd)>,
    /// Number of segments so far, each of which may begin a run.
    runs: u64,
}

impl GzipSegments {
    /// Whether `cursor` is at or after the end of the newest segment. All subscribers still have to
    /// take what is there; from before it perhaps one.
    fn is_new(&self, cursor: Cursor) -> bool {
        self.newest.as_ref().is_none_or(|(newest, _)| cursor >= *newest)
    }

    fn next(&mut self, range: &Range<Cursor>, may_compress: bool) -> GzipSegment {
        self.runs += 1;
        let last = if self.is_new(range.start) { &mut self.newest } else { &mut self.recut };
        let after = last.take().filter(|(last, _)| *last == range.start).map(|(_, after)| after);
        let end = SegmentEnd::default();
        *last = Some((range.end, end.clone()));
        GzipSegment { may_compress, after, run: self.runs, end }
    }
}

impl Segments {
    /// None yet; `share` counts their size. `is_gzip`: they are parts of gzip bodies.
    pub fn new(share: Share, is_gzip: bool) -> Self {
        Self { segments: BTreeMap::new(), share, gzip: is_gzip.then(GzipSegments::default) }
    }

    /// Returns the segment that contains `cursor`, which points at an item of the log. It is cut
    /// from the log if there is none. `None` if the item is a gap and no part from there on is
    /// known: see [`Self::share_part`].
    ///
    /// In a gzip body `compresses` decides whether events of this many bytes are compressed for so
    /// many of the `subscribers`.
    pub fn at(
        &mut self,
        cursor: Cursor,
        log: &ViewLog,
        subscribers: usize,
        compresses: impl FnOnce(usize, usize) -> bool,
    ) -> Option<Arc<Segment>> {
        let before = self.segments.range(..=cursor).next_back();
        if let Some((_, segment)) = before.filter(|(_, segment)| cursor < segment.end) {
            return Some(segment.clone());
        }
        let mut next = self.segments.range(cursor..).next().map_or(log.end(), |(first, _)| *first);
        if let Some((newest, _)) = self.gzip.as_ref().and_then(|gzip| gzip.newest.as_ref())
            && cursor < *newest
        {
            // All subscribers still have to take the rest: their number decides about compression.
            next = next.min(*newest);
        }
        let (entries, estimate_bytes) = cut(log, cursor, next, SEGMENT_BYTES)?;
        let range = cursor..cursor.past(&entries);
        let gzip = self.gzip.as_mut().map(|gzip| {
            let readers = if gzip.is_new(cursor) { subscribers } else { 1 };
            // A segment that is not retained is cut again for the next subscriber.
            let may_compress = !self.share.budget().is_over() && compresses(estimate_bytes, readers);
            gzip.next(&range, may_compress)
        });
        Some(self.retain(Segment::new(range, entries, estimate_bytes, gzip)))
    }

    /// Returns the segment of a part of a gap, which was read at `cursor` and up to `end`. If
    /// another subscriber was faster, this is its segment.
    pub fn share_part(&mut self, cursor: Cursor, end: Cursor, entries: Vec<LogEntry>) -> Arc<Segment> {
        if let Some(segment) = self.segments.get(&cursor) {
            return segment.clone();
        }
        debug_assert!(self.gzip.is_none(), "a watch over HTTP has no parts of gaps");
        let estimate_bytes = entries.iter().map(LogEntry::estimate_bytes).sum();
        self.retain(Segment::new(cursor..end, entries, estimate_bytes, None))
    }

    fn retain(&mut self, segment: Segment) -> Arc<Segment> {
        let segment = Arc::new(segment);
        self.share.add(segment.cost_bytes());
        self.segments.insert(segment.first, segment.clone());
        // One half of the budget is for the segments that subscribers are about to take: the newest
        // of each view.
        while self.share.bytes() > VIEW_SEGMENT_BYTES_MAX || self.share.budget().is_over_half() {
            let Some(oldest) = self.segments.keys().find(|first| **first != segment.first).copied() else { break };
            self.remove(oldest);
        }
        if self.share.budget().is_over() {
            self.remove(segment.first);
        }
        segment
    }

    fn remove(&mut self, first: Cursor) {
        if let Some(segment) = self.segments.remove(&first) {
            self.share.subtract(segment.cost_bytes());
        }
    }

    /// Drops the segments before `first`, where the log was trimmed.
    pub fn trim(&mut self, first: Cursor) {
        while let Some((oldest, segment)) = self.segments.first_key_value()
            && segment.end <= first
        {
            self.remove(*oldest);
        }
    }

    /// Drops all segments, because every subscriber has taken them.
    pub fn clear(&mut self) {
        self.share.set(0);
        self.segments.clear();
    }
}

/// The events in `cursor..next` up to the first item of another kind, at least one and at most
/// about `bytes_max` bytes, with their estimated length. `None` if there is another item at
/// `cursor`.
pub fn cut(log: &ViewLog, cursor: Cursor, next: Cursor, bytes_max: usize) -> Option<(Vec<LogEntry>, usize)> {
    let mut entries = Vec::new();
    let mut bytes = 0;
    for item in log.from(cursor)?.take(cursor.items_before(next)) {
        let LogItem::Event(entry) = item else { break };
        let estimate = entry.estimate_bytes();
        if bytes + estimate > bytes_max && !entries.is_empty() {
            break;
        }
        bytes += estimate;
        entries.push(entry.clone());
    }
    (!entries.is_empty()).then_some((entries, bytes))
}

#[cfg(test)]
mod tests {
    use kubefan_cache::budget::{Budget, ProcessBudget};
    use kubefan_model::{
        ResourceVersion,
        event::{EventType, Transition, WatchEvent},
        fields::FieldTable,
        object::ObjectParser,
    };

    use super::*;
    use crate::views::log::LogItem;

    fn log(events: u64) -> ViewLog {
        let version = |number| ResourceVersion::new(number).unwrap();
        let mut log = ViewLog::new(version(1), Budget::alone(0).share());
        let parser = ObjectParser::new(&FieldTable::default());
        for number in 2..2 + events {
            let json = format!(
                r#"{{"metadata":{{"name":"a","resourceVersion":"{number}"}},"data":"{}"}}"#,
                "x".repeat(SEGMENT_BYTES / 2)
            );
            let object = Arc::new(parser.parse(json.as_bytes()).unwrap());
            let event = Arc::new(WatchEvent::new(EventType::Modified, version(number), object, None));
            log.push(LogItem::Event(LogEntry::of(&event, Transition::Change, None)));
        }
        log
    }

    const BUDGET_BYTES: usize = 64 * SEGMENT_BYTES;

    #[test]
    fn a_view_retains_its_newest_segment_while_others_use_up_the_budget() {
        let log = log(2);
        let budget = Budget::alone(BUDGET_BYTES);
        let mut segments = Segments::new(budget.share(), false);
        let mut others = budget.share();
        others.set(BUDGET_BYTES / 2);
        let first = segments.at(log.first(), &log, 2, |_, _| true).unwrap();
        let again = segments.at(log.first(), &log, 2, |_, _| true).unwrap();
        assert!(Arc::ptr_eq(&first, &again), "its other subscribers take the same segment");
        let second = segments.at(first.end, &log, 2, |_, _| true).unwrap();
        assert!(Arc::ptr_eq(&segments.at(first.end, &log, 2, |_, _| true).unwrap(), &second));
        assert_eq!(budget.used(), BUDGET_BYTES / 2 + second.cost_bytes(), "older ones make room");
        segments.clear();
        others.set(BUDGET_BYTES);
        segments.at(log.first(), &log, 2, |_, _| true);
        assert_eq!(budget.used(), BUDGET_BYTES, "a limit remains");
    }

    /// Parts of a gap without events of the view.
    #[test]
    fn segments_without_entries_are_bounded_too() {
        let log = log(1);
        let budget = Budget::alone(BUDGET_BYTES);
        let mut segments = Segments::new(budget.share(), false);
        let at = |place: usize| log.first().inside_at(place);
        for place in 1..=100_000 {
            segments.share_part(at(place), at(place + 1), Vec::new());
        }
        assert!(budget.used() <= BUDGET_BYTES, "{}", budget.used());
        assert!(segments.segments.len() * size_of::<Segment>() <= BUDGET_BYTES);
        segments.clear();
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn the_segments_of_many_caches_are_bounded_and_each_cache_retains_some() {
        let log = log(2);
        let whole = ProcessBudget::new(BUDGET_BYTES);
        let budgets: Vec<_> = (0..8).map(|_| whole.part()).collect();
        let views = |budget: &Budget| (0..100).map(|_| Segments::new(budget.share(), false)).collect::<Vec<_>>();
        let mut all: Vec<_> = budgets.iter().map(views).collect();
        for view in all.iter_mut().flatten() {
            let first = view.at(log.first(), &log, 2, |_, _| true).unwrap();
            view.at(first.end, &log, 2, |_, _| true);
        }
        assert!(whole.used() <= BUDGET_BYTES, "{}", whole.used());
        for budget in &budgets {
            assert!(budget.used() > 0, "{budgets:?}");
        }
        drop(all);
        assert_eq!(whole.used(), 0);
    }
}
