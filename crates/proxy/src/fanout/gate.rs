//! Admission of everything that pins state while it is sent or read: snapshots, lists, catch-ups, backfills and transfers to peers. A
//! bounded number at once, the others in a queue, first come, first served, and for a bounded time: a storm of starts is worked off and not answered all at once.
//!
//! Live streams are never stopped here. Under memory pressure the gate is narrowed: see [`crate::app`]'s governor.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use crate::{fanout::stream_end::Refusal, telemetry::metrics::GateMetrics};
use kubefan_common::sync::watch;

/// How many are let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GateLimits {
    /// At once.
    pub snapshots_max: usize,
    /// How long one waits for its turn.
    pub snapshot_queue_timeout: Duration,
}

/// The gate of one kubefan.
pub struct Gate {
    limits: GateLimits,
    permits: Arc<Semaphore>,
    places: Arc<Mutex<Places>>,
    /// Nobody may enter: who waits is told so.
    shut: watch::Sender<bool>,
    metrics: GateMetrics,
}

/// Permits that nobody may have now.
#[derive(Debug, Default)]
struct Places {
    held_back: usize,
    /// How many that should be. What is missing was in use, and is kept by whoever comes out: the queue would have it otherwise.
    wanted: usize,
}

/// Leave to pin state; given back when it is dropped.
#[derive(Debug)]
pub struct GatePermit {
    /// `None` only while it is dropped.
    permit: Option<OwnedSemaphorePermit>,
    places: Arc<Mutex<Places>>,
    in_flight: prometheus::IntGauge,
}

impl Gate {
    /// A gate that is wide open.
    pub fn new(limits: GateLimits, metrics: GateMetrics) -> Arc<Self> {
        let permits = Arc::new(Semaphore::new(limits.snapshots_max.min(Semaphore::MAX_PERMITS)));
        Arc::new(Self { limits, permits, places: Arc::default(), shut: watch::Sender::new(false), metrics })
    }

    /// Waits for its turn.
    ///
    /// # Errors
    /// [`Refusal::Exhausted`] where that takes too long, and at once where nobody may enter.
    pub async fn enter(&self) -> Result<GatePermit, Refusal> {
        if let Some(pass) = self.try_enter() {
            return Ok(pass);
        }
        let _waiting = Waiting::new(&self.metrics.waiting);
        let mut shut = self.shut.subscribe();
        let turn = async {
            tokio::select! {
                biased;
                _ = shut.wait_for(|shut| *shut) => None,
                permit = self.permits.clone().acquire_owned() => permit.ok(),
            }
        };
        match timeout(self.limits.snapshot_queue_timeout, turn).await {
            Ok(Some(permit)) => Ok(self.pass(permit)),
            Ok(None) | Err(_) => {
                self.metrics.refused.inc();
                Err(Refusal::Exhausted(self.message()))
            }
        }
    }

    /// Enters if nobody has to be waited for.
    pub fn try_enter(&self) -> Option<GatePermit> {
        self.permits.clone().try_acquire_owned().ok().map(|permit| self.pass(permit))
    }

    /// As [`Self::try_enter`], for one who cannot wait; counts the refusal.
    pub fn enter_now(&self) -> Result<GatePermit, String> {
        self.try_enter().ok_or_else(|| {
            self.metrics.refused.inc();
            self.message()
        })
    }

    fn message(&self) -> String {
        let GateLimits { snapshots_max, snapshot_queue_timeout } = self.limits;
        let now = snapshots_max - locked(&self.places).wanted;
        if now == 0 {
            return "no snapshots are sent while memory is short (--memory-max)".to_owned();
        }
        let why = if now < snapshots_max { " (--memory-max is near)" } else { "" };
        format!(
            "{now} of at most {snapshots_max} snapshots (--snapshots-max) may be sent at a time now{why}, and none ended within \
             {snapshot_queue_timeout:?} (--snapshot-queue-timeout)"
        )
    }

    fn pass(&self, permit: OwnedSemaphorePermit) -> GatePermit {
        self.metrics.in_flight.inc();
        GatePermit { permit: Some(permit), places: self.places.clone(), in_flight: self.metrics.in_flight.clone() }
    }

    /// Lets only so many in at once from now on; those who are in stay, and are not followed while they are too many. To be called
    /// again now and then: a permit that was on its way to one who gave up waiting may have come back.
    pub fn narrow(&self, snapshots_max: usize) {
        let mut places = locked(&self.places);
        places.wanted = self.limits.snapshots_max.saturating_sub(snapshots_max);
        if places.wanted > places.held_back {
            places.held_back += self.permits.forget_permits(places.wanted - places.held_back);
        } else {
            self.permits.add_permits(places.held_back - places.wanted);
            places.held_back = places.wanted;
        }
        drop(places);
        self.shut.send_if_modified(|shut| std::mem::replace(shut, snapshots_max == 0) != (snapshots_max == 0));
    }

