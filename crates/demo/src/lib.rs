//! The demo: the same subscribers and the same changes, first directly on a simulated apiserver,
//! then through kubefan. At the end it prints the cost of each route, in counts.
//!
//! Only the apiserver is simulated: HTTP watches and gRPC streams run over loopback, and kubefan
//! runs as under `serve`. Every wait has a limit, so the demo always ends.

mod churn;
mod counts;
mod error;
pub mod hints;
mod lag;
pub mod live;
mod load;
mod meter;
mod options;
pub mod plain;
mod process;
mod progress;
mod selectors;
mod subscribers;
mod summary;
mod text;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use kube_client::Config;
use kubefan_app::App;
use kubefan_server::transport::listen::{Bound, listen_tcp};
use kubefan_sim::{
    apiserver::{SimApiserver, SimOptions},
    workload::{Workload, WorkloadOptions},
};
use kubefan_upstream::{Upstream, client::UpstreamOptions};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::{churn::Churn, load::Load, progress::Progress};
pub use self::{
    error::DemoError,
    lag::Quantiles,
    meter::{METER_INTERVAL, Meter, Sample},
    options::DemoOptions,
    progress::{Activity, Phase, Route},
    summary::{FinalState, RouteCounts, Summary},
};

/// Longest churn on the direct route; a quarter of the whole duration if that is shorter.
const DIRECT_DURATION_MAX: Duration = Duration::from_secs(5);
/// Open files besides those of the subscribers.
const FILES_BESIDE: u64 = 64;
const NAMESPACES: usize = 10;

/// A demo whose ports are bound, but which has not started.
pub struct Demo {
    options: DemoOptions,
    sim: SimApiserver,
    sim_address: SocketAddr,
    _serving: DropGuard,
    upstream: Upstream,
    app: App,
    bound: (Bound, Bound),
    progress: Arc<Progress>,
}

impl Demo {
    /// Starts the simulated apiserver on a free port and binds kubefan's ports.
    ///
    /// # Errors
    /// If a port is in use, or if the limit on open files is too low for the subscribers.
    pub async fn bind(options: DemoOptions) -> Result<Self, DemoError> {
        let needed = options.subscribers as u64 * 2 + FILES_BESIDE;
        match process::open_files_max() {
            Some(limit) if limit < needed => {
                return Err(DemoError::OpenFiles { subscribers: options.subscribers, needed, limit });
            }
            _ => {}
        }
        let listener = listen_tcp(([127, 0, 0, 1], 0).into())?;
        let sim_address = listener.local_addr()?;
        let sim = SimApiserver::new(SimOptions { seed: options.seed, ..SimOptions::default() });
        let url: http::Uri = format!("http://{sim_address}").parse().map_err(io::Error::other)?;
        let client = || Upstream::from_config(Config::new(url.clone()), UpstreamOptions::default());
        // Two clients, so that kubefan's metrics do not include the direct subscribers.
        let upstream = client()?;
        let app = App::bind_to(client()?, options.serve.clone()).await?;
        let stop = CancellationToken::new();
        tokio::spawn(sim.clone().serve(listener, stop.clone().cancelled_owned()));
        let bound = app.bound()?;
        let progress = Arc::new(Progress::new(options.subscribers));
        Ok(Self { options, sim, sim_address, _serving: stop.drop_guard(), upstream, app, bound, progress })
    }

    /// The addresses of kubefan's data port and admin port.
    pub fn bound(&self) -> &(Bound, Bound) {
        &self.bound
    }

    /// The address of the simulated apiserver.
    pub fn apiserver(&self) -> SocketAddr {
        self.sim_address
    }

    /// Returns a meter for the running demo.
    pub fn meter(&self) -> Meter {
        Meter::new(self.options.clone(), self.progress.clone(), self.sim.clone(), self.app.metrics().clone())
    }

    /// Runs both routes and returns the summary. Cancelling `stop` ends the demo early.
    ///
    /// # Errors
    /// If kubefan fails or the machine is too slow.
    pub async fn run(self, stop: CancellationToken) -> Result<Summary, DemoError> {
        let Self { options, sim, upstream, app, bound, progress, _serving, .. } = self;
        let workload = WorkloadOptions {
            objects: options.objects,
            nodes: options.nodes(),
            namespaces: NAMESPACES,
            apps: selectors::APPS,
        };
        let workload = Workload::new(options.seed, workload);
        let churn = Churn { sim: sim.clone(), workload, progress: progress.clone(), rate: options.rate };
        let mut summary = Summary {
            subscribers: options.subscribers,
            objects: options.objects,
            direct: None,
            kubefan: None,
            final_state: None,
        };
        let kubefan = app.metrics().clone();
        let mut load = Load { options, sim, kubefan, progress, churn, stop };
        load.churn.fill(&load.stop).await?;
        if load.stop.is_cancelled() {
            return Ok(summary);
        }
        let start = Instant::now();

        let direct = load.options.duration.map_or(DIRECT_DURATION_MAX, |whole| (whole / 4).min(DIRECT_DURATION_MAX));
        let before = load.begin(Route::Direct);
        let mut tasks = subscribers::direct(&upstream, &load.options, &load.progress);
        summary.direct = load.run(Route::Direct, before, |ready| Some(ready + direct)).await?;
        load.end(&mut tasks).await;
        if load.stop.is_cancelled() {
            return Ok(summary);
        }

        let end_kubefan = CancellationToken::new();
        let address = bound.0.to_string();
        let before = load.begin(Route::Kubefan);
        let mut serving = tokio::spawn(app.serve(end_kubefan.clone().cancelled_owned()));
        let planned = load.options.duration.map(|whole| (start + whole, whole / 2));
        let through = async {
            load.synced(&address).await?;
            let mut tasks = subscribers::through_kubefan(&address, &load.options, &load.progress);
            // kubefan gets at least half of the whole duration, even if setup took long.
            let end = |ready| planned.map(|(end, least)| end.max(ready + least));
            summary.kubefan = load.run(Route::Kubefan, before, end).await?;
            summary.final_state = summary.kubefan.map(|_| load.final_state());
            load.end(&mut tasks).await;
            Ok(summary)
        };
        let result = tokio::select! {
            result = through => result,
            ended = &mut serving => return Err(match ended {
                Ok(Err(error)) => error.into(),
                Ok(Ok(())) => DemoError::Ended("it stopped without being asked to".to_owned()),
                Err(panic) => DemoError::Ended(panic.to_string()),
            }),
        };
        end_kubefan.cancel();
        // kubefan's drain timeout bounds this wait. Its result no longer matters.
        let _ = serving.await;
        result
    }
}
