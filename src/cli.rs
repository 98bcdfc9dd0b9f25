//! The command line, one file per command. Commands that read objects call a running `kubefan
//! serve` over gRPC and follow kubectl's conventions: its flags, columns and exit codes, and one
//! line per error.

// Text of servers goes through `visible`.
#![deny(clippy::print_stderr, clippy::print_stdout)]

mod admin;
mod auth;
#[cfg(feature = "sim")]
mod bench;
mod check;
mod completion;
#[cfg(feature = "sim")]
mod demo;
mod disconnect;
mod error;
mod estimate;
mod get;
mod given;
mod kubeconfig;
mod object_sample;
mod output;
mod pod_status;
mod projection;
mod select;
mod serve;
mod shutdown;
mod sizing;
mod status_page;
mod subscribers;
mod table;
mod token;
mod top;
mod verify;
mod version;
mod visible;
mod watch;

use std::{ffi::OsString, path::Path, process::ExitCode};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use self::{
    error::CliError,
    given::{Given, is_set},
    visible::print_notice,
};

/// A watch fan-out proxy for Kubernetes.
#[derive(Debug, Parser)]
#[command(name = "kubefan", version, arg_required_else_help = true, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(Box<serve::ServeArgs>),
    #[cfg(feature = "sim")]
    Demo(demo::DemoArgs),
    #[cfg(feature = "sim")]
    Bench(bench::BenchArgs),
    #[cfg(feature = "sim")]
    #[command(hide = true)]
    BenchFloor(bench::FloorArgs),
    #[cfg(feature = "sim")]
    #[command(hide = true)]
    BenchSink(bench::SinkArgs),
    #[cfg(feature = "sim")]
    #[command(name = kubefan_bench::hostile::attacker::ATTACK, hide = true)]
    BenchAttacker(bench::AttackerArgs),
    #[cfg(feature = "sim")]
    #[command(name = kubefan_bench::child::LAUNCH, hide = true)]
    BenchChild(bench::ChildArgs),
    Get(get::GetArgs),
    Watch(watch::WatchArgs),
    Verify(verify::VerifyArgs),
    Auth(auth::AuthArgs),
    Check(Box<check::CheckArgs>),
    Estimate(estimate::EstimateArgs),
    Top(top::TopArgs),
    Subscribers(subscribers::SubscribersArgs),
    Disconnect(disconnect::DisconnectArgs),
    StatusPage(status_page::StatusPageArgs),
    Kubeconfig(kubeconfig::KubeconfigArgs),
    Version(version::VersionArgs),
    Completion(completion::CompletionArgs),
}

/// Runs the command line. Exit codes: 0 for success, 1 for an error (`verify`: a difference, `auth
/// can-i`: no), 2 for invalid arguments (both: also if the result cannot be determined), 130 after
/// ctrl-C and 143 after SIGTERM.
pub(crate) fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args = Vec::from_iter(args);
    let command = as_called(command(), args.first());
    let given = Given { command: &command, args: &args, is_set };
    let parsed = command.clone().try_get_matches_from(&args).and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            if let Some(moved) = given.moved(&error) {
                print_notice(&CliError::Plain(moved).to_string());
                return ExitCode::from(2);
            }
            let error = given.with_variable(error);
            // Help and version arrive here too, with exit code 0.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    match run(cli.command, &given) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_broken_pipe() => ExitCode::SUCCESS,
        Err(CliError::Printed) => ExitCode::FAILURE,
        Err(CliError::Interrupted(signal)) => ExitCode::from(signal.exit_code()),
        Err(CliError::Undetermined(why)) => {
            if let Some(why) = why {
                print_notice(&why);
            }
            ExitCode::from(2)
        }
        Err(error) => {
            print_notice(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command, given: &Given<'_>) -> Result<(), CliError> {
    match command {
        Command::Serve(args) => serve::run(*args, &variables(), given),
        #[cfg(feature = "sim")]
        Command::Demo(args) => demo::run(args),
        #[cfg(feature = "sim")]
        Command::Bench(args) => bench::run(args),
        #[cfg(feature = "sim")]
        Command::BenchFloor(args) => bench::run_floor(&args),
        #[cfg(feature = "sim")]
        Command::BenchSink(args) => bench::run_sink(args),
        #[cfg(feature = "sim")]
        Command::BenchAttacker(args) => bench::run_attacker(args),
        #[cfg(feature = "sim")]
        Command::BenchChild(args) => bench::run_child(&args),
        Command::Get(args) => until_signal(get::run(args)),
        Command::Watch(args) => run_client(watch::run(args)),
        Command::Verify(args) => until_signal(verify::run(args)),
        Command::Auth(args) => until_signal(auth::run(args)),
        Command::Check(args) => until_signal(check::run(*args, &variables(), given)),
        Command::Estimate(args) => until_signal(estimate::run(args)),
        Command::Top(args) => until_signal(top::run(args)),
        Command::Subscribers(args) => until_signal(subscribers::run(args)),
        Command::Disconnect(args) => until_signal(disconnect::run(args)),
        Command::StatusPage(args) => until_signal(status_page::run(args)),
        Command::Kubeconfig(args) => until_signal(async { kubeconfig::run(&args) }),
        Command::Version(args) => version::run(&args),
        Command::Completion(args) => completion::run(&args, &mut command_for_completion()),
    }
}

/// Runs a command until it ends or a signal ends it.
fn until_signal(command: impl Future<Output = Result<(), CliError>>) -> Result<(), CliError> {
    run_client(async {
        let signal = shutdown::stop_signal()?;
        tokio::select! {
            result = command => result,
            signal = signal => Err(CliError::Interrupted(signal)),
        }
    })
}

/// Runs a command that ends soon after a signal. The kernel does not end process 1 of a container
/// by a signal that it does not handle, so every command handles them.
fn run_client(command: impl Future<Output = Result<(), CliError>>) -> Result<(), CliError> {
    shutdown::exit_after_signal().map_err(CliError::plain)?;
    let runtime = client_runtime()?;
    let result = runtime.block_on(command);
    // A look-up of a name or a credential plugin may hang, and must not be waited for.
    runtime.shutdown_background();
    result
}

fn client_runtime() -> Result<tokio::runtime::Runtime, CliError> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CliError::plain)
}

