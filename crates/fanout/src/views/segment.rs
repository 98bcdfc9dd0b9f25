//! A run of a view's log as one block of memory, encoded by the first subscriber that takes it and
//! shared by the others.
//!
//! The problem is to encode each message once per view and not once per subscriber, without
//! deciding in advance which messages belong together. Segments are cut where a subscriber takes:
//! one that is behind finds the same segments in the same order, because the others took them
//! before. They are encoded outside of every lock; a subscriber that needs a segment that is being
//! encoded waits for it. They are retained only while some subscriber still has to take them,
//! within a limit per view and a budget of the process, and made again from the log if they are
//! missing. Encoding at commit time instead would hold up every commit, also for views without a
//! reader at that moment.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, OnceLock},
};

use bytes::{Bytes, BytesMut};
use kubefan_cache::budget::Share;
use kubefan_gzip::Piece;
use kubefan_model::{ResourceVersion, format::Encoding};
use kubefan_telemetry::metrics::GzipPieces;

use super::{
    log::{Cursor, LogItem, ViewLog},
    plain_position::{PlainPosition, PlainRange, SegmentEnd},
};
use crate::send::{
    encoder::{DeltaBases, Encoder},
    frame_buf::FrameBuf,
    log_entry::LogEntry,
};

/// The approximate size of one segment, in bytes; a larger message is a segment of its own.
pub const SEGMENT_BYTES: usize = 64 << 10;
/// The segments that one view retains, in bytes.
const VIEW_SEGMENT_BYTES_MAX: usize = 4 << 20;

/// A run of entries, encoded once: of events, or of a part of one gap. Its end may be after that of
/// its last entry: events of a gap that the view does not see have no entry.
pub struct Segment {
    first: Cursor,
    end: Cursor,
    entries: Vec<LogEntry>,
    estimate_bytes: usize,
    content: OnceLock<Content>,
    /// The content without deltas, for streams that cannot read all of them; made when one takes
    /// it.
    without_deltas: OnceLock<Content>,
    /// For gzip bodies.
    gzip: Option<GzipSegment>,
}

/// The part of a segment that only gzip bodies need.
struct GzipSegment {
    /// Whether it is compressed, or stored.
    is_compressed: bool,
    /// The end of the segment before, if this one follows it.
    after: Option<SegmentEnd>,
    /// The run that begins with this segment if the end of the one before is not known.
    run: u64,
    end: SegmentEnd,
}

/// The entries that a subscriber took of a segment.
pub struct Taken<'a> {
    /// The entries.
    pub entries: &'a [LogEntry],
    /// The place after them.
    pub end: Cursor,
    /// Their plain bytes, in a gzip body.
    pub plain: Option<PlainRange>,
}

struct Content {
    bytes: Bytes,
    /// For each entry, the end of its bytes, and the number of messages up to there.
    ends: Vec<(usize, usize)>,
    /// The versions of the bases of deltas, by entry; shorter than `ends` if the last entries have
    /// none.
    delta_bases: Vec<Option<ResourceVersion>>,
    /// In a gzip body, the positions before each entry and after the last.
    positions: Vec<PlainPosition>,
}

impl Content {
    fn encode(entries: &[LogEntry], capacity: usize, encoder: &Encoder, client: DeltaBases) -> Self {
        let mut bytes = encoder.buffer(capacity);
        let mut ends = Vec::with_capacity(entries.len());
        let mut delta_bases = Vec::new();
        let mut messages = 0;
        for (index, entry) in entries.iter().enumerate() {
            let written = encoder.entry(entry, client, &mut bytes);
            messages += written.messages;
            ends.push((bytes.len(), messages));
            if written.base.is_some() {
                delta_bases.resize(index, None);
                delta_bases.push(written.base);
            }
        }
        Self { bytes: bytes.freeze(), ends, delta_bases, positions: Vec::new() }
    }

    /// Each entry is a piece of its own, because a subscriber may start or stop at any of them.
    fn encode_pieces(entries: &[LogEntry], encoder: &Encoder, gzip: &GzipSegment) -> Self {
        let known = gzip.after.as_ref().and_then(|after| after.get().copied());
        let mut position = known.unwrap_or_else(|| PlainPosition::start_of(gzip.run));
        let mut bytes = BytesMut::new();
        let mut ends = Vec::with_capacity(entries.len());
        let mut positions = Vec::with_capacity(entries.len() + 1);
        positions.push(position);
        let mut messages = 0;
        for entry in entries {
            let mut plain = encoder.buffer(entry.estimate_bytes());
            messages += encoder.entry(entry, DeltaBases::All, &mut plain).messages;
            let plain = plain.freeze();
            let piece = if gzip.is_compressed { encoder.compressed(plain) } else { Piece::stored(plain) };
            piece.put(&mut bytes);
            position = position.then(piece.checksum());
            ends.push((bytes.len(), messages));
            positions.push(position);
        }
        let _ = gzip.end.set(position);
        Self { bytes: bytes.freeze(), ends, delta_bases: Vec::new(), positions }
    }

    /// The plain bytes of some entries; `None` except in a gzip body.
    fn plain(&self, run: &Range<usize>) -> Option<PlainRange> {
        Some(PlainRange { from: *self.positions.get(run.start)?, to: *self.positions.get(run.end)? })
    }

    /// Returns the start of an entry's bytes, and the number of messages before it.
    fn start(&self, index: usize) -> (usize, usize) {
        index.checked_sub(1).map_or((0, 0), |last| self.ends[last])
    }

    fn delta_base(&self, index: usize) -> Option<ResourceVersion> {
        self.delta_bases.get(index).copied().flatten()
    }

