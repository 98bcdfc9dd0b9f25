//! A run of a view's log as one piece of memory, made by whoever takes it first and shared by all who follow.
//!
//! Blocks are cut where somebody took: who is behind gets the same blocks in the same order. They are kept while subscribers are
//! on their way through them, within limits per view and per cache, and made again from the log where they are missing.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::{Bytes, BytesMut};

use super::{
    encoder::{Encoder, Holds},
    frame::FrameWriter,
    log::{LogEntry, ViewLog},
    pieces::Pieces,
};
use crate::model::ResourceVersion;

/// About how much one block holds, in bytes; one larger message is a block of its own.
const BLOCK_BYTES: usize = 64 << 10;
/// The blocks that one view keeps, in bytes.
const VIEW_BLOCK_BYTES_MAX: usize = 4 << 20;
/// The blocks that all views of one cache keep, in bytes.
const BLOCK_BYTES_MAX: usize = 32 << 20;

/// What the blocks of all views of one cache take together, in bytes.
pub type BlockBytes = Arc<AtomicUsize>;

/// A run of entries, encoded once.
pub struct Block {
    first: u64,
    entries: Vec<LogEntry>,
    estimate_bytes: usize,
    content: OnceLock<Content>,
}

struct Content {
    bytes: Bytes,
    /// For each entry, where its bytes end, and the messages up to there.
    ends: Vec<(usize, usize)>,
    /// The bases of deltas, by entry; empty where there is none.
    bases: Vec<Option<ResourceVersion>>,
}

impl Block {
    fn new(first: u64, entries: Vec<LogEntry>, estimate_bytes: usize) -> Self {
        Self { first, entries, estimate_bytes, content: OnceLock::new() }
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
        holds: Holds,
        pieces: &mut Pieces,
    ) -> &[LogEntry] {
        let content = self.content.get_or_init(|| self.encode(encoder));
        let skip = usize::try_from(cursor - self.first).unwrap_or(usize::MAX).min(self.entries.len());
        let (start, before) = skip.checked_sub(1).map_or((0, 0), |last| content.ends[last]);
        let fits = content.ends[skip..].partition_point(|(end, _)| end - start <= bytes_max).max(1);
        let upto = (skip + fits).min(self.entries.len());
        let taken = &self.entries[skip..upto];
        if !content.bases.iter().take(upto).skip(skip).all(|base| encoder.can_read(holds, *base)) {
            // Some of it must be said in full to this one.
            let mut frames = FrameWriter::default();
            let within = taken.iter().take_while(|entry| {
                let more = frames.len() < bytes_max;
                if more {
                    encoder.entry(entry, holds, &mut frames);
                }
                more
            });
            let taken = &taken[..within.count()];
            pieces.append(frames.finish());
            return taken;
        } else if upto > skip {
            let (end, messages) = content.ends[upto - 1];
            pieces.push(content.bytes.slice(start..end));
            pieces.count(messages - before);
        }
        taken
    }

    fn encode(&self, encoder: &Encoder) -> Content {
        let mut bytes = BytesMut::with_capacity(self.estimate_bytes);
        let (mut ends, mut bases, mut messages) = (Vec::with_capacity(self.entries.len()), Vec::new(), 0);
        for (place, entry) in self.entries.iter().enumerate() {
            let written = encoder.entry(entry, Holds::All, &mut bytes);
            messages += written.messages;
            ends.push((bytes.len(), messages));
            if written.base.is_some() {
                bases.resize(place, None);
                bases.push(written.base);
            }
        }
        Content { bytes: bytes.freeze(), ends, bases }
    }
}

/// The blocks of one view.
pub struct Blocks {
    blocks: BTreeMap<u64, Arc<Block>>,
    bytes: usize,
    /// Of all views.
    total: BlockBytes,
}

impl Blocks {
    /// None yet; counted in `total`.
    pub fn new(total: BlockBytes) -> Self {
        Self { blocks: BTreeMap::new(), bytes: 0, total }
    }

    /// The block that holds `cursor`, cut from the log if there is none. The cursor points at an entry of the log.
    pub fn at(&mut self, cursor: u64, log: &ViewLog) -> Option<Arc<Block>> {
        if let Some((_, block)) = self.blocks.range(..=cursor).next_back().filter(|(_, block)| cursor < block.end()) {
            return Some(block.clone());
        }
        let next = self.blocks.range(cursor..).next().map_or(log.end(), |(first, _)| *first);
        let (entries, estimate_bytes) = cut(log, cursor, next, BLOCK_BYTES)?;
        let block = Arc::new(Block::new(cursor, entries, estimate_bytes));
        self.keep(block.clone());
        Some(block)
    }

    fn keep(&mut self, block: Arc<Block>) {
        self.bytes += block.estimate_bytes;
        self.total.fetch_add(block.estimate_bytes, Ordering::Relaxed);
        self.blocks.insert(block.first, block);
        while self.bytes > VIEW_BLOCK_BYTES_MAX || self.total.load(Ordering::Relaxed) > BLOCK_BYTES_MAX {
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

impl Drop for Blocks {
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
