//! Spaces the lists and watches that this kubefan starts at the apiserver while the kubefan at
//! `--upstream` is away.
//!
//! The hazard is a fleet that turns to the apiserver at once: one outage would become two. So each
//! kubefan has one start in each window, and its first window begins at a random moment. All of
//! them together then stay within the rate of the budget, without knowing of each other. A cache
//! with a state waits for one window more, so that those without one go first, in the whole fleet
//! and in each process. One that was overtaken by two takes turns with them: a cache whose list
//! always fails would hold up all others.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kubefan_client::FallbackBudget;
use rand::{RngExt, rngs::StdRng};
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

/// Starts in a row of caches without a state, while one with a state waits.
const OVERTAKEN_MAX: u32 = 2;

/// The starts of one process.
pub(super) struct Pace {
    turns: Mutex<Turns>,
    /// Notified when a start was made or given up.
    changed: Notify,
}

struct Turns {
    budget: FallbackBudget,
    random: StdRng,
    /// The next start.
    next: Option<Instant>,
    /// The first start of a cache with a state.
    later_from: Option<Instant>,
    /// Caches that wait, without a state.
    first: usize,
    /// Caches that wait, with a state.
    later: usize,
    /// Starts in a row of caches without a state, while one with a state waited.
    overtaken: u32,
}

/// The answer to a cache that wants to start.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    Now,
    At(Instant),
}

impl Turns {
    fn enter(&mut self, has_state: bool, now: Instant) {
        let is_idle = self.first + self.later == 0;
        if is_idle && self.next.is_none_or(|next| next <= now) {
            let window = self.budget.window();
            let next = now + window.mul_f64(self.random.random());
            self.next = Some(next);
            self.later_from = Some(next + window);
        }
        *self.waiting(has_state) += 1;
    }

    fn waiting(&mut self, has_state: bool) -> &mut usize {
        if has_state { &mut self.later } else { &mut self.first }
    }

    /// Whether a cache goes before those of the other kind.
    fn goes_first(&self, has_state: bool) -> bool {
        has_state == (self.overtaken >= OVERTAKEN_MAX)
    }

    /// Takes a start, if it is due.
    fn take(&mut self, has_state: bool, now: Instant) -> Turn {
        let at = if has_state { self.next.max(self.later_from) } else { self.next }.unwrap_or(now);
        if at > now {
            return Turn::At(at);
        }
        let others = if has_state { self.first } else { self.later };
        // Another one may be dropped or wait for something else, so this one
        // waits for a window only.
        let latest = at + self.budget.window();
        if !self.goes_first(has_state) && others > 0 && now < latest {
            return Turn::At(latest);
        }
        let overtakes = !has_state && self.later > 0;
        self.overtaken = if overtakes { self.overtaken + 1 } else { 0 };
        // Not from the due time: a start that came late would be followed by the next one at once.
        self.next = Some(now + self.budget.window());
        Turn::Now
    }
}

impl Pace {
    pub(super) fn new(budget: FallbackBudget, random: StdRng) -> Self {
        let turns = Turns { budget, random, next: None, later_from: None, first: 0, later: 0, overtaken: 0 };
        Self { turns: Mutex::new(turns), changed: Notify::new() }
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the budget. The next start keeps its moment.
    pub(super) fn set_budget(&self, budget: FallbackBudget) {
        self.turns().budget = budget;
    }

    pub(super) fn budget(&self) -> FallbackBudget {
        self.turns().budget
    }

    /// Waits for the moment of a start. Cancel-safe: a start that is given up is left to others.
    pub(super) async fn start(&self, has_state: bool) {
        self.turns().enter(has_state, Instant::now());
        let _waiting = Waiting { pace: self, has_state };
        loop {
            let changed = self.changed.notified();
            let turn = self.turns().take(has_state, Instant::now());
            match turn {
                Turn::Now => return,
                Turn::At(at) => tokio::select! {
                    () = sleep_until(at) => {}
                    () = changed => {}
                },
            }
        }
    }
}

/// Counts a cache that waits.
struct Waiting<'a> {
    pace: &'a Pace,
    has_state: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        *self.pace.turns().waiting(self.has_state) -= 1;
        self.pace.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use futures::future::join_all;
    use rand::SeedableRng;

