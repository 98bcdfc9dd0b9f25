//! Admits everything that pins state while it is sent or read: snapshots, lists, catch-ups,
//! backfills and transfers to peers. Replays of history have a few places of their own.
//!
//! The hazard is a storm of starts that fills the memory. So a bounded number is admitted at a
//! time; the others wait for a bounded time, and users, pods and connections take turns. Live
//! streams never pass through here. Under memory pressure the limit is lowered.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kubefan_cache::Refusal;
use kubefan_telemetry::{metrics::GateMetrics, traces};
use tokio::{sync::oneshot, time::timeout};

use super::{
    fair_queue::FairQueue,
    fair_share::{Holder, Shares},
};

/// Replays at a time. Each has up to some megabytes, which no budget counts.
pub const REPLAYS_MAX: usize = 8;

/// Limits of admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GateLimits {
    /// At a time.
    pub snapshots_max: usize,
    /// The longest wait in the queue.
    pub snapshot_queue_timeout: Duration,
}

/// The gate of one kubefan process.
pub struct Gate {
    limits: GateLimits,
    shared: Arc<Shared>,
    replays: Arc<Shared>,
}

struct Shared {
    state: Mutex<Admissions>,
    metrics: GateMetrics,
}

struct Admissions {
    shares: Shares,
    /// Waiting requests, of which none could be admitted now.
    queue: FairQueue<oneshot::Sender<GatePermit>>,
}

/// Permission to pin state, given back when it is dropped.
pub struct GatePermit {
    shared: Arc<Shared>,
    holder: Option<Holder>,
}

impl Gate {
    /// A gate without a lowered limit.
    pub fn new(limits: GateLimits, metrics: GateMetrics) -> Arc<Self> {
        let shared = |places_max| {
            let state = Admissions { shares: Shares::new(places_max), queue: FairQueue::default() };
            Arc::new(Shared { state: Mutex::new(state), metrics: metrics.clone() })
        };
        Arc::new(Self { limits, shared: shared(limits.snapshots_max), replays: shared(REPLAYS_MAX) })
    }

    /// Waits for a permit. `None` stands for kubefan itself.
    ///
    /// # Errors
    /// [`Refusal::Exhausted`] if that takes too long, and at once if the limit is zero.
    pub async fn acquire(&self, holder: Option<Holder>) -> Result<GatePermit, Refusal> {
        let permit = self.wait_for(&self.shared, holder).await;
        permit.ok_or_else(|| Refusal::Exhausted(self.message()))
    }

    /// Waits for a permit to replay history.
    ///
    /// # Errors
    /// [`Refusal::Exhausted`] if that takes too long.
    pub async fn acquire_replay(&self, holder: Option<Holder>) -> Result<GatePermit, Refusal> {
        let permit = self.wait_for(&self.replays, holder).await;
        permit.ok_or_else(|| {
            let limit = self.limits.snapshot_queue_timeout;
            Refusal::Exhausted(format!(
                "{REPLAYS_MAX} watches at a time may be resumed from far behind, and it was not this one's turn within \
                 {limit:?} (tuning.snapshotQueueTimeout)"
            ))
        })
    }

    /// A permit to replay history, if one is free for this holder.
    pub fn try_acquire_replay(&self, holder: Option<Holder>) -> Option<GatePermit> {
        self.replays.try_permit(holder)
    }

    async fn wait_for(&self, shared: &Arc<Shared>, holder: Option<Holder>) -> Option<GatePermit> {
        if let Some(permit) = shared.try_permit(holder) {
            return Some(permit);
        }
        let _wait = traces::wait("permit");
        let permit = match Turn::new(shared, holder) {
            Some(mut turn) => timeout(self.limits.snapshot_queue_timeout, &mut turn.granted).await.ok(),
            None => None,
        };
        let permit = permit.and_then(Result::ok);
        if permit.is_none() {
            shared.metrics.refused.inc();
        }
        permit
    }

    /// A permit, if one is free for this holder.
    pub fn try_acquire(&self, holder: Option<Holder>) -> Option<GatePermit> {
        self.shared.try_permit(holder)
    }

    /// As [`Self::try_acquire`], for a caller that cannot wait; counts the refusal.
    pub fn acquire_now(&self, holder: Option<Holder>) -> Result<GatePermit, String> {
        self.try_acquire(holder).ok_or_else(|| {
            self.shared.metrics.refused.inc();
            self.message()
        })
    }

