//! The measurement: what a delivery costs the server, what the machine allows, and what another server needs for the same.
//!
//! The server under test is a process of its own, fresh in every run; the simulated apiserver and all subscribers are in this one. It
//! is measured from outside, through its port and `/proc`, so any program that takes the flags of `kubefan serve` can be. Machines are
//! noisy and differ: compare within one run of the tool, and shares of the floor rather than microseconds.

mod board;
pub mod child;
mod cluster;
pub mod figures;
pub mod floor;
mod laggards;
mod latency;
mod link;
mod load;
mod messages;
mod process;
mod receivers;
pub mod report;
mod rest;
mod scenario;
mod size;
mod source;
mod stage;
mod tls;

use std::{io, net::SocketAddr, path::PathBuf, pin::pin, time::Duration};

use self::{
    cluster::Cluster,
    figures::{Figure, Figures},
    rest::Endpoint,
    scenario::Case,
    source::{Simulated, Source},
    stage::Stage,
    tls::Certificate,
};
pub use self::{receivers::Windows, report::Report};
use kubefan_model::format::Encoding;
pub use kubefan_proxy::telemetry::requests::Protocol;

/// Files and connections beside those of the subscribers.
const FILES_BESIDE: u64 = 128;
/// Changes per second of `paced`.
const RATE: u32 = 200;
/// Before measuring, so long or a quarter of the measured time.
const WARM_UP_MAX: Duration = Duration::from_millis(1000);

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Scenario {
    /// Every subscriber receives every change, at full speed
    Fanout,
    /// Every subscriber receives every change, at a rate: latencies
    Paced,
    /// The initial state, for the first client and for many at once
    Snapshot,
    /// What an event costs where many watch and few want it
    Selectors,
    /// Memory per subscriber, before and after load
    Idle,
    /// Everyone leaves, changes go on, everyone comes back at once
    ResumeStorm,
    /// Some subscribers stop reading under load: the latencies of the others, and memory
    Stalled,
    /// Lists of everything by many clients at once, over HTTP
    List,
}

impl Scenario {
    /// All, in the order in which they run.
    pub const ALL: [Self; 8] = [
        Self::Fanout,
        Self::Paced,
        Self::Snapshot,
        Self::Selectors,
        Self::Idle,
        Self::ResumeStorm,
        Self::Stalled,
        Self::List,
    ];

    /// As on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fanout => "fanout",
            Self::Paced => "paced",
            Self::Snapshot => "snapshot",
            Self::Selectors => "selectors",
            Self::Idle => "idle",
            Self::ResumeStorm => "resume-storm",
            Self::Stalled => "stalled",
            Self::List => "list",
        }
    }

    /// What it does, for people.
    pub fn description(self) -> &'static str {
        match self {
            Self::Fanout => "every subscriber receives every change, at full speed",
            Self::Paced => "every subscriber receives every change, at a rate",
            Self::Snapshot => "the initial state; a delivery is one object",
            Self::Selectors => "what an event costs where many watch and few want it",
            Self::Idle => "memory per subscriber",
            Self::ResumeStorm => "everyone comes back at once and has missed so many changes (batch)",
            Self::Stalled => "everyone but those who stop reading receives every change, at a rate",
            Self::List => "lists of everything over HTTP; a delivery is one object",
        }
    }
}

/// What is sent of an object.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Projection {
    /// All of it
    #[default]
    Full,
    /// PartialObjectMetadata
    Metadata,
}

impl Projection {
    fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Metadata => "metadata",
        }
    }
}

/// A server that is measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contender {
    /// As it is called in the reports.
    pub name: String,
    /// What it is.
    pub kind: ContenderKind,
}

/// What is measured, and how it is come by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContenderKind {
    /// A program that takes the flags of `kubefan serve`, started anew for each run.
    Program(PathBuf),
    /// A server that runs already.
    Running {
        /// Its data port, without TLS.
        address: SocketAddr,
        /// Its process.
        pid: u32,
    },
    /// The apiserver of [`BenchOptions::kubeconfig`] as a watch server: JSON over HTTP/2. What the writes cost it is measured without
    /// watchers and left out.
    Apiserver {
        /// Its process.
        pid: u32,
    },
}

