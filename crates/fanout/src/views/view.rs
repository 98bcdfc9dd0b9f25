//! A view, which equal subscriptions share: one selection in one format, its log, the segments that
//! are being sent, and the wakers of its subscribers.

use std::sync::{Arc, OnceLock, PoisonError};

use kubefan_admission::fair_share::FairPermit;
use kubefan_cache::{
    Budgets, Expired, Gap, History, Store,
    budget::Share,
    resume::Coverage,
    sliced_scan::SLICE_TESTS,
    stream_end::StreamEnd,
    tenant_bytes::{Tenant, TenantBytes},
};
use kubefan_common::{
    planted::{self, Bug},
    when_planted,
};
use kubefan_model::{
    ResourceVersion,
    event::{TestedEvent, WatchEvent},
    format::Format,
    selection::Selection,
};
use slab::Slab;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::{
    index::ViewId,
    log::{Behind, Cursor, LogItem, Replayed, ViewLog},
    log_bytes::LogBytes,
    log_run::{LogReadError, LogRun},
    segments::{SEGMENT_BYTES, Segments, cut},
    selected_objects::{Page, SelectedObjects},
    shared_snapshot::{SharedSnapshot, SharedSnapshotReader},
    view_gap::ViewGap,
};
use crate::{
    send::{encoder::Encoder, log_entry::LogEntry},
    sync::{Mutex, MutexGuard},
    wake::waker::{StreamWaker, Woken},
};

/// The most tests per object of a selection that is tested inside the hub's critical section. To
/// keep the event for later costs about as much as these tests.
const TESTED_AT_ONCE_MAX: usize = 8;

/// The cost of comparing the projections of two objects, in tests of a selection.
const COMPARISON_TESTS: usize = 1000;

/// Wakers that are checked each time their lock is taken.
const WAKERS_PER_LOCK: usize = 64;

/// The properties that make subscriptions equal.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ViewKey {
    /// The selection.
    pub selection: Selection,
    /// The format.
    pub format: Format,
}

/// A view of one resource and scope. The hub writes it inside its critical section; subscriptions
/// read it.
pub struct View {
    selection: Selection,
    encoder: Arc<Encoder>,
    state: Mutex<ViewState>,
    wakers: Mutex<Slab<Arc<StreamWaker>>>,
    /// Id of the view among those of its hub, set when it is added to them.
    pub(super) id: OnceLock<ViewId>,
    /// Share of the view in the budget of selectors.
    _memory: ViewMemory,
}

struct ViewState {
    log: ViewLog,
    segments: Segments,
    /// The latest compressed snapshot.
    snapshot: Option<Arc<SharedSnapshot>>,
    /// Set once: no more entries will come, and why.
    end: Option<StreamEnd>,
    /// Whether the view is among those that still have events to test.
    is_queued: bool,
    subscribers: usize,
    /// Subscribers that have taken everything.
    waiting: usize,
}

/// The result of [`View::test_slice`].
pub struct TestedSlice {
    /// Number of these events that the view sends.
    pub seen: usize,
    /// Subscribers may read on: [`View::wake`] must follow.
    pub wakes: bool,
    /// The view must be queued again.
    pub has_more: bool,
}

/// Returns the cost of the entries that were compared and gave no message, in tests of a selection.
/// The size of a batch limits only the others.
pub fn comparison_cost(entries: usize, messages: usize) -> usize {
    entries.saturating_sub(messages) * COMPARISON_TESTS
}

/// The memory of a view in the budget of selectors, given back when it is dropped.
pub struct ViewMemory {
    /// Bytes of the view.
    pub(super) _bytes: Share,
    /// The part that counts to the holder that asked for the view.
    pub(super) _of_holder: Option<FairPermit>,
}

impl View {
    /// A view whose history starts at `floor`. `memory` is from the budget of selectors.
    pub fn new(
        selection: Selection,
        encoder: Arc<Encoder>,
        floor: ResourceVersion,
        budgets: &Budgets,
        memory: ViewMemory,
    ) -> Self {
        let state = Mutex::new(ViewState {
            log: ViewLog::new(floor, budgets.logs.share()),
            segments: Segments::new(budgets.segments.share(), encoder.is_gzip()),
            snapshot: None,
            end: None,
            is_queued: false,
            subscribers: 0,
            waiting: 0,
        });
        Self { selection, encoder, state, wakers: Mutex::default(), id: OnceLock::new(), _memory: memory }
    }

    /// The selection.
    pub fn selection(&self) -> &Selection {
        &self.selection
    }

    /// The properties that make a subscription equal to those of this view.
    pub fn key(&self) -> ViewKey {
        ViewKey { selection: self.selection.clone(), format: self.encoder.format().clone() }
    }

