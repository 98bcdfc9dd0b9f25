//! The time at which a client may turn to the apiserver.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kubefan_common::{backoff::BackoffOptions, reasons::ErrorReason};
use tokio::time::Instant;
use tonic::Code;

use crate::error::ClientError;

/// The shortest time over which the clients of a fleet enter. On average 0.5 % do each minute, so
/// that no minute has more than 1 % by chance.
const SPREAD_MIN: Duration = Duration::from_secs(200 * 60);

/// A longer spread is a mistake, and would leave the range of the clock.
const SPREAD_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

/// A client that is this late for its moment, such as after its machine slept, waits for the next
/// one. Otherwise many of them would wake up, and enter, together.
const LATE_MAX: Duration = Duration::from_secs(5);

/// Options of [`Fallback::Paced`](super::Fallback::Paced).
#[derive(Debug, Clone)]
pub struct PacedOptions {
    /// Names this client in its fleet, such as the name of its node or pod. Its hash decides the
    /// client's moment, so clients with the same id enter together.
    pub client_id: String,
    /// Minimum time for which kubefan must be unreachable. Default: 60 s.
    pub after: Duration,
    /// The time over which all clients of a fleet enter, each at its own moment, evenly spread.
    /// Default and minimum: 200 minutes, which is 0.5 % of the fleet each minute on average. At
    /// most 30 days.
    pub spread: Duration,
    /// The delays between attempts to reach kubefan.
    pub backoff: BackoffOptions,
}

impl PacedOptions {
    /// Returns the default options of this client.
    pub fn new(client_id: &str) -> Self {
        Self {
            client_id: client_id.to_owned(),
            after: Duration::from_secs(60),
            spread: SPREAD_MIN,
            backoff: BackoffOptions::default(),
        }
    }

    /// The client's place in the spread. Hashes of ids are evenly distributed.
    pub(super) fn phase(&self) -> Duration {
        let nanos = (u128::from(hash(&self.client_id)) * self.spread().as_nanos()) >> 64;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    pub(super) fn spread(&self) -> Duration {
        self.spread.clamp(SPREAD_MIN, SPREAD_MAX)
    }
}

/// A hash that is the same in every process and version: FNV-1a, and the final mix of SplitMix64,
/// because FNV leaves the high bits of similar short texts similar.
pub(super) fn hash(text: &str) -> u64 {
    let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325, fnv);
    let hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

/// State of the server, as an error shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The server cannot be reached.
    Gone,
    /// The server is reachable, and asks to try again later.
    Refused,
    /// The server gave its answer. A retry of the same request would bring the same.
    Answered,
}

impl Verdict {
    pub(super) fn of(error: &ClientError) -> Self {
        let gone = match error {
            ClientError::Unreachable { .. } => true,
            // kubefan answers no reads of the resource until its operator switches it back.
            ClientError::Status(status) if status.reason == ErrorReason::Passthrough => true,
            // kubefan's own errors have a reason or a delay. Others are of a proxy in between.
            ClientError::Status(status) => {
                use Code::{Aborted, Cancelled, DeadlineExceeded, Internal, Unavailable, Unknown};
                status.reason.is_empty()
                    && status.retry_after.is_none()
                    && matches!(status.code, Unavailable | Unknown | Internal | Cancelled | Aborted | DeadlineExceeded)
            }
            ClientError::Api(status) => status.reason.is_empty() && matches!(status.code, 502..=504),
            _ => false,
        };
        match error {
            _ if gone => Self::Gone,
            error if error.is_retryable() && !error.is_expired() => Self::Refused,
            _ => Self::Answered,
        }
    }
}

/// Whether this error of the apiserver ends the fallback for the rest of the outage.
pub(super) fn ends_fallback(error: &ClientError) -> bool {
    error.retry_after().is_some()
        || error.code() == Code::ResourceExhausted
        || error.is_expired()
        || !error.is_retryable()
}

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

    /// An attempt did not reach kubefan.
    pub(super) fn gone(&self) {
        let mut state = self.state();
        state.since.get_or_insert_with(Instant::now);
        state.refused = false;
    }

    /// Notes that kubefan is reachable, but does not serve. An outage neither starts nor ends.
    pub(super) fn refused(&self) {
        self.state().refused = true;
    }

    /// kubefan serves.
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
