//! Changes at a steady rate, made by the only writer.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::{DemoError, board::Board};
use kubefan_sim::{apiserver::SimApiserver, workload::Workload};

/// How often what is due is made.
const TICK: Duration = Duration::from_millis(10);
/// After so many changes the other tasks get their turn.
const BURST: u64 = 32;

pub(super) struct Churn {
    pub(super) sim: SimApiserver,
    pub(super) workload: Workload,
    pub(super) board: Arc<Board>,
    /// Changes per second.
    pub(super) rate: u32,
}

impl Churn {
    /// Makes every object; ends early when `stop` is cancelled.
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

    /// Changes objects until `end` (`None`: without end) or until `stop` is cancelled.
    ///
    /// Changes that a busy machine did not get to within a second are left out: a pile of them would be a burst, not a rate.
    pub(super) async fn run(&mut self, end: Option<Instant>, stop: &CancellationToken) -> Result<(), DemoError> {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let (mut owed, mut last) = (0.0_f64, Instant::now());
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
            owed = (owed + rate * (now - last).as_secs_f64()).min(rate.max(1.0));
            last = now;
            for count in 1..=owed as u64 {
                self.change()?;
                if count.is_multiple_of(BURST) {
                    tokio::task::yield_now().await;
                }
            }
            owed = owed.fract();
        }
    }

    fn change(&mut self) -> Result<(), DemoError> {
        // Nobody else writes, so the version is known before it can be received.
        self.board.writes.note(self.sim.revision() + 1);
        self.workload.step(&self.sim).map_err(|status| DemoError::Workload(status.message))?;
        self.board.changes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
