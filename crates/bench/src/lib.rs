//! `kubefan bench` measures the cost of a delivery, the floor that the machine allows, and the cost
//! of the same work in another server.
//!
//! The server under test is a separate process, started anew for each run. The simulated apiserver
//! and all subscribers run in this process. The server is measured from outside, through its port
//! and `/proc`, so any program that takes the flags of `kubefan serve` can be measured.
//!
//! Machines are noisy and differ from each other: compare servers within one invocation, and
//! compare shares of the floor rather than microseconds.

mod body;
pub mod child;
mod cluster;
mod connector;
mod counters;
mod encoding;
mod error;
mod event_counter;
pub mod figures;
pub mod floor;
pub mod hostile;
mod latency;
mod livez;
mod load;
mod messages;
mod node_agents;
mod options;
pub mod process;
mod receivers;
pub mod report;
mod rest;
mod scenario;
mod server_process;
mod shared_body;
mod size;
mod source;
mod source_options;
mod stalled_subscribers;
mod tls;
mod windows;

use std::pin::pin;

use self::{
    cluster::Cluster,
    figures::{Figure, Figures},
    rest::Endpoint,
    scenario::Case,
    server_process::Run,
    source::{Simulated, Source},
    tls::Certificate,
};
pub use self::{
    encoding::Encoding,
    error::BenchError,
    options::{BenchOptions, Projection, Scenario, ServerKind, ServerSpec},
    report::Report,
    windows::Windows,
};
pub use kubefan_telemetry::requests::Protocol;

/// Open files that this process needs in addition to the connections of the subscribers.
const OPEN_FILES_BASE: u64 = 128;

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
    options.check()?;
    check_open_files(options)?;
    let directory = tempfile::tempdir()?;
    // Tokens are taken over TLS only.
    let needs_tls = |scenario: &Scenario| options.tls || *scenario == Scenario::Access;
    let certificate =
        options.scenarios.iter().any(needs_tls).then(|| Certificate::make(directory.path())).transpose()?;
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
                certificate: certificate.as_ref().filter(|_| needs_tls(scenario)),
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
    let objects = case.source.workload.objects;
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
                match reports.iter_mut().find(|report| report.is_of(&spec.name, &variant, objects)) {
                    Some(report) => report.add(figures),
                    None => {
                        let mut report = Report::new(scenario, &spec.name, variant, objects);
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
        Figure::BodyBytesPerDelivery,
        Figure::LatencyP50,
        Figure::LatencyP99,
        Figure::RssPerSubscriber,
        Figure::RssPerSubscriberAfterLoad,
        Figure::RssMax,
        Figure::LatencyP99Ratio,
        Figure::CpuPerClient,
        Figure::CpuRatio,
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
        let scenario = case.scenario.as_str();
        let subscribers = case.subscribers;
        return Err(BenchError::OpenFiles { scenario, subscribers, needed, limit });
    }
    Ok(())
}
