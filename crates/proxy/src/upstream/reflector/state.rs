//! The options of a reflector, its position, and the result of a step.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    cache::Update,
    telemetry::metrics::UpstreamWatchGuard,
    upstream::client::{BodyStream, lines::Lines},
};
use kubefan_model::ResourceVersion;

/// Options of a reflector.
#[derive(Debug, Clone, Copy)]
pub struct ReflectorOptions {
    /// Objects per page of a list.
    pub page_size: u32,
    /// Whether to request the initial state as a watch-list (`sendInitialEvents`), if the server
    /// supports it.
    pub watch_list: bool,
    /// The time without data after which a watch counts as dead. Bookmarks arrive about once a
    /// minute while the cluster's version advances.
    pub upstream_idle_timeout: Duration,
    /// The limit for one event, in bytes.
    pub line_bytes_max: usize,
}

/// The position of the reflector. The documentation of this module describes the transitions.
pub(super) enum State {
    /// Nothing usable is known. The next step lists, for `reason`.
    Empty { reason: &'static str },
    /// In a paged list.
    Paging(PagedList),
    /// In the initial events of a watch-list, started for `reason`.
    WatchListing { reason: &'static str, watch: OpenWatch },
    /// Everything up to `version` was emitted. The next step opens a watch from there. If
    /// `in_doubt`, it first asks for the cluster's version.
    Listed { version: ResourceVersion, in_doubt: bool },
    /// A watch is open, and everything up to `version` was emitted.
    Watching { watch: OpenWatch, version: ResourceVersion },
}

impl State {
    /// The reason for the relist if this state is lost. A list that is lost passes its own reason
    /// on.
    pub(super) fn relist_reason(&self) -> &'static str {
        match self {
            Self::Empty { reason } | Self::Paging(PagedList { reason, .. }) | Self::WatchListing { reason, .. } => {
                reason
            }
            Self::Listed { .. } | Self::Watching { .. } => "interrupted",
        }
    }
}

/// The position in a paged list.
pub(super) struct PagedList {
    /// Why the list was started.
    pub(super) reason: &'static str,
    /// The continue token. `None` before the first page.
    pub(super) next: Option<String>,
    /// The version of the first page.
    pub(super) version: Option<ResourceVersion>,
    /// How often in a row the next page has failed.
    pub(super) failures: usize,
    /// The open watch, and the version of its last event, if the list repeats the objects at that
    /// version. The watch continues after the list, so no event is lost.
    pub(super) beside: Option<(OpenWatch, ResourceVersion)>,
}

impl PagedList {
    /// A list from its first page.
    pub(super) fn new(reason: &'static str, beside: Option<(OpenWatch, ResourceVersion)>) -> Self {
        Self { reason, next: None, version: None, failures: 0, beside }
    }
}

/// A watch whose response has started.
pub(super) struct OpenWatch {
    pub(super) lines: Lines<BodyStream>,
    pub(super) opened: Instant,
    /// Whether it has brought a version beyond its start.
    pub(super) advanced: bool,
    pub(super) _guard: UpstreamWatchGuard,
}

/// The result of a step.
pub enum Step {
    /// An update for the cache.
    Update {
        /// The update.
        update: Update,
        /// The time at which its line was read; for the start of a list, the time of the request.
        received: Instant,
    },
    /// A watch was opened, so upstream is reachable and answers.
    Watching {
        /// The time of a consistent read that found the cluster at the watch's starting version, if
        /// there was one. The cache was fresh then.
        proven_at: Option<Instant>,
    },
    /// The watch ended normally, or was silent for too long. The next step opens another.
    Ended {
        /// The label in metrics: `timeout` for a normal end, or `idle`.
        reason: &'static str,
    },
}
