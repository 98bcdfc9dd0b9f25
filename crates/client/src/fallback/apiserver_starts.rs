//! Spaces the requests that a program starts at the apiserver while kubefan is gone.
//!
//! The hazard is a fleet whose clients all turn to the apiserver at once: it would make one outage
//! into two. So each program has one start in each window, and the first one at a random moment of
//! the first window. All programs together then stay within the rate of the budget, without knowing
//! of each other. A request whose caller has a state waits for one window more, so that those
//! without a state go first, in the whole fleet and in each program. One that was overtaken by two
//! takes turns with them: a request that always fails would hold up all others.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kubefan_common::backoff::BackoffOptions;
use rand::{RngExt, rngs::SmallRng};
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use crate::{budget::FallbackBudget, random::generator};

/// Starts in a row of callers without a state, while one with a state waits.
const OVERTAKEN_MAX: u32 = 2;

/// Options of [`ApiserverStarts`].
#[derive(Debug, Clone, Default)]
pub struct BudgetedOptions {
    /// The budget of all programs. One that kubefan has named replaces it.
    pub budget: FallbackBudget,
    /// The delays between attempts to reach kubefan.
    pub backoff: BackoffOptions,
    /// Seed of the moments, for simulations. `None` for a random one.
    pub seed: Option<u64>,
}

/// The requests that one program starts at the apiserver. Clones share them: give all sources of a
/// program clones of one value.
#[derive(Debug, Clone)]
pub struct ApiserverStarts(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    options: BudgetedOptions,
    state: Mutex<StartsState>,
    /// Notified when a request no longer waits.
    changed: Notify,
}

#[derive(Debug)]
struct StartsState {
    random: SmallRng,
    /// The next start. `None` before the first outage.
    next: Option<Instant>,
    /// The first start for a caller with a state.
    with_state_from: Option<Instant>,
    /// Requests that wait, of callers without a state and of all.
    waiting_without_state: usize,
    waiting: usize,
    /// Starts in a row of callers without a state, while one with a state waited.
    overtaken: u32,
}

impl ApiserverStarts {
    /// Returns the starts of a program.
    pub fn new(options: BudgetedOptions) -> Self {
        let state = StartsState {
            random: generator(options.seed),
            next: None,
            with_state_from: None,
            waiting_without_state: 0,
            waiting: 0,
            overtaken: 0,
        };
        Self(Arc::new(Shared { options, state: Mutex::new(state), changed: Notify::new() }))
    }

    fn state(&self) -> MutexGuard<'_, StartsState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn options(&self) -> &BudgetedOptions {
        &self.0.options
    }

    /// A number for the jitter of one watch.
    pub(super) fn draw_seed(&self) -> u64 {
        self.state().random.random()
    }

    /// Returns a request that waits for its start. `named` is the budget that kubefan has named.
    pub(super) fn enter(&self, has_state: bool, named: Option<FallbackBudget>) -> WaitingStart {
        let window = named.unwrap_or(self.0.options.budget).window();
        let now = Instant::now();
        let mut state = self.state();
        if state.waiting == 0 && state.next.is_none_or(|next| next <= now) {
            let next = now + window.mul_f64(state.random.random_range(0.0..1.0));
            state.next = Some(next);
            state.with_state_from = Some(next + window);
        }
        state.waiting += 1;
        state.waiting_without_state += usize::from(!has_state);
        drop(state);
        WaitingStart { starts: self.clone(), has_state, window }
    }

    /// Delays the next start, because the apiserver has asked for it.
    pub(super) fn delay(&self, time: Duration) {
        let until = Instant::now().checked_add(time);
        let mut state = self.state();
        state.next = state.next.max(until);
    }
}

/// A request that waits for its start.
#[derive(Debug)]
pub(super) struct WaitingStart {
    starts: ApiserverStarts,
    has_state: bool,
    window: Duration,
}

impl WaitingStart {
    /// Waits until the request may start. Then it must be dropped. Cancel-safe.
    pub(super) async fn admitted(&self) {
        loop {
            let changed = self.starts.0.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let Some(due) = self.take(Instant::now()) else { return };
            tokio::select! {
                () = sleep_until(due) => {}
                () = changed => {}
            }
        }
    }

