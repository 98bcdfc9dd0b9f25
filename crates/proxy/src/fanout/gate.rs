//! Admits everything that pins state while it is sent or read: snapshots, lists, catch-ups,
//! backfills and transfers to peers.
//!
//! The hazard is a storm of starts that fills the memory. So a bounded number is admitted at a
//! time; the others wait in a queue, in the order in which they came, for a bounded time. Live
//! streams never pass through here. Under memory pressure the limit is lowered.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use crate::{cache::Refusal, telemetry::metrics::GateMetrics};
use kubefan_common::sync::watch;

/// How many are admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GateLimits {
    /// At a time.
    pub snapshots_max: usize,
    /// How long one waits in the queue.
    pub snapshot_queue_timeout: Duration,
}

/// The gate of one kubefan process.
pub struct Gate {
    limits: GateLimits,
    permits: Arc<Semaphore>,
    withholding: Arc<Mutex<Withheld>>,
    /// The limit is zero: everything in the queue is refused.
    shut: watch::Sender<bool>,
    metrics: GateMetrics,
}

/// Permits that are withheld while the limit is lowered.
#[derive(Debug, Default)]
struct Withheld {
    withheld: usize,
    /// How many should be withheld. The rest is in use, and is withheld when it is given back;
    /// otherwise the queue would get it.
    wanted: usize,
}

/// Permission to pin state, given back when it is dropped.
#[derive(Debug)]
pub struct GatePermit {
    /// `None` only while it is being dropped.
    permit: Option<OwnedSemaphorePermit>,
    withholding: Arc<Mutex<Withheld>>,
    in_flight: prometheus::IntGauge,
}

impl Gate {
    /// A gate without a lowered limit.
    pub fn new(limits: GateLimits, metrics: GateMetrics) -> Arc<Self> {
        let permits = Arc::new(Semaphore::new(limits.snapshots_max.min(Semaphore::MAX_PERMITS)));
        Arc::new(Self { limits, permits, withholding: Arc::default(), shut: watch::Sender::new(false), metrics })
    }

    /// Waits for a permit.
    ///
    /// # Errors
    /// [`Refusal::Exhausted`] if that takes too long, and at once if the limit is zero.
    pub async fn acquire(&self) -> Result<GatePermit, Refusal> {
        if let Some(permit) = self.try_acquire() {
            return Ok(permit);
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
            Ok(Some(permit)) => Ok(self.permit(permit)),
            Ok(None) | Err(_) => {
                self.metrics.refused.inc();
                Err(Refusal::Exhausted(self.message()))
            }
        }
    }

    /// A permit, if one is free.
    pub fn try_acquire(&self) -> Option<GatePermit> {
        self.permits.clone().try_acquire_owned().ok().map(|permit| self.permit(permit))
    }

    /// As [`Self::try_acquire`], for one who cannot wait; counts the refusal.
    pub fn acquire_now(&self) -> Result<GatePermit, String> {
        self.try_acquire().ok_or_else(|| {
            self.metrics.refused.inc();
            self.message()
        })
    }

    fn message(&self) -> String {
        let GateLimits { snapshots_max, snapshot_queue_timeout } = self.limits;
        let now = snapshots_max - locked(&self.withholding).wanted;
        if now == 0 {
            return "no snapshots are sent while memory is short (--memory-max)".to_owned();
        }
        let why = if now < snapshots_max { " (--memory-max is near)" } else { "" };
        format!(
            "{now} of at most {snapshots_max} snapshots (--snapshots-max) may be sent at a time now{why}, and none ended within \
             {snapshot_queue_timeout:?} (--snapshot-queue-timeout)"
        )
    }

    fn permit(&self, permit: OwnedSemaphorePermit) -> GatePermit {
        self.metrics.in_flight.inc();
        GatePermit {
            permit: Some(permit),
            withholding: self.withholding.clone(),
            in_flight: self.metrics.in_flight.clone(),
        }
    }

