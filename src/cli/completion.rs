//! `kubefan completion`: prints a shell completion script.

use std::io::Write;

use clap::{Args, Command};
use clap_complete::{Shell, generate};

use super::error::CliError;

/// Print a shell completion script
#[derive(Debug, Args)]
#[command(after_help = "For bash:  source <(kubefan completion bash)")]
pub(super) struct CompletionArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

pub(super) fn run(args: &CompletionArgs, command: &mut Command) -> Result<(), CliError> {
    // The generator panics on a closed pipe, so it writes to memory.
    let mut script = Vec::new();
    generate(args.shell, command, "kubefan", &mut script);
    Ok(std::io::stdout().write_all(&script)?)
}
