//! How many watches a replica moves now: a pure decision.
//!
//! Every replica decides for itself, and only one with more than its share moves any. So replicas
//! cannot pass watches back and forth: what arrives where there was room stays there. The hazards
//! are an overshoot, because the counts are some seconds old and others move too, and moves without
//! an effect, because clients come back to the same replica. Against the first, no replica goes
//! below its share, and it moves little at a time. Against the second, it looks at what its moves
//! have changed, and pauses.

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
/// After moving this part of its watches, and at least so many, a replica must have less above its
/// share. Its number of watches would not tell: in a rolling update clients of others come to all.
const JUDGED_PART: f64 = 0.1;
const JUDGED_MIN: f64 = 10.0;
/// The part of the moved watches by which it must have less.
const EFFECT_MIN: f64 = 0.03;
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

/// Since moving began, or was last judged.
#[derive(Debug)]
struct Round {
    watches_before: u64,
    excess_before: f64,
    moved: u64,
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
        let share = (own + others.iter().sum::<u64>()) as f64 / (others.len() + 1) as f64;
        let excess = own as f64 - share;
        let change = self.begin_or_end(now, own, share);
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

    /// Records that so many watches were asked to move.
    pub(super) fn moved(&mut self, watches: u64) {
        self.credit = (self.credit - watches as f64).max(0.0);
        if let Some(round) = &mut self.round {
            round.moved += watches;
        }
    }

    fn begin_or_end(&mut self, now: Instant, own: u64, share: f64) -> Option<Change> {
        let excess = own as f64 - share;
        let Some(round) = &mut self.round else {
            let may = self.paused_until.is_none_or(|until| now >= until);
            let begins = may && own as f64 > ABOVE_SHARE * share && excess >= EXCESS_MIN;
            return begins.then(|| {
                self.round = Some(Round { watches_before: own, excess_before: excess, moved: 0 });
                Change::Begins
            });
        };
        if own as f64 <= ENOUGH * share || excess < 1.0 {
            (self.round, self.pause) = (None, Duration::ZERO);
            return Some(Change::Ends);
        }
        let moved = round.moved as f64;
        if moved < JUDGED_MIN.max(JUDGED_PART * round.watches_before as f64) {
            return None;
        }
        if round.excess_before - excess >= EFFECT_MIN * moved {
            *round = Round { watches_before: own, excess_before: excess, moved: 0 };
            self.pause = Duration::ZERO;
            return None;
        }
        self.round = None;
        self.pause = (2 * self.pause).clamp(PAUSE, PAUSE_MAX);
        self.paused_until = Some(now + self.pause);
        Some(Change::Pauses(self.pause))
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng, rngs::SmallRng, seq::SliceRandom};

    use super::*;

    const STEP: Duration = Duration::from_secs(2);

    fn after_a_step(own: u64, others: Option<&[u64]>, least: Option<usize>) -> (Decision, Decision) {
        let (mut balance, now) = (Balance::new(1.0), Instant::now());
        let first = balance.decide(now, own, others, least);
        (first, balance.decide(now + STEP, own, others, least))
    }

    #[test]
    fn a_replica_moves_one_percent_a_second_of_what_is_above_its_share() {
        let one = Some(1);
        for (own, others, watches, what) in [
            (1500, Some(&[1500, 0][..]), 30, "a new replica"),
            (1000, Some(&[1000, 1000]), 0, "even"),
            (1090, Some(&[1000, 910]), 0, "within the dead band"),
            (1110, Some(&[1000, 890]), 22, "above it"),
            (900, Some(&[1200, 900]), 0, "another has too many"),
            (3000, Some(&[]), 0, "alone"),
            (0, Some(&[0, 0]), 0, "nothing to move"),
            (3, Some(&[0]), 0, "too few to be worth it"),
            (3000, None, 0, "nothing may move"),
            (105, Some(&[0, 0, 400]), 0, "below the share"),
        ] {
            let (first, second) = after_a_step(own, others, one);
            assert_eq!((first.watches, second.watches), (0, watches), "{what}: {second:?}");
        }
        assert_eq!(after_a_step(60, Some(&[0]), None).1.watches, 1, "1.2 of 60");
    }

