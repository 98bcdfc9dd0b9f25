//! `kubefan bench` measures the cost of a delivery, the floor that the machine allows, and the cost
//! of the same work in another server.
//!
//! The server under test is a separate process, started anew for each run. The simulated apiserver
//! and all subscribers run in this process. The server is measured from outside, through its port
//! and `/proc`, so any program that takes the flags of `kubefan serve` can be measured.
//!
//! Machines are noisy and differ from each other: compare servers within one invocation, and
//! compare shares of the floor rather than microseconds.

pub mod child;
mod cluster;
mod connector;
mod counters;
pub mod figures;
pub mod floor;
mod latency;
mod load;
mod messages;
mod process;
mod receivers;
pub mod report;
mod rest;
mod run;
mod scenario;
mod size;
mod source;
mod stalled_subscribers;
mod tls;

use std::{io, net::SocketAddr, path::PathBuf, pin::pin, time::Duration};

use self::{
    cluster::Cluster,
    figures::{Figure, Figures},
    rest::Endpoint,
    run::Run,
    scenario::Case,
    source::{Simulated, Source},
    tls::Certificate,
};
pub use self::{receivers::Windows, report::Report};
use kubefan_model::format::Encoding;
pub use kubefan_proxy::telemetry::requests::Protocol;

/// Open files that this process needs in addition to the connections of the subscribers.
const OPEN_FILES_BASE: u64 = 128;
/// Default rate of `paced` and `stalled`, in changes per second.
const RATE: u32 = 200;
/// Longest warm-up before a measurement. It otherwise takes a quarter of the measured time.
const WARM_UP_MAX: Duration = Duration::from_millis(1000);

/// What the benchmark does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Scenario {
    /// Every subscriber receives every change, at full speed
    Fanout,
    /// Every subscriber receives every change, at a fixed rate: latencies
    Paced,
    /// The initial state, for one client and for many at once
    Snapshot,
    /// The cost of an event that few of many watchers match
    Selectors,
    /// Memory per subscriber, before and after load
    Idle,
    /// All subscribers disconnect, changes continue, all reconnect at once
    ResumeStorm,
    /// Some subscribers stop reading under load: the latencies of the others, and memory
    Stalled,
    /// Lists of all pods by many clients at once, over HTTP
    List,
}

impl Scenario {
    /// All scenarios, in the order in which they run.
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

    /// The name on the command line and in reports.
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

    /// One line for the header of the table.
    pub fn description(self) -> &'static str {
        match self {
            Self::Fanout => "every subscriber receives every change, at full speed",
            Self::Paced => "every subscriber receives every change, at a rate",
            Self::Snapshot => "the initial state; a delivery is one object",
            Self::Selectors => "the cost of an event that few of many watchers match",
            Self::Idle => "memory per subscriber",
            Self::ResumeStorm => "all subscribers reconnect at once after missing BATCH changes",
            Self::Stalled => "some subscribers stop reading; the others receive every change, at a rate",
            Self::List => "lists of all pods over HTTP; a delivery is one object",
        }
    }
}

/// The part of each object that the server sends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Projection {
    /// The whole object
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

/// A server to measure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerSpec {
    /// Its name in the reports.
    pub name: String,
    /// How it is started or reached.
    pub kind: ServerKind,
}

/// How a server under test is started or reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerKind {
    /// A program that takes the flags of `kubefan serve`. It is started anew for each run.
    Program(PathBuf),
    /// A server that is already running.
    Running {
        /// Its data port, without TLS.
        address: SocketAddr,
        /// Its process id, on this machine.
        pid: u32,
    },
    /// The apiserver of [`BenchOptions::kubeconfig`] as a watch server: JSON over HTTP/2. The cost
    /// of the writes is measured without watchers and subtracted.
    Apiserver {
        /// Its process id, on this machine.
        pid: u32,
    },
}

