//! Every reason why a stream ends. Logs, metrics and status codes share these names.

use std::time::Duration;

use super::ring::Expired;

/// The reason of the end of a stream.
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
    /// The snapshot made too little progress, and the state that it pins is released.
    #[error(
        "the snapshot made too little progress in {0:?} (tuning.snapshotStallTimeout); read it faster, or with a larger window"
    )]
    SnapshotStalled(Duration),
    /// The subscriber fell behind the retained events, and the gate has no permit for a catch-up or
    /// snapshot.
    #[error("{0}; come back with the last version")]
    Overloaded(String),
    /// The subscriber fell behind the retained events.
    #[error(transparent)]
    Expired(#[from] Expired),
    /// The apiserver stopped serving the resource.
    #[error("{0}")]
    NotFound(String),
    /// The apiserver began to deny kubefan the resource.
    #[error("{0}")]
    Forbidden(String),
    /// Upstream's versions went back (etcd was restored), or its schema changed without a new
    /// version: clients need a new snapshot.
    #[error("upstream's history was rewritten: {0}; start over with a snapshot")]
    Rewritten(String),
    /// kubefan stopped caching the resource.
    #[error("{0}")]
    Stopped(String),
    /// The caller may no longer read this.
    #[error("{0}")]
    Revoked(String),
    /// The caller must authenticate itself again.
    #[error("{0}; resume with a valid credential, nothing is lost")]
    Reauthenticate(&'static str),
    /// The operator has changed the mode of reads of this resource.
    #[error(
        "kubefan's operator has changed the mode of {0} (modes in kubefan's configuration file); come back, nothing is lost"
    )]
    Switched(String),
    /// An operator ended this stream.
    #[error("an operator ended this stream (kubefan disconnect); resume, nothing is lost")]
    Disconnected,
    /// kubefan is shutting down.
    #[error("kubefan is shutting down; resume, another replica may answer")]
    Draining,
    /// The connection has reached its greatest age.
    #[error("the connection has reached its greatest age (limits.connectionAgeMax); resume on a new one")]
    Aged,
    /// Other replicas have fewer streams.
    #[error("other replicas have fewer streams; resume on a new connection")]
    Rebalanced,
}

impl StreamEnd {
    /// Every label, for pre-created metrics.
    pub const ALL: [&str; 17] = [
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
        "revoked",
        "reauthenticate",
        "switched",
        "disconnected",
        "draining",
        "connection_age",
        "rebalanced",
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
            Self::Revoked(_) => "revoked",
            Self::Reauthenticate(_) => "reauthenticate",
            Self::Switched(_) => "switched",
            Self::Disconnected => "disconnected",
            Self::Draining => "draining",
            Self::Aged => "connection_age",
            Self::Rebalanced => "rebalanced",
        }
    }
}
