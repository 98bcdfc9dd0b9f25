//! Faults that only harm together with the next step: certain writes, restarts, or reads.

use std::time::Duration;

use kubefan_sim::apiserver::{Fault, FaultRule, Verb};
use rand::RngExt;
use tokio::time::Instant;

use super::{Faults, REWIND_PAUSE};
use crate::workload::Workload;

/// Time for every replica to notice another schema and to read the pods again, and then for a
/// second change or a restart before the next version brings the new bytes.
const SCHEMA_PAUSE: Duration = Duration::from_secs(80);
/// Time for every replica to read the pods again, longer than a page of a list is requested again.
const LISTS_FAIL: Duration = Duration::from_secs(110);
/// The latency of a link over which lists take seconds.
const SLOW_LIST_LATENCY: Duration = Duration::from_millis(300);
/// The longest time that a list takes while no fault is active.
const LIST_TIME: Duration = Duration::from_secs(5);
/// Interval at which programs start over after a change of the schema, in seconds.
const START_OVER_SECONDS: u64 = 8;
/// Time in which a replica does not see a change, because its watch is half-open.
const UNSEEN_TIME: Duration = Duration::from_secs(10);

impl Faults {
    /// Changes one pod while the watch of a replica is half-open, so that it does not see the
    /// change, and lets programs start over, which must not get the state before.
    pub(super) async fn change_unseen(&mut self, workload: &mut Workload) {
        let world = self.world.clone();
        let comes_and_goes = self.random.random_bool(0.5);
        world.note(format!("a pod is created, and deleted again: {comes_and_goes}; programs start over"));
        workload.create_last(&world.sim, &mut world.truth.lock().unwrap(), comes_and_goes);
        for _ in 0..UNSEEN_TIME.as_secs() / 2 {
            for control in &world.controls {
                control.start_over();
            }
            self.pause(Duration::from_secs(2)).await;
        }
    }

    /// Gives all pods other bytes. Returns whether it did: not after a restore from a backup, which
    /// has older bytes.
    pub(crate) async fn change_schema(&mut self, workload: &mut Workload) -> bool {
        let world = self.world.clone();
        if world.truth.lock().unwrap().epochs.len() > 1 {
            return false;
        }
        let failures = if self.random.random_bool(0.4) { self.random.random_range(1..8) } else { 0 };
        world.note(format!("schema changed, and {failures} lists fail"));
        let before = world.change_schema(None);
        let apiserver = &world.apiservers[self.random.random_range(0..world.apiservers.len())];
        apiserver.set_fault(FaultRule {
            fault: Fault::InternalError,
            verb: Some(Verb::List),
            resource: None,
            requests: failures,
        });
        let node = &world.nodes[self.random.random_range(0..world.nodes.len())];
        match self.random.random_range(0..8u32) {
            0 => {
                self.pause(SCHEMA_PAUSE / 2).await;
                world.note("the schema is as before");
                world.change_schema(Some(before));
                self.pause(SCHEMA_PAUSE / 2).await;
            }
            1..=3 if node.is_running() => {
                self.pause(SCHEMA_PAUSE / 2).await;
                world.note("a kubefan restarts");
                node.kill();
                node.start();
                self.pause(SCHEMA_PAUSE / 2).await;
            }
            4 => {
                world.note("only other resources are written, and programs start over again and again");
                node.transport.route.delay(SLOW_LIST_LATENCY);
                for second in 0..SCHEMA_PAUSE.as_secs() / 2 {
                    workload.write_other(&world.sim, &mut world.truth.lock().unwrap());
                    if second % START_OVER_SECONDS == 0 {
                        for control in &world.controls {
                            control.start_over();
                        }
                    }
                    self.pause(Duration::from_secs(1)).await;
                }
                node.transport.route.delay(Duration::ZERO);
            }
            5 => {
                world.note(format!("every list fails for {LISTS_FAIL:?}"));
                world.fail_lists();
                self.pause(LISTS_FAIL).await;
                world.clear_faults();
            }
            _ => {}
        }
        true
    }

    /// Waits until every cache has asked upstream again, and then writes other resources until the
    /// cluster has passed `version`.
    pub(super) async fn overtake(&mut self, version: u64, workload: &mut Workload) {
        let world = self.world.clone();
        let restored_at = Instant::now();
        let has_noticed = || world.nodes.iter().all(|node| node.transport.all_asked_since(restored_at));
        while !has_noticed() && restored_at.elapsed() < REWIND_PAUSE {
            self.pause(Duration::from_secs(1)).await;
        }
        self.pause(LIST_TIME).await;
        while world.sim.revision() <= version {
            workload.write_other(&world.sim, &mut world.truth.lock().unwrap());
        }
    }
}
