//! How a subscription finds its place: at the beginning, where it was, and after it has fallen behind.
//!
//! State and position are taken in one critical section, so that there is no gap and no repeat between what a subscriber is told first and
//! the events after it.

use std::{ops::Bound, sync::Arc};

use tokio::time::Instant;
use tracing::info;

use crate::{
    cache::{Expired, HistorySource, PriorState},
    fanout::{
        gate::GatePermit,
        hub::core::{Cached, Hub, Inner},
        stream_end::{Refusal, StreamEnd},
        subscribe::{
            backlog::{Backlog, BacklogError, BacklogPart, SnapshotHeader},
            catch_up::CatchUp,
            options::{OnExpired, OnLag, Start, SubscribeOptions},
            subscription::{StartPoint, Subscription},
        },
        views::view::{LogReadError, View, ViewKey},
        wake::waker::StreamWaker,
    },
    telemetry::metrics::{Lag, Resume},
};
use kubefan_common::planted::{self, Bug};
use kubefan_model::{ResourceVersion, format::Format, selection::Selection};

impl Hub {
    /// Registers a subscription; state and position are taken in one critical section.
    ///
    /// # Errors
    /// [`Refusal::Expired`] where nothing held here leads on from its version; a backfill may, and a start over always does.
    pub fn subscribe(
        self: &Arc<Self>,
        selection: Selection,
        format: Format,
        terms: impl Into<SubscribeOptions>,
        bell: impl Into<Arc<StreamWaker>>,
    ) -> Result<Subscription, Refusal> {
        let (terms, bell) = (terms.into(), bell.into());
        let mut inner = self.inner();
        self.serving(&inner)?;
        let Inner { cache: Some(cached), views, .. } = &mut *inner else {
            return Err(self.not_synced("no state"));
        };
        let key = ViewKey { selection: selection.spec().clone(), format };
        let view = match views.get(&key) {
            Some(view) => view.clone(),
            None => {
                let encoder = views.encoder(&key.format, (&self.resource, self.parser.tables()), &self.view_bytes.kept);
                Arc::new(View::new(selection, encoder, cached.version, &self.view_bytes))
            }
        };
        let mut floor = None;
        let start = match terms.start {
            Start::Ahead(version) if version <= cached.version => Start::After(version),
            start => start,
        };
        let place = match start {
            Start::Ahead(version) => {
                floor = Some(version);
                StartPoint { cursor: view.end(), prelude: None, resume: floor, pass: None }
            }
            Start::Snapshot => self.snapshot_for(&view, cached, None, terms.marks_end),
            Start::After(requested) | Start::Kept(requested) if requested > cached.version => {
                self.metrics.resume(Resume::Future);
                return Err(Refusal::Future { requested, current: cached.version });
            }
            Start::Over(version) => {
                self.resumed(version, Resume::Restart);
                self.snapshot_for(&view, cached, Some(version), false)
            }
            Start::After(version) | Start::Kept(version) => {
                let (place, way) = match &terms.backfill {
                    None => self.way_on(&view, cached, version)?,
                    Some(backfill) if backfill.epoch != cached.epoch => {
                        let oldest = cached.history.oldest();
                        return Err(Expired { requested: version, oldest }.into());
                    }
                    Some(backfill) => {
                        let from =
                            if planted::is(Bug::SpliceDoubles) { cached.history.oldest() } else { backfill.reached };
                        let then = self.way_on(&view, cached, from)?.0;
                        let part = BacklogPart::Backfill { backfill: backfill.clone(), after: version, told: version };
                        let prelude = Backlog::new(part).followed_by(then.prelude);
                        (StartPoint { prelude: Some(prelude), ..then }, Resume::Backfill)
                    }
                };
                self.resumed(version, way);
                StartPoint { resume: Some(version), ..place }
            }
        };
        let place = self.admit(place, terms.pass.clone()).map_err(Refusal::Exhausted)?;
        if planted::is(Bug::SubscribedInTwoSections) {
            drop(inner);
            inner = self.inner();
        }
        let at_view = view.join(bell.clone());
        if inner.views.get(&key).is_none() {
            inner.views.insert(view.clone());
        }
        inner.subscribers += 1;
        inner.used_at = Instant::now();
        drop(inner);
        self.metrics.subscription_started();
        Ok(Subscription::new(self.clone(), view, (at_view, bell), place, floor, &terms))
    }

    fn resumed(&self, from: ResourceVersion, way: Resume) {
        self.metrics.resume(way);
        if way != Resume::Ring {
            info!(resource = self.resource.resource, %from, way = way.as_str(), "resumed");
        }
    }

    /// The state from the start, and the place in the log after it.
    fn snapshot_for(
        &self,
        view: &View,
        cached: &Cached,
        restarted_from: Option<ResourceVersion>,
        marks_end: bool,
    ) -> StartPoint {
        let begin = Some((self.resource.clone(), self.cluster()));
        let head = |version| SnapshotHeader { version, begin, restarted_from, marks_end };
        let (cursor, part) = if view.key().format.encoding().compresses_snapshots() {
            let Cached { store, history, version, .. } = cached;
            let (chunks, version, cursor) =
                view.generation(store, *version, history.ring(), restarted_from, Instant::now());
            (cursor, BacklogPart::Chunks { head: head(version), chunks, next: 0 })
        } else {
            (view.end(), BacklogPart::Objects { head: head(cached.version), store: cached.store.clone(), last: None })
        };
        StartPoint { cursor, prelude: Some(Backlog::new(part)), resume: None, pass: None }
    }