    /// The encoder of its format.
    pub fn encoder(&self) -> &Encoder {
        &self.encoder
    }

    /// Never held across an await, nor while frames are made.
    fn state(&self) -> MutexGuard<'_, ViewState> {
        // A panic while the lock was held cannot leave an entry half written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wakers(&self) -> MutexGuard<'_, Slab<Arc<StreamWaker>>> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends an event if this view sends it. Returns whether it does.
    pub fn append(&self, event: &Arc<WatchEvent>, tested: &TestedEvent<'_>, received: Instant) -> bool {
        let seen = tested.transition(&self.selection).filter(|seen| self.encoder.tells(event, *seen));
        let Some(seen) = seen else { return false };
        self.push(&mut self.state(), LogItem::Event(LogEntry::of(event, seen, Some(received))));
        true
    }

    /// Whether events are tested outside of the critical section, because that takes long.
    pub fn tests_later(&self) -> bool {
        self.tests_per_event() > 2 * TESTED_AT_ONCE_MAX
    }

    /// The cost of testing an event, which is two objects.
    fn tests_per_event(&self) -> usize {
        let comparison = if self.encoder.format().only_changes() { COMPARISON_TESTS } else { 0 };
        2 * self.selection.tests() + comparison
    }

    /// Appends an event to be tested later. Returns whether the view must be queued for that.
    pub fn append_untested(&self, event: &Arc<WatchEvent>, received: Instant) -> bool {
        let mut state = self.state();
        self.push(&mut state, LogItem::Untested(event.clone(), received));
        !std::mem::replace(&mut state.is_queued, true)
    }

    /// Tests a slice of the untested events, without a lock. Called by one task at a time.
    pub fn test_slice(&self) -> TestedSlice {
        let events_max = (SLICE_TESTS / self.tests_per_event()).max(1);
        let (from, events) = self.state().log.untested(events_max);
        let found = events.into_iter().map(|(event, received)| {
            let seen = event.transition(&self.selection).filter(|seen| self.encoder.tells(&event, *seen));
            match seen {
                Some(seen) => LogItem::Event(LogEntry::of(&event, seen, Some(received))),
                None => LogItem::Unseen(event.version()),
            }
        });
        let found: Vec<_> = found.collect();
        let seen = found.iter().filter(|item| matches!(item, LogItem::Event(_))).count();
        let mut state = self.state();
        let can_read_on = state.log.tested(from, found);
        state.is_queued = state.log.has_untested();
        let is_over = !state.is_queued && state.end.is_some();
        TestedSlice { seen, wakes: can_read_on || is_over, has_more: state.is_queued }
    }

    /// Appends a gap. Its events are selected when a subscriber takes it.
    pub fn append_gap(&self, gap: &Arc<Gap>, received: Instant) {
        let mut state = self.state();
        // With a new schema an object may have other bytes at the same version.
        state.snapshot = None;
        self.push(&mut state, LogItem::Gap(Arc::new(ViewGap::new(gap.clone(), Some(received)))));
    }

    fn push(&self, state: &mut ViewState, item: LogItem) {
        state.waiting = 0;
        state.log.push(item);
    }

    /// Removes its compressed snapshot. The caller drops it without a lock.
    pub fn forget(&self) -> Option<Arc<SharedSnapshot>> {
        self.state().snapshot.take()
    }

    /// Removes its compressed snapshot if that is too old to be reused.
    pub fn tidy(&self, now: Instant) -> Option<Arc<SharedSnapshot>> {
        self.state().snapshot.take_if(|snapshot| snapshot.is_over(now))
    }

    /// Drops the items that the ring has evicted.
    pub fn trim(&self, floor: ResourceVersion) {
        let mut state = self.state();
        state.log.trim(floor);
        let first = state.log.first();
        state.segments.trim(first);
    }

    /// Drops the oldest items of its log. Leaves a `share` of the items, from 0 to 1, and at least
    /// the newest.
    pub fn shorten(&self, share: f64) {
        let floor = self.state().log.floor_leaving(share);
        self.trim(floor);
    }

    /// Calls `f` with the bytes of its log, under the lock of the view.
    pub fn with_log_bytes<T>(&self, f: impl FnOnce(&mut LogBytes) -> T) -> T {
        f(self.state().log.bytes_mut())
    }

    /// Ends the view. [`Self::wake`] follows.
    pub fn close(&self, end: &StreamEnd) {
        self.state().end.get_or_insert_with(|| end.clone());
    }

    /// Returns the view's end, if it has ended.
    pub fn ended(&self) -> Option<StreamEnd> {
        self.state().end.clone()
    }

