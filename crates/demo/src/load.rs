//! One route from its first subscriber to its last delivery: connect, change objects, let everything arrive, count.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use prometheus::Registry;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use super::{
    Activity, DemoError, DemoOptions, Finish, READY_TIMEOUT, Route, RouteCounts, board::Board, churn::Churn,
    counts::Counts,
};
use kubefan_client::{ClientOptions, ListWatch};
use kubefan_common::proto::v1alpha1::ResourceState;
use kubefan_model::GroupVersionResource;
use kubefan_sim::apiserver::SimApiserver;

/// For what is under way to arrive.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);
/// For watches that were ended to be noticed by the apiserver.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// The apiserver has been silent for so long: everything was sent.
const QUIET: Duration = Duration::from_millis(200);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The parts that both routes use.
pub(super) struct Load {
    pub(super) options: DemoOptions,
    pub(super) sim: SimApiserver,
    /// kubefan's metrics.
    pub(super) kubefan: Registry,
    pub(super) board: Arc<Board>,
    pub(super) churn: Churn,
    pub(super) stop: CancellationToken,
}

impl Load {
    fn counts(&self) -> Counts {
        Counts::read(&self.sim.stats(), &self.kubefan, &self.board)
    }

    /// Starts the count of a route.
    pub(super) fn begin(&self, route: Route) -> Counts {
        self.board.enter(route, Activity::Connecting);
        self.counts()
    }

    /// Waits for the initial state, changes objects until `end` says, and lets everything arrive. `None` if stopped before that.
    pub(super) async fn run(
        &mut self,
        route: Route,
        before: Counts,
        end: impl FnOnce(Instant) -> Option<Instant>,
    ) -> Result<Option<RouteCounts>, DemoError> {
        let subscribers = self.board.subscribers();
        let (board, stop) = (&self.board, &self.stop);
        wait_until(READY_TIMEOUT, || board.ready() == subscribers || stop.is_cancelled()).await;
        if self.stop.is_cancelled() {
            return Ok(None);
        }
        if self.board.ready() < subscribers {
            return Err(DemoError::NotReady { route, ready: self.board.ready(), subscribers });
        }
        let (ready, watches) = (self.counts(), pod_watches(&self.sim));
        self.board.enter(route, Activity::Churning);
        self.churn.run(end(Instant::now()), &self.stop).await?;
        self.board.enter(route, Activity::Settling);
        let pod_watches = watches.max(pod_watches(&self.sim));
        match route {
            // These hear of a version only by their own events.
            Route::Direct => self.quiet().await,
            Route::Kubefan => {
                let version = self.sim.revision();
                wait_until(SETTLE_TIMEOUT, || self.board.at(version) == subscribers).await;
            }
        }
        let settled = self.counts();
        Ok(Some(RouteCounts { pod_watches, initial: ready - before, churn: settled - ready }))
    }

    /// Waits until the apiserver sends no more.
    async fn quiet(&self) {
        let (mut last, mut since) = (self.counts(), Instant::now());
        let quiet = || {
            let counts = self.counts();
            if counts != last {
                (last, since) = (counts, Instant::now());
            }
            since.elapsed() >= QUIET
        };
        wait_until(SETTLE_TIMEOUT, quiet).await;
    }

    /// Waits until kubefan serves the pods, or until the demo is stopped.
    pub(super) async fn synced(&self, address: &str) -> Result<(), DemoError> {
        let failed = |error| DemoError::Client(Box::new(error));
        let kubefan = ListWatch::connect(address, &ClientOptions::default()).await.map_err(failed)?;
        let start = Instant::now();
        while start.elapsed() < READY_TIMEOUT && !self.stop.is_cancelled() {
            let resources = kubefan.list_resources().await.map_err(failed)?;
            if resources.iter().any(|resource| resource.name == "pods" && resource.state() == ResourceState::Synced) {
                break;
            }
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// How far every subscriber has come.
    pub(super) fn finish(&self) -> Finish {
        let version = self.sim.revision();
        let breaks = self.board.breaks.load(Ordering::Relaxed);
        Finish { version, at_version: self.board.at(version), breaks }
    }

    /// Ends the subscribers, and waits until the apiserver has noticed.
    pub(super) async fn end(&self, tasks: &mut JoinSet<()>) {
        tasks.shutdown().await;
        if self.board.stage().route == Route::Direct {
            wait_until(CLOSE_TIMEOUT, || pod_watches(&self.sim) == 0).await;
        }
    }
}

/// Watches on pods that the apiserver has open.
pub(super) fn pod_watches(sim: &SimApiserver) -> u64 {
    let pods = GroupVersionResource::new("", "v1", "pods");
    sim.stats().open_watches.get(&pods).copied().unwrap_or_default()
}

async fn wait_until(limit: Duration, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() && start.elapsed() < limit {
        sleep(POLL_INTERVAL).await;
    }
}
