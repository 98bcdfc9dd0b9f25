//! Runs one route: connects the subscribers, changes objects, waits until every change is
//! delivered, and counts.

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
    churn::Churn,
    counts::Counts,
    error::{DemoError, READY_TIMEOUT},
    options::DemoOptions,
    progress::{Activity, Progress, Route},
    summary::{FinalState, RouteCounts},
};
use kubefan_client::{Client, ClientOptions};
use kubefan_common::proto::v1alpha1::ResourceState;
use kubefan_model::GroupVersionResource;
use kubefan_sim::apiserver::SimApiserver;

/// Limit for the delivery of the last changes.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Limit for the apiserver to notice closed watches.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time without a change of the counters after which everything counts as sent.
const QUIET: Duration = Duration::from_millis(200);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// State that both routes share.
pub(super) struct Load {
    pub(super) options: DemoOptions,
    pub(super) sim: SimApiserver,
    /// kubefan's metrics.
    pub(super) kubefan: Registry,
    pub(super) progress: Arc<Progress>,
    pub(super) churn: Churn,
    pub(super) stop: CancellationToken,
}

impl Load {
    fn counts(&self) -> Counts {
        Counts::read(&self.sim.stats(), &self.kubefan, &self.progress)
    }

    /// Starts a route and returns the counts at its start.
    pub(super) fn begin(&self, route: Route) -> Counts {
        self.progress.enter(route, Activity::Connecting);
        self.counts()
    }

    /// Waits for every subscriber's initial state, changes objects until the time that `end`
    /// computes from the start of the churn, and waits for the deliveries. Returns `None` if it is
    /// stopped before the churn.
    pub(super) async fn run(
        &mut self,
        route: Route,
        before: Counts,
        end: impl FnOnce(Instant) -> Option<Instant>,
    ) -> Result<Option<RouteCounts>, DemoError> {
        let subscribers = self.progress.subscribers();
        let progress = &self.progress;
        let stop = &self.stop;
        wait_until(READY_TIMEOUT, || progress.ready() == subscribers || stop.is_cancelled()).await;
        if self.stop.is_cancelled() {
            return Ok(None);
        }
        if self.progress.ready() < subscribers {
            return Err(DemoError::NotReady { route, ready: self.progress.ready(), subscribers });
        }
        let ready = self.counts();
        let watches = pod_watches(&self.sim);
        self.progress.enter(route, Activity::Churning);
        self.churn.run(end(Instant::now()), &self.stop).await?;
        self.progress.enter(route, Activity::Settling);
        let pod_watches = watches.max(pod_watches(&self.sim));
        match route {
            // A direct subscriber that no change concerns does not learn the newest version.
            Route::Direct => self.quiet().await,
            Route::Kubefan => {
                let version = self.sim.revision();
                wait_until(SETTLE_TIMEOUT, || self.progress.at(version) == subscribers).await;
            }
        }
        let settled = self.counts();
        Ok(Some(RouteCounts { pod_watches, initial: ready - before, churn: settled - ready }))
    }

    /// Waits until the counters stop moving.
    async fn quiet(&self) {
        let mut last = self.counts();
        let mut since = Instant::now();
        let quiet = || {
            let counts = self.counts();
            if counts != last {
                last = counts;
                since = Instant::now();
            }
            since.elapsed() >= QUIET
        };
        wait_until(SETTLE_TIMEOUT, quiet).await;
    }

    /// Waits until kubefan serves the pods, the demo is stopped, or the limit is reached.
    pub(super) async fn synced(&self, address: &str) -> Result<(), DemoError> {
        let failed = |error| DemoError::Client(Box::new(error));
        let kubefan = Client::connect(address, &ClientOptions::default()).await.map_err(failed)?;
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

    /// Returns the progress of the subscribers.
    pub(super) fn final_state(&self) -> FinalState {
        let version = self.sim.revision();
        let breaks = self.progress.breaks.load(Ordering::Relaxed);
        FinalState { version, at_version: self.progress.at(version), breaks }
    }

    /// Ends the subscribers and, on the direct route, waits until the apiserver has noticed.
    pub(super) async fn end(&self, tasks: &mut JoinSet<()>) {
        tasks.shutdown().await;
        if self.progress.phase().route == Route::Direct {
            wait_until(CLOSE_TIMEOUT, || pod_watches(&self.sim) == 0).await;
        }
    }
}

/// Number of watches on pods open at the apiserver.
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
