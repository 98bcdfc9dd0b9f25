//! How many watches a replica moves now: a pure decision.
//!
//! Every replica decides for itself, and only one with more than its share moves any. So replicas
//! cannot pass watches back and forth: what arrives where there was room stays there. The hazards
//! are an overshoot, because the counts are some seconds old and others move too, and moves without
//! an effect, because clients come back to the same replica. Against the first, no replica goes
//! below its share, and it moves little at a time. Against the second, it compares what its moves
//! have changed with what they would change behind a balancer that picks at random, and pauses if
//! chance does not explain the difference.

use std::time::Duration;

use tokio::time::Instant;

/// A replica moves watches if it has more than its share times this.
const ABOVE_SHARE: f64 = 1.1;
/// It continues until it has less than its share times this.
const ENOUGH: f64 = 1.03;
/// The fewest watches above the share that are worth a move.
const EXCESS_MIN: f64 = 2.0;
/// The longest time between two decisions for which watches are moved.
const ELAPSED_MAX: Duration = Duration::from_secs(5);
/// The fewest moves, as a part of the replica's watches and in number, after which it judges them.
const JUDGED_PART: f64 = 0.1;
const JUDGED_MIN: f64 = 10.0;
/// It judges moves once the effect that they should have is so many standard deviations of it.
const CERTAIN: f64 = 4.0;
/// The part of that effect which they must have had.
const EFFECT_MIN: f64 = 0.1;
/// The pause if it has not: the first, and the longest.
const PAUSE: Duration = Duration::from_secs(60);
const PAUSE_MAX: Duration = Duration::from_secs(900);

/// The state of a replica's rebalancing.
#[derive(Debug)]
pub(super) struct Balance {
    /// The part of its watches that a replica moves in a second.
    rate: f64,
    decided_at: Option<Instant>,
    /// Watches that may be moved now.
    credit: f64,
    round: Option<Round>,
    pause: Duration,
    paused_until: Option<Instant>,
}

/// The watches of all replicas that take new ones, at one time.
#[derive(Debug)]
struct Counts {
    own: f64,
    others: Vec<f64>,
}

impl Counts {
    fn new(own: u64, others: &[u64]) -> Self {
        Self { own: own as f64, others: others.iter().map(|watches| *watches as f64).collect() }
    }

    fn replicas(&self) -> usize {
        self.others.len() + 1
    }

    fn total(&self) -> f64 {
        self.own + self.others.iter().sum::<f64>()
    }

    fn share(&self) -> f64 {
        self.total() / self.replicas() as f64
    }

    /// The watches of this replica above its share.
    fn excess(&self) -> f64 {
        self.own - self.share()
    }

    /// The watches that the replicas below their share have less than it, all together.
    fn deficit(&self) -> f64 {
        self.taken_of(f64::INFINITY)
    }

    /// How many of so many watches, spread evenly, the others take without passing their share.
    fn taken_of(&self, watches: f64) -> f64 {
        let (share, each) = (self.share(), watches / self.replicas() as f64);
        self.others.iter().map(|other| (share - other).clamp(0.0, each)).sum()
    }
}

/// The moves since moving began, or since they were last judged.
///
/// They are judged by what the others have less than their share, not by what is left here: several
/// replicas that have too many move into each other, which hides from each what its own moves have
/// done. A balancer that picks at random gives each replica below its share a part of the moved
/// watches, and what others move can only add to that.
#[derive(Debug)]
struct Round {
    own_before: f64,
    total_before: f64,
    deficit_before: f64,
    /// What the last decision saw.
    seen: Counts,
    moved: f64,
    /// By how much a balancer that picks at random would lessen the deficit.
    expected: f64,
    /// The variance of that.
    variance: f64,
}

/// What moves have shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Too few to tell an effect from chance.
    Open,
    /// They help.
    Effect,
    /// They do not: clients come back here.
    NoEffect,
}

impl Round {
    fn new(seen: Counts) -> Self {
        Self {
            own_before: seen.own,
            total_before: seen.total(),
            deficit_before: seen.deficit(),
            seen,
            moved: 0.0,
            expected: 0.0,
            variance: 0.0,
        }
    }

