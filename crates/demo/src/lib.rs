//! The demo: the same subscribers and the same changes, first directly on a simulated apiserver,
//! then through kubefan. At the end it prints what each route cost, in counts.
//!
//! Only the apiserver is simulated: HTTP watches and gRPC streams run over loopback, and kubefan
//! runs as under `serve`. Every wait has a limit, so the demo always ends.

mod churn;
mod counts;
pub mod hints;
mod lag;
pub mod live;
mod load;
mod meter;
pub mod plain;
mod process;
mod progress;
mod selectors;
mod subscribers;
mod summary;
mod text;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use kube_client::Config;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::{churn::Churn, load::Load, progress::Progress};
pub use self::{
    lag::Quantiles,
    meter::{METER_INTERVAL, Meter, Sample},
    progress::{Activity, Phase, Route},
    summary::{FinalState, RouteCounts, Summary},
};
use kubefan_client::ClientError;
use kubefan_proxy::{
    app::{App, AppError},
    config::ServeConfig,
    server::transport::listen::{Bound, listen_tcp},
    upstream::{Upstream, client::UpstreamOptions, settings::SettingsError},
};
use kubefan_sim::{
    apiserver::{SimApiserver, SimOptions},
    workload::{Workload, WorkloadOptions},
};

/// Longest churn on the direct route; a quarter of the whole duration if that is shorter.
const DIRECT_DURATION_MAX: Duration = Duration::from_secs(5);
/// Limit for every subscriber to receive its initial state.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// Open files besides those of the subscribers.
const FILES_BESIDE: u64 = 64;
/// Approximate number of pods per node.
const PODS_PER_NODE: usize = 50;
const NAMESPACES: usize = 10;

/// Configuration of the demo.
#[derive(Debug, Clone)]
pub struct DemoOptions {
    /// Number of pods.
    pub objects: usize,
    /// Number of subscribers.
    pub subscribers: usize,
    /// Changes per second.
    pub rate: u32,
    /// Time from the first subscriber to the last change; `None` for no end.
    pub duration: Option<Duration>,
    /// Seed of the pods and their changes.
    pub seed: u64,
    /// kubefan's configuration. Its upstream settings are ignored.
    pub serve: ServeConfig,
}

impl Default for DemoOptions {
    fn default() -> Self {
        let mut serve = ServeConfig::default();
        serve.cache.resources = vec!["pods".to_owned()];
        Self { objects: 5_000, subscribers: 300, rate: 200, duration: Some(Duration::from_secs(30)), seed: 1, serve }
    }
}

impl DemoOptions {
    /// Number of nodes that the pods run on.
    fn nodes(&self) -> usize {
        self.objects.div_ceil(PODS_PER_NODE).max(1)
    }
}

/// Why the demo failed.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// Each subscriber needs two open files in this process: both ends of its connection.
    #[error(
        "--subscribers {subscribers} needs about {needed} open files, and the limit is {limit}; raise it (ulimit -n {needed}) or \
         use fewer subscribers"
    )]
    OpenFiles {
        /// The requested number of subscribers.
        subscribers: usize,
        /// Open files needed.
        needed: u64,
        /// The limit on open files.
        limit: u64,
    },
    /// The simulated apiserver cannot listen on loopback.
    #[error("the simulated apiserver cannot listen on loopback: {0}")]
    Listen(#[from] io::Error),
    /// The client of the simulated apiserver cannot be built.
    #[error(transparent)]
    Upstream(#[from] SettingsError),
    /// kubefan failed.
    #[error(transparent)]
    App(#[from] AppError),
    /// kubefan ended although the demo was still running.
    #[error("kubefan ended: {0}")]
    Ended(String),
    /// A request to kubefan failed.
    #[error("a request to kubefan failed: {0}")]
    Client(Box<ClientError>),
    /// The simulated apiserver refused a change.
    #[error("the simulated apiserver refused a change: {0}")]
    Workload(String),
    /// The machine is too slow for this many subscribers or objects.
    #[error(
        "only {ready} of {subscribers} subscribers ({}) had their initial state within {READY_TIMEOUT:?}; use fewer --subscribers or --objects",
        .route.as_str()
    )]
    NotReady {
        /// The route.
        route: Route,
        /// Number of subscribers that had their initial state.
        ready: usize,
        /// Number of all subscribers.
        subscribers: usize,
    },
}

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
        let (upstream, app) = (client()?, App::bind_to(client()?, options.serve.clone()).await?);
        let stop = CancellationToken::new();
        tokio::spawn(sim.clone().serve(listener, stop.clone().cancelled_owned()));
        let (bound, progress) = (app.bound()?, Arc::new(Progress::new(options.subscribers)));
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

        let (end_kubefan, address) = (CancellationToken::new(), bound.0.to_string());
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
