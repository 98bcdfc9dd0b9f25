//! A compressed snapshot, made once and sent to all subscribers that start at about the same time.
//!
//! When a kubefan restarts, thousands of subscribers start within a second, and compressing the
//! same state for each would take minutes of CPU. But each of them must be sent a state and exactly
//! the events after it, and the state changes all the time. So a shared snapshot is the state of a
//! view at one version. A subscriber that starts while it is young is sent that snapshot, and then
//! the events since; a later one gets the next snapshot, which reuses the chunks in which nothing
//! has changed. A chunk is compressed by the first subscriber that needs it; others that need the
//! same one wait for it. Chunks are retained within a budget, and for a minute.

use std::{
    ops::Range,
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use kubefan_cache::budget::Share;
use kubefan_common::{
    encoding::chunk,
    planted::{self, Bug},
};
use kubefan_gzip::Piece;
use kubefan_model::{ObjectKey, ResourceVersion, object::Object, selection::Selection};
use tokio::time::Instant;

use super::selected_objects::SelectedObjects;
use crate::send::{
    control,
    encoder::Encoder,
    frame::{Body, EventHead, Sink, put_delimited},
    frame_buf::FrameBuf,
};

/// The greatest age of a state that a new subscriber is sent; the events since follow it.
const SHARED_AGE_MAX: Duration = Duration::from_secs(1);
/// Time for which its chunks are retained for the next one.
const CHUNKS_RETAINED: Duration = Duration::from_secs(60);
/// Approximate size of one chunk, in bytes of JSON: large enough to compress well, small enough
/// that a change renews little.
const CHUNK_JSON_BYTES: usize = 256 << 10;

/// The state of a view at one version, in chunks.
pub struct SharedSnapshot {
    version: ResourceVersion,
    made: Instant,
    /// Owned by the subscribers that are sent it, so that a snapshot that is not being sent pins no
    /// old objects.
    objects: Weak<SelectedObjects>,
    /// The chunks of the snapshot before, until they are compared.
    before: Mutex<Option<Arc<[Chunk]>>>,
    chunks: OnceLock<Arc<[Chunk]>>,
}

/// A shared snapshot, for one subscriber.
pub enum SharedSnapshotReader {
    /// Chunks of which some may still have to be encoded from this state.
    Encoding(Arc<SharedSnapshot>, Arc<SelectedObjects>),
    /// Chunks that are all encoded.
    Encoded(Arc<[Chunk]>),
}

/// The chunk at a reader's index.
pub enum ChunkFrame {
    /// The chunk, and how many objects it has.
    Chunk(EncodedChunk, usize),
    /// Nothing yet: another slice of the state must be scanned.
    Later,
    /// The index is after the last chunk.
    End,
}

/// A run of objects; a clone shares the encoded message.
#[derive(Clone)]
pub struct Chunk {
    /// The first key.
    first: ObjectKey,
    /// The last key.
    last: ObjectKey,
    /// A hash of the versions of its objects.
    fingerprint: u64,
    objects: usize,
    json_bytes: usize,
    /// Its bytes; `None` if the budget had no room for them.
    encoded: Arc<OnceLock<Option<(EncodedChunk, Share)>>>,
}

/// The bytes of a chunk.
#[derive(Clone)]
pub enum EncodedChunk {
    /// A whole gRPC message.
    Message(Bytes),
    /// Events of a watch over HTTP, as a piece of a gzip body.
    Events(Piece),
}

impl EncodedChunk {
    fn len(&self) -> usize {
        match self {
            Self::Message(bytes) => bytes.len(),
            Self::Events(piece) => piece.wire_len(),
        }
    }

    /// Adds the chunk, which has this many objects, to frames.
    pub fn append_to(&self, objects: usize, frames: &mut FrameBuf) {
        match self {
            Self::Message(bytes) => {
                frames.push(bytes.clone());
                frames.count(1);
            }
            Self::Events(piece) => {
                frames.push_piece(piece);
                frames.count(objects);
            }
        }
    }
}

impl SharedSnapshot {
    /// Returns the snapshot of these objects at `version`. It reuses the chunks of `before` that
    /// have not changed.
    pub fn new(objects: &Arc<SelectedObjects>, version: ResourceVersion, before: Option<&Self>, now: Instant) -> Self {
        let before = before.and_then(|before| before.chunks.get()).cloned();
        let objects = Arc::downgrade(objects);
        let before = Mutex::new(before);
        Self { version, made: now, objects, before, chunks: OnceLock::new() }
    }

    /// The version of the state.
    pub fn version(&self) -> ResourceVersion {
        self.version
    }

    /// Whether it is too old to be reused.
    pub fn is_over(&self, now: Instant) -> bool {
        now.duration_since(self.made) > CHUNKS_RETAINED
    }

    /// Joins a subscriber that starts now, with the cache at `version`. `None` if the snapshot is
    /// too old, or its state is gone.
    pub fn join(self: &Arc<Self>, version: ResourceVersion, now: Instant) -> Option<SharedSnapshotReader> {
        if self.version != version && now.duration_since(self.made) > SHARED_AGE_MAX {
            return None;
        }
        match self.chunks.get().filter(|chunks| chunks.iter().all(|chunk| chunk.retained().is_some())) {
            Some(made) => Some(SharedSnapshotReader::Encoded(made.clone())),
            None => self.objects.upgrade().map(|objects| SharedSnapshotReader::Encoding(self.clone(), objects)),
        }
    }

    /// The chunks, planned by the first subscriber that needs them; `None` while the objects are
    /// not all found.
    fn chunks(&self, objects: &SelectedObjects, selection: &Selection) -> Option<&[Chunk]> {
        if let Some(chunks) = self.chunks.get() {
            return Some(chunks);
        }
        let selected = objects.scan(selection)?;
        let chunks = self.chunks.get_or_init(|| {
            let before = self.before.lock().unwrap_or_else(PoisonError::into_inner).take();
            plan(selected, before.as_deref().unwrap_or_default()).into()
        });
        Some(chunks)
    }
}

impl SharedSnapshotReader {
    /// The message of the chunk at this index, and how many objects it has.
    pub fn frame(&self, index: usize, selection: &Selection, encoder: &Encoder) -> ChunkFrame {
        let frame = match self {
            Self::Encoded(chunks) => {
                chunks.get(index).and_then(|chunk| Some((chunk.retained()?.clone(), chunk.objects)))
            }
            Self::Encoding(snapshot, objects) => {
                let Some(chunks) = snapshot.chunks(objects, selection) else { return ChunkFrame::Later };
                chunks.get(index).map(|chunk| (chunk.encoded(objects, encoder), chunk.objects))
            }
        };
        frame.map_or(ChunkFrame::End, |(chunk, objects)| ChunkFrame::Chunk(chunk, objects))
    }
}

impl Chunk {
    fn new(objects: &[Arc<Object>]) -> Option<Self> {
        let first = objects.first()?;
        let last = objects.last()?;
        Some(Self {
            first: first.key().clone(),
            last: last.key().clone(),
            fingerprint: fingerprint(objects),
            objects: objects.len(),
            json_bytes: objects.iter().map(|object| object.json_len()).sum(),
            encoded: Arc::default(),
        })
    }

    fn retained(&self) -> Option<&EncodedChunk> {
        self.encoded.get()?.as_ref().map(|(chunk, _)| chunk)
    }

    /// Its bytes, compressed by the first subscriber that needs them; by each if they cannot be
    /// retained.
    fn encoded(&self, objects: &SelectedObjects, encoder: &Encoder) -> EncodedChunk {
        let mut made = None;
        let retained = self.encoded.get_or_init(|| {
            let chunk = made.insert(self.encode(objects, encoder)).clone();
            let share = encoder.budgets().chunks.take(chunk.len())?;
            Some((chunk, share))
        });
        match retained {
            Some((chunk, _)) => chunk.clone(),
            None => made.unwrap_or_else(|| self.encode(objects, encoder)),
        }
    }

    fn encode(&self, objects: &SelectedObjects, encoder: &Encoder) -> EncodedChunk {
        let objects = objects.range(&self.first, &self.last);
        if encoder.is_gzip() {
            let mut events = encoder.buffer(self.json_bytes + 64 * self.objects);
            for object in objects {
                encoder.object(object, &mut events);
            }
            return EncodedChunk::Events(encoder.compressed(events.freeze()));
        }
        let mut content = BytesMut::with_capacity(self.json_bytes + 128 * self.objects);
        for object in objects {
            let body = Body::object(encoder.snapshot_bytes(object));
            put_delimited(&EventHead::of_snapshot(object), &body, &mut content);
        }
        let mut message = encoder.buffer(0);
        match chunk::encode_content(&content) {
            Ok(zstd) => message.message(&control::snapshot_chunk(zstd)),
            // More than a chunk may hold: the objects are sent one by one.
            Err(_) => {
                for object in objects {
                    encoder.object(object, &mut message);
                }
            }
        }
        EncodedChunk::Message(message.freeze())
    }
}

/// A version is of one object only, so a hash of the versions tells two runs of objects apart.
fn fingerprint(objects: &[Arc<Object>]) -> u64 {
    objects
        .iter()
        .fold(0, |mix: u64, object| (mix ^ object.version().get()).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
}

/// Cuts the selected objects where the snapshot before was cut, so that unchanged chunks are found
/// again. Runs that have grown too large or too small are cut anew.
fn plan(objects: &[Arc<Object>], before: &[Chunk]) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    let mut start = 0;
    let mut old = before.iter().peekable();
    while start < objects.len() {
        // The chunk before that starts here, if its objects are the same.
        let key = objects[start].key();
        while old.peek().is_some_and(|chunk| chunk.first < *key) {
            old.next();
        }
        let same = old.peek().filter(|chunk| chunk.first == *key).and_then(|chunk| {
            let run = start..(start + chunk.objects).min(objects.len());
            let last = objects[run.clone()].last()?.key();
            let unchanged = planted::is(Bug::StaleChunk) || fingerprint(&objects[run.clone()]) == chunk.fingerprint;
            (*last == chunk.last && unchanged).then_some((*chunk, run))
        });
        if let Some((chunk, run)) = same {
            chunks.push(chunk.clone());
            start = run.end;
            continue;
        }
        let stop = old.clone().find(|chunk| chunk.first > *key).map(|chunk| chunk.first.clone());
        let run = cut(objects, start, stop.as_ref());
        chunks.extend(Chunk::new(&objects[run.clone()]));
        start = run.end;
    }
    chunks
}

/// A run from `start` of about [`CHUNK_JSON_BYTES`]. It ends before `stop`, unless it would be too
/// short.
fn cut(objects: &[Arc<Object>], start: usize, stop: Option<&ObjectKey>) -> Range<usize> {
    let mut end = start;
    let mut bytes = 0;
    while let Some(object) = objects.get(end) {
        let at_stop = stop == Some(object.key()) && bytes >= CHUNK_JSON_BYTES / 4;
        // A run may grow by half before it is cut, so that one more object does not move every cut
        // after it.
        let limit = if stop.is_some() { CHUNK_JSON_BYTES * 3 / 2 } else { CHUNK_JSON_BYTES };
        if end > start && (at_stop || bytes + object.json_len() > limit) {
            break;
        }
        bytes += object.json_len();
        end += 1;
    }
    start..end
}
