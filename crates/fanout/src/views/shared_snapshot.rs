//! A compressed snapshot, made once and sent to all subscribers that start at about the same time,
//! or to all readers of a list.
//!
//! When a kubefan restarts, thousands of subscribers start within a second, and compressing the
//! same state for each would take minutes of CPU. But each of them must be sent a state and exactly
//! the events after it, and the state changes all the time. So a shared snapshot is the state of a
//! view at one version. A subscriber that starts while it is young is sent that snapshot, and then
//! the events since; a later one gets the next snapshot, which reuses the chunks in which nothing
//! has changed. A chunk is compressed by the first subscriber that needs it; others that need the
//! same one wait for it. Chunks are retained within a budget, and for a minute.
//!
//! A watch over HTTP gets the state of that moment, because its reader may have asked for the
//! newest. It reuses the chunks alone.

use std::{
    ops::Range,
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
    time::Duration,
};

use kubefan_cache::{Store, budget::Share};
use kubefan_common::planted::{self, Bug};
use kubefan_model::{ObjectKey, ResourceVersion, object::Object, selection::Selection};
use tokio::time::Instant;

use super::selected_objects::SelectedObjects;
use crate::send::{
    chunk::{ChunkEncoder, EncodedChunk},
    encoder::Encoder,
};

/// The greatest age of a state that a new subscriber is sent; the events since follow it.
const SHARED_AGE_MAX: Duration = Duration::from_secs(1);
/// Time for which its chunks are retained for the next one.
const CHUNKS_RETAINED: Duration = Duration::from_secs(60);
/// Approximate size of one chunk, in bytes of JSON: large enough to compress well, small enough
/// that a change renews little.
const CHUNK_JSON_BYTES: usize = 256 << 10;
/// Objects that one subscriber plans before others run: about a millisecond.
const SLICE_OBJECTS: usize = 16 << 10;

/// The state of a view at one version, in chunks.
pub struct SharedSnapshot {
    version: ResourceVersion,
    made: Instant,
    /// Owned by the subscribers that are sent it, so that a snapshot that is not being sent pins no
    /// old objects.
    objects: Weak<SelectedObjects>,
    /// The chunks of the snapshot before, until its own are planned. The next snapshot takes them
    /// under the hub's lock. So they are not behind the lock of the plan, which a slice holds.
    before: Mutex<Option<Arc<[Chunk]>>>,
    plan: Mutex<Plan>,
    chunks: OnceLock<Arc<[Chunk]>>,
}

/// The cuts of a snapshot, as far as they were made.
#[derive(Default)]
struct Plan {
    /// The chunks of the snapshot before.
    before: Option<Arc<[Chunk]>>,
    /// The first chunk of `before` that does not end before the next cut.
    next_before: usize,
    /// Its own chunks.
    cut: Vec<Chunk>,
    /// Number of objects in them.
    cut_objects: usize,
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
    /// A chunk.
    Chunk(TakenChunk),
    /// Nothing yet: another slice of the state must be scanned.
    Later,
    /// The index is after the last chunk.
    End,
}

/// A chunk for one reader.
pub struct TakenChunk {
    /// Its bytes.
    pub encoded: EncodedChunk,
    /// Number of its objects.
    pub objects: usize,
    /// Whether it was encoded for this reader.
    pub is_new: bool,
}

/// A run of objects; a clone shares the encoded bytes.
#[derive(Clone)]
pub struct Chunk(Arc<ChunkContent>);

struct ChunkContent {
    /// The first key.
    first: ObjectKey,
    /// The last key.
    last: ObjectKey,
    /// Its objects, to be compared by address: with a new schema an object may have other bytes at
    /// the same version. An address is not used again while it is known here.
    objects: Box<[Weak<Object>]>,
    json_bytes: usize,
    /// The length of its plain items, if the head of a list needs it.
    items_len: OnceLock<usize>,
    /// Its bytes; `None` if the budget had no room for them.
    encoded: OnceLock<Option<(EncodedChunk, Share)>>,
}

impl SharedSnapshot {
    /// Returns the snapshot of these objects at `version`. It reuses the chunks of `before` that
    /// have not changed.
    pub fn new(objects: &Arc<SelectedObjects>, version: ResourceVersion, before: Option<&Self>, now: Instant) -> Self {
        let before = before.and_then(Self::newest_chunks);
        let objects = Arc::downgrade(objects);
        let plan = Mutex::new(Plan { before: before.clone(), ..Plan::default() });
        let before = Mutex::new(before);
        Self { version, made: now, objects, before, plan, chunks: OnceLock::new() }
    }

    /// The planned chunks, or those of the snapshot before.
    fn newest_chunks(&self) -> Option<Arc<[Chunk]>> {
        if let Some(chunks) = self.chunks.get() {
            return Some(chunks.clone());
        }
        let before = self.before.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // Planning may have ended since the first look.
        before.or_else(|| self.chunks.get().cloned())
    }

