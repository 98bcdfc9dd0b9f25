//! What equal subscriptions share: one selection, its log, the blocks that are on their way to subscribers, and the bells of those who
//! wait for more.

use std::sync::{Arc, PoisonError};

use slab::Slab;
use tokio::time::Instant;

use crate::{
    cache::{EventRing, Expired, Gap, Store},
    fanout::{
        send::{budget::Budgets, encoder::Encoder},
        stream_end::StreamEnd,
        sync::{Mutex, MutexGuard},
        views::{
            log::{GapTransition, LogBytes, LogEntry, ViewLog, entries, entry, gap_entries},
            segment::{Segment, SegmentBytes, Segments, cut},
            shared_snapshot::{SharedSnapshot, SharedSnapshotReader},
        },
        wake::waker::{StreamWaker, Woken},
    },
};
use kubefan_common::planted::{self, Bug};
use kubefan_model::{
    ResourceVersion,
    event::WatchEvent,
    format::Format,
    selection::{Selection, SelectionSpec},
};

/// What makes subscriptions equal.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ViewKey {
    /// What is selected.
    pub selection: SelectionSpec,
    /// How it is sent.
    pub format: Format,
}

/// A view of one resource and scope. The hub writes it, inside its own critical section; subscriptions read it.
pub struct View {
    selection: Selection,
    encoder: Arc<Encoder>,
    state: Mutex<ViewState>,
    bells: Mutex<Slab<Arc<StreamWaker>>>,
}

struct ViewState {
    log: ViewLog,
    blocks: Segments,
    /// The latest compressed snapshot.
    generation: Option<Arc<SharedSnapshot>>,
    /// Set once: no more entries will come, and why.
    end: Option<StreamEnd>,
    subscribers: usize,
    /// Those who have taken everything.
    waiting: usize,
}

/// What comes next for a cursor.
pub enum LogRun {
    /// Nothing yet; the bell is armed.
    Nothing,
    /// A block that others take too.
    Shared(Arc<Segment>),
    /// Entries that nobody else takes.
    Alone(Vec<LogEntry>),
}

/// The totals that all views of a cache are counted in.
#[derive(Default, Clone)]
pub struct ViewBytes {
    /// Of logs.
    pub logs: LogBytes,
    /// Of blocks.
    pub blocks: SegmentBytes,
    /// Of what is kept to save work.
    pub kept: Budgets,
}

impl View {
    /// A view whose history starts at `floor`.
    pub fn new(selection: Selection, encoder: Arc<Encoder>, floor: ResourceVersion, bytes: &ViewBytes) -> Self {
        let state = Mutex::new(ViewState {
            log: ViewLog::new(floor, bytes.logs.clone()),
            blocks: Segments::new(bytes.blocks.clone()),
            generation: None,
            end: None,
            subscribers: 0,
            waiting: 0,
        });
        Self { selection, encoder, state, bells: Mutex::default() }
    }

    /// What is selected.
    pub fn selection(&self) -> &Selection {
        &self.selection
    }

    /// What makes a subscription equal to those it has.
    pub fn key(&self) -> ViewKey {
        ViewKey { selection: self.selection.spec().clone(), format: self.encoder.format().clone() }
    }

    /// How it is sent.
    pub fn encoder(&self) -> &Encoder {
        &self.encoder
    }

    /// Never held across an await, nor while frames are made.
    fn state(&self) -> MutexGuard<'_, ViewState> {
        // A panic while the lock was held cannot leave an entry half written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bells(&self) -> MutexGuard<'_, Slab<Arc<StreamWaker>>> {
        self.bells.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends what this view sees of an event; tells how many messages that is.
    pub fn append(&self, event: &Arc<WatchEvent>, received: Instant) -> usize {
        let seen = event.transition(&self.selection).filter(|seen| self.encoder.tells(event, *seen));
        self.extend(seen.map(|seen| entry(event, seen, Some(received))))
    }

    /// Appends a gap and what this view sees inside; tells how many messages that is.
    pub fn append_gap(&self, gap: &Arc<Gap>, inside: Vec<GapTransition>, received: Instant) -> usize {
        self.extend(gap_entries(gap, inside, Some(received)))
    }

    fn extend(&self, entries: impl IntoIterator<Item = LogEntry>) -> usize {
        let mut entries = entries.into_iter().peekable();
        if entries.peek().is_none() {
            return 0;
        }
        let mut state = self.state();
        state.waiting = 0;
        let before = state.log.end();
        entries.for_each(|entry| state.log.push(entry));
        (state.log.end() - before) as usize
    }

    /// Forgets its compressed snapshot: objects may have changed without their versions.
    pub fn forget(&self) {
        self.state().generation = None;
    }

    /// Lets go of a compressed snapshot that nobody has come for.
    pub fn tidy(&self, now: Instant) {
        let mut state = self.state();
        if state.generation.as_ref().is_some_and(|generation| generation.is_over(now)) {
            state.generation = None;
        }
    }