    #[test]
    fn a_connection_with_many_watches_moves_once_there_is_credit_for_all() {
        let (mut balance, start) = (Balance::new(1.0), Instant::now());
        let mut moved_at = Vec::new();
        for step in 0..40u32 {
            let now = start + STEP * step;
            let own = 1000 - 100 * moved_at.len() as u64;
            let decision = balance.decide(now, own, Some(&[500, 500]), Some(100));
            if decision.watches >= 100 {
                balance.moved(100);
                moved_at.push(step);
                if moved_at.len() == 2 {
                    break;
                }
            }
        }
        assert_eq!(moved_at, [5, 11], "100 watches are ten seconds of 1 %, and a bit more of fewer");
        let decision = balance.decide(start + STEP * 99, 120, Some(&[90, 90]), Some(100));
        assert!(decision.watches <= 20, "never below the share");
    }

    #[test]
    fn a_hold_ends_a_round_and_forgets_the_credit() {
        let (mut balance, now) = (Balance::new(1.0), Instant::now());
        assert_eq!(balance.decide(now, 100, Some(&[0]), Some(1)).change, Some(Change::Begins));
        assert_eq!(balance.decide(now + STEP, 100, None, Some(1)).change, Some(Change::Holds));
        assert_eq!(balance.decide(now + 2 * STEP, 100, None, Some(1)).change, None);
        let decision = balance.decide(now + 100 * STEP, 100, Some(&[0]), Some(1));
        assert_eq!(decision.change, Some(Change::Begins));
        assert!(decision.watches <= 5, "at most for five seconds: {decision:?}");
    }

    /// In a rolling update all clients of a replica come to the others, as many as this one moves.
    #[test]
    fn arrivals_everywhere_do_not_hide_the_effect_of_moves() {
        let (mut balance, mut now) = (Balance::new(1.0), Instant::now());
        let mut counts = [2200_u64, 1100, 200];
        let mut changes = Vec::new();
        for _ in 0..12 {
            let decision = balance.decide(now, counts[0], Some(&counts[1..]), Some(1));
            changes.extend(decision.change);
            balance.moved(decision.watches);
            let back = decision.watches / 3;
            counts = [counts[0] - decision.watches + back + 40, counts[1] + back + 40, counts[2] + back + 40];
            now += STEP;
        }
        assert_eq!(changes, [Change::Begins], "{counts:?}");
        assert!(counts[0] > 2200, "although it has more than before: {counts:?}");
    }

    /// Where a client goes that is asked to come back.
    #[derive(Clone, Copy, Debug)]
    enum Clients {
        /// To any replica: a balancer that picks at random.
        Random,
        /// To the first of an order of its own.
        OwnOrder,
        /// To the first of the same order: the balancer is broken.
        SameOrder,
    }

    struct World {
        /// The replica of each client, and its order of replicas.
        clients: Vec<(usize, Vec<usize>)>,
        counts: Vec<u64>,
        replicas: Vec<Balance>,
        moves: usize,
        /// How often a replica went from above the dead band to below the share.
        overshoots: usize,
    }

    impl World {
        /// The largest count, as a multiple of the mean.
        fn largest(&self) -> f64 {
            let mean = self.clients.len() as f64 / self.counts.len() as f64;
            self.counts.iter().copied().max().unwrap_or_default() as f64 / mean
        }
    }

