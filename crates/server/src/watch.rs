//! A watch that was admitted. An API hands it to the transport, which sends it.

use std::{sync::Arc, time::Duration};

use http::HeaderMap;
use kubefan_access::Lease;
use kubefan_admission::FairPermit;
use kubefan_audit::AuditRecord;
use kubefan_cache::StreamEnd;
use kubefan_fanout::Subscription;
use kubefan_model::Media;
use tokio::time::Instant;

use crate::{staleness::Staleness, subscribers::Registered};

/// An admitted watch.
pub struct OpenedWatch {
    /// Position of the watch in the stream of changes.
    pub subscription: Subscription,
    /// A bookmark is sent after this time without events; `None` if no bookmarks are sent.
    pub bookmark_interval: Option<Duration>,
    /// Time at which the watch ends by itself.
    pub timeout_at: Option<Instant>,
    /// The protocol that the watch is sent in.
    pub protocol: WatchProtocol,
    /// Permit of the watch among all streams.
    pub place: FairPermit,
    /// The right of its caller, which is reviewed while the watch lasts.
    pub lease: Lease,
    /// Entry of the watch among the subscribers.
    pub registered: Registered,
    /// The staleness of the state that it starts from.
    pub staleness: Staleness,
    /// The headers that let a page of another site read it.
    pub cross_origin: Arc<HeaderMap>,
    /// Record of the watch in the audit log, which is complete when the watch is dropped.
    pub record: AuditRecord,
}

impl OpenedWatch {
    /// Reason from outside to end the watch; `None` while it may continue.
    pub fn end(&self) -> Option<StreamEnd> {
        self.lease.end().or_else(|| self.registered.end())
    }

    /// Returns the way to move it to another replica.
    pub fn movable(&self) -> Movable {
        match (self.protocol, self.bookmark_interval) {
            (WatchProtocol::Grpc, _) => Movable::Cheaply,
            (WatchProtocol::Kube(_), Some(_)) => Movable::ByBookmark,
            (WatchProtocol::Kube(_), None) => Movable::No,
        }
    }
}

/// The way to move a watch to another replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Movable {
    /// The last message carries the version that the watch resumes from (gRPC).
    Cheaply,
    /// A last bookmark brings the version that it resumes from (HTTP with bookmarks).
    ByBookmark,
    /// The client may know only an old version, so the watch stays until its own timeout.
    No,
}

/// The protocol of a watch: how its stream starts and ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchProtocol {
    /// gRPC: the reason for the end is in the trailers.
    Grpc,
    /// A Kubernetes watch in this encoding: the reason is an ERROR event, if there is one. There
    /// are no trailers.
    Kube(Media),
}

impl WatchProtocol {
    /// The encoding of a Kubernetes watch. A gRPC stream has none: its messages are the same with
    /// any encoding of the objects in them, and here it counts as JSON.
    pub fn media(self) -> Media {
        match self {
            Self::Grpc => Media::Json,
            Self::Kube(media) => media,
        }
    }
}
