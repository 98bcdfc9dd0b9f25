//! The closed sets of label values. A closed set allows every counter to exist from the start.

/// The reason why a request was refused instead of forwarded upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassthroughRefusal {
    /// Too many requests are being forwarded (`limits.passthroughMax`).
    Limit,
    /// The caller authenticates only by client certificate, which cannot be forwarded.
    Certificate,
    /// The request asks for a protocol upgrade, and upgrades are off
    /// (`tuning.passthroughUpgrades`).
    Upgrade,
    /// The request names another host or comes from another host's web page, and would be forwarded
    /// with kubefan's credentials.
    Foreign,
    /// The method is one for an HTTP proxy, such as CONNECT, or the path may lead to another
    /// service with kubefan's credentials.
    Method,
    /// The request impersonates another user, but would be forwarded with kubefan's credentials.
    Impersonation,
    /// The caller is not known, or HTTP headers cannot name it, and kubefan would act as it
    /// (`--access=authorized-impersonate`).
    Identity,
    /// This process has already forwarded the request once.
    Loop,
}

impl PassthroughRefusal {
    /// Every value.
    pub const ALL: [Self; 8] = [
        Self::Limit,
        Self::Certificate,
        Self::Upgrade,
        Self::Foreign,
        Self::Method,
        Self::Impersonation,
        Self::Identity,
        Self::Loop,
    ];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Certificate => "certificate",
            Self::Upgrade => "upgrade",
            Self::Foreign => "foreign",
            Self::Method => "method",
            Self::Impersonation => "impersonation",
            Self::Identity => "identity",
            Self::Loop => "loop",
        }
    }
}

/// The way in which a connection to the data port ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionEnd {
    /// The peer closed it.
    Closed,
    /// The peer broke the protocol.
    Error,
    /// No request arrived for too long.
    Idle,
    /// The TLS or HTTP handshake failed.
    Handshake,
    /// The peer did not answer a keepalive.
    Keepalive,
    /// kubefan is shutting down.
    Draining,
    /// The connection reached its greatest age (`limits.connectionAgeMax`).
    Age,
    /// The streams of the connection moved to replicas that have fewer (`--rebalance`).
    Rebalanced,
    /// The limit on connections was reached (`limits.connectionsMax`).
    Refused,
}

impl ConnectionEnd {
    /// Every value.
    pub const ALL: [Self; 9] = [
        Self::Closed,
        Self::Error,
        Self::Idle,
        Self::Handshake,
        Self::Keepalive,
        Self::Draining,
        Self::Age,
        Self::Rebalanced,
        Self::Refused,
    ];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Error => "error",
            Self::Idle => "idle",
            Self::Handshake => "handshake",
            Self::Keepalive => "keepalive",
            Self::Draining => "draining",
            Self::Age => "age",
            Self::Rebalanced => "rebalanced",
            Self::Refused => "refused",
        }
    }
}

/// Answer to a request to resume from a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resume {
    /// With the events after the version, from the ring.
    Ring,
    /// With a catch-up, from the current state and the conflated history.
    CatchUp,
    /// With events read again from upstream.
    Backfill,
    /// With a snapshot, because history cannot resume from the version.
    Restart,
    /// Refused: history cannot resume from the version.
    Expired,
    /// Refused: this cache has not reached the version yet.
    Future,
}

impl Resume {
    /// Every label.
    pub const ALL: [&str; 6] = ["ring", "residue", "backfill", "restart", "expired", "future"];

    /// The label in metrics and traces.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::CatchUp => "residue",
            Self::Backfill => "backfill",
            Self::Restart => "restart",
            Self::Expired => "expired",
            Self::Future => "future",
        }
    }
}

/// Outcome for a subscription that fell behind the retained events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lag {
    /// The subscription continued with a catch-up.
    CatchUp,
    /// The subscription restarted with a snapshot.
    Restart,
    /// The subscription ended.
    Expired,
}

impl Lag {
    /// Every label.
    pub const ALL: [&str; 3] = ["catch_up", "restart", "expired"];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::CatchUp => "catch_up",
            Self::Restart => "restart",
            Self::Expired => "expired",
        }
    }
}

/// Outcome of the transfer of a cache to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// The whole cache was sent.
    Given,
    /// The peer disconnected or took too long.
    CutOff,
}

impl Transfer {
    /// Every label.
    pub const ALL: [&str; 2] = ["given", "cut_off"];

    /// The label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Given => "given",
            Self::CutOff => "cut_off",
        }
    }
}

/// Outcome of an attempt to start a cache from a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WarmStart {
    /// The cache started from the peer's data.
    Warm,
    /// There is no other replica.
    Alone,
    /// No replica sent the whole cache.
    Failed,
    /// Upstream did not confirm the received data.
    Unconfirmed,
    /// The warm start took too long.
    Timeout,
}

impl WarmStart {
    /// Every label.
    pub const ALL: [&str; 5] = ["warm", "alone", "failed", "unconfirmed", "timeout"];

    /// The label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Alone => "alone",
            Self::Failed => "failed",
            Self::Unconfirmed => "unconfirmed",
            Self::Timeout => "timeout",
        }
    }
}

/// Outcome of an attempt to start a cache from its saved state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SavedStart {
    /// It is served as stale, because upstream does not answer.
    Served,
    /// Upstream has confirmed it, and its history continues.
    Confirmed,
    /// Upstream has not confirmed it, or no longer can.
    Unconfirmed,
    /// The file cannot be used.
    Refused,
}

impl SavedStart {
    /// Every label.
    pub const ALL: [&str; 4] = ["served", "confirmed", "unconfirmed", "refused"];

    /// The label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::Confirmed => "confirmed",
            Self::Unconfirmed => "unconfirmed",
            Self::Refused => "refused",
        }
    }
}

/// The result of a self-check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SelfCheck {
    /// The cache matches upstream.
    Equal,
    /// The cache differs from upstream.
    Different,
    /// Upstream no longer has the version of the cache.
    Expired,
    /// Upstream could not be read.
    Failed,
}

impl SelfCheck {
    /// Every label.
    pub const ALL: [&str; 4] = ["equal", "different", "expired", "failed"];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Equal => "equal",
            Self::Different => "different",
            Self::Expired => "expired",
            Self::Failed => "failed",
        }
    }
}

/// Result of a proof of a cache's freshness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The cache was at the cluster's version already.
    Held,
    /// The cache's own watch brought it to the cluster's version.
    CaughtUp,
    /// The objects of the cache are those of a list at the cluster's version.
    Equal,
    /// A bookmark moved it to the cluster's version.
    Bookmark,
    /// The cache is behind: it did not catch up in time, no bookmark arrived, or the bookmark came
    /// from an apiserver that is behind as well.
    Behind,
    /// Upstream did not answer, or the cache has no open watch.
    Failed,
}

impl Proof {
    /// Every label.
    pub const ALL: [&str; 6] = ["held", "caught_up", "equal", "bookmark", "behind", "failed"];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::CaughtUp => "caught_up",
            Self::Equal => "equal",
            Self::Bookmark => "bookmark",
            Self::Behind => "behind",
            Self::Failed => "failed",
        }
    }
}

/// The purpose of an upstream watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchPurpose {
    /// Feeds the cache.
    Standing,
    /// A short watch for events from before the cache started.
    Backfill,
    /// A short watch for a bookmark that proves a cache fresh.
    Probe,
}

impl WatchPurpose {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Standing => "standing",
            Self::Backfill => "backfill",
            Self::Probe => "probe",
        }
    }
}
