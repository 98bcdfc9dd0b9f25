//! The queue of reviews: they are sent at a limited rate, with a limited number at a time. Those
//! that wait take turns: by tenant if it is known, then by workload or address, then by connection.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::{Instant, sleep_until, timeout},
};

use kubefan_admission::{FairPool, Holder, PermitKind, fair_queue::FairQueue};

const WAITING_REVIEWS: PermitKind = PermitKind {
    name: "reviews of callers that wait for the apiserver",
    setting: "limits.accessReviewsWaitingMax",
    identity_setting: "",
};

/// Limits of the reviews of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLimits {
    /// Reviews sent in a second, on average.
    pub per_second: u32,
    /// Reviews sent at once after a silence.
    pub burst: u32,
    /// Reviews that are being answered at a time.
    pub in_flight_max: usize,
    /// Reviews that wait.
    pub waiting_max: usize,
    /// The longest wait of a review.
    pub wait_timeout: Duration,
}

impl QueueLimits {
    /// One part in this many is for large questions.
    const LARGE_PART: u32 = 10;

    /// The limits of large questions, beside those of all others.
    pub(super) fn for_large(self) -> Self {
        let part = |number: u32| (number / Self::LARGE_PART).max(1);
        let part_of_size = |number: usize| (number / Self::LARGE_PART as usize).max(1);
        Self {
            per_second: part(self.per_second),
            burst: part(self.burst),
            in_flight_max: part_of_size(self.in_flight_max),
            waiting_max: part_of_size(self.waiting_max),
            wait_timeout: self.wait_timeout,
        }
    }
}

/// The right to send one review. It is kept until the review is answered.
pub(super) type Turn = OwnedSemaphorePermit;

/// The queue of the reviews of one kind.
pub(super) struct ReviewQueue {
    limits: QueueLimits,
    places: Arc<FairPool>,
    shared: Arc<Shared>,
}

struct Shared {
    in_flight: Arc<Semaphore>,
    state: Mutex<PendingReviews>,
}

struct PendingReviews {
    rate: Rate,
    waiting: FairQueue<oneshot::Sender<Turn>>,
    /// Whether a task gives turns. It ends when nothing waits.
    is_served: bool,
}

/// A rate with a burst (GCRA).
struct Rate {
    interval: Duration,
    tolerance: Duration,
    /// Time at which the next review would be due if they were sent evenly.
    due_at: Instant,
}

impl Rate {
    fn new(per_second: u32, burst: u32) -> Self {
        let interval = Duration::from_secs(1) / per_second.max(1);
        Self { interval, tolerance: interval * burst.saturating_sub(1), due_at: Instant::now() }
    }

    /// The earliest time for the next one.
    fn next_at(&self) -> Instant {
        self.due_at.checked_sub(self.tolerance).unwrap_or(self.due_at)
    }

    fn take(&mut self, now: Instant) {
        self.due_at = self.due_at.max(now) + self.interval;
    }
}

impl ReviewQueue {
    pub(super) fn new(limits: QueueLimits) -> Self {
        let rate = Rate::new(limits.per_second, limits.burst);
        let state = Mutex::new(PendingReviews { rate, waiting: FairQueue::default(), is_served: false });
        let in_flight = Arc::new(Semaphore::new(limits.in_flight_max.clamp(1, Semaphore::MAX_PERMITS)));
        Self { limits, places: FairPool::new(limits.waiting_max), shared: Arc::new(Shared { in_flight, state }) }
    }