    /// Admits only so many at a time from now on. Permits in use stay valid, and are withheld when
    /// they are given back. Call it again now and then: a permit that was handed to a waiter that
    /// gave up may have come back.
    pub fn narrow(&self, snapshots_max: usize) {
        let mut withholding = locked(&self.withholding);
        withholding.wanted = self.limits.snapshots_max.saturating_sub(snapshots_max);
        if withholding.wanted > withholding.withheld {
            withholding.withheld += self.permits.forget_permits(withholding.wanted - withholding.withheld);
        } else {
            self.permits.add_permits(withholding.withheld - withholding.wanted);
            withholding.withheld = withholding.wanted;
        }
        drop(withholding);
        self.shut.send_if_modified(|shut| std::mem::replace(shut, snapshots_max == 0) != (snapshots_max == 0));
    }

    /// How many are admitted at a time if the limit is not lowered.
    pub fn snapshots_max(&self) -> usize {
        self.limits.snapshots_max
    }
}

impl Drop for GatePermit {
    fn drop(&mut self) {
        self.in_flight.dec();
        let mut withholding = locked(&self.withholding);
        let permit = self.permit.take();
        if withholding.withheld < withholding.wanted {
            withholding.withheld += 1;
            permit.into_iter().for_each(OwnedSemaphorePermit::forget);
        }
    }
}

fn locked(withholding: &Mutex<Withheld>) -> MutexGuard<'_, Withheld> {
    withholding.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts a waiter, however its wait ends.
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
    async fn waiters_are_admitted_in_order_or_refused_after_the_timeout() {
        let gate = gate(1);
        let first = gate.acquire().await.unwrap();
        assert!(gate.acquire_now().is_err());
        let (second, third) = (gate.clone(), gate.clone());
        let second = tokio::spawn(async move { second.acquire().await });
        tokio::task::yield_now().await;
        let third = tokio::spawn(async move { third.acquire().await });
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
    async fn a_lowered_limit_admits_fewer_until_it_is_raised() {
        let gate = gate(4);
        let inside: Vec<_> = std::iter::from_fn(|| gate.try_acquire()).take(3).collect();
        gate.narrow(1);
        assert!(gate.try_acquire().is_none());
        drop(inside);
        let only = gate.try_acquire().unwrap();
        assert!(gate.try_acquire().is_none());
        gate.narrow(4);
        assert_eq!(std::iter::from_fn(|| gate.try_acquire()).take(9).collect::<Vec<_>>().len(), 3);
        drop(only);
    }
    #[tokio::test(start_paused = true)]
    async fn a_lowered_limit_withholds_permits_that_are_given_back() {
        let gate = gate(4);
        let mut inside: Vec<_> = std::iter::from_fn(|| gate.try_acquire()).collect();
        let enter = |gate: Arc<Gate>| async move { gate.acquire().await };
        let mut queue: JoinSet<_> = (0..4).map(|_| enter(gate.clone())).collect();
        tokio::task::yield_now().await;
        gate.narrow(1);
        inside.truncate(1);
        tokio::task::yield_now().await;
        assert_eq!(
            (gate.metrics.in_flight.get(), gate.metrics.waiting.get()),
            (1, 4),
            "the three permits are withheld"
        );
        inside.clear();
        let next = queue.join_next().await.unwrap().unwrap().unwrap();
        assert_eq!((gate.metrics.in_flight.get(), gate.metrics.waiting.get()), (1, 3));
        gate.narrow(4);
        let others = [queue.join_next().await, queue.join_next().await, queue.join_next().await];
        assert!(others.iter().all(|other| matches!(other, Some(Ok(Ok(_))))), "and the waiters are admitted");
        drop(next);
        assert!(gate.try_acquire().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_limit_of_zero_refuses_waiters_at_once() {
        let gate = gate(1);
        let inside = gate.acquire().await.unwrap();
        let waits = gate.clone();
        let waits = tokio::spawn(async move { waits.acquire().await });
        tokio::task::yield_now().await;
        let begun = Instant::now();
        gate.narrow(0);
        for refusal in [waits.await.unwrap().unwrap_err(), gate.acquire().await.unwrap_err()] {
            assert!(matches!(&refusal, Refusal::Exhausted(message) if message.contains("--memory-max")), "{refusal}");
        }
        assert_eq!(begun.elapsed(), Duration::ZERO);
        drop(inside);
        assert!(gate.try_acquire().is_none());
        gate.narrow(1);
        assert!(gate.acquire().await.is_ok());
    }
}
