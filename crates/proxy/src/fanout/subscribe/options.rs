//! What a subscriber asks for: where it starts, and how it wants to go on where events are no longer held.

use std::sync::Arc;

use crate::{cache::Backfill, fanout::gate::GatePermit};
use kubefan_model::ResourceVersion;

/// Where a subscription starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// The state as a snapshot, then events.
    Snapshot,
    /// What came after this version.
    After(ResourceVersion),
    /// The same, for a client that has kept the bytes of every object it was sent: it can read deltas from the start.
    Kept(ResourceVersion),
    /// What comes after this version, which the cache may not have reached: silence until then. For a client that was told of it by upstream, and
    /// of a format without deltas.
    Ahead(ResourceVersion),
    /// A snapshot in the place of what came after this version, from which nothing leads on.
    Over(ResourceVersion),
}

/// What becomes of a subscription that has fallen behind the events that are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnLag {
    /// Nothing leads on: [`OnExpired`] decides.
    #[default]
    Expire,
    /// It goes on with a catch-up.
    Conflate,
}

/// What becomes of a subscription from whose version nothing leads on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnExpired {
    /// It ends.
    #[default]
    Fail,
    /// It starts over with a snapshot.
    Restart,
}

/// All of it.
#[derive(Debug, Clone)]
pub struct SubscribeOptions {
    /// Where it starts.
    pub start: Start,
    /// On lag.
    pub on_lag: OnLag,
    /// Where nothing leads on.
    pub on_expired: OnExpired,
    /// Of which cluster the version is that it starts from; empty where that is not known.
    pub cluster: String,
    /// The events up to a version that something leads on from, read again from upstream.
    pub backfill: Option<Arc<Backfill>>,
    /// A watch over HTTP asks to be told where its initial state ends.
    pub marks_end: bool,
    /// Leave to be sent more than events; where there is none, and the gate has room, it is given then.
    pub pass: Option<Arc<GatePermit>>,
}

impl From<Start> for SubscribeOptions {
    fn from(start: Start) -> Self {
        let (on_lag, on_expired) = (OnLag::default(), OnExpired::default());
        Self { start, on_lag, on_expired, cluster: String::new(), backfill: None, marks_end: false, pass: None }
    }
}