/// What to measure.
#[derive(Debug, Clone)]
pub struct BenchOptions {
    /// The scenarios to run, in this order.
    pub scenarios: Vec<Scenario>,
    /// Number of subscribers (watch streams). Some scenarios set their own number instead.
    pub subscribers: usize,
    /// Streams per connection. At least 1.
    pub streams_per_connection: usize,
    /// Changes per burst. Each size is measured separately. Each at least 1.
    pub batches: Vec<usize>,
    /// Number of pods; `None` for 1,000, or 10,000 in `snapshot` and `list`.
    pub objects: Option<usize>,
    /// Approximate JSON size of a pod in bytes; `None` for the workload's own, 3 to 6 kB.
    pub object_bytes: Option<usize>,
    /// Changes per second in `paced` and `stalled` (`None`: 200) and during `snapshot` (`None`: no
    /// changes).
    pub rate: Option<u32>,
    /// How long each load is measured.
    pub duration: Duration,
    /// Number of repetitions. At least 1.
    pub runs: usize,
    /// Concurrent clients in `snapshot` and `list`. At least 1.
    pub clients: usize,
    /// Numbers of views by `spec.nodeName` in `selectors`. Each is measured separately.
    pub views: Vec<usize>,
    /// Changes that each subscriber misses in `resume-storm`.
    pub missed: usize,
    /// Subscribers that stop reading in `stalled`; `None` for one in twenty.
    pub stalled: Option<usize>,
    /// Use TLS between server and subscribers.
    pub tls: bool,
    /// The protocol between subscribers and kubefan. An apiserver is always measured over HTTP.
    pub protocol: Protocol,
    /// The encoding of objects.
    pub encoding: Encoding,
    /// The part of each object that is sent.
    pub projection: Projection,
    /// The flow-control windows of the subscribers.
    pub windows: Windows,
    /// Threads that run the subscribers. At least 1.
    pub receiver_threads: usize,
    /// The servers to measure, in alternation.
    pub servers: Vec<ServerSpec>,
    /// A real apiserver to create the pods in, instead of a simulated one. It cannot be combined
    /// with `object_bytes`.
    pub kubeconfig: Option<PathBuf>,
    /// The path of this program, which also runs the floor as a separate process.
    pub program: PathBuf,
    /// Seed of the workload. The same seed produces the same pods and changes.
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
            servers: Vec::new(),
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

    fn paced_rate(&self) -> u32 {
        self.rate.unwrap_or(RATE)
    }
}

/// Why a measurement could not start or finish.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The limit of open files is too low: every connection needs one in this process and one in
    /// the server.
    #[error(
        "{scenario} with {subscribers} subscribers needs about {needed} open files, and the limit is {limit}; raise it (ulimit -n {needed}), \
         or use fewer subscribers or more --streams-per-connection"
    )]
    OpenFiles {
        /// The scenario that needs the most.
        scenario: &'static str,
        /// Its number of subscribers.
        subscribers: usize,
        /// Number of open files it needs.
        needed: u64,
        /// The limit of open files.
        limit: u64,
    },
    /// A server did not start.
    #[error("{name} did not start: {message}")]
    Start {
        /// The name of the server.
        name: String,
        /// The last line it printed.
        message: String,
    },
    /// A subscriber lost its stream, or the server refused it.
    #[error("a subscriber failed: {0}")]
    Subscriber(String),
    /// A wait timed out.
    #[error(
        "{doing}: only {reached} of {expected} after {limit:?}; use fewer subscribers or objects, or a faster machine"
    )]
    Stuck {
        /// What the benchmark was waiting for.
        doing: &'static str,
        /// The time limit.
        limit: Duration,
        /// The count that was reached.
        reached: u64,
        /// The count that was expected.
        expected: u64,
    },
    /// The server used more memory than its limit.
    #[error("the server used {used} bytes of memory, more than its --memory-max of {budget}")]
    Memory {
        /// Resident memory in bytes.
        used: u64,
        /// The value of `--memory-max`, in bytes.
        budget: u64,
    },
    /// The apiserver refused a change.
    #[error("the apiserver refused a change: {0}")]
    Source(String),
    /// The cluster of the kubeconfig cannot be used.
    #[error("the apiserver: {0}")]
    Cluster(String),
    /// An error together with the scenario and the server it occurred in.
    #[error("{scenario}, {server}: {error}")]
    During {
        /// The name of the scenario.
        scenario: &'static str,
        /// The name of the server.
        server: String,
        /// The error itself.
        error: Box<BenchError>,
    },
    /// The `stop` future of [`run()`] completed.
    #[error("stopped")]
    Stopped,
    /// The operating system reported an error.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Runs all measurements that the options select. `progress` receives one line per step. When
