//! The only writer of the demo. It changes objects at a steady rate.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::{error::DemoError, progress::Progress};
use kubefan_sim::{apiserver::SimApiserver, workload::Workload};

/// Interval at which due changes are applied.
const TICK: Duration = Duration::from_millis(10);
/// After this many changes the writer yields to other tasks.
const BURST: u64 = 32;

pub(super) struct Churn {
    pub(super) sim: SimApiserver,
    pub(super) workload: Workload,
    pub(super) progress: Arc<Progress>,
    /// Changes per second.
    pub(super) rate: u32,
}

impl Churn {
    /// Creates every object. Returns early if `stop` is cancelled.
    pub(super) async fn fill(&mut self, stop: &CancellationToken) -> Result<(), DemoError> {
        let mut count = 0_u64;
        while let Some(change) = self.workload.next_setup() {
            change.apply(&self.sim).map_err(|status| DemoError::Workload(status.message))?;
            count += 1;
            if count.is_multiple_of(BURST) {
                tokio::task::yield_now().await;
                if stop.is_cancelled() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Changes objects until `end` (`None`: forever) or until `stop` is cancelled.
    ///
    /// If the machine is too busy, changes that are more than a second late are skipped. Catching
    /// up on them would be a burst instead of a steady rate.
    pub(super) async fn run(&mut self, end: Option<Instant>, stop: &CancellationToken) -> Result<(), DemoError> {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut due = 0.0_f64;
        let mut last = Instant::now();
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                _ = ticks.tick() => {}
            }
            let now = Instant::now();
            if end.is_some_and(|end| now >= end) {
                return Ok(());
            }
            let rate = f64::from(self.rate);
            due = (due + rate * (now - last).as_secs_f64()).min(rate.max(1.0));
            last = now;
            for count in 1..=due as u64 {
                self.change()?;
                if count.is_multiple_of(BURST) {
                    tokio::task::yield_now().await;
                }
            }
            due = due.fract();
        }
    }

    fn change(&mut self) -> Result<(), DemoError> {
        // This is the only writer, so the next version is known before any subscriber can receive
        // it.
        self.progress.writes.record(self.sim.revision() + 1);
        self.workload.step(&self.sim).map_err(|status| DemoError::Workload(status.message))?;
        self.progress.changes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