    fn message(&self) -> String {
        let GateLimits { snapshots_max, snapshot_queue_timeout } = self.limits;
        let now = self.shared.lock().shares.places_max();
        if now == 0 {
            return "no snapshots are sent while memory is short (--memory-max)".to_owned();
        }
        let why = if now < snapshots_max { " (--memory-max is near)" } else { "" };
        format!(
            "{now} of at most {snapshots_max} snapshots (limits.snapshotsMax) may be sent at a time now{why}, and none ended within \
             {snapshot_queue_timeout:?} (tuning.snapshotQueueTimeout)"
        )
    }

    /// Sets the number admitted at a time from now on. Permits in use stay valid; those that are
    /// given back are withheld until the limit is met. A limit of zero refuses everything in the
    /// queue.
    pub fn narrow(&self, snapshots_max: usize) {
        let mut state = self.shared.lock();
        state.shares.set_places_max(snapshots_max.min(self.limits.snapshots_max));
        if snapshots_max == 0 {
            let refused = std::mem::take(&mut state.queue);
            drop(state);
            drop(refused);
        } else {
            self.shared.admit_waiting(state);
        }
    }

    /// Returns how many are admitted at a time if the limit is not lowered.
    pub fn snapshots_max(&self) -> usize {
        self.limits.snapshots_max
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Admissions> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_permit(self: &Arc<Self>, holder: Option<Holder>) -> Option<GatePermit> {
        let mut state = self.lock();
        state.shares.admits(holder, 1).then(|| self.permit(&mut state, holder))
    }

    fn permit(self: &Arc<Self>, state: &mut Admissions, holder: Option<Holder>) -> GatePermit {
        state.shares.take(holder, 1);
        self.metrics.in_flight.inc();
        GatePermit { shared: self.clone(), holder }
    }

    /// Admits as many from the queue as the limit allows.
    fn admit_waiting(self: &Arc<Self>, mut state: MutexGuard<'_, Admissions>) {
        // Dropping a permit takes the lock.
        let mut returned = Vec::new();
        while state.shares.free() > 0 {
            let Admissions { shares, queue } = &mut *state;
            let next = queue.pop(|level, key| shares.admits_at(level, key, 1));
            let Some((holder, waiting)) = next else { break };
            let permit = self.permit(&mut state, holder);
            returned.extend(waiting.send(permit).err());
        }
        drop(state);
    }
}

impl Drop for GatePermit {
    fn drop(&mut self) {
        self.shared.metrics.in_flight.dec();
        let mut state = self.shared.lock();
        state.shares.give_back(self.holder, 1);
        self.shared.admit_waiting(state);
    }
}

impl fmt::Debug for GatePermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatePermit").field("holder", &self.holder).finish_non_exhaustive()
    }
}

/// A place in the queue, left however the wait ends.
struct Turn {
    shared: Arc<Shared>,
    holder: Option<Holder>,
    number: u64,
    granted: oneshot::Receiver<GatePermit>,
}

impl Turn {
    /// `None` if nothing is admitted at all.
    fn new(shared: &Arc<Shared>, holder: Option<Holder>) -> Option<Self> {
        let mut state = shared.lock();
        if state.shares.places_max() == 0 {
            return None;
        }
        let (grant, granted) = oneshot::channel();
        let number = state.queue.push(holder, grant);
        shared.metrics.waiting.inc();
        drop(state);
        let turn = Self { shared: shared.clone(), holder, number, granted };
        // A permit may have been given back since the caller looked.
        shared.admit_waiting(shared.lock());
        Some(turn)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.shared.metrics.waiting.dec();
        self.shared.lock().queue.remove(self.holder, self.number);
    }
}

#[cfg(test)]
mod tests {
    use kubefan_telemetry::metrics::Metrics;
    use prometheus::Registry;
    use tokio::{task::JoinSet, time::Instant};

    use super::*;

    fn gate(snapshots_max: usize) -> Arc<Gate> {
        let limits = GateLimits { snapshots_max, snapshot_queue_timeout: Duration::from_secs(10) };
        Gate::new(limits, Metrics::new(Registry::new()).unwrap().gate())
    }

