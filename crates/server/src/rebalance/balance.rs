//! Decides how many watches a replica moves now: a pure decision.
//!
//! Every replica decides for itself, and only one with more than its share moves any. So replicas
//! cannot pass watches back and forth: a watch that arrives where there was room stays there. The
//! hazards are an overshoot, because the counts are some seconds old and others move too, and moves
//! without an effect, because clients come back to the same replica. Against the first, no replica
//! goes below its share, and it moves little at a time. Against the second, it compares the real
//! effect of its moves with the effect that they would have behind a balancer that picks at random,
//! and pauses if chance does not explain the difference.
//! chance does not explain the difference.

use std::time::Duration;

use tokio::time::Instant;

use super::rebalance_check::{Counts, Round, Verdict};

/// A replica moves watches if it has more than its share times this.
const BEGINS_ABOVE_SHARE: f64 = 1.1;
/// A replica that moves watches continues until it has less than its share times this.
const ENDS_BELOW_SHARE: f64 = 1.03;
/// The fewest watches above the share that are worth a move.
const EXCESS_MIN: f64 = 2.0;
/// The longest time between two decisions that counts for the moves.
const ELAPSED_MAX: Duration = Duration::from_secs(5);
/// The pause if moves have no effect: the first, and the longest.
const PAUSE: Duration = Duration::from_secs(60);
const PAUSE_MAX: Duration = Duration::from_secs(900);

/// The state of a replica's rebalancing.
#[derive(Debug)]
pub(super) struct Balance {
    /// The part of its watches that a replica moves in a second.
    rate: f64,
    decided_at: Option<Instant>,
    /// Watches that may be moved now, as in a token bucket.
    tokens: f64,
    round: Option<Round>,
    pause: Duration,
    paused_until: Option<Instant>,
}

/// A decision: the watches to move now, and a change to log.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Decision {
    /// The number of watches to move.
    pub(super) watches: u64,
    /// This replica's share.
    pub(super) share: f64,
    /// The change of state, if this decision makes one.
    pub(super) change: Option<Change>,
}

/// A change of a replica's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// The replica begins to move watches.
    Begins,
    /// The replica is close to its share.
    Ends,
    /// The moves had no effect; the replica pauses for this long.
    Pauses(Duration),
    /// The replica may not move any watch now.
    Holds,
}

impl Balance {
    /// A replica that moves at most `percent_per_second` of its watches a second.
    pub(super) fn new(percent_per_second: f64) -> Self {
        let rate = percent_per_second / 100.0;
        Self { rate, decided_at: None, tokens: 0.0, round: None, pause: Duration::ZERO, paused_until: None }
    }

    /// Decides at `now`, with `own` watches here. `others` are the watches of each other replica
    /// that takes new ones; `None` if nothing may be moved now. `least` is the smallest number that
    /// can be moved; `None`: none can.
    pub(super) fn decide(&mut self, now: Instant, own: u64, others: Option<&[u64]>, least: Option<usize>) -> Decision {
        let elapsed = self.decided_at.replace(now).map_or(Duration::ZERO, |at| now - at).min(ELAPSED_MAX);
        let Some(others) = others else {
            self.tokens = 0.0;
            let change = self.round.take().map(|_| Change::Holds);
            return Decision { watches: 0, share: own as f64, change };
        };
        let counts = Counts::new(own, others);
        let share = counts.share();
        let excess = counts.excess();
        let change = self.begin_or_end(now, counts);
        if self.round.is_none() {
            self.tokens = 0.0;
            return Decision { watches: 0, share, change };
        }
        let earned = self.rate * own as f64 * elapsed.as_secs_f64();
        // A connection with many watches moves as a whole, once there are tokens for all.
        let limit = (earned + 1.0).max(least.map_or(1.0, |least| least as f64));
        self.tokens = (self.tokens + earned).min(limit);
        Decision { watches: self.tokens.min(excess).max(0.0) as u64, share, change }
    }

    /// Records the connections that were asked to move by the last decision, by their numbers of
    /// watches.
    pub(super) fn moved(&mut self, connections: &[usize]) {
        self.tokens = (self.tokens - connections.iter().sum::<usize>() as f64).max(0.0);
        if let Some(round) = &mut self.round {
            round.add(connections);
        }
    }

    fn begin_or_end(&mut self, now: Instant, counts: Counts) -> Option<Change> {
        let own = counts.own;
        let share = counts.share();
        let excess = counts.excess();
        let Some(round) = &mut self.round else {
            let may = self.paused_until.is_none_or(|until| now >= until);
            let begins = may && own > BEGINS_ABOVE_SHARE * share && excess >= EXCESS_MIN;
            return begins.then(|| {
                self.round = Some(Round::new(counts));
                Change::Begins
            });
        };
        if own <= ENDS_BELOW_SHARE * share || excess < 1.0 {
            self.round = None;
            self.pause = Duration::ZERO;
            return Some(Change::Ends);
        }
        if counts.replicas() != round.seen.replicas() {
            round.continue_with(counts);
            return None;
        }
        match round.judge(&counts) {
            Verdict::Open => {
                round.seen = counts;
                None
            }
            Verdict::Effect => {
                *round = Round::new(counts);
                self.pause = Duration::ZERO;
                None
            }
            Verdict::NoEffect => {
                self.round = None;
                self.pause = (2 * self.pause).clamp(PAUSE, PAUSE_MAX);
                self.paused_until = Some(now + self.pause);
                Some(Change::Pauses(self.pause))
            }
        }
    }
}

#[cfg(test)]
mod tests;
