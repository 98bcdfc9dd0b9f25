//! Watches over HTTP: their start and their duration.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use kubefan_access::{Authorized, Read};
use kubefan_admission::{FairPermit, Holder};
use kubefan_audit::AuditRecord;
use kubefan_cache::Refusal;
use kubefan_common::spread::spread;
use kubefan_fanout::{Hub, OfStream, ReadSource, Served, Start, Subscription};
use tokio::time::Instant;

use super::{
    answer::Answer,
    options::{WatchOptions, WatchStart},
};
use crate::{
    client_info::RequestOrigin,
    reader::Reader,
    staleness::Staleness,
    watch::{OpenedWatch, WatchProtocol},
};

/// A bookmark is sent after this time without events, as the apiserver does.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);
/// The shortest timeout of a watch that names none (`--min-request-timeout` of the apiserver). The
/// longest is twice as long.
const TIMEOUT_MIN: Duration = Duration::from_secs(1800);

/// Timeouts for watches that name none. They are spread evenly, so that watches that start together
/// do not end together, and move to other replicas over time.
#[derive(Default)]
pub struct DefaultTimeouts {
    watches: AtomicU32,
}

impl DefaultTimeouts {
    /// Returns the timeout of the next watch.
    fn next(&self) -> Duration {
        TIMEOUT_MIN.mul_f64(1.0 + spread(self.watches.fetch_add(1, Ordering::Relaxed).into()))
    }
}

/// The parts that a watch is opened with.
pub struct WatchParts {
    /// The authorized read.
    pub read: Authorized<Read>,
    /// The cache.
    pub served: Served,
    /// Position of the watch in the cache.
    pub subscription: Subscription,
    /// Permit of the watch among all streams.
    pub place: FairPermit,
    /// The client.
    pub sender: RequestOrigin,
    /// Staleness of the cache.
    pub staleness: Staleness,
    /// Handles to the stream of the watch.
    pub handles: WatchHandles,
}

/// Handles to the stream of a watch, for the parts that may end it.
pub struct WatchHandles {
    /// Ends with the right of its caller.
    pub for_lease: OfStream,
    /// Ends on request of operators.
    pub for_operator: OfStream,
}

/// Opens a watch that was subscribed.
pub fn open(
    reader: &Reader,
    timeouts: &DefaultTimeouts,
    options: &WatchOptions,
    WatchParts { read, served, subscription, place, sender, staleness, handles }: WatchParts,
) -> Answer {
    let WatchHandles { for_lease, for_operator } = handles;
    let timeout = options.timeout.unwrap_or_else(|| timeouts.next());
    let holder = place.holder().unwrap_or_else(|| Holder::new(0, None));
    let registered = reader.register(&read, sender, &served, &subscription, for_operator);
    let lease = reader.lease(read, &served.gvr, holder, for_lease);
    Answer::Watch(Box::new(OpenedWatch {
        subscription,
        bookmark_interval: options.bookmarks.then_some(BOOKMARK_INTERVAL),
        timeout_at: Some(Instant::now() + timeout),
        protocol: WatchProtocol::Kube(served.parser.media()),
        place,
        lease,
        registered,
        staleness,
        cross_origin: Arc::default(),
        record: AuditRecord::default(),
    }))
}

/// Returns the start of the subscription of a watch.
///
/// # Errors
/// The reason why there is no state to start with.
pub fn start(start: WatchStart, hub: &Hub, source: &ReadSource) -> Result<Start, Refusal> {
    // The version of a cluster may be ahead of a quiet resource's cache. The apiserver, too, is
    // silent until its cache reaches the version.
    Ok(match start {
        WatchStart::State(_) => Start::Snapshot,
        WatchStart::Now(_) => Start::Await(hub.snapshot_of(source)?.1),
        WatchStart::After(version) => Start::Await(version),
    })
}
