//! The demo: the same subscribers and the same churn first directly on a simulated apiserver, then through kubefan, and what each
//! way cost, in counts.
//!
//! Everything is real but the apiserver: HTTP watches and gRPC streams over loopback, kubefan as `serve` runs it. Every wait has a
//! limit, so that the demo ends by itself.

mod board;
mod churn;
mod contrast;
mod counts;
pub mod hints;
mod lag;
pub mod live;
mod load;
mod meter;
pub mod plain;
mod process;
mod selectors;
mod subscribers;
mod text;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use kube_client::Config;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::{board::Board, churn::Churn, load::Load};
pub use self::{
    board::{Activity, Route, Stage},
    contrast::{Contrast, Finish, RouteCounts},
    lag::Quantiles,
    meter::{METER_INTERVAL, Meter, Sample},
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

/// How long the churn runs on the direct route at most; a quarter of the whole if that is shorter.
const DIRECT_DURATION_MAX: Duration = Duration::from_secs(5);
/// For every subscriber to receive its initial state.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// Files and connections beside those of the subscribers.
const FILES_BESIDE: u64 = 64;
/// Pods per node, about.
const PODS_PER_NODE: usize = 50;
const NAMESPACES: usize = 10;

/// What to show.
#[derive(Debug, Clone)]
pub struct DemoOptions {
    /// Pods.
    pub objects: usize,
    /// Subscribers.
    pub subscribers: usize,
    /// Changes per second.
    pub rate: u32,
    /// From the first subscriber to the last change; `None` for without end.
    pub duration: Option<Duration>,
    /// Decides the pods and their changes.
    pub seed: u64,
    /// How kubefan serves. How it reaches its apiserver is not read.
    pub serve: ServeConfig,
}

impl Default for DemoOptions {
    fn default() -> Self {
        let serve = ServeConfig { resources: vec!["pods".to_owned()], ..ServeConfig::default() };
        Self { objects: 5_000, subscribers: 300, rate: 200, duration: Some(Duration::from_secs(30)), seed: 1, serve }
    }
}

impl DemoOptions {
    /// How many nodes the pods run on.
    fn nodes(&self) -> usize {
        self.objects.div_ceil(PODS_PER_NODE).max(1)
    }
}

/// Why the demo cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// Every subscriber needs two connections' ends in this process.
    #[error(
        "--subscribers {subscribers} needs about {needed} open files, and the limit is {limit}; raise it (ulimit -n {needed}) or \
         take fewer subscribers"
    )]
    OpenFiles {
        /// As it was asked for.
        subscribers: usize,
        /// Files it takes.
        needed: u64,
        /// Files there may be.
        limit: u64,
    },
    /// The simulated apiserver cannot listen on loopback.
    #[error("the simulated apiserver cannot listen on loopback: {0}")]
    Listen(#[from] io::Error),
    /// No client of the simulated apiserver.
    #[error(transparent)]
    Upstream(#[from] SettingsError),
    /// kubefan cannot run.
    #[error(transparent)]
    App(#[from] AppError),
    /// kubefan has ended.
    #[error("kubefan ended: {0}")]
    Ended(String),
    /// kubefan cannot be asked.
    #[error("asking kubefan: {0}")]
    Client(Box<ClientError>),
    /// The simulated apiserver refused a change.
    #[error("the simulated apiserver refused a change: {0}")]
    Workload(String),
    /// The machine is too slow for so many.
    #[error(
        "only {ready} of {subscribers} subscribers ({}) had their initial state within {READY_TIMEOUT:?}; take fewer --subscribers or --objects",
        .route.as_str()
    )]
    NotReady {
        /// Which way.
        route: Route,
        /// Those that had it.
        ready: usize,
        /// All.
        subscribers: usize,
    },
}

/// A demo whose ports are bound, and in which nothing has happened yet.
pub struct Demo {
    options: DemoOptions,
    sim: SimApiserver,
    sim_address: SocketAddr,
    _serving: DropGuard,
    upstream: Upstream,
    app: App,
    bound: (Bound, Bound),
    board: Arc<Board>,
}

