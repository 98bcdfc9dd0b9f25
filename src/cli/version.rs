//! `kubefan version`: prints the version and the platform.

use std::io::Write;

use clap::{Args, ValueEnum};

use super::error::CliError;

/// Print the version
#[derive(Debug, Args)]
pub(super) struct VersionArgs {
    /// Output format [default: one line of text]
    #[arg(short, long, value_enum)]
    output: Option<Format>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    Json,
}

pub(super) fn run(args: &VersionArgs) -> Result<(), CliError> {
    let version = env!("CARGO_PKG_VERSION");
    let os = std::env::consts::OS;
    let arch = std::env::consts::ARCH;
    let text = match args.output {
        None => format!("kubefan {version} ({os}/{arch})"),
        Some(Format::Json) => serde_json::json!({"version": version, "os": os, "arch": arch}).to_string(),
    };
    Ok(writeln!(std::io::stdout(), "{text}")?)
}
