//! Decides whether a kubefan at `--upstream` or the apiserver is read: a state machine without a
//! clock.
//!
//! | state | lists and watches start at | next |
//! |---|---|---|
//! | `Healthy` | the kubefan | `Away` after a failure, or if it was busy for [`BUSY_MAX`] |
//! | `Away` | the apiserver, each at its turn | `Returning` with the first probe that is answered |
//! | `Returning` | the apiserver, each at its turn | `Healthy` if each probe was answered for the hold; `Away` if one fails |
//!
//! The hold is zero if nothing was started at the apiserver yet, so that a kubefan that another
//! replica replaces at once is not left. It doubles with each relapse.

use std::time::Duration;

use tokio::time::Instant;

/// The time for which the kubefan may answer that it cannot serve before it counts as away. A cache
/// that starts answers so for some seconds. Longer than the interval at which a quiet cache asks
/// for the freshness over gRPC, which is an answer.
const BUSY_MAX: Duration = Duration::from_secs(30);
/// The longest time between two such answers in a row. HTTP watches that are open answer nothing
/// for minutes, though the kubefan serves them.
const BUSY_GAP_MAX: Duration = Duration::from_secs(30);
/// The time for which the kubefan must be healthy if something was started at the apiserver.
const HOLD_MIN: Duration = Duration::from_secs(30);
/// The longest hold of a kubefan that fails soon after each return.
const HOLD_MAX: Duration = Duration::from_secs(600);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Healthy,
    Away,
    Returning { healthy_since: Instant },
}

/// The state of the kubefan at `--upstream`, as its answers and the probes show it.
#[derive(Debug)]
pub(super) struct SideMachine {
    state: State,
    /// Number of outages. A request that was sent before the last one cannot begin a new one.
    epoch: u64,
    /// Time of the first answer in a row that it cannot serve.
    busy_since: Option<Instant>,
    /// Time of the last one.
    busy_at: Option<Instant>,
    returned_at: Option<Instant>,
    /// The time for which probes must be answered in this outage.
    hold: Duration,
}

impl Default for SideMachine {
    fn default() -> Self {
        Self {
            state: State::Healthy,
            epoch: 0,
            busy_since: None,
            busy_at: None,
            returned_at: None,
            hold: Duration::ZERO,
        }
    }
}