    #[tokio::test(start_paused = true)]
    async fn waiters_are_admitted_in_order_or_refused_after_the_timeout() {
        let gate = gate(1);
        let first = gate.acquire(None).await.unwrap();
        assert!(gate.acquire_now(None).is_err());
        let second = gate.clone();
        let third = gate.clone();
        let second = tokio::spawn(async move { second.acquire(None).await });
        tokio::task::yield_now().await;
        let third = tokio::spawn(async move { third.acquire(None).await });
        tokio::task::yield_now().await;
        assert_eq!((gate.shared.metrics.waiting.get(), gate.shared.metrics.in_flight.get()), (2, 1));
        drop(first);
        let second = second.await.unwrap().unwrap();
        let refusal = third.await.unwrap().unwrap_err();
        assert!(
            matches!(&refusal, Refusal::Exhausted(message) if message.contains("limits.snapshotsMax")),
            "{refusal}"
        );
        drop(second);
        assert_eq!(
            (gate.shared.metrics.waiting.get(), gate.shared.metrics.in_flight.get(), gate.shared.metrics.refused.get()),
            (0, 0, 2)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_lowered_limit_admits_fewer_until_it_is_raised() {
        let gate = gate(4);
        let inside: Vec<_> = std::iter::from_fn(|| gate.try_acquire(None)).take(3).collect();
        gate.narrow(1);
        assert!(gate.try_acquire(None).is_none());
        drop(inside);
        let only = gate.try_acquire(None).unwrap();
        assert!(gate.try_acquire(None).is_none());
        gate.narrow(4);
        assert_eq!(std::iter::from_fn(|| gate.try_acquire(None)).take(9).collect::<Vec<_>>().len(), 3);
        drop(only);
    }
    #[tokio::test(start_paused = true)]
    async fn a_lowered_limit_withholds_permits_that_are_given_back() {
        let gate = gate(4);
        let mut inside: Vec<_> = std::iter::from_fn(|| gate.try_acquire(None)).collect();
        let enter = |gate: Arc<Gate>| async move { gate.acquire(None).await };
        let mut queue: JoinSet<_> = (0..4).map(|_| enter(gate.clone())).collect();
        tokio::task::yield_now().await;
        gate.narrow(1);
        inside.truncate(1);
        tokio::task::yield_now().await;
        assert_eq!(
            (gate.shared.metrics.in_flight.get(), gate.shared.metrics.waiting.get()),
            (1, 4),
            "the three permits are withheld"
        );
        inside.clear();
        let next = queue.join_next().await.unwrap().unwrap().unwrap();
        assert_eq!((gate.shared.metrics.in_flight.get(), gate.shared.metrics.waiting.get()), (1, 3));
        gate.narrow(4);
        let others = [queue.join_next().await, queue.join_next().await, queue.join_next().await];
        assert!(others.iter().all(|other| matches!(other, Some(Ok(Ok(_))))), "and the waiters are admitted");
        drop(next);
        assert!(gate.try_acquire(None).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_from_one_address_leaves_places_and_turns_to_others() {
        let gate = gate(32);
        let of = |connection, byte| Some(Holder::new(connection, Some([10, 0, 0, byte].into())));
        let mut crowd: Vec<_> = (0..100).map_while(|number| gate.try_acquire(of(number, 1))).collect();
        assert_eq!(crowd.len(), 30);
        let enter = |gate: Arc<Gate>, holder| async move { gate.acquire(holder).await };
        let mut more: JoinSet<_> = (100..200).map(|number| enter(gate.clone(), of(number, 1))).collect();
        tokio::task::yield_now().await;
        let _others: Vec<_> = (2..4).map(|byte| gate.try_acquire(of(200 + u64::from(byte), byte)).unwrap()).collect();
        let late = tokio::spawn(enter(gate.clone(), of(300, 4)));
        tokio::task::yield_now().await;
        drop(crowd.pop());
        assert!(late.await.unwrap().is_ok(), "it does not wait behind the crowd");
        more.abort_all();
        while more.join_next().await.is_some() {}
        assert_eq!(gate.shared.metrics.waiting.get(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_limit_of_zero_refuses_waiters_at_once() {
        let gate = gate(1);
        let inside = gate.acquire(None).await.unwrap();
        let waits = gate.clone();
        let waits = tokio::spawn(async move { waits.acquire(None).await });
        tokio::task::yield_now().await;
        let begun = Instant::now();
        gate.narrow(0);
        for refusal in [waits.await.unwrap().unwrap_err(), gate.acquire(None).await.unwrap_err()] {
            assert!(matches!(&refusal, Refusal::Exhausted(message) if message.contains("--memory-max")), "{refusal}");
        }
        assert_eq!(begun.elapsed(), Duration::ZERO);
        drop(inside);
        assert!(gate.try_acquire(None).is_none());
        gate.narrow(1);
        assert!(gate.acquire(None).await.is_ok());
    }
}