/// `stop` completes, the run ends early; pods and namespaces created in a cluster are deleted in
/// either case.
///
/// # Errors
/// At the first failure. Every wait has a time limit.
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
            progress(&format!("{}: creating {} pods", scenario.as_str(), case.source.workload.objects));
            let mut source = match (&options.kubeconfig, &endpoint) {
                (Some(kubeconfig), Some(endpoint)) => {
                    let cluster = Cluster::create(kubeconfig, endpoint.clone(), case.source.clone()).await?;
                    progress(&format!("  in the namespace {}", cluster.namespace()));
                    Source::Cluster(Box::new(cluster))
                }
                _ => tokio::select! {
                    simulated = Simulated::start(case.source.clone(), directory.path()) => Source::Simulated(simulated?),
                    () = &mut stop => return Err(BenchError::Stopped),
                },
            };
            let run_of = |spec| Run {
                options,
                spec,
                certificate: certificate.as_ref(),
                endpoint: endpoint.as_ref(),
                program: &options.program,
            };
            let measured = async {
                source.fill().await?;
                run_case(&case, options, run_of, &mut source, &mut progress).await
            };
            let result = tokio::select! {
                result = measured => result,
                () = &mut stop => Err(BenchError::Stopped),
            };
            let cleaned_up = source.clean_up().await;
            reports.append(&mut result?);
            cleaned_up?;
        }
    }
    Ok(reports)
}

/// Runs one case `options.runs` times, alternating between the servers.
async fn run_case<'a>(
    case: &Case,
    options: &'a BenchOptions,
    run_of: impl Fn(&'a ServerSpec) -> Run<'a>,
    source: &mut Source,
    progress: &mut impl FnMut(&str),
) -> Result<Vec<Report>, BenchError> {
    let scenario = case.scenario;
    let mut reports: Vec<Report> = Vec::new();
    for number in 1..=options.runs {
        for spec in &options.servers {
            progress(&format!("{} {number}/{}: {}", scenario.as_str(), options.runs, spec.name));
            let samples = case.measure(&run_of(spec), source).await.map_err(|error| BenchError::During {
                scenario: scenario.as_str(),
                server: spec.name.clone(),
                error: Box::new(error),
            })?;
            for (variant, figures) in samples {
                progress(&line(&variant, &figures));
                match reports.iter_mut().find(|report| report.is_of(&spec.name, &variant)) {
                    Some(report) => report.add(figures),
                    None => {
                        let mut report = Report::new(scenario, &spec.name, variant);
                        report.add(figures);
                        reports.push(report);
                    }
                }
            }
        }
    }
    Ok(reports)
}

/// Formats one measurement as one line.
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

/// Raises the soft limit of open files to the hard limit, for this process and its children, and
/// checks that it suffices.
fn check_open_files(options: &BenchOptions) -> Result<(), BenchError> {
    let Some(limit) = process::raise_open_files() else { return Ok(()) };
    let cases = options.scenarios.iter().flat_map(|scenario| Case::of(*scenario, options));
    let Some(case) = cases.max_by_key(|case| case.subscribers) else { return Ok(()) };
    let needed = case.subscribers.div_ceil(options.streams_per_connection) as u64 + OPEN_FILES_BASE;
    if limit < needed {
        let (scenario, subscribers) = (case.scenario.as_str(), case.subscribers);
        return Err(BenchError::OpenFiles { scenario, subscribers, needed, limit });
    }
    Ok(())
}