    /// The entries from `index` to `upto` that fit into `bytes_max` bytes, at least one.
    fn fitting(&self, index: usize, upto: usize, bytes_max: usize) -> Range<usize> {
        let (start, _) = self.start(index);
        let fits = self.ends[index..upto].partition_point(|(end, _)| end - start <= bytes_max).max(1);
        index..(index + fits).min(upto)
    }

    fn append_to(&self, run: &Range<usize>, frames: &mut FrameBuf) {
        let (start, before) = self.start(run.start);
        let (end, messages) = self.start(run.end);
        frames.push(self.bytes.slice(start..end));
        frames.count(messages - before);
    }
}

impl Segment {
    fn new(first: Cursor, end: Cursor, entries: Vec<LogEntry>, estimate_bytes: usize) -> Self {
        let content = OnceLock::new();
        let without_deltas = OnceLock::new();
        Self { first, end, entries, estimate_bytes, content, without_deltas, gzip: None }
    }

    /// Memory of the segment, in bytes. Segments without entries count too: there are thousands of
    /// them in a large gap if the view sees little of it.
    fn cost_bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(&*self.entries) + self.estimate_bytes
    }

    /// Whether its events are compressed when they are encoded.
    pub fn is_compressed(&self) -> bool {
        self.gzip.as_ref().is_some_and(|gzip| gzip.is_compressed)
    }

    /// Whether its entries were encoded, and so compared.
    pub fn is_encoded(&self) -> bool {
        self.content.get().is_some()
    }

    /// Adds the messages from `cursor` on to `frames`, at most about `bytes_max` bytes and at least
    /// one entry, for a client that has these bases of deltas. Encodes the segment if that was not
    /// done yet. Never called under a view's lock.
    pub fn take(
        &self,
        cursor: Cursor,
        bytes_max: usize,
        encoder: &Encoder,
        client: DeltaBases,
        frames: &mut FrameBuf,
    ) -> Taken<'_> {
        let mut made = 0;
        let content = self.content.get_or_init(|| {
            if let Some(gzip) = &self.gzip {
                made = self.entries.len() as u64;
                return Content::encode_pieces(&self.entries, encoder, gzip);
            }
            // Deltas are much shorter than the estimate.
            let is_delta = encoder.format().encoding() == Encoding::ZstdDelta;
            Content::encode(&self.entries, if is_delta { 0 } else { self.estimate_bytes }, encoder, DeltaBases::All)
        });
        let skip = self.first.skipped(&self.entries, cursor);
        let mut index = skip;
        let had = frames.len();
        // A run of entries that the client can read, then a run that it must be sent in full, and
        // so on.
        while index < self.entries.len() && (index == skip || frames.len() - had < bytes_max) {
            let reads = |index: usize| encoder.can_read(client, content.delta_base(index));
            let can_read = reads(index);
            let all = self.entries.len();
            let upto = if content.delta_bases.is_empty() {
                all
            } else {
                (index..all).find(|next| reads(*next) != can_read).unwrap_or(all)
            };
            let content = if can_read {
                content
            } else {
                self.without_deltas
                    .get_or_init(|| Content::encode(&self.entries, self.estimate_bytes, encoder, DeltaBases::None))
            };
            let run = content.fitting(index, upto, bytes_max.saturating_sub(frames.len() - had));
            content.append_to(&run, frames);
            index = run.end;
        }
        let entries = &self.entries[skip..index];
        let end = if index == self.entries.len() { self.end } else { cursor.past(entries) };
        let plain = content.plain(&(skip..index));
        if let Some(plain) = plain {
            let plain_bytes = plain.bytes();
            frames.count_pieces(GzipPieces { made, sent: entries.len() as u64, plain_bytes });
        }
        Taken { entries, end, plain }
    }
}

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
    /// Whether no segment has contained `cursor` before. Then all subscribers still have to take
    /// it, and otherwise perhaps one.
    fn is_new(&self, cursor: Cursor) -> bool {
        self.newest.as_ref().is_none_or(|(newest, _)| cursor >= *newest)
    }

    fn next(&mut self, first: Cursor, end: Cursor, is_compressed: bool) -> GzipSegment {
        self.runs += 1;
        let last = if self.is_new(first) { &mut self.newest } else { &mut self.recut };
        let after = last.take().filter(|(last, _)| *last == first).map(|(_, after)| after);
        let segment_end = SegmentEnd::default();
        *last = Some((end, segment_end.clone()));
        GzipSegment { is_compressed, after, run: self.runs, end: segment_end }
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
        let next = self.segments.range(cursor..).next().map_or(log.end(), |(first, _)| *first);
        let (entries, estimate_bytes) = cut(log, cursor, next, SEGMENT_BYTES)?;
        let mut segment = Segment::new(cursor, cursor.past(&entries), entries, estimate_bytes);
        if let Some(gzip) = &mut self.gzip {
            let readers = if gzip.is_new(cursor) { subscribers } else { 1 };
            // A segment that is not retained is cut again for the next subscriber.
            let is_compressed = !self.share.budget().is_over() && compresses(estimate_bytes, readers);
            segment.gzip = Some(gzip.next(segment.first, segment.end, is_compressed));
        }
        Some(self.retain(segment))
    }

    /// Returns the segment of a part of a gap, which was read at `cursor` and up to `end`. If
    /// another subscriber was faster, this is its segment.
    pub fn share_part(&mut self, cursor: Cursor, end: Cursor, entries: Vec<LogEntry>) -> Arc<Segment> {
        if let Some(segment) = self.segments.get(&cursor) {
            return segment.clone();
        }
        debug_assert!(self.gzip.is_none(), "a watch over HTTP has no parts of gaps");
        let estimate_bytes = entries.iter().map(LogEntry::estimate_bytes).sum();
        self.retain(Segment::new(cursor, end, entries, estimate_bytes))
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
