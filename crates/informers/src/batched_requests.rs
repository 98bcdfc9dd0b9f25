//! Rounds of requests to upstream on behalf of readers. An answer proves nothing about events after
//! its request was sent, so each round serves the readers that came before it began, and a later
//! reader waits for the next one. However many readers there are, the rounds of a cache follow one
//! another, with an interval.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kubefan_common::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

/// The rounds of one cache. `D` is the combined demand of a round's readers, `A` is its answer.
pub(super) struct BatchedRequests<D, A> {
    state: Mutex<BatchState<D, A>>,
}

struct BatchState<D, A> {
    /// Whether a task runs the rounds.
    is_running: bool,
    /// The earliest start of the next round. `None` means at once.
    not_before: Option<Instant>,
    next: Option<Batch<D, A>>,
}

/// A round, and the readers that wait for it.
pub(super) struct Batch<D, A> {
    /// The combined demand of its readers.
    pub(super) demand: D,
    /// Sender of the answer, of which each waiting reader has a clone.
    answer: Arc<watch::Sender<Option<A>>>,
}

/// The place of a reader in a round.
pub(super) struct BatchTicket<A> {
    answer: Arc<watch::Sender<Option<A>>>,
    /// Whether the reader must start a task that calls [`BatchedRequests::begin`] until it returns
    /// `None`.
    pub(super) must_run: bool,
}

impl<D, A> Default for BatchedRequests<D, A> {
    fn default() -> Self {
        Self { state: Mutex::new(BatchState { is_running: false, not_before: None, next: None }) }
    }
}

impl<D: Default, A> BatchedRequests<D, A> {
    fn state(&self) -> MutexGuard<'_, BatchState<D, A>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins the next round if it may begin within `wait`. `add` adds the demand of the reader.
    pub(super) fn join(&self, wait: Duration, add: impl FnOnce(&mut D)) -> Option<BatchTicket<A>> {
        let mut state = self.state();
        if state.not_before.is_some_and(|not_before| not_before > Instant::now() + wait) {
            return None;
        }
        let next = state.next.get_or_insert_with(|| Batch { demand: D::default(), answer: Arc::default() });
        add(&mut next.demand);
        let answer = next.answer.clone();
        let must_run = !std::mem::replace(&mut state.is_running, true);
        Some(BatchTicket { answer, must_run })
    }

    /// Begins the next round when it is due. The one after it is due `interval` later. `None` if no
    /// reader waits.
    pub(super) async fn begin(&self, interval: Duration) -> Option<Batch<D, A>> {
        let not_before = self.state().not_before;
        if let Some(not_before) = not_before {
            sleep_until(not_before).await;
        }
        let mut state = self.state();
        let round = state.next.take().filter(|next| Arc::strong_count(&next.answer) > 1);
        match &round {
            Some(_) => state.not_before = Some(Instant::now() + interval),
            None => state.is_running = false,
        }
        round
    }

    /// Replaces the interval between the round under way and the next one.
    pub(super) fn next_due(&self, not_before: Instant) {
        self.state().not_before = Some(not_before);
    }

    /// Like [`Self::next_due`], and answers the readers that wait for the next round at once.
    pub(super) fn pause(&self, not_before: Instant, answer: A) {
        self.next_due(not_before);
        let next = self.state().next.take();
        if let Some(next) = next {
            next.answer(answer);
        }
    }
}

impl<D, A> Batch<D, A> {
    /// Answers its readers.
    pub(super) fn answer(self, answer: A) {
        self.answer.send_replace(Some(answer));
    }
}

impl<A: Clone> BatchTicket<A> {
    /// Returns the answer, if it comes within `limit`.
    pub(super) async fn answer(&self, limit: Duration) -> Option<A> {
        let mut answer = self.answer.subscribe();
        timeout(limit, answer.wait_for(Option::is_some)).await.ok()?.ok()?.clone()
    }
}
