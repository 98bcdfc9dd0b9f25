//! The errors of a configuration. Each names the flag and, where there is one, the way out.

use std::path::PathBuf;

/// A configuration that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("--config {}: {message}", .file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// The problem, with the line.
        message: String,
    },
    /// A value cannot be used.
    #[error("{flag} {value:?}: {problem}")]
    Value {
        /// The flag. The environment variable and the key in the file are the same name, spelled
        /// their way.
        flag: &'static str,
        /// The value that was given.
        value: String,
        /// Why it cannot be used, and what to do.
        problem: String,
    },
    /// Two options contradict each other, or one needs another.
    #[error("{0}")]
    Contradiction(String),
}

impl ConfigError {
    /// The result of a check that found two options in contradiction.
    pub(super) fn contradiction<T>(text: impl Into<String>) -> Result<T, Self> {
        Err(Self::Contradiction(text.into()))
    }
}