    /// Waits for a turn.
    ///
    /// # Errors
    /// The reason why there is no turn: too many reviews wait, or it took too long.
    pub(super) async fn turn(&self, holder: Holder) -> Result<Turn, String> {
        if let Some(turn) = self.shared.try_turn() {
            return Ok(turn);
        }
        let QueueLimits { wait_timeout, per_second, .. } = self.limits;
        let place = self.places.try_take(Some(holder));
        let _place = place.ok_or_else(|| WAITING_REVIEWS.refusal(&self.places, holder))?;
        let mut waiting = Waiting::new(&self.shared, holder);
        let turn = timeout(wait_timeout, &mut waiting.granted).await.ok().and_then(Result::ok);
        turn.ok_or_else(|| {
            format!(
                "no review of this caller could be sent within {wait_timeout:?}: kubefan sends at most {per_second} per second \
                 (limits.accessReviewsPerSecond); try again"
            )
        })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, PendingReviews> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A turn, if none waits for one.
    fn try_turn(&self) -> Option<Turn> {
        let mut state = self.lock();
        let now = Instant::now();
        if state.is_served || now < state.rate.next_at() {
            return None;
        }
        let turn = self.in_flight.clone().try_acquire_owned().ok()?;
        state.rate.take(now);
        Some(turn)
    }

    /// Gives turns until nothing waits.
    async fn serve(self: Arc<Self>) {
        loop {
            // Never closed.
            let Ok(turn) = self.in_flight.clone().acquire_owned().await else { return };
            loop {
                let next_at = self.lock().rate.next_at();
                if next_at <= Instant::now() {
                    break;
                }
                sleep_until(next_at).await;
            }
            let mut state = self.lock();
            let Some((_, waiting)) = state.waiting.pop(|_, _| true) else {
                state.is_served = false;
                return;
            };
            // A turn that is not taken comes back at once.
            if waiting.send(turn).is_ok() {
                state.rate.take(Instant::now());
            }
        }
    }
}

/// A place in the queue, left however the wait ends.
struct Waiting {
    shared: Arc<Shared>,
    holder: Holder,
    number: u64,
    granted: oneshot::Receiver<Turn>,
}

impl Waiting {
    fn new(shared: &Arc<Shared>, holder: Holder) -> Self {
        let (grant, granted) = oneshot::channel();
        let mut state = shared.lock();
        let number = state.waiting.push(Some(holder), grant);
        if !std::mem::replace(&mut state.is_served, true) {
            tokio::spawn(shared.clone().serve());
        }
        drop(state);
        Self { shared: shared.clone(), holder, number, granted }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.shared.lock().waiting.remove(Some(self.holder), self.number);
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        task::{JoinSet, yield_now},
        time::sleep,
    };

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn queue(per_second: u32, burst: u32, in_flight_max: usize, waiting_max: usize) -> Arc<ReviewQueue> {
        let wait_timeout = 10 * SECOND;
        Arc::new(ReviewQueue::new(QueueLimits { per_second, burst, in_flight_max, waiting_max, wait_timeout }))
    }

    fn holder(connection: u64, last_byte: u8) -> Holder {
        Holder::new(connection, Some([10, 0, 0, last_byte].into()))
    }

    #[tokio::test(start_paused = true)]
    async fn reviews_are_sent_at_a_rate_after_a_burst() {
        let queue = queue(10, 5, 100, 100);
        let start = Instant::now();
        let mut turns = JoinSet::new();
        for number in 0..25 {
            let queue = queue.clone();
            turns.spawn(async move { queue.turn(holder(number, 1)).await.map(drop) });
        }
        while let Some(turn) = turns.join_next().await {
            turn.unwrap().unwrap();
        }
        assert_eq!(start.elapsed().as_millis().div_ceil(100), 20);
        sleep(SECOND).await;
        assert!(!queue.shared.lock().is_served, "no task is left");
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_from_one_address_does_not_delay_others() {
        let queue = queue(10, 1, 100, 1000);
        let start = Instant::now();
        let mut crowd = JoinSet::new();
        for number in 0..500 {
            let queue = queue.clone();
            crowd.spawn(async move { queue.turn(holder(number, 1)).await.map(drop) });
        }
        yield_now().await;
        drop(queue.turn(holder(1000, 2)).await.unwrap());
        assert!(start.elapsed() <= SECOND, "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn only_so_many_are_in_flight_and_wait() {
        let queue = queue(1000, 1000, 1, 1);
        let first = queue.turn(holder(1, 1)).await.unwrap();
        let second = tokio::spawn({
            let queue = queue.clone();
            async move { queue.turn(holder(2, 1)).await.map(drop) }
        });
        yield_now().await;
        assert!(queue.turn(holder(3, 1)).await.unwrap_err().contains("at most 1 reviews of callers"));
        drop(first);
        second.await.unwrap().unwrap();
        let kept = queue.turn(holder(4, 1)).await.unwrap();
        let start = Instant::now();
        assert!(queue.turn(holder(5, 1)).await.unwrap_err().contains("limits.accessReviewsPerSecond"));
        assert_eq!(start.elapsed(), 10 * SECOND);
        drop(kept);
    }
}