    /// A world whose clients are on the first `before` of `replicas`.
    fn world(count: usize, before: usize, replicas: usize, of: Clients, random: &mut SmallRng) -> World {
        let clients = (0..count).map(|_| {
            let mut order: Vec<usize> = (0..replicas).collect();
            if !matches!(of, Clients::SameOrder) {
                order.shuffle(random);
            }
            let at = order.iter().copied().find(|replica| *replica < before).unwrap_or(0);
            (at, order)
        });
        let clients: Vec<(usize, Vec<usize>)> = clients.collect();
        let mut counts = vec![0; replicas];
        clients.iter().for_each(|(at, _)| counts[*at] += 1);
        World { clients, counts, replicas: (0..replicas).map(|_| Balance::new(1.0)).collect(), moves: 0, overshoots: 0 }
    }

    /// Lets the replicas decide for so many seconds, each at times of its own and by counts that
    /// are up to two seconds old.
    fn run(world: &mut World, seconds: u64, of: Clients, random: &mut SmallRng) {
        let start = Instant::now();
        let mut next: Vec<Duration> = world.replicas.iter().map(|_| STEP.mul_f64(random.random())).collect();
        let mut known = world.counts.clone();
        for half_second in 0..2 * seconds {
            let now = Duration::from_millis(500 * half_second);
            if half_second % 4 == 0 {
                known.clone_from(&world.counts);
            }
            for (replica, next) in next.iter_mut().enumerate() {
                if now < *next {
                    continue;
                }
                *next = now + STEP.mul_f64(random.random_range(0.8..1.2));
                let own = world.counts[replica];
                let others: Vec<u64> =
                    known.iter().enumerate().filter(|(at, _)| *at != replica).map(|(_, n)| *n).collect();
                let decision = world.replicas[replica].decide(start + now, own, Some(&others), Some(1));
                world.replicas[replica].moved(decision.watches);
                world.moves += decision.watches as usize;
                if (own - decision.watches) as f64 <= decision.share - 1.0 && decision.watches > 0 {
                    world.overshoots += 1;
                }
                if decision.watches == 0 {
                    continue;
                }
                let count = world.replicas.len();
                let mut here: Vec<_> = world.clients.iter_mut().filter(|(at, _)| *at == replica).collect();
                here.shuffle(random);
                for (at, order) in here.into_iter().take(decision.watches as usize) {
                    *at = match of {
                        Clients::Random => random.random_range(0..count),
                        Clients::OwnOrder | Clients::SameOrder => order[0],
                    };
                    world.counts[replica] -= 1;
                    world.counts[*at] += 1;
                }
            }
        }
    }

    #[test]
    fn replicas_even_out_within_minutes_and_then_rest() {
        let cases = [(4000, 2, 3, 120), (4000, 1, 2, 150), (1200, 2, 3, 120), (4000, 4, 6, 120), (9000, 5, 10, 150)];
        // Of clients with an order of their own, most of those that are moved late come back, and
        // a replica may be the first of more than 1.1 times its share: it tries now and then.
        for (of, times, resting) in [(Clients::Random, 1, 100), (Clients::OwnOrder, 2, 10)] {
            for (count, before, replicas, seconds) in cases {
                let random = &mut SmallRng::seed_from_u64(7);
                let mut world = world(count, before, replicas, of, random);
                run(&mut world, times * seconds, of, random);
                let what = format!("{of:?} {count} {before}→{replicas}: {:?}", world.counts);
                assert!(world.largest() <= 1.15, "{what}");
                assert_eq!(world.overshoots, 0, "{what}");
                run(&mut world, 300, of, random);
                let settled = world.moves;
                run(&mut world, 600, of, random);
                assert!(world.moves - settled <= count / resting, "{what}, then {} moves", world.moves - settled);
                assert!(world.largest() <= 1.15, "{what}");
            }
        }
    }

    #[test]
    fn moves_without_an_effect_become_rare() {
        let random = &mut SmallRng::seed_from_u64(7);
        let mut world = world(1000, 1, 3, Clients::SameOrder, random);
        run(&mut world, 3600, Clients::SameOrder, random);
        assert_eq!(world.counts, [1000, 0, 0]);
        assert!(world.moves < 1500, "{} moves in an hour", world.moves);
    }
}
