//! Errors of a measurement.

use std::{io, time::Duration};

/// The reason why a measurement could not start or finish.
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
        /// Number of subscribers of the scenario.
        subscribers: usize,
        /// Number of open files it needs.
        needed: u64,
        /// The limit of open files.
        limit: u64,
    },
    /// Subscribers with the configured protocol cannot ask for the encoding.
    #[error("--encoding {encoding} needs --protocol {protocol}")]
    EncodingOfProtocol {
        /// The name of the encoding.
        encoding: &'static str,
        /// The protocol that it needs.
        protocol: &'static str,
    },
    /// A scenario has encodings of its own.
    #[error("the scenario {scenario} has encodings of its own; leave out --encoding {encoding}")]
    EncodingOfScenario {
        /// The name of the encoding.
        encoding: &'static str,
        /// The name of the scenario.
        scenario: &'static str,
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
        /// The step that the benchmark was waiting for.
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
    /// A scenario needs the ports of a server that the benchmark starts.
    #[error("this scenario measures only servers that the benchmark starts itself")]
    NotStarted,
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
    /// The `stop` future of [`run()`](super::run()) completed.
    #[error("stopped")]
    Stopped,
    /// The operating system reported an error.
    #[error("{0}")]
    Io(#[from] io::Error),
}