impl SideMachine {
    pub(super) fn is_away(&self) -> bool {
        self.state != State::Healthy
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Notes that a request of this epoch has found no kubefan.
    pub(super) fn failed(&mut self, epoch: u64, now: Instant) {
        if self.is_away() || epoch != self.epoch {
            return;
        }
        let relapse_within = (2 * self.hold).max(2 * HOLD_MIN);
        let is_relapse = self.returned_at.is_some_and(|at| now.saturating_duration_since(at) < relapse_within);
        self.hold = if is_relapse { (2 * self.hold).clamp(HOLD_MIN, HOLD_MAX) } else { Duration::ZERO };
        self.state = State::Away;
        self.busy_since = None;
        self.epoch += 1;
    }

    /// Notes an answer of this epoch that the kubefan cannot serve now.
    pub(super) fn busy(&mut self, epoch: u64, now: Instant) {
        if self.is_away() || epoch != self.epoch {
            return;
        }
        let is_in_a_row = self.busy_at.is_some_and(|at| now.saturating_duration_since(at) <= BUSY_GAP_MAX);
        let since = self.busy_since.filter(|_| is_in_a_row).unwrap_or(now);
        self.busy_since = Some(since);
        self.busy_at = Some(now);
        if now.saturating_duration_since(since) >= BUSY_MAX {
            self.failed(epoch, now);
        }
    }

    /// Notes any other answer.
    pub(super) fn answered(&mut self) {
        self.busy_since = None;
    }

    /// Notes that a read was started at the apiserver. It should not move again soon.
    pub(super) fn started(&mut self) {
        if self.is_away() {
            self.hold = self.hold.max(HOLD_MIN);
        }
    }

    /// Notes the result of a probe.
    pub(super) fn probed(&mut self, is_healthy: bool, now: Instant) {
        let healthy_since = match self.state {
            State::Healthy => return,
            _ if !is_healthy => {
                self.state = State::Away;
                return;
            }
            State::Away => now,
            State::Returning { healthy_since } => healthy_since,
        };
        self.state = State::Returning { healthy_since };
        if now.saturating_duration_since(healthy_since) >= self.hold {
            self.state = State::Healthy;
            self.returned_at = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine and the time since its start, in seconds.
    struct Case {
        machine: SideMachine,
        start: Instant,
    }

    impl Case {
        fn new() -> Self {
            Self { machine: SideMachine::default(), start: Instant::now() }
        }

        fn at(&self, seconds: u64) -> Instant {
            self.start + Duration::from_secs(seconds)
        }

        fn fails(&mut self, seconds: u64) -> bool {
            self.machine.failed(self.machine.epoch(), self.at(seconds));
            self.machine.is_away()
        }

        fn is_away_after_probe(&mut self, is_healthy: bool, seconds: u64) -> bool {
            self.machine.probed(is_healthy, self.at(seconds));
            self.machine.is_away()
        }
    }

    #[test]
    fn a_kubefan_that_is_back_before_anything_has_moved_is_not_left() {
        let mut case = Case::new();
        assert!(case.fails(0));
        assert!(case.is_away_after_probe(false, 1));
        assert!(!case.is_away_after_probe(true, 2));
    }

    #[test]
    fn after_a_move_the_kubefan_must_be_healthy_for_half_a_minute() {
        let mut case = Case::new();
        case.fails(0);
        case.machine.started();
        assert!(case.is_away_after_probe(true, 10));
        assert!(case.is_away_after_probe(true, 39));
        assert!(case.is_away_after_probe(false, 40), "one probe that fails starts the time anew");
        assert!(case.is_away_after_probe(true, 41));
        assert!(case.is_away_after_probe(true, 70));
        assert!(!case.is_away_after_probe(true, 71));
    }

    #[test]
    fn each_relapse_doubles_the_hold_up_to_ten_minutes() {
        let mut case = Case::new();
        let mut now = 0;
        let mut holds = Vec::new();
        for _ in 0..8 {
            case.fails(now);
            case.machine.started();
            let healthy_from = now + 1;
            now = healthy_from;
            while case.is_away_after_probe(true, now) {
                now += 1;
            }
            holds.push(now - healthy_from);
            now += 1;
        }
        assert_eq!(holds, [30, 60, 120, 240, 480, 600, 600, 600]);
        case.fails(now + 1200);
        case.machine.started();
        assert!(case.is_away_after_probe(true, now + 1201));
        assert!(!case.is_away_after_probe(true, now + 1231), "no relapse after a long time");
    }

    #[test]
    fn a_busy_kubefan_is_left_after_half_a_minute_without_another_answer() {
        let mut case = Case::new();
        let busy = |case: &mut Case, seconds| {
            case.machine.busy(0, case.at(seconds));
            case.machine.is_away()
        };
        assert!(!busy(&mut case, 0) && !busy(&mut case, 29));
        case.machine.answered();
        assert!(!busy(&mut case, 31) && !busy(&mut case, 60));
        assert!(busy(&mut case, 61));
    }

    #[test]
    fn busy_answers_that_are_far_apart_are_not_in_a_row() {
        let mut case = Case::new();
        for seconds in [0, 31, 62, 93] {
            case.machine.busy(0, case.at(seconds));
            assert!(!case.machine.is_away());
        }
    }

    #[test]
    fn a_request_from_before_an_outage_does_not_begin_the_next() {
        let mut case = Case::new();
        case.fails(0);
        case.is_away_after_probe(true, 1);
        case.machine.failed(0, case.at(2));
        assert!(!case.machine.is_away());
        case.machine.failed(1, case.at(2));
        assert!(case.machine.is_away());
    }
}
