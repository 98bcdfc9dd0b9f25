//! The format of log lines, for the configuration and for logging.

use serde::Deserialize;

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

kubefan_common::display_choice!(LogFormat);