    /// Wakes every subscription that waits. Returns their numbers.
    ///
    /// The lock is taken for a few wakers at a time and never while one wakes: a subscription that
    /// joins or leaves has the hub's lock, which must not wait for a wave. A waker keeps its id,
    /// so none that was armed before is missed. One that has left meanwhile wakes a stream that is
    /// gone.
    pub fn wake(&self) -> Woken {
        let mut woken = Woken::default();
        let mut next_id = 0;
        loop {
            let armed: SmallVec<[Arc<StreamWaker>; WAKERS_PER_LOCK]> = {
                let wakers = self.wakers();
                if next_id >= wakers.capacity() {
                    return woken;
                }
                let ids = next_id..next_id + WAKERS_PER_LOCK;
                ids.filter_map(|id| wakers.get(id).filter(|waker| waker.is_armed()).cloned()).collect()
            };
            next_id += WAKERS_PER_LOCK;
            woken = [woken, armed.iter().map(|waker| waker.wake()).sum()].into_iter().sum();
        }
    }

    /// The version after which the log is complete.
    pub fn floor(&self) -> ResourceVersion {
        self.state().log.floor()
    }

    /// Whether a subscription can start in the log after `version`, if history has the items that
    /// the log lacks.
    pub fn can_start_after(&self, version: ResourceVersion) -> bool {
        self.state().log.can_start_after(version)
    }

    /// Limits the coverage of history to this log, for a subscription that must continue in it: the
    /// ring may have items that were trimmed here.
    pub fn limit_coverage(&self, coverage: Coverage) -> Coverage {
        if self.can_start_after(coverage.version) { coverage } else { coverage.shortened(self.floor()) }
    }

    /// The end of the log.
    pub fn end(&self) -> Cursor {
        self.state().log.end()
    }

    /// Returns the lag of a subscription at this item of the log.
    pub fn behind(&self, item: u64, now: Instant) -> Behind {
        self.state().log.behind(item, now)
    }

    /// Whether the view has not ended, and has nothing after `cursor`.
    pub fn is_read_up(&self, cursor: Cursor) -> bool {
        let state = self.state();
        state.end.is_none() && state.log.seek(cursor) == Some(state.log.end())
    }

    /// Reads the entries after `cursor`, about `bytes_max` bytes of them. If there are none, it
    /// arms the waker. `waited` is the caller's memory of the cursor at which it last found
    /// nothing. Each test is subtracted from `tests_left`. When none are left, the run may have no
    /// entries.
    pub fn read(
        &self,
        cursor: Cursor,
        bytes_max: usize,
        waker: &StreamWaker,
        waited: &mut Option<Cursor>,
        tests_left: &mut usize,
    ) -> Result<LogRun, LogReadError> {
        let mut state = self.state();
        let ViewState { log, segments, end, subscribers, waiting, .. } = &mut *state;
        match log.seek(cursor) {
            None => return Err(LogReadError::Behind { oldest: log.floor() }),
            Some(next) if next != cursor => return Ok(LogRun::Passed(next)),
            Some(_) => {}
        }
        if log.is_untested(cursor) {
            // Armed under the lock that the result of the test takes too.
            waker.arm();
            *waited = Some(cursor);
            return Ok(LogRun::Empty);
        }
        if cursor < log.end() {
            // A segment pays only if several subscribers take it, or if it may be compressed.
            let readers = *subscribers;
            let is_shared = readers > 1 || self.encoder.is_gzip();
            let run = if is_shared {
                let compresses = |bytes, readers| self.encoder.takes_compression(bytes, readers);
                segments.at(cursor, log, readers, compresses).map(LogRun::Shared)
            } else {
                cut(log, cursor, log.end(), bytes_max).map(|(entries, _)| LogRun::unshared_at(cursor, entries))
            };
            return match run {
                Some(run) => Ok(run),
                None => {
                    let gap = log.gap_at(cursor).cloned();
                    drop(state);
                    let read = |gap: Arc<ViewGap>| self.read_gap(&gap, cursor, bytes_max, is_shared, tests_left);
                    gap.map_or(Ok(LogRun::Empty), read)
                }
            };
        }
        if let Some(end) = end {
            return Err(LogReadError::Ended(end.clone()));
        }
        when_planted!(ArmedAfterTheRead => return { drop(state); waker.arm(); Ok(LogRun::Empty) });
        // Armed under the lock that an append takes too: an append after this wakes.
        waker.arm();
        if *waited != Some(cursor) {
            *waited = Some(cursor);
            *waiting += 1;
        }
        if *waiting >= *subscribers {
            segments.clear();
        }
        Ok(LogRun::Empty)
    }