    /// Sees to it that whoever is sent more than events has leave for it.
    fn admit(&self, place: StartPoint, pass: Option<Arc<GatePermit>>) -> Result<StartPoint, String> {
        let pass = match (&place.prelude, pass) {
            (None, _) => None,
            (Some(_), Some(pass)) => Some(pass),
            (Some(_), None) => Some(Arc::new(self.gate.enter_now()?)),
        };
        Ok(StartPoint { pass, ..place })
    }

    /// What leads on from `version`, where anything held here does, for one who can be told of marks or not.
    pub fn way_from(&self, version: ResourceVersion, has_marks: bool) -> Result<HistorySource, Refusal> {
        let inner = self.inner();
        Ok(self.serving(&inner)?.history.way_for(version, has_marks)?)
    }

    /// What leads on from `version`, which is not from the future: the log, or a catch-up and then the log.
    fn way_on(&self, view: &View, cached: &Cached, version: ResourceVersion) -> Result<(StartPoint, Resume), Expired> {
        let place = |cursor, prelude| StartPoint { cursor, prelude, resume: Some(version), pass: None };
        match cached.history.way_for(version, view.encoder().format().has_marks())? {
            HistorySource::Log => Ok((place(view.cursor_after(version, cached.history.ring())?, None), Resume::Ring)),
            HistorySource::CatchUp => {
                let catch_up = Box::new(CatchUp::new(version, cached.store.clone(), cached.version));
                let prelude = Backlog::new(BacklogPart::CatchUp { catch_up, begun: false });
                Ok((place(view.end(), Some(prelude)), Resume::Residue))
            }
        }
    }

    /// How a subscription goes on that has fallen behind the events that are held: everything up to `sent` was sent to it, where that
    /// is exact.
    pub(in crate::fanout) fn lagging(
        &self,
        view: &View,
        sent: Option<ResourceVersion>,
        expired: Expired,
        terms: (OnLag, OnExpired),
        pass: Option<Arc<GatePermit>>,
    ) -> Result<StartPoint, StreamEnd> {
        let inner = self.inner();
        let cached = self.current(&inner, view)?;
        let (on_lag, on_expired) = terms;
        let sent = if planted::is(Bug::LaggardFromFloor) { sent.map(|_| expired.oldest) } else { sent };
        let (place, lag) = match sent.filter(|_| on_lag == OnLag::Conflate).map(|sent| self.way_on(view, cached, sent))
        {
            Some(Ok((place, _))) => (place, Lag::CatchUp),
            _ if on_expired == OnExpired::Restart => {
                (self.snapshot_for(view, cached, Some(expired.requested), false), Lag::Restart)
            }
            _ => {
                self.metrics.lag(Lag::Expired);
                return Err(expired.into());
            }
        };
        let place = self.admit(place, pass).map_err(StreamEnd::Overloaded)?;
        self.metrics.lag(lag);
        Ok(place)
    }

    /// Where one goes on who has everything up to `floor` from elsewhere, and whether the cache has come so far.
    pub(in crate::fanout) fn skip(&self, view: &View, floor: ResourceVersion) -> Result<(u64, bool), LogReadError> {
        let inner = self.inner();
        let cached = self.current(&inner, view).map_err(LogReadError::Ended)?;
        if cached.version < floor {
            return Ok((view.end(), false));
        }
        let cursor = view.cursor_after(floor, cached.history.ring());
        cursor.map(|cursor| (cursor, true)).map_err(|expired| LogReadError::Behind { oldest: expired.oldest })
    }

    /// A part of what [`History::replaced`] tells, for a catch-up in this view.
    pub(in crate::fanout) fn replaced(
        &self,
        view: &View,
        after: ResourceVersion,
        up_to: Bound<ResourceVersion>,
        changes_max: usize,
    ) -> Result<(Vec<PriorState>, Option<ResourceVersion>), BacklogError> {
        let inner = self.inner();
        let cached = self.current(&inner, view).map_err(BacklogError::Ended)?;
        cached.history.replaced(after, up_to, changes_max).map_err(BacklogError::Expired)
    }

    /// The state that this view is of: versions of another history mean nothing in it.
    fn current<'a>(&self, inner: &'a Inner, view: &View) -> Result<&'a Cached, StreamEnd> {
        match (view.ended(), &inner.cache) {
            (Some(end), _) => Err(end),
            (None, Some(cached)) => Ok(cached),
            // A hub that forgets its state ends its views in the same section.
            (None, None) => Err(StreamEnd::Stopped(inner.message.clone())),
        }
    }

    /// Unregisters a subscription; a view that nobody uses any more is dropped.
    pub(in crate::fanout) fn leave(&self, view: &Arc<View>, place: usize, waited: Option<u64>) {
        let mut inner = self.inner();
        inner.subscribers -= 1;
        inner.used_at = Instant::now();
        if view.leave(place, waited) == 0 {
            inner.views.remove(view);
        }
    }
}