impl Demo {
    /// Starts the simulated apiserver on a port of its own and binds kubefan's ports.
    ///
    /// # Errors
    /// When a port is taken, or this process may not open enough connections.
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
        // Two, so that the direct subscribers are not in kubefan's metrics.
        let (upstream, app) = (client()?, App::bind_to(client()?, options.serve.clone()).await?);
        let stop = CancellationToken::new();
        tokio::spawn(sim.clone().serve(listener, stop.clone().cancelled_owned()));
        let (bound, board) = (app.bound()?, Arc::new(Board::new(options.subscribers)));
        Ok(Self { options, sim, sim_address, _serving: stop.drop_guard(), upstream, app, bound, board })
    }

    /// Where kubefan's data port and admin port are.
    pub fn bound(&self) -> &(Bound, Bound) {
        &self.bound
    }

    /// Where the simulated apiserver is.
    pub fn apiserver(&self) -> SocketAddr {
        self.sim_address
    }

    /// Measures the demo while it runs.
    pub fn meter(&self) -> Meter {
        Meter::new(self.options.clone(), self.board.clone(), self.sim.clone(), self.app.metrics().clone())
    }

    /// Runs both routes; `stop` ends it early.
    ///
    /// # Errors
    /// When kubefan fails or the machine is too slow.
    pub async fn run(self, stop: CancellationToken) -> Result<Contrast, DemoError> {
        let Self { options, sim, upstream, app, bound, board, _serving, .. } = self;
        let workload = WorkloadOptions {
            objects: options.objects,
            nodes: options.nodes(),
            namespaces: NAMESPACES,
            apps: selectors::APPS,
        };
        let workload = Workload::new(options.seed, workload);
        let churn = Churn { sim: sim.clone(), workload, board: board.clone(), rate: options.rate };
        let mut contrast = Contrast {
            subscribers: options.subscribers,
            objects: options.objects,
            direct: None,
            kubefan: None,
            finish: None,
        };
        let kubefan = app.metrics().clone();
        let mut load = Load { options, sim, kubefan, board, churn, stop };
        load.churn.fill(&load.stop).await?;
        if load.stop.is_cancelled() {
            return Ok(contrast);
        }
        let start = Instant::now();

        let direct = load.options.duration.map_or(DIRECT_DURATION_MAX, |whole| (whole / 4).min(DIRECT_DURATION_MAX));
        let before = load.begin(Route::Direct);
        let mut tasks = subscribers::direct(&upstream, &load.options, &load.board);
        contrast.direct = load.run(Route::Direct, before, |ready| Some(ready + direct)).await?;
        load.end(&mut tasks).await;
        if load.stop.is_cancelled() {
            return Ok(contrast);
        }

        let (end_kubefan, address) = (CancellationToken::new(), bound.0.to_string());
        let before = load.begin(Route::Kubefan);
        let mut serving = tokio::spawn(app.serve(end_kubefan.clone().cancelled_owned()));
        let planned = load.options.duration.map(|whole| (start + whole, whole / 2));
        let through = async {
            load.synced(&address).await?;
            let mut tasks = subscribers::through_kubefan(&address, &load.options, &load.board);
            // However long it took to come here, half of the time is kubefan's.
            let end = |ready| planned.map(|(end, least)| end.max(ready + least));
            contrast.kubefan = load.run(Route::Kubefan, before, end).await?;
            contrast.finish = contrast.kubefan.map(|_| load.finish());
            load.end(&mut tasks).await;
            Ok(contrast)
        };
        let result = tokio::select! {
            result = through => result,
            ended = &mut serving => return Err(match ended {
                Ok(Err(error)) => error.into(),
                Ok(Ok(())) => DemoError::Ended("nobody asked it to".to_owned()),
                Err(panic) => DemoError::Ended(panic.to_string()),
            }),
        };
        end_kubefan.cancel();
        // Bounded by kubefan's own drain timeout; how it ended is of no more interest.
        let _ = serving.await;
        result
    }
}
