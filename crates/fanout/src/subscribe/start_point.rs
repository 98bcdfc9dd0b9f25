//! The point where a subscription starts or continues: its backlog, and its place in the view's log
//! after that.
//!
//! Both are taken in one critical section of the hub, so that there is no gap and no repeat between
//! them.

use std::sync::Arc;

use kubefan_admission::{fair_share::Holder, gate::GatePermit};
use kubefan_cache::{
    Backfill, CachedState, Expired, HistorySource, OnExpired, OnLag,
    resume::{OnAhead, ResumePlan, ResumeRequest, Situation, plan},
    stream_end::StreamEnd,
};
use kubefan_common::{
    planted::{self, Bug},
    proto::v1alpha1::ResolvedResource,
    when_planted,
};
use kubefan_model::ResourceVersion;
use kubefan_telemetry::metrics::Lag;
use tokio::time::Instant;

use crate::{
    hub::{Hub, ProvedState},
    subscribe::{
        backlog::{Backlog, BacklogPart, SnapshotHeader},
        catch_up::CatchUp,
    },
    views::{
        log::{Cursor, Replayed},
        view::View,
    },
};

/// The point where a subscription starts or continues.
pub(super) struct StartPoint {
    /// The place in the view's log.
    pub(super) cursor: Cursor,
    /// Sent before the log is read.
    pub(super) backlog: Option<Backlog>,
    /// Everything at or below this version was sent.
    pub(super) resume: Option<ResourceVersion>,
}

/// The part of a subscription that is sent first.
pub(super) enum First {
    /// Nothing: the subscription waits until the cache has passed this version.
    Nothing(ResourceVersion),
    /// A proved state that the cache has not reached, in place of a snapshot of the cache. Only
    /// events after its version follow.
    Proved { proved: ProvedState, marks_end: bool },
    /// A snapshot. If it starts over, it replaces everything after this version.
    Snapshot { restarted_from: Option<ResourceVersion>, marks_end: bool },
    /// The changes that this part of history has after a version.
    History(HistorySource, ResourceVersion),
    /// The events of a backfill after a version, then the changes of this part of history after the
    /// backfill.
    Backfill(Arc<Backfill>, ResourceVersion, HistorySource),
}

impl First {
    /// The version after which it continues in the log; `None` if it starts at the end of the log.
    pub(super) fn log_from(&self, cached: &CachedState) -> Option<ResourceVersion> {
        match self {
            Self::History(HistorySource::Log, version) => Some(*version),
            Self::Backfill(backfill, _, HistorySource::Log) => Some(backfill_end(backfill, cached)),
            _ => None,
        }
    }

    /// Whether it pins state while it is sent, which takes a gate permit.
    pub(super) fn needs_permit(&self) -> bool {
        !matches!(self, Self::Nothing(_) | Self::History(HistorySource::Log, _))
    }
}

/// A subscription that has fallen behind the retained events.
pub(super) struct Lagging {
    /// Everything up to this version was sent; `None` if the sent part is the state at no version.
    pub(super) sent: Option<ResourceVersion>,
    /// The error of the log.
    pub(super) expired: Expired,
    /// Reaction if the subscription lags.
    pub(super) on_lag: OnLag,
    /// Reaction if the version of the subscription is no longer retained.
    pub(super) on_expired: OnExpired,
    /// The holder that a new permit counts to.
    pub(super) holder: Option<Holder>,
    /// A permit that it still has, which is used again.
    pub(super) permit: Option<Arc<GatePermit>>,
}

impl Hub {
    /// Prepares the start point, inside the critical section that `cached` is borrowed from.
    /// `replayed` may have the history that it needs.
    pub(super) fn start_point(
        &self,
        view: &View,
        cached: &CachedState,
        first: First,
        replayed: Option<Replayed>,
    ) -> Result<StartPoint, Expired> {
        let replayed = replayed.filter(|replayed| replayed.epoch == cached.epoch);
        match first {
            First::Nothing(version) => Ok(StartPoint { cursor: view.end(), backlog: None, resume: Some(version) }),
            First::Snapshot { restarted_from, marks_end } => {
                Ok(self.snapshot_point(view, cached, restarted_from, marks_end))
            }
            First::Proved { proved: ProvedState { store, version, .. }, marks_end } => {
                let marks_end = marks_end && !planted::is(Bug::ProvedStateNeverEnds);
                let header = SnapshotHeader { version, begin: self.begin(), restarted_from: None, marks_end };
                // The state is proved at a version that the cache has not reached.
                let (cursor, part) = if view.encoder().is_gzip() && cached.store.is_same(&store) {
                    let CachedState { store, history, version, .. } = cached;
                    let (chunks, _, cursor) =
                        view.shared_snapshot(store, *version, history, Some(*version), Instant::now());
                    (cursor, BacklogPart::Chunks { header, chunks, next: 0 })
                } else {
                    (view.end(), BacklogPart::Objects { header, store, last: None })
                };
                Ok(StartPoint { cursor, backlog: Some(Backlog::new(part)), resume: None })
            }
            First::History(source, version) => history_point(view, cached, source, version, replayed),
            First::Backfill(backfill, version, source) => {
                let then = history_point(view, cached, source, backfill_end(&backfill, cached), None)?;
                let part = BacklogPart::Backfill { backfill, after: version, sent_up_to: version };
                let backlog = Some(Backlog::new(part).followed_by(then.backlog));
                Ok(StartPoint { backlog, resume: Some(version), ..then })
            }
        }
    }

