//! What equal subscriptions share: one selection, its log of ready frames, and the wake-up of those who wait for more.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slab::Slab;
use tokio::time::Instant;

use super::{
    bell::Bell,
    frame::Frame,
    log::{LogEntry, ViewLog},
    outcome::StreamEnd,
};
use crate::{
    cache::{EventRing, Expired, Record},
    model::{ResourceVersion, selection::Selection},
};

/// A view of one resource and scope. The hub writes it, inside its own critical section; subscriptions read it.
pub struct View {
    selection: Selection,
    state: Mutex<ViewState>,
    bells: Mutex<Slab<Arc<Bell>>>,
}

/// What a view's lock guards.
pub struct ViewState {
    /// The frames.
    pub log: ViewLog,
    /// Set once: no more frames will come, and why.
    pub end: Option<StreamEnd>,
}

impl View {
    /// A view whose history starts at `floor`.
    pub fn new(selection: Selection, floor: ResourceVersion) -> Self {
        let state = Mutex::new(ViewState { log: ViewLog::new(floor), end: None });
        Self { selection, state, bells: Mutex::default() }
    }

    /// What is selected.
    pub fn selection(&self) -> &Selection {
        &self.selection
    }

    /// The log, and whether it has ended. Never held across an await.
    pub fn state(&self) -> MutexGuard<'_, ViewState> {
        // A panic while the lock was held cannot leave an entry half written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bells(&self) -> MutexGuard<'_, Slab<Arc<Bell>>> {
        self.bells.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends what this view sees of a record; tells whether there was anything.
    pub fn append(&self, record: &Record, received: Instant) -> usize {
        let entries = entries(record, &self.selection, Some(received));
        let count = entries.len();
        if count > 0 {
            let mut state = self.state();
            entries.into_iter().for_each(|entry| state.log.push(entry));
        }
        count
    }

    /// Lets go of what the ring has let go of.
    pub fn trim(&self, floor: ResourceVersion) {
        self.state().log.trim(floor);
    }

    /// What its log takes beyond the objects that it shares with the cache.
    pub fn log_bytes(&self) -> usize {
        self.state().log.bytes()
    }

    /// Ends the view.
    pub fn close(&self, end: StreamEnd) {
        self.state().end.get_or_insert(end);
        self.wake();
    }

    /// Rings the bell of every subscription that waits.
    pub fn wake(&self) {
        self.bells().iter().for_each(|(_, bell)| {
            bell.ring();
        });
    }

    /// The place in the log after `version`; the log is completed from the ring where it begins later.
    pub fn cursor_after(&self, version: ResourceVersion, ring: &EventRing) -> Result<u64, Expired> {
        let records = ring.since(version)?;
        let mut state = self.state();
        let floor = state.log.floor();
        if version < floor {
            let older = records.take_while(|record| record.version() <= floor);
            let older = older.flat_map(|record| entries(record, &self.selection, None)).collect();
            state.log.extend_back(version, older);
        }
        Ok(state.log.after(version))
    }

    /// Takes a subscription in; gives its place.
    pub fn join(&self, bell: Arc<Bell>) -> usize {
        self.bells().insert(bell)
    }

    /// Lets a subscription go; tells how many are left.
    pub fn leave(&self, place: usize) -> usize {
        let mut bells = self.bells();
        bells.remove(place);
        bells.len()
    }
}

/// What a selection sees of a record.
fn entries(record: &Record, selection: &Selection, received: Option<Instant>) -> Vec<LogEntry> {
    let entry = |frame| LogEntry { version: record.version(), frame, received };
    match record {
        Record::Event(event) => {
            event.transition(selection).map(|seen| entry(Frame::event(event, seen))).into_iter().collect()
        }
        Record::Gap(gap) => {
            let seen = gap.events.iter().filter_map(|e| Some(Frame::gap_event(e, e.transition(selection)?)));
            let begin = std::iter::once(Frame::gap_begin(gap));
            begin.chain(seen).chain(std::iter::once(Frame::gap_end(gap))).map(entry).collect()
        }
    }
}
