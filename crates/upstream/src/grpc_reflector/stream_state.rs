//! The position of a reflector over gRPC, and the input that it waits for there.

use std::{future::Future, pin::Pin, time::Duration};

use kubefan_cache::RelistReason;
use kubefan_client::{ClientError, WatchItem, WatchStream};
use kubefan_model::ResourceVersion;
use kubefan_telemetry::metrics::UpstreamWatchGuard;
use tokio::time::{Instant, timeout};

use super::span::Span;
use crate::{
    error::UpstreamError,
    fallback::{Attempt, Verdict},
    kubefan_client::Freshness,
    reflector::NextStep,
};

/// Time for the other kubefan to open a watch, and between two parts of a snapshot. It waits for
/// its own first list for some seconds.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// The position of the reflector.
pub(super) enum StreamState {
    /// Nothing usable is known. The next step asks for a snapshot, for `reason`.
    Empty { reason: RelistReason },
    /// A snapshot was asked for, or is being read.
    Snapshot { reason: RelistReason, watch: OpenWatch },
    /// Everything up to `version` was emitted. The next step opens a watch from there.
    Resume { version: ResourceVersion },
    /// A watch is open, and everything up to `version` was emitted.
    Watching { watch: OpenWatch, version: ResourceVersion },
    /// A kubefan cannot list the state at an older version.
    Unserved,
}

/// The next kubefan's answer about the age of its state.
pub(super) type FreshnessAnswer = Pin<Box<dyn Future<Output = Result<Freshness, UpstreamError>> + Send>>;

pub(super) struct OpenWatch {
    pub(super) stream: WatchStream,
    /// Notes the end, if there is a fallback.
    pub(super) attempt: Option<Attempt>,
    pub(super) called_at: Instant,
    /// The cluster of its state. Empty if it is unknown.
    pub(super) cluster: String,
    /// The events of a marked span so far.
    pub(super) marked: Option<Span>,
    /// Time at which the last message was received.
    pub(super) received_at: Instant,
    /// The next answer about the age.
    pub(super) freshness: FreshnessAnswer,
    /// A proof that counts once its version is reached, and when it was received.
    pub(super) proof: Option<(Freshness, Instant)>,
    pub(super) _guard: UpstreamWatchGuard,
}

impl OpenWatch {
    /// Notes that nothing was received in time.
    pub(super) fn note_stall(&self) {
        if let Some(attempt) = &self.attempt {
            attempt.note(Verdict::Lost);
        }
    }
}

pub(super) enum Input {
    Nothing,
    Item(Option<Result<WatchItem, ClientError>>),
    Stalled,
    Freshness(Result<Freshness, UpstreamError>),
}

impl StreamState {
    /// Waits for the next input. Cancel-safe.
    pub(super) async fn input(&mut self) -> Input {
        match self {
            Self::Snapshot { watch, .. } => {
                timeout(ANSWER_TIMEOUT, watch.stream.next()).await.map_or(Input::Stalled, Input::Item)
            }
            Self::Watching { watch, .. } => tokio::select! {
                item = watch.stream.next() => Input::Item(item),
                answer = &mut watch.freshness => Input::Freshness(answer),
            },
            Self::Empty { .. } | Self::Resume { .. } | Self::Unserved => Input::Nothing,
        }
    }

    /// Returns the action of the next step if no event is pending.
    pub(super) fn next_step(&self) -> NextStep {
        match self {
            Self::Empty { .. } | Self::Unserved => NextStep::RequestList,
            Self::Snapshot { .. } => NextStep::ReadList,
            Self::Resume { .. } => NextStep::OpenWatch,
            Self::Watching { .. } => NextStep::ReadWatch,
        }
    }

    pub(super) fn relist_reason(&self) -> RelistReason {
        match self {
            Self::Empty { reason } | Self::Snapshot { reason, .. } => *reason,
            Self::Resume { .. } | Self::Watching { .. } | Self::Unserved => RelistReason::Interrupted,
        }
    }
}