/// What to measure.
#[derive(Debug, Clone)]
pub struct BenchOptions {
    /// What is done, in this order.
    pub scenarios: Vec<Scenario>,
    /// Streams; where a scenario decides their number itself, that goes before.
    pub subscribers: usize,
    /// Streams that share a connection. At least 1.
    pub streams_per_connection: usize,
    /// Changes per burst, each measured by itself. Each at least 1.
    pub batches: Vec<usize>,
    /// Pods; `None` for 1,000, and 10,000 where their number is the point.
    pub objects: Option<usize>,
    /// About how many bytes of JSON a pod has; `None` as the workload makes them, 3 to 6 kB.
    pub object_bytes: Option<usize>,
    /// Changes per second in `paced` and `stalled`, and during `snapshot`; `None` for 200 and none.
    pub rate: Option<u32>,
    /// What is measured in one run of one load.
    pub duration: Duration,
    /// How often everything is repeated. At least 1.
    pub runs: usize,
    /// Clients at once in `snapshot`. At least 1.
    pub clients: usize,
    /// Numbers of views by `spec.nodeName` in `selectors`.
    pub views: Vec<usize>,
    /// Changes that a subscriber misses in `resume-storm`.
    pub missed: usize,
    /// Subscribers that stop reading in `stalled`; `None` for a twentieth.
    pub stalled: Option<usize>,
    /// Serve and receive over TLS.
    pub tls: bool,
    /// How subscribers speak to kubefan. An apiserver is always spoken to over HTTP.
    pub protocol: Protocol,
    /// How objects are encoded.
    pub encoding: Encoding,
    /// What is sent of them.
    pub projection: Projection,
    /// What the subscribers let the server send.
    pub windows: Windows,
    /// Threads that receive. At least 1.
    pub receiver_threads: usize,
    /// The servers, alternating. The first is the one in question.
    pub contenders: Vec<Contender>,
    /// A real apiserver to make the objects in, instead of a simulated one; it needs objects as they are.
    pub kubeconfig: Option<PathBuf>,
    /// This program: the floor is a process of it.
    pub program: PathBuf,
    /// Decides the pods and their changes.
    pub seed: u64,
}

impl Default for BenchOptions {
    fn default() -> Self {
        Self {
            scenarios: Scenario::ALL.to_vec(),
            subscribers: 1_000,
            streams_per_connection: 1,
            batches: vec![1, 32],
            objects: None,
            object_bytes: None,
            rate: None,
            duration: Duration::from_secs(2),
            runs: 3,
            clients: 50,
            views: vec![100, 1_000],
            missed: 500,
            stalled: None,
            tls: false,
            protocol: Protocol::Grpc,
            encoding: Encoding::Json,
            projection: Projection::Full,
            windows: Windows::KUBEFAN,
            receiver_threads: 1,
            contenders: Vec::new(),
            kubeconfig: None,
            program: PathBuf::new(),
            seed: 1,
        }
    }
}

impl BenchOptions {
    fn warm_up(&self) -> Duration {
        (self.duration / 4).min(WARM_UP_MAX)
    }

    fn stalled(&self) -> usize {
        self.stalled.unwrap_or_else(|| self.subscribers.div_ceil(20))
    }

    fn rate_of_paced(&self) -> u32 {
        self.rate.unwrap_or(RATE)
    }
}

/// Why nothing can be measured, or not to the end.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// Every connection is a file in two processes.
    #[error(
        "{scenario} with {subscribers} subscribers needs about {needed} open files, and the limit is {limit}; raise it (ulimit -n {needed}), \
         or take fewer subscribers or more --streams-per-connection"
    )]
    OpenFiles {
        /// The scenario that needs most.
        scenario: &'static str,
        /// How many it has.
        subscribers: usize,
        /// Files they take.
        needed: u64,
        /// Files there may be.
        limit: u64,
    },
    /// A server cannot be started.
    #[error("{name} did not start: {message}")]
    Start {
        /// The server.
        name: String,
        /// What it said last.
        message: String,
    },
    /// A subscriber lost its stream, or was refused one.
    #[error("a subscriber failed: {0}")]
    Subscriber(String),
    /// What was waited for did not come.
    #[error(
        "{doing}: after {limit:?} there were {there} of {expected}; take fewer subscribers or objects, or a faster machine"
    )]
    Stuck {
        /// What it was.
        doing: &'static str,
        /// How long was waited.
        limit: Duration,
        /// What was there.
        there: u64,
        /// What was expected.
        expected: u64,
    },
    /// The server took more memory than it was allowed.
    #[error("the server took {taken} bytes of memory, more than its --memory-max of {budget}")]
    Memory {
        /// Resident bytes.
        taken: u64,
        /// What it was told.
        budget: u64,
    },
    /// The apiserver refused a change.
    #[error("a change was refused: {0}")]
    Source(String),
    /// The cluster of the kubeconfig cannot be used.
    #[error("the apiserver: {0}")]
    Cluster(String),
    /// In one scenario, with one server.
    #[error("{scenario}, {server}: {error}")]
    During {
        /// Which scenario.
        scenario: &'static str,
        /// Which server.
        server: String,
        /// What went wrong.
        error: Box<BenchError>,
    },
    /// It was told to stop.
    #[error("stopped")]
    Stopped,
    /// The system refused something.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Measures everything that the options ask for. Each line that `progress` gets tells one step. When `stop` is done, what was made is
