use rand::{RngExt, SeedableRng, rngs::SmallRng, seq::SliceRandom};

use super::*;

const STEP: Duration = Duration::from_secs(2);
/// Runs of a world with chance.
const SEEDS: u64 = 50;

fn after_a_step(own: u64, others: Option<&[u64]>, least: Option<usize>) -> (Decision, Decision) {
    let mut balance = Balance::new(1.0);
    let now = Instant::now();
    let first = balance.decide(now, own, others, least);
    (first, balance.decide(now + STEP, own, others, least))
}

#[test]
fn a_replica_above_its_share_moves_one_percent_a_second() {
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
    let mut balance = Balance::new(1.0);
    let start = Instant::now();
    let mut moved_at = Vec::new();
    for step in 0..40u32 {
        let now = start + STEP * step;
        let own = 1000 - 100 * moved_at.len() as u64;
        let decision = balance.decide(now, own, Some(&[500, 500]), Some(100));
        if decision.watches >= 100 {
            balance.moved(&[100]);
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
    let mut balance = Balance::new(1.0);
    let now = Instant::now();
    assert_eq!(balance.decide(now, 100, Some(&[0]), Some(1)).change, Some(Change::Begins));
    assert_eq!(balance.decide(now + STEP, 100, None, Some(1)).change, Some(Change::Holds));
    assert_eq!(balance.decide(now + 2 * STEP, 100, None, Some(1)).change, None);
    let decision = balance.decide(now + 100 * STEP, 100, Some(&[0]), Some(1));
    assert_eq!(decision.change, Some(Change::Begins));
    assert!(decision.watches <= 5, "at most for five seconds: {decision:?}");
}

/// The share of two replicas is not that of three, so the moves seem to have made it worse.
#[test]
fn another_number_of_replicas_is_no_effect_of_moves() {
    let mut balance = Balance::new(10.0);
    let mut now = Instant::now();
    let mut changes = Vec::new();
    for (own, others) in [(60, &[20][..]), (54, &[26]), (50, &[30, 0]), (45, &[32, 3]), (41, &[33, 6]), (38, &[33, 9])]
    {
        let decision = balance.decide(now, own, Some(others), Some(1));
        changes.extend(decision.change);
        balance.moved(&vec![1; decision.watches as usize]);
        now += STEP;
    }
    assert_eq!(changes, [Change::Begins]);
}

/// In a rolling update all clients of a replica come to the others, as many as this one moves.
#[test]
fn arrivals_everywhere_do_not_hide_the_effect_of_moves() {
    let mut balance = Balance::new(1.0);
    let mut now = Instant::now();
    let mut counts = [2200_u64, 1100, 200];
    let mut changes = Vec::new();
    for _ in 0..12 {
        let decision = balance.decide(now, counts[0], Some(&counts[1..]), Some(1));
        changes.extend(decision.change);
        balance.moved(&vec![1; decision.watches as usize]);
        let back = decision.watches / 3;
        counts = [counts[0] - decision.watches + back + 40, counts[1] + back + 40, counts[2] + back + 40];
        now += STEP;
    }
    assert_eq!(changes, [Change::Begins], "{counts:?}");
    assert!(counts[0] > 2200, "although it has more than before: {counts:?}");
}

/// The target of a client that is asked to come back.
#[derive(Clone, Copy, Debug)]
enum Clients {
    /// To any replica: a balancer that picks at random.
    Random,
    /// To the first of an order of its own.
    OwnOrder,
    /// To the first of the same order: the balancer is broken.
    SameOrder,
    /// To where it was: the balancer remembers its clients.
    SameReplica,
}

/// A world before its first second.
#[derive(Clone, Copy, Debug)]
struct Scene {
    of: Clients,
    clients: usize,
    /// The replicas that the clients are on at first, without an order of their own evenly.
    loaded: usize,
    replicas: usize,
    percent: f64,
    seed: u64,
}

struct Client {
    replica: usize,
    order: Vec<usize>,
}

struct World {
    of: Clients,
    random: SmallRng,
    now: Instant,
    clients: Vec<Client>,
    counts: Vec<u64>,
    replicas: Vec<Replica>,
    moves: usize,
    /// The moves before the first pause.
    moves_before_a_pause: Option<usize>,
    pauses: usize,
    /// Moves of a replica from above the dead band to below the share.
    overshoots: usize,
}

struct Replica {
    balance: Balance,
    is_up: bool,
    decides_at: Instant,
}

impl World {
    fn new(Scene { of, clients, loaded, replicas, percent, seed }: Scene) -> Self {
        let mut random = SmallRng::seed_from_u64(seed);
        let now = Instant::now();
        let client = |number: usize, random: &mut SmallRng| {
            let mut order: Vec<usize> = (0..replicas).collect();
            if matches!(of, Clients::OwnOrder) {
                order.shuffle(random);
            }
            let first = order.iter().copied().find(|replica| *replica < loaded).unwrap_or(0);
            let is_ordered = matches!(of, Clients::OwnOrder | Clients::SameOrder);
            Client { replica: if is_ordered { first } else { number % loaded }, order }
        };
        let clients: Vec<Client> = (0..clients).map(|number| client(number, &mut random)).collect();
        let mut counts = vec![0; replicas];
        for client in &clients {
            counts[client.replica] += 1;
        }
        let replicas = counts.iter().map(|_| Replica {
            balance: Balance::new(percent),
            is_up: true,
            decides_at: now + STEP.mul_f64(random.random()),
        });
        let replicas = replicas.collect();
        World {
            of,
            random,
            now,
            clients,
            counts,
            replicas,
            moves: 0,
            moves_before_a_pause: None,
            pauses: 0,
            overshoots: 0,
        }
    }

    /// The largest count, as a multiple of the mean.
    fn largest(&self) -> f64 {
        let mean = self.clients.len() as f64 / self.counts.len() as f64;
        self.counts.iter().copied().max().unwrap_or_default() as f64 / mean
    }

    /// Lets the replicas decide for so many seconds, each at times of its own and by counts
    /// that are up to two seconds old.
    fn run(&mut self, seconds: u64) {
        let mut known = self.counts.clone();
        for half_second in 0..2 * seconds {
            if half_second % 4 == 0 {
                known.clone_from(&self.counts);
            }
            for replica in 0..self.replicas.len() {
                if self.replicas[replica].is_up && self.replicas[replica].decides_at <= self.now {
                    self.decide(replica, &known);
                }
            }
            self.now += Duration::from_millis(500);
        }
    }

    fn decide(&mut self, number: usize, known: &[u64]) {
        let own = self.counts[number];
        let others: Vec<u64> =
            (0..known.len()).filter(|at| *at != number && self.replicas[*at].is_up).map(|at| known[at]).collect();
        let replica = &mut self.replicas[number];
        replica.decides_at = self.now + STEP.mul_f64(self.random.random_range(0.8..1.2));
        let decision = replica.balance.decide(self.now, own, Some(&others), Some(1));
        replica.balance.moved(&vec![1; decision.watches as usize]);
        if let Some(Change::Pauses(_)) = decision.change {
            self.moves_before_a_pause.get_or_insert(self.moves);
            self.pauses += 1;
        }
        self.moves += decision.watches as usize;
        if (own - decision.watches) as f64 <= decision.share - 1.0 && decision.watches > 0 {
            self.overshoots += 1;
        }
        self.move_away(number, decision.watches as usize);
    }

    /// Asks so many clients of a replica to come back.
    fn move_away(&mut self, from: usize, watches: usize) {
        if watches == 0 {
            return;
        }
        let mut here: Vec<usize> = (0..self.clients.len()).filter(|at| self.clients[*at].replica == from).collect();
        let moved = here.partial_shuffle(&mut self.random, watches).0.to_vec();
        let up: Vec<usize> = (0..self.replicas.len()).filter(|at| self.replicas[*at].is_up).collect();
        for at in moved {
            let client = &mut self.clients[at];
            let to = match self.of {
                Clients::Random => up[self.random.random_range(0..up.len())],
                Clients::OwnOrder | Clients::SameOrder => client.order[0],
                Clients::SameReplica => from,
            };
            client.replica = to;
            self.counts[from] -= 1;
            self.counts[to] += 1;
        }
    }

    /// Kills a replica and starts it again some seconds later.
    fn restart(&mut self, replica: usize, seconds: u64) {
        self.replicas[replica].is_up = false;
        self.move_away(replica, usize::MAX);
        self.run(seconds);
        let balance = Balance::new(100.0 * self.replicas[replica].balance.rate);
        self.replicas[replica] = Replica { balance, is_up: true, decides_at: self.now };
    }
}

#[test]
fn replicas_even_out_within_minutes_and_then_rest() {
    let cases = [(4000, 2, 3, 120), (4000, 1, 2, 150), (1200, 2, 3, 120), (4000, 4, 6, 120), (9000, 5, 10, 150)];
    // Most clients with an order of their own that are moved late come back, and a replica may be
    // the first of more than 1.1 times its share: it tries now and then.
    for (of, times, resting) in [(Clients::Random, 1, 100), (Clients::OwnOrder, 2, 10)] {
        for (clients, loaded, replicas, seconds) in cases {
            let mut world = World::new(Scene { of, clients, loaded, replicas, percent: 1.0, seed: 7 });
            world.run(times * seconds);
            let what = format!("{of:?} {clients} {loaded}→{replicas}: {:?}", world.counts);
            assert!(world.largest() <= 1.15, "{what}");
            assert_eq!(world.overshoots, 0, "{what}");
            world.run(300);
            let settled = world.moves;
            world.run(600);
            assert!(world.moves - settled <= clients / resting, "{what}, then {} moves", world.moves - settled);
            assert!(world.largest() <= 1.15, "{what}");
        }
    }
}

/// If there are few clients, or most replicas have too many and so move into each other, then
/// as many as a replica moves may come to it by chance.
#[test]
fn chance_does_not_pause_replicas_behind_a_random_balancer() {
    let few = Scene { of: Clients::Random, clients: 80, loaded: 2, replicas: 3, percent: 10.0, seed: 0 };
    for scene in [
        few,
        Scene { percent: 1.0, ..few },
        Scene { loaded: 1, replicas: 2, ..few },
        Scene { clients: 400, loaded: 5, replicas: 6, ..few },
        Scene { clients: 120, replicas: 10, ..few },
    ] {
        for seed in 0..SEEDS {
            let mut world = World::new(Scene { seed, ..scene });
            world.run((600.0 / scene.percent) as u64);
            assert_eq!(world.pauses, 0, "{scene:?}, seed {seed}: {:?}", world.counts);
            assert!(world.largest() <= 1.15, "{scene:?}, seed {seed}: {:?}", world.counts);
        }
    }
}

#[test]
fn a_restart_does_not_pause_the_other_replicas() {
    for seed in 0..SEEDS {
        let scene = Scene { of: Clients::Random, clients: 80, loaded: 3, replicas: 3, percent: 10.0, seed };
        let mut world = World::new(scene);
        world.run(20);
        world.restart(1, 5);
        world.run(60);
        assert_eq!(world.pauses, 0, "seed {seed}: {:?}", world.counts);
        assert!(world.largest() <= 1.15, "seed {seed}: {:?}", world.counts);
    }
}

#[test]
fn moves_without_an_effect_pause_soon_and_become_rare() {
    let few = Scene { of: Clients::SameReplica, clients: 80, loaded: 2, replicas: 3, percent: 10.0, seed: 7 };
    for scene in [
        few,
        Scene { percent: 1.0, ..few },
        Scene { loaded: 1, replicas: 2, ..few },
        Scene { clients: 400, loaded: 5, replicas: 6, ..few },
        Scene { clients: 3000, loaded: 5, replicas: 6, percent: 1.0, ..few },
        Scene { of: Clients::SameOrder, clients: 1000, loaded: 1, percent: 1.0, ..few },
    ] {
        let mut world = World::new(scene);
        let before = world.counts.clone();
        world.run(3600);
        assert_eq!(world.counts, before, "{scene:?}");
        let first = world.moves_before_a_pause.unwrap_or(usize::MAX);
        // Four standard deviations, or a tenth of the watches, and what a decision adds.
        let judged = (16 * (scene.replicas - 1)).max(scene.clients / scene.loaded / 10) * scene.loaded;
        assert!(first <= judged * 5 / 4, "{scene:?}: {first} moves before a pause");
        assert!(world.moves <= 10 * judged, "{scene:?}: {} moves in an hour", world.moves);
    }
}

#[test]
fn a_replica_that_comes_and_goes_does_not_keep_moves_without_an_effect_going() {
    let mut balance = Balance::new(1.0);
    let mut now = Instant::now();
    let paused = (0..300).any(|step| {
        now += STEP;
        let others: &[u64] = if step / 3 % 2 == 0 { &[0] } else { &[0, 0] };
        let decision = balance.decide(now, 1000, Some(others), Some(1));
        balance.moved(&vec![1; decision.watches as usize]);
        matches!(decision.change, Some(Change::Pauses(_)))
    });
    assert!(paused, "all clients come back here");
}
