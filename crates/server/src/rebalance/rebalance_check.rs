//! Judges whether the moves of a replica have an effect: a pure function.
//!
//! Clients that know only one address come back to the same replica, and then moving must stop. The
//! hazard is chance: a balancer that picks at random sends some back too, and if there are few
//! moves perhaps all. So moves are judged once chance cannot explain that nothing has changed.
//!
//! They are judged by how far the others are below their share, not by the watches left here:
//! several replicas that have too many move into each other, which hides the effect of its own
//! moves from each. A balancer that picks at random gives each replica below its share a part of
//! the moved watches, and the moves of others can only add to that.

/// The fewest moves, as a part of the replica's watches and in number, after which it judges them.
const JUDGED_PART: f64 = 0.1;
const JUDGED_MIN: f64 = 10.0;
/// Moves are judged once their expected effect is this many of its standard deviations.
const STANDARD_DEVIATIONS_MIN: f64 = 4.0;
/// The part of the expected effect that moves must have had.
const EFFECT_MIN: f64 = 0.1;

/// The watches of all replicas that take new ones, at one time.
#[derive(Debug)]
pub(super) struct Counts {
    /// Watches of this replica.
    pub(super) own: f64,
    others: Vec<f64>,
}

impl Counts {
    /// The counts of this replica and of the others.
    pub(super) fn new(own: u64, others: &[u64]) -> Self {
        Self { own: own as f64, others: others.iter().map(|watches| *watches as f64).collect() }
    }

    /// The number of replicas.
    pub(super) fn replicas(&self) -> usize {
        self.others.len() + 1
    }

    fn total(&self) -> f64 {
        self.own + self.others.iter().sum::<f64>()
    }

    /// The watches of each replica if all had as many.
    pub(super) fn share(&self) -> f64 {
        self.total() / self.replicas() as f64
    }

    /// The watches of this replica above its share.
    pub(super) fn excess(&self) -> f64 {
        self.own - self.share()
    }

    /// The watches that the replicas below their share lack, all together.
    fn deficit(&self) -> f64 {
        self.taken_of(f64::INFINITY)
    }

    /// The part of `watches` that fits below the share of the others, if every replica gets an
    /// equal part of them.
    fn taken_of(&self, watches: f64) -> f64 {
        let share = self.share();
        let each = watches / self.replicas() as f64;
        self.others.iter().map(|other| (share - other).clamp(0.0, each)).sum()
    }
}

/// The moves since moving began, or since they were last judged.
#[derive(Debug)]
pub(super) struct Round {
    own_before: f64,
    total_before: f64,
    deficit_before: f64,
    /// The counts at the last decision.
    pub(super) seen: Counts,
    moved: f64,
    /// The watches of the largest connection that was asked to move.
    largest: f64,
    /// The expected decrease of the deficit behind a balancer that picks at random.
    expected: f64,
    /// The variance of `expected`.
    variance: f64,
}

/// The verdict on moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Too few to tell an effect from chance.
    Open,
    /// The moves help.
    Effect,
    /// The moves do not help: clients come back here.
    NoEffect,
}

impl Round {
    /// No moves yet.
    pub(super) fn new(seen: Counts) -> Self {
        Self {
            own_before: seen.own,
            total_before: seen.total(),
            deficit_before: seen.deficit(),
            seen,
            moved: 0.0,
            largest: 1.0,
            expected: 0.0,
            variance: 0.0,
        }
    }

    /// Adds connections with this many watches each, which were asked to move.
    pub(super) fn add(&mut self, connections: &[usize]) {
        let moved: f64 = connections.iter().map(|watches| *watches as f64).sum();
        let taken = self.seen.taken_of(moved);
        let part = taken / moved.max(1.0);
        self.moved += moved;
        self.largest = connections.iter().fold(self.largest, |largest, watches| largest.max(*watches as f64));
        self.expected += taken;
        // The watches of a connection go together.
        self.variance += connections.iter().map(|watches| (*watches as f64).powi(2) * part * (1.0 - part)).sum::<f64>();
    }

    /// Continues with another number of replicas, whose shares are no effect of moves.
    pub(super) fn continue_with(&mut self, now: Counts) {
        self.total_before += now.total() - self.seen.total();
        self.deficit_before += now.deficit() - self.seen.deficit();
        self.seen = now;
    }

    /// Judges the moves by the counts now, of as many replicas.
    pub(super) fn judge(&self, now: &Counts) -> Verdict {
        // Clients that came or left meanwhile, above or below the share, are chance too. The
        // variance of one is a quarter at most, times its watches.
        let variance = self.variance + (now.total() - self.total_before).abs() * self.largest / 4.0;
        let is_enough = self.moved >= JUDGED_MIN.max(JUDGED_PART * self.own_before);
        if !is_enough || self.expected < STANDARD_DEVIATIONS_MIN * variance.sqrt() {
            return Verdict::Open;
        }
        let effect = self.deficit_before - now.deficit();
        if effect >= EFFECT_MIN * self.expected { Verdict::Effect } else { Verdict::NoEffect }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_are_judged_once_chance_cannot_explain_what_they_have_changed() {
        use Verdict::{Effect, NoEffect, Open};
        let one: &[usize] = &[1];
        let ten: &[usize] = &[10];
        for (before, connections, of, after, verdict, what) in [
            ([40, 40, 0], 10, one, [40, 40, 0], Open, "all ten came back, or ten others came"),
            ([40, 40, 0], 31, one, [40, 40, 0], Open, "still too few"),
            ([40, 40, 0], 33, one, [40, 40, 0], NoEffect, "all came back"),
            ([40, 40, 0], 33, one, [41, 28, 11], Effect, "the other replica moved some here"),
            ([40, 40, 0], 33, one, [55, 25, 0], NoEffect, "the clients of the other one came here too"),
            ([80, 0, 0], 9, one, [80, 0, 0], Open, "too few to judge"),
            ([80, 0, 0], 10, one, [80, 0, 0], NoEffect, "each other one should have three"),
            ([80, 0, 0], 10, one, [79, 1, 0], Effect, "there is another replica"),
            ([1000, 1000, 0], 99, one, [1000, 1000, 0], Open, "less than a tenth"),
            ([1000, 1000, 0], 100, one, [1000, 1000, 0], NoEffect, "all came back"),
            ([1000, 1000, 0], 10, ten, [1000, 1000, 0], Open, "chance has decided only ten times"),
            ([1000, 1000, 0], 33, ten, [1000, 1000, 0], NoEffect, "and now often enough"),
            ([1000, 1000, 0], 33, ten, [1040, 1040, 0], Open, "eight have come, which chance may have sent here"),
            ([40, 40, 0], 40, one, [60, 59, 1], Open, "forty have come, which chance may have sent here"),
            ([40, 40, 0], 400, one, [60, 60, 0], NoEffect, "chance would not send all forty here"),
        ] {
            let counts = |[own, others @ ..]: [u64; 3]| Counts::new(own, &others);
            let mut round = Round::new(counts(before));
            for _ in 0..connections {
                round.add(of);
            }
            assert_eq!(round.judge(&counts(after)), verdict, "{what}: {round:?}");
        }
    }
}
