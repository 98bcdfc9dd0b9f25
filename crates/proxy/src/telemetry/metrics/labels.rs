//! The values of labels: what there is to tell apart, each set closed, so that a counter of every value is there from the start.

/// Why a request was not passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// There are too many.
    Limit,
    /// A client certificate is all that the caller has.
    Certificate,
    /// It wants to become something else, and may not.
    Upgrade,
    /// It is not of this machine, and would have been passed on as kubefan's own.
    Foreign,
    /// It is for a proxy of another kind.
    Method,
    /// It would have been passed on as kubefan, where its caller wants to be somebody else.
    Impersonation,
    /// It was passed on by this very process before.
    Loop,
}

impl Refused {
    /// Every label.
    pub const ALL: [Self; 7] =
        [Self::Limit, Self::Certificate, Self::Upgrade, Self::Foreign, Self::Method, Self::Impersonation, Self::Loop];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Certificate => "certificate",
            Self::Upgrade => "upgrade",
            Self::Foreign => "foreign",
            Self::Method => "method",
            Self::Impersonation => "impersonation",
            Self::Loop => "loop",
        }
    }
}

/// How a connection to the data port ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionEnd {
    /// The peer closed it.
    Closed,
    /// The peer broke the protocol.
    Error,
    /// Nothing was asked for on it.
    Idle,
    /// TLS or HTTP did not come about.
    Handshake,
    /// The peer did not answer.
    Keepalive,
    /// kubefan is shutting down.
    Draining,
    /// There were too many.
    Refused,
}

impl ConnectionEnd {
    /// Every label.
    pub const ALL: [Self; 7] =
        [Self::Closed, Self::Error, Self::Idle, Self::Handshake, Self::Keepalive, Self::Draining, Self::Refused];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Error => "error",
            Self::Idle => "idle",
            Self::Handshake => "handshake",
            Self::Keepalive => "keepalive",
            Self::Draining => "draining",
            Self::Refused => "refused",
        }
    }
}

/// How a request to go on from a version was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resume {
    /// From the ring.
    Ring,
    /// By a catch-up, from the state and the residue.
    Residue,
    /// By events that were read again from upstream.
    Backfill,
    /// By a snapshot, because nothing led on.
    Restart,
    /// The events are no longer held.
    Expired,
    /// The version is not reached yet.
    Future,
}

impl Resume {
    /// Every label.
    pub const ALL: [&str; 6] = ["ring", "residue", "backfill", "restart", "expired", "future"];

    /// The label in metrics and traces.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Residue => "residue",
            Self::Backfill => "backfill",
            Self::Restart => "restart",
            Self::Expired => "expired",
            Self::Future => "future",
        }
    }
}

/// What became of a subscription that had fallen behind the events that are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lag {
    /// It went on with a catch-up.
    CatchUp,
    /// It started over with a snapshot.
    Restart,
    /// It ended.
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

/// How the transfer of a cache to a peer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// All was sent.
    Given,
    /// The peer went away, or took too long.
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

/// How an attempt to take over a cache from a peer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WarmStart {
    /// It was taken over.
    Warm,
    /// There is no other replica.
    Alone,
    /// No replica gave it whole.
    Failed,
    /// Upstream did not confirm what was given.
    Unconfirmed,
    /// It took too long.
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

/// What a self-check has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SelfCheck {
    /// The cache is what upstream has.
    Equal,
    /// It is not.
    Different,
    /// Upstream no longer holds the version of the cache.
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

/// How upstream's word was had that a cache is fresh, or in which way not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The cache was at the cluster's version already.
    Held,
    /// Its own watch brought it there.
    CaughtUp,
    /// A bookmark has moved it there.
    Bookmark,
    /// It is behind, and nobody had the time, or no bookmark came, or that of an apiserver that is behind too.
    Behind,
    /// Upstream could not be asked, or the cache is not watched just now.
    Failed,
}

impl Proof {
    /// Every label.
    pub const ALL: [&str; 5] = ["held", "caught_up", "bookmark", "behind", "failed"];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::CaughtUp => "caught_up",
            Self::Bookmark => "bookmark",
            Self::Behind => "behind",
            Self::Failed => "failed",
        }
    }
}

/// What a watch upstream is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchPurpose {
    /// The one that feeds the cache.
    Standing,
    /// A short one, for events from before the cache began.
    Backfill,
    /// A short one, for a bookmark that proves a cache to be fresh.
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