    /// The version of the state.
    pub fn version(&self) -> ResourceVersion {
        self.version
    }

    /// Whether it is too old to be reused.
    pub fn is_over(&self, now: Instant) -> bool {
        self.age(now) > CHUNKS_RETAINED
    }

    /// Joins a subscriber that starts now, with the cache at `version`. `None` if the snapshot is
    /// too old, or its state is gone.
    pub fn join(self: &Arc<Self>, version: ResourceVersion, now: Instant) -> Option<SharedSnapshotReader> {
        if self.version != version && self.age(now) > SHARED_AGE_MAX {
            return None;
        }
        match self.chunks.get().filter(|chunks| chunks.iter().all(|chunk| chunk.retained().is_some())) {
            Some(made) => Some(SharedSnapshotReader::Encoded(made.clone())),
            None => self.objects.upgrade().map(|objects| SharedSnapshotReader::Encoding(self.clone(), objects)),
        }
    }

    /// Joins a reader of exactly this state. `None` if its objects are gone: then another snapshot
    /// reuses its chunks.
    pub fn join_at(self: &Arc<Self>, store: &Store) -> Option<(Arc<Self>, Arc<SelectedObjects>)> {
        let objects = self.objects.upgrade().filter(|objects| objects.is_of(store))?;
        Some((self.clone(), objects))
    }

    /// Age of the snapshot.
    pub fn age(&self, now: Instant) -> Duration {
        now.duration_since(self.made)
    }

    /// The chunks. The subscribers that need them first find the objects and plan the chunks, a
    /// slice with each call; `None` until that is done.
    pub fn chunks(&self, objects: &SelectedObjects, selection: &Selection) -> Option<&[Chunk]> {
        if self.chunks.get().is_none() {
            let selected = objects.scan(selection)?;
            if self.plan_slice(selected) {
                // The value is dropped without the lock: it may have an address for each object.
                let before = self.before.lock().unwrap_or_else(PoisonError::into_inner).take();
                drop(before);
            }
        }
        self.chunks.get().map(|chunks| &**chunks)
    }

    /// Plans a slice of the chunks. Returns whether it was the last one.
    fn plan_slice(&self, selected: &[Arc<Object>]) -> bool {
        let mut plan = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
        // Another subscriber may have planned the last of them meanwhile.
        let is_planned = self.chunks.get().is_none() && plan.advance(selected, SLICE_OBJECTS);
        if is_planned {
            let Plan { cut, .. } = std::mem::take(&mut *plan);
            let _ = self.chunks.set(cut.into());
        }
        is_planned
    }
}

impl SharedSnapshotReader {
    /// The chunk at this index.
    pub fn frame(&self, index: usize, selection: &Selection, encoder: &Encoder) -> ChunkFrame {
        let chunk = match self {
            Self::Encoded(chunks) => chunks.get(index).and_then(Chunk::taken),
            Self::Encoding(snapshot, objects) => {
                let Some(chunks) = snapshot.chunks(objects, selection) else { return ChunkFrame::Later };
                chunks.get(index).map(|chunk| chunk.take(objects, encoder))
            }
        };
        chunk.map_or(ChunkFrame::End, ChunkFrame::Chunk)
    }
}

impl Chunk {
    fn new(objects: &[Arc<Object>]) -> Option<Self> {
        let first = objects.first()?;
        let last = objects.last()?;
        Some(Self(Arc::new(ChunkContent {
            first: first.key().clone(),
            last: last.key().clone(),
            objects: objects.iter().map(Arc::downgrade).collect(),
            json_bytes: objects.iter().map(|object| object.json_len()).sum(),
            items_len: OnceLock::new(),
            encoded: OnceLock::new(),
        })))
    }

    /// Whether the budget had no room for its bytes.
    fn is_refused(&self) -> bool {
        self.0.encoded.get().is_some_and(Option::is_none)
    }

    /// Whether these are its objects.
    fn is_of(&self, objects: &[Arc<Object>]) -> bool {
        let known = &self.0.objects;
        known.len() == objects.len() && known.iter().zip(objects).all(|(known, now)| known.as_ptr() == Arc::as_ptr(now))
    }

    fn retained(&self) -> Option<&EncodedChunk> {
        self.0.encoded.get()?.as_ref().map(|(chunk, _)| chunk)
    }

    /// Number of its objects.
    pub fn objects(&self) -> usize {
        self.0.objects.len()
    }

    /// The length of its plain items, if the head of a list needs it.
    pub fn items_len(&self, objects: &SelectedObjects, encoder: &impl ChunkEncoder) -> usize {
        *self.0.items_len.get_or_init(|| encoder.items_len(objects.range(&self.0.first, &self.0.last)))
    }

    /// Takes it if it is encoded and retained.
    fn taken(&self) -> Option<TakenChunk> {
        Some(TakenChunk { encoded: self.retained()?.clone(), objects: self.objects(), is_new: false })
    }

