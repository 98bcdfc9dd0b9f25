//! Admission of everything that pins state while it is sent: snapshots, lists, catch-ups and backfills. A bounded number at once, the
//! others in a queue, first come, first served, and for a bounded time: a storm of starts is worked off and not answered all at once.
//!
//! Live streams are never stopped here. Under memory pressure the gate is narrowed: see [`crate::app`]'s governor.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::outcome::Refusal;
use crate::telemetry::metrics::GateMetrics;

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
    /// Permits that nobody may have now.
    held_back: Mutex<usize>,
    metrics: GateMetrics,
}

/// Leave to pin state; given back when it is dropped.
#[derive(Debug)]
pub struct Pass {
    _permit: OwnedSemaphorePermit,
    in_flight: prometheus::IntGauge,
}

impl Gate {
    /// A gate that is wide open.
    pub fn new(limits: GateLimits, metrics: GateMetrics) -> Arc<Self> {
        let permits = Arc::new(Semaphore::new(limits.snapshots_max.min(Semaphore::MAX_PERMITS)));
        Arc::new(Self { limits, permits, held_back: Mutex::new(0), metrics })
    }

    /// Waits for its turn.
    ///
    /// # Errors
    /// [`Refusal::Exhausted`] where that takes too long.
    pub async fn enter(&self) -> Result<Pass, Refusal> {
        if let Some(pass) = self.try_enter() {
            return Ok(pass);
        }
        let _waiting = Waiting::new(&self.metrics.waiting);
        let limit = self.limits.snapshot_queue_timeout;
        match timeout(limit, self.permits.clone().acquire_owned()).await {
            Ok(Ok(permit)) => Ok(self.pass(permit)),
            _ => {
                self.metrics.refused.inc();
                Err(Refusal::Exhausted(self.message()))
            }
        }
    }

    /// Enters if nobody has to be waited for.
    pub fn try_enter(&self) -> Option<Pass> {
        self.permits.clone().try_acquire_owned().ok().map(|permit| self.pass(permit))
    }

    /// As [`Self::try_enter`], for one who cannot wait; counts the refusal.
    pub fn enter_now(&self) -> Result<Pass, String> {
        self.try_enter().ok_or_else(|| {
            self.metrics.refused.inc();
            self.message()
        })
    }

    fn message(&self) -> String {
        let GateLimits { snapshots_max, snapshot_queue_timeout } = self.limits;
        let held_back = *self.held_back.lock().unwrap_or_else(PoisonError::into_inner);
        let now = snapshots_max - held_back;
        let why = if held_back > 0 { " (--memory-max is reached)" } else { "" };
        format!(
            "{now} of at most {snapshots_max} snapshots (--snapshots-max) may be sent at a time now{why}, and none ended within \
             {snapshot_queue_timeout:?} (--snapshot-queue-timeout)"
        )
    }

    fn pass(&self, permit: OwnedSemaphorePermit) -> Pass {
        self.metrics.in_flight.inc();
        Pass { _permit: permit, in_flight: self.metrics.in_flight.clone() }
    }

    /// Lets only so many in at once from now on; those who are in stay. To be called again until there are no more than that.
    pub fn narrow(&self, snapshots_max: usize) {
        let mut held_back = self.held_back.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = self.limits.snapshots_max.saturating_sub(snapshots_max);
        if wanted > *held_back {
            *held_back += self.permits.forget_permits(wanted - *held_back);
        } else {
            self.permits.add_permits(*held_back - wanted);
            *held_back = wanted;
        }
    }

    /// How many are let in at once where nothing is short.
    pub fn snapshots_max(&self) -> usize {
        self.limits.snapshots_max
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.in_flight.dec();
    }
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
        // What was in use could not be taken away before.
        gate.narrow(1);
        let only = gate.try_enter().unwrap();
        assert!(gate.try_enter().is_none());
        gate.narrow(4);
        assert_eq!(std::iter::from_fn(|| gate.try_enter()).take(9).collect::<Vec<_>>().len(), 3);
        drop(only);
    }
}
