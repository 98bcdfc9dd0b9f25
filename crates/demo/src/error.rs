//! Errors of the demo.

use std::{io, time::Duration};

use kubefan_app::AppError;
use kubefan_client::ClientError;
use kubefan_upstream::settings::SettingsError;

use super::progress::Route;

/// Limit for every subscriber to receive its initial state.
pub(super) const READY_TIMEOUT: Duration = Duration::from_secs(120);

/// The reason why the demo failed.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// Each subscriber needs two open files in this process: both ends of its connection.
    #[error(
        "--subscribers {subscribers} needs about {needed} open files, and the limit is {limit}; raise it (ulimit -n {needed}) or \
         use fewer subscribers"
    )]
    OpenFiles {
        /// The requested number of subscribers.
        subscribers: usize,
        /// Open files needed.
        needed: u64,
        /// The limit on open files.
        limit: u64,
    },
    /// The simulated apiserver cannot listen on loopback.
    #[error("the simulated apiserver cannot listen on loopback: {0}")]
    Listen(#[from] io::Error),
    /// The client of the simulated apiserver cannot be built.
    #[error(transparent)]
    Upstream(#[from] SettingsError),
    /// kubefan failed.
    #[error(transparent)]
    App(#[from] AppError),
    /// kubefan ended although the demo was still running.
    #[error("kubefan ended: {0}")]
    Ended(String),
    /// A request to kubefan failed.
    #[error("a request to kubefan failed: {0}")]
    Client(Box<ClientError>),
    /// The simulated apiserver refused a change.
    #[error("the simulated apiserver refused a change: {0}")]
    Workload(String),
    /// The machine is too slow for this many subscribers or objects.
    #[error(
        "only {ready} of {subscribers} subscribers ({}) had their initial state within {READY_TIMEOUT:?}; use fewer --subscribers or --objects",
        .route.as_str()
    )]
    NotReady {
        /// The route.
        route: Route,
        /// Number of subscribers that had their initial state.
        ready: usize,
        /// Number of all subscribers.
        subscribers: usize,
    },
}
