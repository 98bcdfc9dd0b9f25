//! A run of a view's log as one piece of memory, made by whoever takes it first and shared by all who follow.
//!
//! Segments are cut where somebody took: who is behind gets the same blocks in the same order. They are kept while subscribers are
//! on their way through them, within limits per view and per cache, and made again from the log where they are missing.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;

use crate::fanout::{
    send::{
        encoder::{DeltaBases, Encoder},
        frame_buf::FrameBuf,
    },
    views::log::{LogEntry, ViewLog},
};
use kubefan_model::{ResourceVersion, format::Encoding};

/// About how much one block holds, in bytes; one larger message is a block of its own.
const SEGMENT_BYTES: usize = 64 << 10;
/// The blocks that one view keeps, in bytes.
const VIEW_SEGMENT_BYTES_MAX: usize = 4 << 20;
/// The blocks that all views of one cache keep, in bytes.
const SEGMENT_BYTES_MAX: usize = 32 << 20;

/// What the blocks of all views of one cache take together, in bytes.
pub type SegmentBytes = Arc<AtomicUsize>;

/// A run of entries, encoded once.
pub struct Segment {
    first: u64,
    entries: Vec<LogEntry>,
    estimate_bytes: usize,
    content: OnceLock<Content>,
    /// The same without deltas, for streams that cannot read all of them; made where there is one.
    full: OnceLock<Content>,
}

struct Content {
    bytes: Bytes,
    /// For each entry, where its bytes end, and the messages up to there.
    ends: Vec<(usize, usize)>,
    /// The bases of deltas, by entry; empty where there is none.
    bases: Vec<Option<ResourceVersion>>,
}

impl Content {
    fn encode(entries: &[LogEntry], capacity: usize, encoder: &Encoder, holds: DeltaBases) -> Self {
        let mut bytes = encoder.buffer(capacity);
        let (mut ends, mut bases, mut messages) = (Vec::with_capacity(entries.len()), Vec::new(), 0);
        for (place, entry) in entries.iter().enumerate() {
            let written = encoder.entry(entry, holds, &mut bytes);
            messages += written.messages;
            ends.push((bytes.len(), messages));
            if written.base.is_some() {
                bases.resize(place, None);
                bases.push(written.base);
            }
        }
        Self { bytes: bytes.freeze(), ends, bases }
    }

    /// Where the bytes of an entry begin, and the messages before it.
    fn start(&self, place: usize) -> (usize, usize) {
        place.checked_sub(1).map_or((0, 0), |last| self.ends[last])
    }

    fn base(&self, place: usize) -> Option<ResourceVersion> {
        self.bases.get(place).copied().flatten()
    }

    /// The entries after `place` that fit into `bytes_max` bytes, at least one.
    fn fitting(&self, place: usize, upto: usize, bytes_max: usize) -> Range<usize> {
        let (start, _) = self.start(place);
        let fits = self.ends[place..upto].partition_point(|(end, _)| end - start <= bytes_max).max(1);
        place..(place + fits).min(upto)
    }

    fn give(&self, run: &Range<usize>, pieces: &mut FrameBuf) {
        let ((start, before), (end, messages)) = (self.start(run.start), self.start(run.end));
        pieces.push(self.bytes.slice(start..end));
        pieces.count(messages - before);
    }
}

impl Segment {
    fn new(first: u64, entries: Vec<LogEntry>, estimate_bytes: usize) -> Self {
        Self { first, entries, estimate_bytes, content: OnceLock::new(), full: OnceLock::new() }
    }

    fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// Adds the messages from `cursor` on to `pieces`, at most about `bytes_max` bytes and at least one entry; gives the entries that
    /// were taken. Encodes the block if nobody has. Never called under a view's lock.
    pub fn take(
        &self,
        cursor: u64,
        bytes_max: usize,
        encoder: &Encoder,
        holds: DeltaBases,
        pieces: &mut FrameBuf,
    ) -> &[LogEntry] {
        let content = self.content.get_or_init(|| {
            // Deltas are much shorter than what was estimated.
            let is_delta = encoder.format().encoding() == Encoding::ZstdDelta;
            Content::encode(&self.entries, if is_delta { 0 } else { self.estimate_bytes }, encoder, DeltaBases::All)
        });
        let skip = usize::try_from(cursor - self.first).unwrap_or(usize::MAX).min(self.entries.len());
        let (mut place, had) = (skip, pieces.len());
        // A run of what the stream can read, then one of what must be said in full, and so on.
        while place < self.entries.len() && (place == skip || pieces.len() - had < bytes_max) {
            let reads = |place: usize| encoder.can_read(holds, content.base(place));
            let (same, all) = (reads(place), self.entries.len());
            let upto = match content.bases.is_empty() {
                true => all,
                false => (place..all).find(|next| reads(*next) != same).unwrap_or(all),
            };
            let content = match same {
                true => content,
                false => self
                    .full
                    .get_or_init(|| Content::encode(&self.entries, self.estimate_bytes, encoder, DeltaBases::Nothing)),
            };
            let run = content.fitting(place, upto, bytes_max.saturating_sub(pieces.len() - had));
            content.give(&run, pieces);
            place = run.end;
        }
        &self.entries[skip..place]
    }
}

/// The blocks of one view.
pub struct Segments {
    blocks: BTreeMap<u64, Arc<Segment>>,
    bytes: usize,
    /// Of all views.
    total: SegmentBytes,
}

impl Segments {
    /// None yet; counted in `total`.
    pub fn new(total: SegmentBytes) -> Self {
        Self { blocks: BTreeMap::new(), bytes: 0, total }
    }

    /// The block that holds `cursor`, cut from the log if there is none. The cursor points at an entry of the log.
    pub fn at(&mut self, cursor: u64, log: &ViewLog) -> Option<Arc<Segment>> {
        if let Some((_, block)) = self.blocks.range(..=cursor).next_back().filter(|(_, block)| cursor < block.end()) {
            return Some(block.clone());
        }
        let next = self.blocks.range(cursor..).next().map_or(log.end(), |(first, _)| *first);
        let (entries, estimate_bytes) = cut(log, cursor, next, SEGMENT_BYTES)?;
        let block = Arc::new(Segment::new(cursor, entries, estimate_bytes));
        self.keep(block.clone());
        Some(block)
    }

    fn keep(&mut self, block: Arc<Segment>) {
        self.bytes += block.estimate_bytes;
        self.total.fetch_add(block.estimate_bytes, Ordering::Relaxed);
        self.blocks.insert(block.first, block);
        while self.bytes > VIEW_SEGMENT_BYTES_MAX || self.total.load(Ordering::Relaxed) > SEGMENT_BYTES_MAX {
            if !self.drop_oldest() {
                break;
            }
        }
    }

    fn drop_oldest(&mut self) -> bool {
        let Some((_, oldest)) = self.blocks.pop_first() else { return false };
        self.bytes -= oldest.estimate_bytes;
        self.total.fetch_sub(oldest.estimate_bytes, Ordering::Relaxed);
        true
    }

    /// Lets go of what lies before `first`, as the log does.
    pub fn trim(&mut self, first: u64) {
        while self.blocks.first_key_value().is_some_and(|(_, block)| block.end() <= first) {
            self.drop_oldest();
        }
    }

    /// Lets go of all blocks: nobody is on the way.
    pub fn clear(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
        self.bytes = 0;
        self.blocks.clear();
    }
}

impl Drop for Segments {
    fn drop(&mut self) {
        self.clear();
    }
}

/// The entries in `cursor..next`, at least one and at most about `bytes_max` bytes, with their estimated length.
pub fn cut(log: &ViewLog, cursor: u64, next: u64, bytes_max: usize) -> Option<(Vec<LogEntry>, usize)> {
    let (mut entries, mut bytes) = (Vec::new(), 0);
    for entry in log.from(cursor)?.take(usize::try_from(next - cursor).unwrap_or(usize::MAX)) {
        let estimate = entry.estimate_bytes();
        if bytes + estimate > bytes_max && !entries.is_empty() {
            break;
        }
        bytes += estimate;
        entries.push(entry.clone());
    }
    (!entries.is_empty()).then_some((entries, bytes))
}
