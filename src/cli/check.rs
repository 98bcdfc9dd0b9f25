//! `kubefan check`: looks for everything that would go wrong with a configuration of `serve`, and
//! serves nothing. One file per group of checks; each finding is one line with its remedy.
//!
//! The checks ask the same questions as `serve`, with the same code where it exists. They change
//! nothing: ports are bound for a moment, and reviews store nothing.

mod access_rights;
mod apiserver;
mod cached_resources;
mod certificates;
mod configuration;
mod managed_certificate;
mod network_step;
mod peer_replicas;
mod ports;
mod report;
mod resource_limits;
mod socket_owner;

use clap::{Args, ValueEnum};

use self::report::{Outcome, Report};
use super::{error::CliError, given::Given, serve::ServeArgs};

/// Find out what would go wrong with `kubefan serve`, without serving
///
/// Takes the flags, the environment and the file of `kubefan serve`. Checks the configuration, the
/// certificates, the ports, the way to the apiserver and kubefan's rights there, the peers and the
/// limits of this machine. Exit codes: 0 without an error, 1 with one, 2 for invalid arguments.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  # With the configuration of a pod, in the pod
  kubefan check --config /etc/kubefan/config.yaml

  # From elsewhere, as the account that a kubeconfig names
  kubefan check --resource pods,services --kubeconfig kubefan.kubeconfig

  # For a program
  kubefan check --resource pods -o json")]
pub(super) struct CheckArgs {
    #[command(flatten)]
    serve: ServeArgs,

    /// Output format [default: a line per finding]
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    output: Option<Format>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// JSON
    Json,
}

/// Checks and prints. `variables` are the environment variables that a command reads.
pub(super) async fn run(args: CheckArgs, variables: &[String], given: &Given<'_>) -> Result<(), CliError> {
    let mut report = Report::to_stdout(args.output == Some(Format::Json));
    if let Some(config) = configuration::check(args.serve, variables, given, &mut report) {
        certificates::check(&config, &mut report);
        ports::check(&config, &mut report).await;
        let upstream = apiserver::check(&config, &mut report).await;
        let mut cached = None;
        if let Some(upstream) = &upstream {
            cached = Some(cached_resources::check(&config, upstream, &mut report).await);
            access_rights::check(&config, upstream, &mut report).await;
        }
        let managed = managed_certificate::check(&config, upstream.as_ref(), &mut report).await;
        peer_replicas::check(&config, managed.as_ref(), &mut report).await;
        resource_limits::check(&config, cached.as_deref(), &mut report);
    }
    match report.finish()? {
        Outcome::Error => Err(CliError::Printed),
        Outcome::Ok | Outcome::Warning => Ok(()),
    }
}