    /// Takes it. The first reader encodes it; each reader does if it cannot be retained. While the
    /// budget of CPU time is spent, a reader gets it as a stored piece that is not retained.
    pub fn take(&self, objects: &SelectedObjects, encoder: &impl ChunkEncoder) -> TakenChunk {
        if let Some(taken) = self.taken() {
            return taken;
        }
        let run = objects.range(&self.0.first, &self.0.last);
        let may_compress = encoder.takes_compression(self.0.json_bytes);
        let encode = || encoder.encode(run, self.0.json_bytes, may_compress);
        if !may_compress {
            return TakenChunk { encoded: encode(), objects: self.objects(), is_new: true };
        }
        let mut made = None;
        let retained = self.0.encoded.get_or_init(|| {
            let chunk = made.insert(encode()).clone();
            let share = encoder.budgets().chunks.take(chunk.wire_len())?;
            Some((chunk, share))
        });
        let is_new = made.is_some() || retained.is_none();
        let encoded = match retained {
            Some((chunk, _)) => chunk.clone(),
            None => made.unwrap_or_else(encode),
        };
        TakenChunk { encoded, objects: self.objects(), is_new }
    }
}

impl Plan {
    /// Cuts the selected objects where the snapshot before was cut, so that unchanged chunks are
    /// found again. Runs that have grown too large or too small are cut anew. Stops after about
    /// `most` objects. Returns whether all are cut.
    fn advance(&mut self, selected: &[Arc<Object>], most: usize) -> bool {
        let before = self.before.as_deref().unwrap_or_default();
        let stop_at = selected.len().min(self.cut_objects.saturating_add(most));
        while self.cut_objects < stop_at {
            let start = self.cut_objects;
            let key = selected[start].key();
            while before.get(self.next_before).is_some_and(|chunk| chunk.0.first < *key) {
                self.next_before += 1;
            }
            let old = &before[self.next_before..];
            // The chunk before that starts here, if its objects are the same.
            let same = old.first().filter(|chunk| chunk.0.first == *key).and_then(|chunk| {
                let run = start..(start + chunk.objects()).min(selected.len());
                let now = &selected[run.clone()];
                let is_stale =
                    || planted::is(Bug::StaleChunk) && now.last().is_some_and(|last| *last.key() == chunk.0.last);
                // The budget may have room for a new one.
                let is_same = chunk.is_of(now) && !chunk.is_refused();
                (is_same || is_stale()).then_some((chunk, run))
            });
            if let Some((chunk, run)) = same {
                self.cut.push(chunk.clone());
                self.cut_objects = run.end;
                continue;
            }
            let stop = old.iter().find(|chunk| chunk.0.first > *key).map(|chunk| &chunk.0.first);
            let run = cut(selected, start, stop);
            self.cut.extend(Chunk::new(&selected[run.clone()]));
            self.cut_objects = run.end;
        }
        self.cut_objects == selected.len()
    }
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

#[cfg(test)]
mod tests {
    use kubefan_model::{fields::FieldTable, object::ObjectParser};

    use super::*;

    /// Objects of a third of a chunk each.
    fn objects(count: usize) -> Vec<Arc<Object>> {
        let parser = ObjectParser::new(&FieldTable::default());
        let data = "x".repeat(CHUNK_JSON_BYTES / 3);
        let object = |number: usize| {
            let json = format!(
                r#"{{"metadata":{{"name":"{number:03}","resourceVersion":"{}"}},"data":"{data}"}}"#,
                number + 1
            );
            Arc::new(parser.parse(json.as_bytes()).unwrap())
        };
        (0..count).map(object).collect()
    }

    fn planned(objects: &[Arc<Object>], before: Option<&[Chunk]>, most: usize) -> Vec<Chunk> {
        let mut plan = Plan { before: before.map(Arc::from), ..Plan::default() };
        while !plan.advance(objects, most) {}
        plan.cut
    }

    #[test]
    fn chunks_that_are_planned_in_slices_are_those_that_are_planned_at_once() {
        let mut objects = objects(40);
        let first = planned(&objects, None, usize::MAX);
        objects.remove(17);
        objects.remove(3);
        let cuts = |chunks: &[Chunk]| chunks.iter().map(|chunk| chunk.0.first.clone()).collect::<Vec<_>>();
        let at_once = planned(&objects, Some(&first), usize::MAX);
        let in_slices = planned(&objects, Some(&first), 1);
        assert_eq!(cuts(&in_slices), cuts(&at_once));
        assert_eq!(in_slices.iter().map(Chunk::objects).sum::<usize>(), objects.len());
        let is_reused = |chunk: &Chunk| first.iter().any(|before| Arc::ptr_eq(&before.0, &chunk.0));
        let reused = |chunks: &[Chunk]| chunks.iter().filter(|chunk| is_reused(chunk)).count();
        assert_eq!((reused(&in_slices), reused(&at_once)), (first.len() - 2, first.len() - 2));
    }
}