    /// Takes the next start. If it is not due yet, returns the time to look again.
    fn take(&self, now: Instant) -> Option<Instant> {
        let mut state = self.starts.state();
        let mut due = state.next.unwrap_or(now);
        if self.has_state {
            due = due.max(state.with_state_from.unwrap_or(now));
        }
        if now < due {
            return Some(due);
        }
        let goes_first = self.has_state == (state.overtaken >= OVERTAKEN_MAX);
        let waiting_with_state = state.waiting - state.waiting_without_state;
        let others = if self.has_state { state.waiting_without_state } else { waiting_with_state };
        // Another one may belong to a reader that does not poll, so this one
        // waits for a window only.
        if !goes_first && others > 0 && now < due + self.window {
            return Some(due + self.window);
        }
        let overtakes = !self.has_state && waiting_with_state > 0;
        state.overtaken = if overtakes { state.overtaken + 1 } else { 0 };
        // Not from `due`: a start that came late would be followed by the next one at once.
        state.next = Some(now + self.window);
        None
    }
}

impl Drop for WaitingStart {
    fn drop(&mut self) {
        let mut state = self.starts.state();
        state.waiting -= 1;
        state.waiting_without_state -= usize::from(!self.has_state);
        drop(state);
        self.starts.0.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_secs(20);

    fn starts(seed: u64) -> ApiserverStarts {
        let budget = FallbackBudget { clients: 100, starts_per_second: 5.0 };
        ApiserverStarts::new(BudgetedOptions { budget, seed: Some(seed), ..BudgetedOptions::default() })
    }

    async fn admitted(start: WaitingStart) -> Instant {
        start.admitted().await;
        Instant::now()
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_start_is_in_the_first_window_and_each_later_one_a_window_after_the_last() {
        let mut phases = Vec::new();
        for seed in 0..20 {
            let starts = starts(seed);
            let began = Instant::now();
            let first = admitted(starts.enter(false, None)).await;
            phases.push((first - began).as_secs());
            assert!(first - began <= WINDOW);
            let (second, third) =
                tokio::join!(admitted(starts.enter(false, None)), admitted(starts.enter(false, None)));
            assert!(second.max(third) - first >= 2 * WINDOW);
        }
        phases.sort_unstable();
        phases.dedup();
        assert!(phases.len() > 5, "the moments are spread: {phases:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn those_without_a_state_go_first_in_a_program_and_in_a_fleet() {
        for seed in 0..20 {
            let starts = starts(seed);
            let began = Instant::now();
            let later = starts.enter(true, None);
            let first = starts.enter(false, None);
            let (later, first) = tokio::join!(admitted(later), admitted(first));
            assert!(first - began <= WINDOW);
            assert!(later - began >= WINDOW && later > first);
        }
        let began = Instant::now();
        let alone = admitted(starts(1).enter(true, None)).await;
        assert!(alone - began >= WINDOW && alone - began <= 2 * WINDOW, "also if nobody waits in its own program");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_given_up_or_not_polled_does_not_hold_up_the_others() {
        let starts = starts(3);
        let began = Instant::now();
        drop(starts.enter(false, None));
        let unpolled = starts.enter(false, None);
        let later = admitted(starts.enter(true, None)).await;
        assert!(later - began <= 3 * WINDOW);
        drop(unpolled);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_always_fails_does_not_hold_up_those_with_a_state() {
        let starts = starts(3);
        let began = Instant::now();
        let failing = async {
            loop {
                admitted(starts.enter(false, None)).await;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        let later = tokio::select! {
            later = admitted(starts.enter(true, None)) => later,
            () = failing => unreachable!("it never ends"),
        };
        assert!(later - began <= 5 * WINDOW);
    }

    #[tokio::test(start_paused = true)]
    async fn a_budget_that_kubefan_names_replaces_the_configured_one() {
        let starts = starts(4);
        let began = Instant::now();
        let named = Some(FallbackBudget { clients: 6000, starts_per_second: 50.0 });
        admitted(starts.enter(false, named)).await;
        let second = admitted(starts.enter(false, named)).await;
        assert!(second - began >= Duration::from_secs(120));
    }

    #[tokio::test(start_paused = true)]
    async fn the_apiserver_can_delay_the_next_start() {
        let starts = starts(5);
        let began = Instant::now();
        let start = starts.enter(false, None);
        starts.delay(Duration::from_secs(90));
        assert!(admitted(start).await - began >= Duration::from_secs(90));
    }
}
