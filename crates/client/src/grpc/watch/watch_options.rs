//! The options of a watch.

use std::time::Duration;

use crate::grpc::projection::Projection;
use kubefan_common::{backoff::BackoffOptions, encoding::Encoding};

/// Behaviour if history cannot resume from the requested version: it is too old or belongs to
/// another history. (`--help` shows the text of the variants without links.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum OnExpired {
    /// End with the error
    Fail,
    /// Start over with a snapshot
    #[default]
    Restart,
}

/// Behaviour if the stream has fallen behind the events that the server retains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum OnLag {
    /// Treat it as an expired version
    Expire,
    /// Continue with a marked catch-up, which sends each changed object once
    #[default]
    Conflate,
}

/// Default of [`WatchOptions::delta_base_bytes_max`]: 1 GiB.
pub const DELTA_BASE_BYTES_MAX: usize = 1 << 30;

/// Options of a watch.
#[derive(Debug, Clone)]
pub struct WatchOptions {
    /// Resume after this version: a `WatchStream::resume_version` of the same target, or the
    /// version of a list. Empty starts with a snapshot.
    pub resource_version: String,
    /// The cluster of that version, from the list or the watch that returned it; empty if unknown.
    /// The same address may lead to another cluster one day, where the version would be
    /// meaningless.
    pub cluster: String,
    /// The watch ends after this time, counted over all its connections. Rounded up to whole
    /// seconds on the wire. `None` for no limit.
    pub timeout: Option<Duration>,
    /// The server sends a bookmark if the stream was silent for this long and the version has
    /// moved. `None` means the server's default of 60 s; the minimum is 1 s.
    pub bookmark_interval: Option<Duration>,
    /// The parts of each object to send.
    pub projection: Projection,
    /// Do not send changes that leave the projected bytes the same. Requires a projection that
    /// leaves something out, or deltas.
    pub only_changes: bool,
    /// Encoding of objects on the wire. Events always carry whole objects; with deltas the watch
    /// stores a copy of each. The objects of events are JSON, but protobuf with
    /// [`Encoding::Protobuf`], which kubefan serves for built-in types: `k8s\0` and a
    /// `runtime.Unknown`, as [`RawProtobuf`](crate::RawProtobuf) reads it.
    pub encoding: Encoding,
    /// Memory limit of those copies, in bytes. Above it the watch continues without deltas.
    pub delta_base_bytes_max: usize,
    /// Behaviour if history cannot resume from the version.
    pub on_expired: OnExpired,
    /// Behaviour if the stream has fallen behind the events that the server retains.
    pub on_lag: OnLag,
    /// The delays between retries.
    pub backoff: BackoffOptions,
    /// Longest delay while kubefan is not synced, if it is shorter: a user may be waiting.
    pub not_synced_delay_max: Option<Duration>,
    /// Report the first connection too, as `WatchItem::Reconnected`: kubefan has accepted the
    /// watch, also if nothing follows for long.
    pub reports_first_connection: bool,
    /// Seed of the retry jitter, for simulations. `None` for a random one.
    pub seed: Option<u64>,
}

impl Default for WatchOptions {
    fn default() -> Self {
        Self {
            resource_version: String::new(),
            cluster: String::new(),
            timeout: None,
            bookmark_interval: None,
            projection: Projection::default(),
            only_changes: false,
            encoding: Encoding::default(),
            delta_base_bytes_max: DELTA_BASE_BYTES_MAX,
            on_expired: OnExpired::default(),
            on_lag: OnLag::default(),
            backoff: BackoffOptions::default(),
            not_synced_delay_max: None,
            reports_first_connection: false,
            seed: None,
        }
    }
}