    /// Reads the entries after `cursor`, which points into a gap. Tests the selection without a
    /// lock.
    fn read_gap(
        &self,
        gap: &ViewGap,
        cursor: Cursor,
        bytes_max: usize,
        is_shared: bool,
        tests_left: &mut usize,
    ) -> Result<LogRun, LogReadError> {
        if !self.encoder.format().has_markers() {
            let passed = LogRun::Passed(cursor.past_item());
            when_planted!(GapPassesInSilence => return Ok(passed));
            let crossing = gap.crossing(&self.selection).map_err(LogReadError::Gap)?;
            return Ok(crossing.map_or(passed, |entry| LogRun::unshared_at(cursor, vec![entry])));
        }
        let bytes_max = if is_shared { SEGMENT_BYTES } else { bytes_max };
        let (entries, place) = gap.part(cursor.place(), &self.selection, bytes_max, tests_left);
        let end = place.map_or(cursor.past_item(), |place| cursor.inside_at(place));
        if is_shared {
            return Ok(LogRun::Shared(self.state().segments.share_part(cursor, end, entries)));
        }
        Ok(LogRun::Unshared(entries, end))
    }

    /// The compressed snapshot for a subscriber that starts now, with the cache at `version`; its
    /// version, and the place in the log after it. It is at least as new as `not_older_than`.
    pub fn shared_snapshot(
        &self,
        store: &Store,
        version: ResourceVersion,
        history: &History,
        not_older_than: Option<ResourceVersion>,
        now: Instant,
    ) -> (SharedSnapshotReader, ResourceVersion, Cursor) {
        let known = self.state().snapshot.clone();
        if let Some(snapshot) = &known
            && not_older_than.is_none_or(|least| snapshot.version() >= least)
            && let Some(reader) = snapshot.join(version, now)
            && let Ok(cursor) = self.cursor_after(snapshot.version(), history, None)
        {
            let cursor = if planted::is(Bug::SnapshotSpliceDrops) { self.end() } else { cursor };
            return (reader, snapshot.version(), cursor);
        }
        let objects = Arc::new(SelectedObjects::new(store.clone(), Page::default()));
        let snapshot = Arc::new(SharedSnapshot::new(&objects, version, known.as_deref(), now));
        let mut state = self.state();
        state.snapshot = Some(snapshot.clone());
        (SharedSnapshotReader::Encoding(snapshot, objects), version, state.log.end())
    }

    /// Returns the place in the log after `version`, where it must be able to
    /// [start](Self::can_start_after). If the log starts later, completes it from the replayed part
    /// of this history, and from the ring.
    pub fn cursor_after(
        &self,
        version: ResourceVersion,
        history: &History,
        replayed: Option<Replayed>,
    ) -> Result<Cursor, Expired> {
        let _ = history.ring().since(version)?;
        let mut state = self.state();
        let floor = state.log.floor();
        if !state.log.can_start_after(version) {
            return Err(Expired { requested: version, oldest: floor });
        }
        if version < floor && !planted::is(Bug::LateViewWithoutHistory) {
            let replayed = replayed.filter(|replayed| replayed.after == version);
            let (mut older, from) = replayed.map_or((Vec::new(), version), |replayed| replayed.up_to(floor));
            let records = history.since(from, &self.selection)?;
            let records = records.take_while(|record| record.version() <= floor || planted::is(Bug::HistoryTwice));
            older.extend(records.filter_map(|record| LogItem::replayed(record, &self.selection)));
            state.log.extend_back(version, older);
        }
        Ok(state.log.after(version))
    }

    /// Returns the later of `cursor` and the place after `floor`, which is the end if `floor` is
    /// above the log; and the gaps from `cursor` to there that hold other bytes of unchanged
    /// objects. History is not needed for it: the log has every event after a valid cursor.
    pub fn cursor_past(&self, cursor: Cursor, floor: ResourceVersion) -> (Cursor, Vec<Arc<ViewGap>>) {
        let state = self.state();
        if floor < state.log.floor() {
            return (cursor, Vec::new());
        }
        let past = cursor.max(state.log.after(floor));
        (past, state.log.reencoded_between(cursor, past))
    }

    /// Adds a subscription of a tenant. Returns the id of its waker.
    pub fn join(&self, waker: Arc<StreamWaker>, tenant_bytes: &Arc<TenantBytes>) -> usize {
        let mut state = self.state();
        state.subscribers += 1;
        state.log.bytes_mut().join(tenant_bytes);
        drop(state);
        self.wakers().insert(waker)
    }

    /// Removes a subscription of a tenant. Returns how many are left.
    pub fn leave(&self, waker_id: usize, waited: Option<Cursor>, tenant: Tenant) -> usize {
        self.wakers().remove(waker_id);
        let mut state = self.state();
        state.subscribers -= 1;
        state.log.bytes_mut().leave(tenant);
        if waited == Some(state.log.end()) {
            state.waiting = state.waiting.saturating_sub(1);
        }
        if state.waiting >= state.subscribers {
            state.segments.clear();
        }
        state.subscribers
    }
}