    /// The resource and the cluster that the start of a snapshot names.
    fn begin(&self) -> Option<(ResolvedResource, Option<String>)> {
        Some((self.resource.clone(), self.cluster()))
    }

    fn snapshot_point(
        &self,
        view: &View,
        cached: &CachedState,
        restarted_from: Option<ResourceVersion>,
        marks_end: bool,
    ) -> StartPoint {
        let header = |version| SnapshotHeader { version, begin: self.begin(), restarted_from, marks_end };
        let (cursor, part) = if view.encoder().format().compresses_snapshots() {
            let CachedState { store, history, version, .. } = cached;
            // A reader over HTTP may have asked for the newest state, and the cache was proved to
            // have it.
            let not_older_than = if view.encoder().format().has_markers() { restarted_from } else { Some(*version) };
            let (chunks, version, cursor) =
                view.shared_snapshot(store, *version, history, not_older_than, Instant::now());
            (cursor, BacklogPart::Chunks { header: header(version), chunks, next: 0 })
        } else {
            let header = header(cached.version);
            let store = cached.store.clone();
            (view.end(), BacklogPart::Objects { header, store, last: None })
        };
        StartPoint { cursor, backlog: Some(Backlog::new(part)), resume: None }
    }

    /// Returns the point from which a subscription that has fallen behind the retained events
    /// continues.
    pub(super) fn lagging(
        &self,
        view: &View,
        lagging: Lagging,
    ) -> Result<(StartPoint, Option<Arc<GatePermit>>), StreamEnd> {
        let Lagging { sent, expired, on_lag, on_expired, holder, permit } = lagging;
        let state = self.lock();
        let cached = state.state_of(view)?;
        let sent = if planted::is(Bug::LaggingFromFloor) { sent.map(|_| expired.oldest) } else { sent };
        let gap_markers = view.encoder().format().has_markers();
        let coverage = sent.map(|sent| view.limit_coverage(cached.history.coverage(sent, cached.version, gap_markers)));
        let position = coverage.ok_or(StreamEnd::Expired(expired));
        let on_ahead = OnAhead::Refuse;
        let (first, lag) =
            match (plan(ResumeRequest { position, situation: Situation::Lags(on_lag), on_expired, on_ahead }), sent) {
                (ResumePlan::Continue(source), Some(sent)) => (First::History(source, sent), Lag::CatchUp),
                (ResumePlan::Restart, _) => {
                    let restarted_from = Some(expired.requested);
                    (First::Snapshot { restarted_from, marks_end: false }, Lag::Restart)
                }
                // The log's error is reported: the subscriber ran into that one.
                _ => {
                    self.metrics.lag(Lag::Expired);
                    return Err(expired.into());
                }
            };
        let permit = if first.needs_permit() {
            match permit {
                Some(permit) => Some(permit),
                None => Some(Arc::new(self.gate().acquire_now(holder).map_err(StreamEnd::Overloaded)?)),
            }
        } else {
            None
        };
        let point = self.start_point(view, cached, first, None)?;
        self.metrics.lag(lag);
        Ok((point, permit))
    }
}

/// The version that history continues from after a backfill.
pub(super) fn backfill_end(backfill: &Backfill, cached: &CachedState) -> ResourceVersion {
    when_planted!(SpliceDoubles => return cached.history.oldest());
    backfill.reached
}

/// After `version`: the log, or a catch-up and then the log.
fn history_point(
    view: &View,
    cached: &CachedState,
    source: HistorySource,
    version: ResourceVersion,
    replayed: Option<Replayed>,
) -> Result<StartPoint, Expired> {
    let (cursor, backlog) = match source {
        HistorySource::Log => (view.cursor_after(version, &cached.history, replayed)?, None),
        HistorySource::CatchUp => {
            let catch_up = Box::new(CatchUp::new(version, cached.store.clone(), cached.version));
            let part = BacklogPart::CatchUp { catch_up, is_started: false };
            (view.end(), Some(Backlog::new(part)))
        }
    };
    Ok(StartPoint { cursor, backlog, resume: Some(version) })
}
