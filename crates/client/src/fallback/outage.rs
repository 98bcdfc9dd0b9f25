//! Record of kubefan's outage, and the moments at which a client may turn to the apiserver in it.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::{outage_errors::Reachability, paced_options::PacedOptions};

/// A client that is this late for its moment, such as after its machine slept, waits for the next
/// one. Otherwise many of them would wake up, and enter, together.
const LATE_MAX: Duration = Duration::from_secs(5);

/// Record of kubefan's outage. One for all watches of a source.
#[derive(Debug)]
pub(super) struct Outage {
    pub(super) options: PacedOptions,
    phase: Duration,
    state: Mutex<OutageState>,
}

#[derive(Debug, Default)]
struct OutageState {
    /// Start of the time for which kubefan has been unreachable. `None` while it is reachable.
    since: Option<Instant>,
    /// The last attempt was answered, with an error.
    refused: bool,
    /// The apiserver asked to be left alone.
    stopped: bool,
}

impl Outage {
    pub(super) fn new(options: PacedOptions) -> Self {
        Self { phase: options.phase(), options, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, OutageState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn since(&self) -> Option<Instant> {
        self.state().since
    }

    /// Notes the state of kubefan that an error showed.
    pub(super) fn note(&self, reachability: Reachability) {
        match reachability {
            Reachability::Gone => self.begin(),
            Reachability::Refused => self.refused(),
            Reachability::Answered => self.end(),
        }
    }

    /// Begins an outage. One that goes on keeps its start.
    fn begin(&self) {
        let mut state = self.state();
        state.since.get_or_insert_with(Instant::now);
        state.refused = false;
    }

    /// Notes that kubefan is reachable, but does not serve. An outage neither starts nor ends.
    fn refused(&self) {
        self.state().refused = true;
    }

    /// Ends the outage.
    pub(super) fn end(&self) {
        *self.state() = OutageState::default();
    }

    /// Ends the fallback for the rest of the outage.
    pub(super) fn stop(&self) {
        self.state().stopped = true;
    }

    /// The client's next moment after `now`. `None` without an outage, and if the fallback ended.
    pub(super) fn next_moment(&self, now: Instant) -> Option<Instant> {
        let state = self.state();
        let since = state.since.filter(|_| !state.stopped)?;
        let first = since.checked_add(self.options.after)?.checked_add(self.phase)?;
        let Some(past) = now.checked_duration_since(first) else { return Some(first) };
        let spread = self.options.spread();
        let periods = u32::try_from(past.as_nanos() / spread.as_nanos()).ok()?.checked_add(1)?;
        first.checked_add(spread.checked_mul(periods)?)
    }

    /// Whether the client may enter now, at `moment`.
    pub(super) fn admits(&self, moment: Instant, now: Instant) -> bool {
        let state = self.state();
        let is_gone = state.since.is_some() && !state.refused && !state.stopped;
        is_gone && now.saturating_duration_since(moment) <= LATE_MAX
    }
}
