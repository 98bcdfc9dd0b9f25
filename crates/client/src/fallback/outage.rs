//! Record of kubefan's outage, and the moments at which a client may turn to the apiserver in it.

use std::{
    future::pending,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kubefan_common::backoff::BackoffOptions;
use tokio::time::{Instant, sleep_until};

use super::{
    apiserver_starts::{ApiserverStarts, WaitingStart},
    outage_errors::Reachability,
    paced_options::{PacedOptions, hash},
};
use crate::budget::FallbackBudget;

/// Time for which the apiserver's watch continues after the client's next moment. A new watch takes
/// its place at that moment.
const OVERLAP: Duration = Duration::from_secs(60);

/// With a budget, a kubefan that answers "try again later" for this long counts as gone. One that
/// starts answers so for some seconds.
const REFUSED_MAX: Duration = Duration::from_secs(10);

/// A client that is this late for its moment, such as after its machine slept, waits for the next
/// one. Otherwise many of them would wake up, and enter, together.
const LATE_MAX: Duration = Duration::from_secs(5);

/// Waits until the turn has come; for ever without one. Cancel-safe.
pub(super) async fn turn_of(turn: &Option<Turn>) {
    match turn {
        Some(turn) => turn.has_come().await,
        None => pending().await,
    }
}

/// Record of kubefan's outage. One for all watches of a source.
#[derive(Debug)]
pub(super) struct Outage {
    pace: Pace,
    state: Mutex<OutageState>,
}

/// Decides when a client turns to the apiserver.
#[derive(Debug)]
enum Pace {
    /// At its own moment, with a watch from its version.
    Moments { options: PacedOptions, phase: Duration },
    /// Within a budget, with lists and watches.
    Starts(ApiserverStarts),
}

/// A request to the apiserver that waits for its turn.
#[derive(Debug)]
pub(super) enum Turn {
    Moment(Instant),
    Start(WaitingStart),
}

impl Turn {
    /// Waits until it has come. Cancel-safe.
    pub(super) async fn has_come(&self) {
        match self {
            Self::Moment(moment) => sleep_until(*moment).await,
            Self::Start(start) => start.admitted().await,
        }
    }
}

#[derive(Debug, Default)]
struct OutageState {
    /// Start of the time for which kubefan has been unreachable. `None` while it is reachable.
    since: Option<Instant>,
    /// Time of the first attempt in a row that was answered with "try again later". `None` if the
    /// last one was not.
    refused_since: Option<Instant>,
    /// The apiserver asked to be left alone.
    stopped: bool,
}

impl Outage {
    pub(super) fn with_moments(options: PacedOptions) -> Self {
        Self { pace: Pace::Moments { phase: options.phase(), options }, state: Mutex::default() }
    }

    pub(super) fn with_starts(starts: ApiserverStarts) -> Self {
        Self { pace: Pace::Starts(starts), state: Mutex::default() }
    }

    /// The budgeted starts; `None` if the client has moments.
    pub(super) fn starts(&self) -> Option<&ApiserverStarts> {
        match &self.pace {
            Pace::Moments { .. } => None,
            Pace::Starts(starts) => Some(starts),
        }
    }

    /// The delays between attempts to reach kubefan.
    pub(super) fn backoff(&self) -> BackoffOptions {
        match &self.pace {
            Pace::Moments { options, .. } => options.backoff.clone(),
            Pace::Starts(starts) => starts.options().backoff.clone(),
        }
    }

    /// A seed for the jitter of one watch, different for each client.
    pub(super) fn jitter_seed(&self) -> u64 {
        match &self.pace {
            Pace::Moments { options, .. } => hash(&options.client_id),
            Pace::Starts(starts) => starts.draw_seed(),
        }
    }

    /// The time after which a watch of the apiserver ends. `None` for the default of its source.
    pub(super) fn watch_timeout(&self) -> Option<Duration> {
        match &self.pace {
            Pace::Moments { options, .. } => Some(options.spread() + OVERLAP),
            Pace::Starts(_) => None,
        }
    }

    fn state(&self) -> MutexGuard<'_, OutageState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn since(&self) -> Option<Instant> {
        self.state().since
    }

    /// Whether the last attempt failed, so that kubefan is gone or asks to try again later.
    pub(super) fn has_failures(&self) -> bool {
        let state = self.state();
        state.since.is_some() || state.refused_since.is_some()
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
        state.refused_since = None;
    }

    /// Notes that kubefan is reachable, but does not serve. An outage neither starts nor ends, but
    /// with a budget one starts if this goes on.
    fn refused(&self) {
        let now = Instant::now();
        let mut state = self.state();
        let refused_since = *state.refused_since.get_or_insert(now);
        if self.starts().is_some() && now.saturating_duration_since(refused_since) >= REFUSED_MAX {
            state.since.get_or_insert(now);
        }
    }

    /// Ends the outage.
    pub(super) fn end(&self) {
        *self.state() = OutageState::default();
    }

    /// Ends the fallback for the rest of the outage.
    pub(super) fn stop(&self) {
        self.state().stopped = true;
    }

    /// The client's next turn. `None` without an outage, and if the fallback ended. `named` is the
    /// budget that kubefan has named.
    pub(super) fn next_turn(&self, has_state: bool, named: Option<FallbackBudget>) -> Option<Turn> {
        match &self.pace {
            Pace::Moments { options, phase } => self.next_moment(options, *phase, Instant::now()).map(Turn::Moment),
            Pace::Starts(starts) => self.since().map(|_| Turn::Start(starts.enter(has_state, named))),
        }
    }

    /// The client's next moment after `now`.
    fn next_moment(&self, options: &PacedOptions, phase: Duration, now: Instant) -> Option<Instant> {
        let state = self.state();
        let since = state.since.filter(|_| !state.stopped)?;
        let first = since.checked_add(options.after)?.checked_add(phase)?;
        let Some(past) = now.checked_duration_since(first) else { return Some(first) };
        let spread = options.spread();
        let periods = u32::try_from(past.as_nanos() / spread.as_nanos()).ok()?.checked_add(1)?;
        first.checked_add(spread.checked_mul(periods)?)
    }

    /// Whether the client may enter now, at its turn.
    pub(super) fn admits(&self, turn: &Turn) -> bool {
        let state = self.state();
        let is_gone = state.since.is_some() && !state.stopped;
        match turn {
            Turn::Moment(moment) => is_gone && state.refused_since.is_none() && moment.elapsed() <= LATE_MAX,
            Turn::Start(_) => is_gone,
        }
    }
}
