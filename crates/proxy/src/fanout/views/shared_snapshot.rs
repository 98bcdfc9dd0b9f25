//! A snapshot in compressed chunks, made once and sent to everybody who starts at about the same time.
//!
//! A generation is the state of a view at one version. Who starts while it is young gets it, and then the events since; who starts
//! later gets the next one, which takes over the chunks that nothing has changed in. Chunks are compressed by whoever needs them
//! first; others who need the same one wait for it. They are kept within a budget of the whole cache, and for a minute.

use std::{
    ops::Range,
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use tokio::time::Instant;

use crate::{
    cache::Store,
    fanout::send::{
        budget::Share,
        encoder::Encoder,
        frame::{Body, EventHead, Sink, control, put_delimited},
    },
};
use kubefan_common::{
    encoding::chunk,
    planted::{self, Bug},
};
use kubefan_model::{ObjectKey, ResourceVersion, object::Object, selection::Selection};

/// How old a state a new subscriber may be sent; what has happened since follows as events.
const SHARED_AGE_MAX: Duration = Duration::from_secs(1);
/// How long its chunks are kept for the next one.
const CHUNKS_RETAINED: Duration = Duration::from_secs(60);
/// About how much one chunk holds, in bytes of JSON: enough to compress well, little enough that a change renews little.
const CHUNK_JSON_BYTES: usize = 256 << 10;

/// The state of a view at one version, in chunks.
pub struct SharedSnapshot {
    version: ResourceVersion,
    made: Instant,
    /// Held by those who are sent it, so that a generation alone pins no old objects.
    store: Weak<Store>,
    /// What the one before knew; until it is looked at.
    before: Mutex<Option<Arc<[Chunk]>>>,
    chunks: OnceLock<Arc<[Chunk]>>,
}

/// A generation as it is handed to a subscriber: with what the chunks are made from, unless all are made.
pub enum SharedSnapshotReader {
    /// Some chunks may have to be made from this state.
    Making(Arc<SharedSnapshot>, Arc<Store>),
    /// All chunks are there.
    Made(Arc<[Chunk]>),
}

/// One part of it; a clone shares what is made.
#[derive(Clone)]
pub struct Chunk {
    /// The first key and the last.
    keys: (ObjectKey, ObjectKey),
    /// The versions of its objects, mixed: what differs has changed.
    fingerprint: u64,
    objects: usize,
    json_bytes: usize,
    /// The whole gRPC message; nothing where there was no room to keep it.
    frame: Arc<OnceLock<Option<(Bytes, Share)>>>,
}

impl SharedSnapshot {
    /// The state in `store`, which is at `version`, taking over from `before` what has not changed.
    pub fn new(store: &Arc<Store>, version: ResourceVersion, before: Option<&Self>, now: Instant) -> Self {
        let before = before.and_then(|before| before.chunks.get()).cloned();
        let (store, before) = (Arc::downgrade(store), Mutex::new(before));
        Self { version, made: now, store, before, chunks: OnceLock::new() }
    }

    /// The version of the state.
    pub fn version(&self) -> ResourceVersion {
        self.version
    }

    /// Whether it is too old to be of use to the next one.
    pub fn is_over(&self, now: Instant) -> bool {
        now.duration_since(self.made) > CHUNKS_RETAINED
    }

    /// For a subscriber that starts now, with the cache at `version`: `None` where it is too old, or no longer at hand.
    pub fn join(self: &Arc<Self>, version: ResourceVersion, now: Instant) -> Option<SharedSnapshotReader> {
        if self.version != version && now.duration_since(self.made) > SHARED_AGE_MAX {
            return None;
        }
        match self.chunks.get().filter(|chunks| chunks.iter().all(|chunk| chunk.kept().is_some())) {
            Some(made) => Some(SharedSnapshotReader::Made(made.clone())),
            None => self.store.upgrade().map(|store| SharedSnapshotReader::Making(self.clone(), store)),
        }
    }

    /// The chunks, planned by the first who asks.
    fn chunks(&self, store: &Store, selection: &Selection) -> &[Chunk] {
        self.chunks.get_or_init(|| {
            let before = self.before.lock().unwrap_or_else(PoisonError::into_inner).take();
            plan(store, selection, before.as_deref().unwrap_or_default()).into()
        })
    }
}

impl SharedSnapshotReader {
    /// The message of the chunk at this place, and how many objects it has; `None` after the last.
    pub fn frame(&self, place: usize, selection: &Selection, encoder: &Encoder) -> Option<(Bytes, usize)> {
        match self {
            Self::Made(chunks) => chunks.get(place).and_then(|chunk| Some((chunk.kept()?.clone(), chunk.objects))),
            Self::Making(generation, store) => generation
                .chunks(store, selection)
                .get(place)
                .map(|chunk| (chunk.frame(store, selection, encoder), chunk.objects)),
        }
    }
}

impl Chunk {
    fn new(objects: &[&Arc<Object>]) -> Option<Self> {
        let (first, last) = (objects.first()?, objects.last()?);
        Some(Self {
            keys: (first.key().clone(), last.key().clone()),
            fingerprint: fingerprint(objects),
            objects: objects.len(),
            json_bytes: objects.iter().map(|object| object.json_len()).sum(),
            frame: Arc::default(),
        })
    }

    fn kept(&self) -> Option<&Bytes> {
        self.frame.get()?.as_ref().map(|(frame, _)| frame)
    }

    /// Its message, compressed by the first who asks; by each where it cannot be kept.
    fn frame(&self, store: &Store, selection: &Selection, encoder: &Encoder) -> Bytes {
        let mut made = None;
        let kept = self.frame.get_or_init(|| {
            let frame = made.insert(self.make(store, selection, encoder)).clone();
            let share = encoder.budgets().chunks.take(frame.len())?;
            Some((frame, share))
        });
        match kept {
            Some((frame, _)) => frame.clone(),
            None => made.unwrap_or_else(|| self.make(store, selection, encoder)),
        }
    }

    fn make(&self, store: &Store, selection: &Selection, encoder: &Encoder) -> Bytes {
        let objects = || store.select_range(selection, &self.keys.0, &self.keys.1);
        let mut content = BytesMut::with_capacity(self.json_bytes + 128 * self.objects);
        for object in objects() {
            let body = Body::object(encoder.snapshot_bytes(object));
            put_delimited(&EventHead::of_snapshot(object), &body, &mut content);
        }
        let mut frame = encoder.buffer(0);
        match chunk::encode_content(&content) {
            Ok(zstd) => frame.message(&control::snapshot_chunk(zstd)),
            // More than a chunk may hold: one by one they can be told still.
            Err(_) => objects().for_each(|object| encoder.object(object, &mut frame)),
        }
        frame.freeze()
    }
}

/// Versions are unique, and an object's key goes with its version: their mix tells two runs of objects apart.
fn fingerprint(objects: &[&Arc<Object>]) -> u64 {
    objects
        .iter()
        .fold(0, |mix: u64, object| (mix ^ object.version().get()).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
}

/// Cuts the selected objects where the generation before was cut, so that what has not changed is found again; runs that have grown
/// too large or too small are cut anew.
fn plan(store: &Store, selection: &Selection, before: &[Chunk]) -> Vec<Chunk> {
    let objects: Vec<_> = store.select(selection, None).collect();
    let (mut chunks, mut start, mut old) = (Vec::new(), 0, before.iter().peekable());
    while start < objects.len() {
        // The known chunk that begins here, if the objects are the same.
        let key = objects[start].key();
        while old.peek().is_some_and(|chunk| chunk.keys.0 < *key) {
            old.next();
        }
        let same = old.peek().filter(|chunk| chunk.keys.0 == *key).and_then(|chunk| {
            let run = start..(start + chunk.objects).min(objects.len());
            let last = objects[run.clone()].last()?.key();
            let unchanged = planted::is(Bug::StaleChunk) || fingerprint(&objects[run.clone()]) == chunk.fingerprint;
            (*last == chunk.keys.1 && unchanged).then_some((*chunk, run))
        });
        if let Some((chunk, run)) = same {
            chunks.push(chunk.clone());
            start = run.end;
            continue;
        }
        let stop = old.clone().find(|chunk| chunk.keys.0 > *key).map(|chunk| chunk.keys.0.clone());
        let run = cut(&objects, start, stop.as_ref());
        chunks.extend(Chunk::new(&objects[run.clone()]));
        start = run.end;
    }
    chunks
}

/// A run from `start` of about [`CHUNK_JSON_BYTES`], that ends before `stop` unless it were too short.
fn cut(objects: &[&Arc<Object>], start: usize, stop: Option<&ObjectKey>) -> Range<usize> {
    let (mut end, mut bytes) = (start, 0);
    while let Some(object) = objects.get(end) {
        let at_stop = stop == Some(object.key()) && bytes >= CHUNK_JSON_BYTES / 4;
        // A run may grow by half before it is cut, so that one more object does not move every cut after it.
        let limit = if stop.is_some() { CHUNK_JSON_BYTES * 3 / 2 } else { CHUNK_JSON_BYTES };
        if end > start && (at_stop || bytes + object.json_len() > limit) {
            break;
        }
        bytes += object.json_len();
        end += 1;
    }
    start..end
}