/// taken away, from a cluster too, and it ends.
///
/// # Errors
/// At the first thing that fails; every wait has a limit.
pub async fn run(
    options: &BenchOptions,
    stop: impl Future<Output = ()>,
    mut progress: impl FnMut(&str),
) -> Result<Vec<Report>, BenchError> {
    let mut stop = pin!(stop);
    check_open_files(options)?;
    let directory = tempfile::tempdir()?;
    let certificate = options.tls.then(|| Certificate::make(directory.path())).transpose()?;
    let endpoint = match &options.kubeconfig {
        Some(kubeconfig) => Some(Endpoint::read(kubeconfig).await?),
        None => None,
    };
    let mut reports: Vec<Report> = Vec::new();
    for scenario in &options.scenarios {
        for case in Case::of(*scenario, options) {
            progress(&format!("{}: making {} pods", scenario.as_str(), case.source.workload.objects));
            let mut source = match (&options.kubeconfig, &endpoint) {
                (Some(kubeconfig), Some(endpoint)) => {
                    let cluster = Cluster::begin(kubeconfig, endpoint.clone(), case.source.clone()).await?;
                    progress(&format!("  in the namespace {}", cluster.namespace()));
                    Source::Cluster(Box::new(cluster))
                }
                _ => tokio::select! {
                    simulated = Simulated::start(case.source.clone(), directory.path()) => Source::Simulated(simulated?),
                    () = &mut stop => return Err(BenchError::Stopped),
                },
            };
            let stage = |contender| Stage {
                options,
                contender,
                certificate: certificate.as_ref(),
                endpoint: endpoint.as_ref(),
                program: &options.program,
            };
            let measured = async {
                source.fill().await?;
                run_case(&case, options, stage, &mut source, &mut progress).await
            };
            let result = tokio::select! {
                result = measured => result,
                () = &mut stop => Err(BenchError::Stopped),
            };
            let finished = source.finish().await;
            reports.append(&mut result?);
            finished?;
        }
    }
    Ok(reports)
}

/// All runs of one case with all servers, alternating.
async fn run_case<'a>(
    case: &Case,
    options: &'a BenchOptions,
    stage: impl Fn(&'a Contender) -> Stage<'a>,
    source: &mut Source,
    progress: &mut impl FnMut(&str),
) -> Result<Vec<Report>, BenchError> {
    let scenario = case.scenario;
    let mut reports: Vec<Report> = Vec::new();
    for run in 1..=options.runs {
        for contender in &options.contenders {
            progress(&format!("{} {run}/{}: {}", scenario.as_str(), options.runs, contender.name));
            let samples = case.run(&stage(contender), source).await.map_err(|error| BenchError::During {
                scenario: scenario.as_str(),
                server: contender.name.clone(),
                error: Box::new(error),
            })?;
            for (variant, figures) in samples {
                progress(&line(&variant, &figures));
                match reports.iter_mut().find(|report| report.is_of(&contender.name, &variant)) {
                    Some(report) => report.add(figures),
                    None => {
                        let mut report = Report::new(scenario, &contender.name, variant);
                        report.add(figures);
                        reports.push(report);
                    }
                }
            }
        }
    }
    Ok(reports)
}

/// One measurement in a line.
fn line(variant: &scenario::Variant, figures: &Figures) -> String {
    let scenario::Variant { name, subscribers, batch } = variant;
    let mut line = format!("  {subscribers} subscribers");
    if !name.is_empty() {
        line.push_str(&format!(", {name}"));
    }
    if let Some(batch) = batch {
        line.push_str(&format!(", batch {batch}"));
    }
    let shown = [
        Figure::CpuPerDelivery,
        Figure::FloorCpuPerDelivery,
        Figure::CpuPerEvent,
        Figure::CpuPerEventAndWatcher,
        Figure::LatencyP50,
        Figure::LatencyP99,
        Figure::RssPerSubscriber,
        Figure::RssPerSubscriberAfterLoad,
        Figure::RssMax,
        Figure::LatencyP99Ratio,
        Figure::CatchUps,
        Figure::Seconds,
    ];
    for figure in shown {
        if let Some(value) = figures.get(figure) {
            let (name, digits) = figure.column();
            line.push_str(&format!(", {name} {value:.digits$}"));
        }
    }
    line
}

/// Raises the limit of open files as far as it goes, for this process and those it starts, and checks that it is enough.
fn check_open_files(options: &BenchOptions) -> Result<(), BenchError> {
    let Some(limit) = process::raise_open_files() else { return Ok(()) };
    let cases = options.scenarios.iter().flat_map(|scenario| Case::of(*scenario, options));
    let Some(case) = cases.max_by_key(|case| case.subscribers) else { return Ok(()) };
    let needed = case.subscribers.div_ceil(options.streams_per_connection) as u64 + FILES_BESIDE;
    if limit < needed {
        let (scenario, subscribers) = (case.scenario.as_str(), case.subscribers);
        return Err(BenchError::OpenFiles { scenario, subscribers, needed, limit });
    }
    Ok(())
}