    use super::*;

    fn pace(clients: u32, starts_per_second: f64, seed: u64) -> Arc<Pace> {
        Arc::new(Pace::new(FallbackBudget { clients, starts_per_second }, StdRng::seed_from_u64(seed)))
    }

    /// Returns the times of starts, in seconds, in the order of the list.
    async fn times(pace: &Arc<Pace>, have_states: &[bool]) -> Vec<f64> {
        let began = Instant::now();
        let starts = have_states.iter().map(|has_state| async move {
            pace.start(*has_state).await;
            began.elapsed().as_secs_f64()
        });
        join_all(starts).await
    }

    #[tokio::test(start_paused = true)]
    async fn starts_are_a_window_apart_and_the_first_is_at_a_random_moment() {
        let mut firsts = Vec::new();
        for seed in 0..20 {
            let times = times(&pace(100, 10.0, seed), &[false; 4]).await;
            assert!((0.0..10.1).contains(&times[0]), "{times:?}");
            let is_apart = |pair: &[f64]| (pair[1] - pair[0] - 10.0).abs() < 0.01;
            assert!(times.windows(2).all(is_apart), "{times:?}");
            firsts.push(times[0]);
        }
        assert!(firsts.iter().any(|first| *first < 3.0) && firsts.iter().any(|first| *first > 7.0), "{firsts:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn caches_without_a_state_go_first() {
        let times = times(&pace(100, 10.0, 1), &[true, false, true, false]).await;
        let latest_first = times[1].max(times[3]);
        assert!(times[0] > latest_first && times[2] > latest_first, "{times:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_cache_with_a_state_waits_for_the_second_window_also_if_it_is_alone() {
        for seed in 0..20 {
            let time = times(&pace(100, 10.0, seed), &[true]).await[0];
            assert!((10.0..20.1).contains(&time), "{time}");
        }
    }

    /// Its list fails each time, so it waits again soon.
    #[tokio::test(start_paused = true)]
    async fn a_cache_that_never_gets_a_state_does_not_hold_up_the_others() {
        let pace = pace(100, 10.0, 1);
        let failing = async {
            loop {
                pace.start(false).await;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        let times = tokio::select! {
            times = times(&pace, &[true; 4]) => times,
            () = failing => unreachable!("it never ends"),
        };
        assert!(times.iter().all(|time| *time <= 130.0), "one of three starts is theirs: {times:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_cache_that_does_not_look_whether_it_is_its_turn_does_not_hold_up_the_others() {
        for has_state in [false, true] {
            let pace = pace(100, 10.0, 1);
            let mut others: Vec<_> = (0..3).map(|_| Box::pin(pace.start(!has_state))).collect();
            for other in &mut others {
                assert!(futures::poll!(other).is_pending());
            }
            let times = times(&pace, &[has_state; 4]).await;
            assert!(times.iter().all(|time| *time <= 90.0), "{times:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_that_is_given_up_lets_the_others_pass() {
        let pace = pace(100, 10.0, 1);
        let given_up = tokio::time::timeout(Duration::from_millis(1), pace.start(false));
        assert!(given_up.await.is_err());
        assert!(times(&pace, &[true]).await[0] < 20.1);
    }

    /// A fleet of 500 processes with two caches each, all of which lose their kubefan at once.
    #[tokio::test(start_paused = true)]
    async fn a_fleet_stays_within_its_rate() {
        let began = Instant::now();
        let starts = (0..500).flat_map(|seed| {
            let pace = pace(500, 10.0, seed);
            [pace.clone(), pace].map(|pace| async move {
                pace.start(true).await;
                began.elapsed().as_secs()
            })
        });
        let times = join_all(starts).await;
        for ten_seconds in 0..16 {
            let window = ten_seconds * 10..(ten_seconds + 1) * 10;
            let count = times.iter().filter(|time| window.contains(*time)).count();
            assert!(count <= 140, "{count} starts in {window:?}");
        }
        assert!(times.iter().all(|time| *time <= 150));
    }
}
