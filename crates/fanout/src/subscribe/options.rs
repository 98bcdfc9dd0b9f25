//! The options of a subscriber: its start, and its reactions if events are no longer retained.

use std::sync::Arc;

use kubefan_admission::{fair_share::Holder, gate::GatePermit};
use kubefan_cache::{Backfill, OnExpired, OnLag, Refusal};
use kubefan_model::ResourceVersion;

use crate::{hub::ReadSource, views::log::Replayed};

/// Start of a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// With a snapshot of [the state](SubscribeOptions::source), then events.
    Snapshot,
    /// After this version.
    Resume(ResourceVersion),
    /// After this version, for a client that retained the bytes of every object it was sent: it can
    /// read deltas from the start.
    ResumeWithObjects(ResourceVersion),
    /// Behind what the cache has of this version, as the apiserver starts a watch: versions over
    /// HTTP do not say how many events of one were sent, so what comes later is sent. If the cache
    /// has not reached the version, silence until then: the client may have it from upstream. For a
    /// format without deltas.
    Await(ResourceVersion),
}

/// Everything that a subscriber asks for.
#[derive(Debug, Clone)]
pub struct SubscribeOptions {
    /// Start of the subscription.
    pub start: Start,
    /// Reaction if it falls behind.
    pub on_lag: OnLag,
    /// Reaction if history cannot resume from its version.
    pub on_expired: OnExpired,
    /// The cluster that its version is of; empty if that is not known.
    pub cluster: String,
    /// Whether its version, named by a number alone, may be the end of that version: the client
    /// does not know.
    pub may_be_complete: bool,
    /// Whether a watch over HTTP asks for a bookmark where its initial state ends.
    pub marks_end: bool,
    /// The state that a snapshot is taken from, for a format without deltas.
    pub source: ReadSource,
    /// The holder that takes its permits, and whose tenant its log may be charged to; `None` for
    /// kubefan itself.
    pub holder: Option<Holder>,
}

impl SubscribeOptions {
    /// The version whose history the cache must know, after which it continues in this or another
    /// way.
    pub fn resumes_from(&self) -> Option<ResourceVersion> {
        match self.start {
            Start::Resume(version) | Start::ResumeWithObjects(version) => Some(version),
            Start::Await(_) | Start::Snapshot => None,
        }
    }

    /// The version after which it reads history, if the cache has reached it.
    pub fn reads_history_after(&self) -> Option<ResourceVersion> {
        match self.start {
            Start::Resume(version) | Start::ResumeWithObjects(version) => Some(version),
            Start::Await(version) => Some(version.end()),
            Start::Snapshot => None,
        }
    }
}

impl From<Start> for SubscribeOptions {
    fn from(start: Start) -> Self {
        let on_lag = OnLag::default();
        let on_expired = OnExpired::default();
        let may_be_complete = false;
        let marks_end = false;
        let source = ReadSource::Cache;
        let holder = None;
        Self { start, on_lag, on_expired, cluster: String::new(), may_be_complete, marks_end, source, holder }
    }
}

/// Parts that were fetched for a subscriber before it could subscribe, outside of the hub's lock.
#[derive(Debug, Default)]
pub struct Provided {
    /// Refusal, if the version is of another history than that of the cache.
    pub other_history: Option<Refusal>,
    /// The events that the cache's history lacks.
    pub backfill: ProvidedBackfill,
    /// A permit to be sent more than events.
    pub permit: Option<Arc<GatePermit>>,
    /// The history after its version ([`Hub::replay`](crate::Hub::replay)).
    pub replayed: Option<Replayed>,
    /// Number of replays that [`Hub::try_subscribe`](crate::Hub::try_subscribe) has asked for.
    pub replays_asked: usize,
}

/// The events up to a version that history resumes from, read again from upstream.
#[derive(Debug, Clone, Default)]
pub enum ProvidedBackfill {
    /// Not read yet.
    #[default]
    Missing,
    /// Read.
    Read(Arc<Backfill>),
    /// Upstream does not have them either.
    Unavailable,
}