    /// Lets go of what the ring has let go of.
    pub fn trim(&self, floor: ResourceVersion) {
        let mut state = self.state();
        state.log.trim(floor);
        let first = state.log.first();
        state.blocks.trim(first);
    }

    /// Ends the view. [`Self::wake`] follows.
    pub fn close(&self, end: &StreamEnd) {
        self.state().end.get_or_insert_with(|| end.clone());
    }

    /// How it has ended.
    pub fn ended(&self) -> Option<StreamEnd> {
        self.state().end.clone()
    }

    /// Rings the bell of every subscription that waits; tells who that was.
    pub fn wake(&self) -> Woken {
        self.bells().iter().map(|(_, bell)| bell.ring()).sum()
    }

    /// The end of the log.
    pub fn end(&self) -> u64 {
        self.state().log.end()
    }

    /// The end of the log where more may come; `None` where the view has ended.
    pub fn open_end(&self) -> Option<u64> {
        let state = self.state();
        state.end.is_none().then(|| state.log.end())
    }

    /// What comes after `cursor`, about `bytes_max` bytes of it; arms the bell where that is nothing. `waited` is the caller's memory of
    /// where it has last found nothing.
    pub fn run(
        &self,
        cursor: u64,
        bytes_max: usize,
        bell: &StreamWaker,
        waited: &mut Option<u64>,
    ) -> Result<LogRun, LogReadError> {
        let mut state = self.state();
        let ViewState { log, blocks, end, subscribers, waiting, .. } = &mut *state;
        if cursor < log.first() {
            return Err(LogReadError::Behind { oldest: log.floor() });
        }
        if cursor < log.end() {
            // A block pays where more than one take it.
            return Ok(match *subscribers {
                ..=1 => cut(log, cursor, log.end(), bytes_max)
                    .map_or(LogRun::Nothing, |(entries, _)| LogRun::Alone(entries)),
                _ => blocks.at(cursor, log).map_or(LogRun::Nothing, LogRun::Shared),
            });
        }
        if let Some(end) = end {
            return Err(LogReadError::Ended(end.clone()));
        }
        if planted::is(Bug::ArmedAfterTheLook) {
            drop(state);
            bell.arm();
            *waited = Some(cursor);
            return Ok(LogRun::Nothing);
        }
        // Armed under the lock that an append takes too: what comes after this rings.
        bell.arm();
        if *waited != Some(cursor) {
            *waited = Some(cursor);
            *waiting += 1;
        }
        if *waiting >= *subscribers {
            blocks.clear();
        }
        Ok(LogRun::Nothing)
    }

    /// The compressed snapshot for one who starts now, with the cache at `version`; its version, and the place in the log after it.
    pub fn generation(
        &self,
        store: &Store,
        version: ResourceVersion,
        ring: &EventRing,
        not_older_than: Option<ResourceVersion>,
        now: Instant,
    ) -> (SharedSnapshotReader, ResourceVersion, u64) {
        let known = self.state().generation.clone();
        if let Some(generation) = &known
            && not_older_than.is_none_or(|least| generation.version() >= least)
            && let Some(joined) = generation.join(version, now)
            && let Ok(cursor) = self.cursor_after(generation.version(), ring)
        {
            let cursor = if planted::is(Bug::SnapshotSpliceDrops) { self.end() } else { cursor };
            return (joined, generation.version(), cursor);
        }
        let store = Arc::new(store.clone());
        let generation = Arc::new(SharedSnapshot::new(&store, version, known.as_deref(), now));
        let mut state = self.state();
        state.generation = Some(generation.clone());
        (SharedSnapshotReader::Making(generation, store), version, state.log.end())
    }

    /// The place in the log after `version`; the log is completed from the ring where it begins later.
    pub fn cursor_after(&self, version: ResourceVersion, ring: &EventRing) -> Result<u64, Expired> {
        let records = ring.since(version)?;
        let mut state = self.state();
        let floor = state.log.floor();
        if version < floor && !planted::is(Bug::LateViewWithoutHistory) {
            let older = records.take_while(|record| record.version() <= floor || planted::is(Bug::HistoryTwice));
            let older = older.flat_map(|record| entries(record, &self.selection, None)).collect();
            state.log.extend_back(version, older);
        }
        Ok(state.log.after(version))
    }

    /// Takes a subscription in; gives its place.
    pub fn join(&self, bell: Arc<StreamWaker>) -> usize {
        self.state().subscribers += 1;
        self.bells().insert(bell)
    }

    /// Lets a subscription go; tells how many are left.
    pub fn leave(&self, place: usize, waited: Option<u64>) -> usize {
        self.bells().remove(place);
        let mut state = self.state();
        state.subscribers -= 1;
        if waited == Some(state.log.end()) {
            state.waiting = state.waiting.saturating_sub(1);
        }
        if state.waiting >= state.subscribers {
            state.blocks.clear();
        }
        state.subscribers
    }
}

/// Why there is nothing more for a cursor.
pub enum LogReadError {
    /// What it points at is gone.
    Behind {
        /// The oldest version that can be gone on from.
        oldest: ResourceVersion,
    },
    /// The view has ended.
    Ended(StreamEnd),
}