    /// Adds connections with so many watches each, which were asked to move.
    fn add(&mut self, connections: &[usize]) {
        let moved: f64 = connections.iter().map(|watches| *watches as f64).sum();
        let taken = self.seen.taken_of(moved);
        let part = taken / moved.max(1.0);
        self.moved += moved;
        self.expected += taken;
        // The watches of a connection go together.
        self.variance += connections.iter().map(|watches| (*watches as f64).powi(2) * part * (1.0 - part)).sum::<f64>();
    }

    fn judge(&self, now: &Counts) -> Verdict {
        // Where clients came or left meanwhile, above or below the share, is chance too. The
        // variance of one is a quarter at most.
        let variance = self.variance + (now.total() - self.total_before).abs() / 4.0;
        let is_enough = self.moved >= JUDGED_MIN.max(JUDGED_PART * self.own_before);
        if !is_enough || self.expected < CERTAIN * variance.sqrt() {
            return Verdict::Open;
        }
        let effect = self.deficit_before - now.deficit();
        if effect >= EFFECT_MIN * self.expected { Verdict::Effect } else { Verdict::NoEffect }
    }
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Decision {
    /// Move about so many watches.
    pub(super) watches: u64,
    /// This replica's share.
    pub(super) share: f64,
    /// What begins or ends with this decision.
    pub(super) change: Option<Change>,
}

/// A change of what a replica does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// It begins to move watches.
    Begins,
    /// It is close to its share.
    Ends,
    /// Its moves had no effect; it pauses for this long.
    Pauses(Duration),
    /// It may not move any now.
    Holds,
}

impl Balance {
    /// A replica that moves at most `percent_per_second` of its watches a second.
    pub(super) fn new(percent_per_second: f64) -> Self {
        let rate = percent_per_second / 100.0;
        Self { rate, decided_at: None, credit: 0.0, round: None, pause: Duration::ZERO, paused_until: None }
    }

    /// Decides at `now`, with `own` watches here. `others` are the watches of each other replica
    /// that takes new ones; `None` if nothing may be moved now. `least` is the smallest number that
    /// can be moved; `None`: none can.
    pub(super) fn decide(&mut self, now: Instant, own: u64, others: Option<&[u64]>, least: Option<usize>) -> Decision {
        let elapsed = self.decided_at.replace(now).map_or(Duration::ZERO, |at| now - at).min(ELAPSED_MAX);
        let Some(others) = others else {
            self.credit = 0.0;
            let change = self.round.take().map(|_| Change::Holds);
            return Decision { watches: 0, share: own as f64, change };
        };
        let counts = Counts::new(own, others);
        let (share, excess) = (counts.share(), counts.excess());
        let change = self.begin_or_end(now, counts);
        if self.round.is_none() {
            self.credit = 0.0;
            return Decision { watches: 0, share, change };
        }
        let earned = self.rate * own as f64 * elapsed.as_secs_f64();
        // A connection with many watches moves as a whole, once there is credit for all.
        let limit = (earned + 1.0).max(least.map_or(1.0, |least| least as f64));
        self.credit = (self.credit + earned).min(limit);
        Decision { watches: self.credit.min(excess).max(0.0) as u64, share, change }
    }

    /// Records that connections with so many watches each were asked to move, by the last decision.
    pub(super) fn moved(&mut self, connections: &[usize]) {
        self.credit = (self.credit - connections.iter().sum::<usize>() as f64).max(0.0);
        if let Some(round) = &mut self.round {
            round.add(connections);
        }
    }

    fn begin_or_end(&mut self, now: Instant, counts: Counts) -> Option<Change> {
        let (own, share, excess) = (counts.own, counts.share(), counts.excess());
        let Some(round) = &mut self.round else {
            let may = self.paused_until.is_none_or(|until| now >= until);
            let begins = may && own > ABOVE_SHARE * share && excess >= EXCESS_MIN;
            return begins.then(|| {
                self.round = Some(Round::new(counts));
                Change::Begins
            });
        };
        if own <= ENOUGH * share || excess < 1.0 {
            (self.round, self.pause) = (None, Duration::ZERO);
            return Some(Change::Ends);
        }
        if counts.replicas() != round.seen.replicas() {
            // The share is another one, which is no effect of moves.
            *round = Round::new(counts);
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
