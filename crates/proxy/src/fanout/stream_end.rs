//! Every way a request can be refused and a stream can end, each once: logs, metrics and status codes share these names.

use std::time::Duration;

use crate::cache::Expired;
use kubefan_model::ResourceVersion;

/// Why a subscription or a read cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The first list is not complete.
    #[error("{resource} is not synced: {message}")]
    NotSynced {
        /// The resource.
        resource: String,
        /// What is under way, or the last error upstream.
        message: String,
    },
    /// Upstream has not proved the state for too long.
    #[error(
        "the state of {resource} was {}, and --max-staleness is {staleness_max:?}{}",
        proved(.age), because(.message)
    )]
    Stale {
        /// The resource.
        resource: String,
        /// How long ago; `None` where it never has.
        age: Option<Duration>,
        /// How long ago it may be.
        staleness_max: Duration,
        /// The last error upstream; may be empty.
        message: String,
    },
    /// The apiserver does not serve the resource.
    #[error("{0}")]
    NotFound(String),
    /// The apiserver denies kubefan the resource.
    #[error("{0}")]
    Forbidden(String),
    /// The events after the version are gone.
    #[error(transparent)]
    Expired(#[from] Expired),
    /// The version is of another history: of before etcd was restored, or of another cluster.
    #[error("{0}; start over with a snapshot")]
    Rewritten(String),
    /// This cache has not reached the version.
    #[error("too large resource version: {requested}, current: {current}")]
    Future {
        /// What was asked for.
        requested: ResourceVersion,
        /// What is held.
        current: ResourceVersion,
    },
    /// The request is wrong.
    #[error("{message}")]
    Invalid {
        /// The field at fault, as a path in the request message.
        field: &'static str,
        /// What is wrong with it and what would be right.
        message: String,
    },
    /// kubefan was not told to cache this.
    #[error("{0}")]
    NotCached(String),
    /// A limit is reached.
    #[error("{0}")]
    Exhausted(String),
    /// Upstream could not be asked.
    #[error("{0}")]
    Unavailable(String),
    /// kubefan is shutting down.
    #[error("kubefan is shutting down; try again, another replica may answer")]
    Draining,
}

fn proved(age: &Option<Duration>) -> String {
    match age {
        Some(age) => format!("last proved by the apiserver {}s ago", age.as_secs()),
        None => "not proved by the apiserver yet".to_owned(),
    }
}

fn because(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}

/// Why a stream ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StreamEnd {
    /// `timeout_seconds` is over.
    #[error("the watch reached its timeout")]
    Timeout,
    /// The deadline that the subscriber's gRPC library set is over.
    #[error("the deadline of the call is over")]
    Deadline,
    /// The subscriber went away.
    #[error("the subscriber went away")]
    Cancelled,
    /// The snapshot made too little progress, and what it pins is let go of.
    #[error(
        "the snapshot made too little progress in {0:?} (--snapshot-stall-timeout); read it faster, or with a larger window"
    )]
    SnapshotStalled(Duration),
    /// The subscriber fell behind what is held, and there is no room to send what leads on just now.
    #[error("{0}; come back with the last version")]
    Overloaded(String),
    /// The subscriber fell behind what is held.
    #[error(transparent)]
    Expired(#[from] Expired),
    /// The apiserver stopped serving the resource.
    #[error("{0}")]
    NotFound(String),
    /// The apiserver began to deny kubefan the resource.
    #[error("{0}")]
    Forbidden(String),
    /// Upstream's versions went back (etcd was restored), or its schema changed without a new version: state must be read anew.
    #[error("upstream's history was rewritten: {0}; start over with a snapshot")]
    Rewritten(String),
    /// kubefan stopped caching the resource.
    #[error("{0}")]
    Stopped(String),
    /// kubefan is shutting down.
    #[error("kubefan is shutting down; resume, another replica may answer")]
    Draining,
}

impl StreamEnd {
    /// Every label, for pre-created metrics.
    pub const ALL: [&str; 11] = [
        "timeout",
        "deadline",
        "cancelled",
        "snapshot_stalled",
        "overloaded",
        "expired",
        "not_found",
        "forbidden",
        "rewritten",
        "stopped",
        "draining",
    ];

    /// The label in metrics and logs.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Deadline => "deadline",
            Self::Cancelled => "cancelled",
            Self::SnapshotStalled(_) => "snapshot_stalled",
            Self::Overloaded(_) => "overloaded",
            Self::Expired(_) => "expired",
            Self::NotFound(_) => "not_found",
            Self::Forbidden(_) => "forbidden",
            Self::Rewritten(_) => "rewritten",
            Self::Stopped(_) => "stopped",
            Self::Draining => "draining",
        }
    }
}