/// The command, with the defaults of `serve` in the help of those that take its options.
fn command() -> clap::Command {
    let command = without_values(Cli::command());
    ["serve", "check"].into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, |serve| serve::with_second_variables(serve::with_defaults(serve)))
    })
}

/// The command as its user called it. kubectl runs `kubectl kubefan` as a program `kubectl-kubefan`
/// (kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins).
fn as_called(command: clap::Command, program: Option<&OsString>) -> clap::Command {
    match program.and_then(|program| Path::new(program).file_stem()) {
        Some(name) if name == "kubectl-kubefan" => command.bin_name("kubectl kubefan"),
        _ => command,
    }
}

/// The help names environment variables, but must not show their values.
fn without_values(command: clap::Command) -> clap::Command {
    command.mut_args(|arg| arg.hide_env_values(true)).mut_subcommands(without_values)
}

/// A command with those below it.
fn with_subcommands(command: &clap::Command) -> Vec<&clap::Command> {
    std::iter::once(command).chain(command.get_subcommands().flat_map(with_subcommands)).collect()
}

/// Every environment variable that a command reads.
fn variables() -> Vec<String> {
    let command = Cli::command();
    let all = with_subcommands(&command);
    let args = all.into_iter().flat_map(clap::Command::get_arguments);
    let first = args.filter_map(|arg| Some(arg.get_env()?.to_str()?.to_owned()));
    let second = kubefan_app::config::second_variables().into_iter().map(|names| names.second.to_owned());
    first.chain(second).collect()
}

fn command_for_completion() -> clap::Command {
    Cli::command()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn usage_is_that_of_the_plugin_when_kubectl_calls_it() {
        let usage = |words: &[&str]| {
            let program = OsString::from(words[0]);
            let error = as_called(command(), Some(&program)).try_get_matches_from(words).expect_err("it asks for help");
            error.to_string().lines().find(|line| line.starts_with("Usage:")).map(str::to_owned)
        };
        let expected = |text: &str| Some(text.to_owned());
        assert_eq!(usage(&["kubefan", "--help"]), expected("Usage: kubefan <COMMAND>"));
        assert_eq!(usage(&["/opt/bin/kubectl-kubefan", "--help"]), expected("Usage: kubectl kubefan <COMMAND>"));
        let below = expected("Usage: kubectl kubefan version [OPTIONS]");
        assert_eq!(usage(&["kubectl-kubefan", "version", "--help"]), below);
    }

    #[test]
    fn no_help_shows_the_value_of_a_variable() {
        let command = command();
        let shown = with_subcommands(&command).into_iter().flat_map(|command| {
            command.get_arguments().filter(|arg| arg.get_env().is_some() && !arg.is_hide_env_values_set())
        });
        assert_eq!(shown.map(|arg| arg.get_id().to_string()).collect::<Vec<_>>(), [] as [String; 0]);
        assert!(variables().contains(&"KUBEFAN_ADMIN".to_owned()), "of a command below another");
    }
}
