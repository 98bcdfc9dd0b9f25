//! `kubefan estimate`: kubefan's savings and needs, by the metrics of a running apiserver or by the
//! figures of a cluster that does not exist yet.

mod apiserver_load;
mod calculator;
mod exposition;
mod savings;
mod savings_text;
mod seats;

use std::{
    io::{IsTerminal, Write, stderr, stdout},
    path::PathBuf,
    time,
};

use clap::{Args, ValueEnum};
use kubefan_app::config::Duration;
use kubefan_upstream::{Upstream, client::UpstreamOptions, settings::UpstreamSettings};
use tokio::time::{Instant, sleep};

use self::{
    apiserver_load::LoadReader,
    calculator::{CalculatorArgs, Sizing},
    savings::Savings,
};
use super::{error::CliError, visible::print_json};

/// The shortest time between two samples. In less, most counters do not move.
const SAMPLE_TIME_MIN: time::Duration = time::Duration::from_secs(1);
/// Interval at which a terminal shows the remaining time.
const PROGRESS_INTERVAL: time::Duration = time::Duration::from_secs(1);

/// Estimate what kubefan would take over from the apiserver, and what it would need
///
/// Without figures such as --nodes it reads the apiserver's own metrics twice, and reports which
/// watches kubefan would take over and their current cost. With figures it asks no cluster, and
/// calculates.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  # What would it save here? Looks at the cluster for a minute
  kubefan estimate --context prod --for 60s

  # What would a cluster of this size need?
  kubefan estimate --nodes 5000 --pods 150000 --events-per-second 200 --subscribers 25000")]
pub(super) struct EstimateArgs {
    /// Replicas of kubefan
    #[arg(long, value_name = "COUNT", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    replicas: u32,

    /// Output format [default: text]
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    output: Option<Format>,

    #[command(flatten)]
    calculator: CalculatorArgs,

    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Flags that find the apiserver.
#[derive(Debug, Args)]
#[command(next_help_heading = "Of a cluster")]
struct ClusterArgs {
    /// The kubeconfig of the apiserver, instead of $KUBECONFIG, ~/.kube/config or the pod's service
    /// account. Its user needs the right to get the path /metrics
    #[arg(long, env = "KUBEFAN_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// The context of the kubeconfig, instead of its current one
    #[arg(long, env = "KUBEFAN_CONTEXT", value_name = "NAME")]
    context: Option<String>,

    /// The time between the two samples
    #[arg(long = "for", value_name = "DURATION", default_value = "30s")]
    sample_time: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// JSON
    Json,
}

pub(super) async fn run(args: EstimateArgs) -> Result<(), CliError> {
    if args.calculator.is_asked() {
        let sizing = Sizing::of(&args.calculator, args.replicas).map_err(CliError::Plain)?;
        return match args.output {
            Some(Format::Json) => Ok(print_json(&mut stdout(), &sizing)?),
            None => Ok(write!(stdout(), "{}", sizing.text())?),
        };
    }
    let savings = observe(&args.cluster, args.replicas).await?;
    match args.output {
        Some(Format::Json) => Ok(print_json(&mut stdout(), &savings)?),
        None => Ok(savings_text::print(&savings, &mut stdout().lock())?),
    }
}

/// Reads the apiserver's metrics twice.
async fn observe(args: &ClusterArgs, replicas: u32) -> Result<Savings, CliError> {
    let sample_time = args.sample_time.0;
    if sample_time < SAMPLE_TIME_MIN {
        return Err(CliError::Plain(format!("--for {} is too short; give at least 1s", args.sample_time)));
    }
    let settings = UpstreamSettings { kubeconfig: args.kubeconfig.clone(), context: args.context.clone() };
    let upstream = Upstream::from_settings(settings, UpstreamOptions::default()).await.map_err(CliError::plain)?;
    let reader = LoadReader::new(&upstream);
    let before = reader.read().await.map_err(CliError::Plain)?;
    wait(sample_time).await;
    let after = reader.read().await.map_err(CliError::Plain)?;
    let load = after.since(&before).map_err(CliError::Plain)?;
    let mut savings = Savings::of(load, replicas);
    savings.measure_objects(&upstream).await;
    Ok(savings)
}

/// Waits, and shows the remaining time on a terminal.
async fn wait(whole: time::Duration) {
    let end = Instant::now() + whole;
    while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        if stderr().is_terminal() {
            // Progress that cannot be shown is no failure.
            let _ = write!(stderr(), "\r\x1b[Kobserving the apiserver, {} s left", left.as_secs() + 1);
        }
        sleep(left.min(PROGRESS_INTERVAL)).await;
    }
    if stderr().is_terminal() {
        let _ = write!(stderr(), "\r\x1b[K");
    }
}