    /// How many are let in at once where nothing is short.
    pub fn snapshots_max(&self) -> usize {
        self.limits.snapshots_max
    }
}

impl Drop for GatePermit {
    fn drop(&mut self) {
        self.in_flight.dec();
        let mut places = locked(&self.places);
        let permit = self.permit.take();
        if places.held_back < places.wanted {
            places.held_back += 1;
            permit.into_iter().for_each(OwnedSemaphorePermit::forget);
        }
    }
}

fn locked(places: &Mutex<Places>) -> MutexGuard<'_, Places> {
    places.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts one who waits, however that ends.
struct Waiting<'a>(&'a prometheus::IntGauge);

impl<'a> Waiting<'a> {
    fn new(gauge: &'a prometheus::IntGauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;
    use tokio::{task::JoinSet, time::Instant};

    use super::*;
    use crate::telemetry::metrics::Metrics;

    fn gate(snapshots_max: usize) -> Arc<Gate> {
        let limits = GateLimits { snapshots_max, snapshot_queue_timeout: Duration::from_secs(10) };
        Gate::new(limits, Metrics::new(Registry::new()).unwrap().gate())
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_is_let_in_in_order_or_told_to_come_back() {
        let gate = gate(1);
        let first = gate.enter().await.unwrap();
        assert!(gate.enter_now().is_err());
        let (second, third) = (gate.clone(), gate.clone());
        let second = tokio::spawn(async move { second.enter().await });
        tokio::task::yield_now().await;
        let third = tokio::spawn(async move { third.enter().await });
        tokio::task::yield_now().await;
        assert_eq!((gate.metrics.waiting.get(), gate.metrics.in_flight.get()), (2, 1));
        drop(first);
        let second = second.await.unwrap().unwrap();
        let refusal = third.await.unwrap().unwrap_err();
        assert!(matches!(&refusal, Refusal::Exhausted(message) if message.contains("--snapshots-max")), "{refusal}");
        drop(second);
        assert_eq!((gate.metrics.waiting.get(), gate.metrics.in_flight.get(), gate.metrics.refused.get()), (0, 0, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_narrow_gate_lets_fewer_in_and_opens_again() {
        let gate = gate(4);
        let inside: Vec<_> = std::iter::from_fn(|| gate.try_enter()).take(3).collect();
        gate.narrow(1);
        assert!(gate.try_enter().is_none());
        drop(inside);
        let only = gate.try_enter().unwrap();
        assert!(gate.try_enter().is_none());
        gate.narrow(4);
        assert_eq!(std::iter::from_fn(|| gate.try_enter()).take(9).collect::<Vec<_>>().len(), 3);
        drop(only);
    }
    #[tokio::test(start_paused = true)]
    async fn a_gate_that_was_narrowed_takes_places_from_those_who_end_and_not_from_the_queue() {
        let gate = gate(4);
        let mut inside: Vec<_> = std::iter::from_fn(|| gate.try_enter()).collect();
        let enter = |gate: Arc<Gate>| async move { gate.enter().await };
        let mut queue: JoinSet<_> = (0..4).map(|_| enter(gate.clone())).collect();
        tokio::task::yield_now().await;
        gate.narrow(1);
        inside.truncate(1);
        tokio::task::yield_now().await;
        assert_eq!((gate.metrics.in_flight.get(), gate.metrics.waiting.get()), (1, 4), "nobody follows the three");
        inside.clear();
        let next = queue.join_next().await.unwrap().unwrap().unwrap();
        assert_eq!((gate.metrics.in_flight.get(), gate.metrics.waiting.get()), (1, 3));
        gate.narrow(4);
        let others = [queue.join_next().await, queue.join_next().await, queue.join_next().await];
        assert!(others.iter().all(|other| matches!(other, Some(Ok(Ok(_))))), "and it opens for those who wait");
        drop(next);
        assert!(gate.try_enter().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_gate_that_is_shut_tells_those_who_wait_at_once() {
        let gate = gate(1);
        let inside = gate.enter().await.unwrap();
        let waits = gate.clone();
        let waits = tokio::spawn(async move { waits.enter().await });
        tokio::task::yield_now().await;
        let begun = Instant::now();
        gate.narrow(0);
        for refusal in [waits.await.unwrap().unwrap_err(), gate.enter().await.unwrap_err()] {
            assert!(matches!(&refusal, Refusal::Exhausted(message) if message.contains("--memory-max")), "{refusal}");
        }
        assert_eq!(begun.elapsed(), Duration::ZERO);
        drop(inside);
        assert!(gate.try_enter().is_none());
        gate.narrow(1);
        assert!(gate.enter().await.is_ok());
    }
}
