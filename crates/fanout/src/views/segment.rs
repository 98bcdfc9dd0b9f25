//! A run of a view's log as one block of memory, encoded by the first subscriber that takes it and
//! shared by the others.
//!
//! It is encoded outside of every lock; a subscriber that needs a segment that is being encoded
//! waits for it. Encoding at commit time instead would hold up every commit, also for views without
//! a reader at that moment.

use std::{ops::Range, sync::OnceLock};

use bytes::{Bytes, BytesMut};
use kubefan_model::{ResourceVersion, format::Encoding};
use kubefan_telemetry::metrics::GzipPieces;

use super::{
    log::Cursor,
    plain_position::{PlainPosition, PlainRange, SegmentEnd},
};
use crate::send::{
    encoder::{DeltaBases, Encoder},
    frame_buf::FrameBuf,
    log_entry::LogEntry,
};

/// A run of entries, encoded once: of events, or of a part of one gap. Its end may be after that of
/// its last entry: events of a gap that the view does not see have no entry.
pub struct Segment {
    /// The place of its first entry.
    pub first: Cursor,
    /// The place after it.
    pub end: Cursor,
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
pub struct GzipSegment {
    /// Whether its events may be compressed. If not, all are stored.
    pub may_compress: bool,
    /// The end of the segment before, if this one follows it.
    pub after: Option<SegmentEnd>,
    /// The run that begins with this segment if the end of the one before is not known.
    pub run: u64,
    /// Its own end.
    pub end: SegmentEnd,
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
            let piece = encoder.piece(plain.freeze(), gzip.may_compress);
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
    /// Returns a segment that is not encoded yet. `gzip`: it is part of gzip bodies.
    pub fn new(range: Range<Cursor>, entries: Vec<LogEntry>, estimate_bytes: usize, gzip: Option<GzipSegment>) -> Self {
        let Range { start: first, end } = range;
        let content = OnceLock::new();
        let without_deltas = OnceLock::new();
        Self { first, end, entries, estimate_bytes, content, without_deltas, gzip }
    }

    /// Memory of the segment, in bytes. Segments without entries count too: there are thousands of
    /// them in a large gap if the view sees little of it.
    pub fn cost_bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(&*self.entries) + self.estimate_bytes
    }

    /// About the bytes that are compressed when it is encoded.
    pub fn compressed_bytes(&self) -> usize {
        if self.gzip.as_ref().is_some_and(|gzip| gzip.may_compress) { self.estimate_bytes } else { 0 }
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
