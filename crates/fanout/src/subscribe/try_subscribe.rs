//! Registers a subscription.
//!
//! [`Hub::try_subscribe`] plans and subscribes in one critical section. A gate permit or a backfill
//! takes time and cannot be fetched there, so it is returned as a [`SubscribeNeed`]. The caller
//! fetches it without the lock, and asks again with all of it: the decision is made anew each time,
//! in one place, and never goes stale between planning and subscribing.

use std::sync::Arc;

use kubefan_admission::fair_share::Holder;
use kubefan_cache::{
    Expired, HistorySource, PublishedCache, Refusal,
    resume::{BackfillState, OnAhead, ResumePlan, ResumeRequest, Situation, plan},
};
use kubefan_common::{
    planted::{self, Bug},
    when_planted,
};
use kubefan_model::{ResourceVersion, format::Format, selection::Selection};
use kubefan_telemetry::metrics::Resume;
use tokio::time::Instant;
use tracing::info;

use super::{
    options::{Provided, ProvidedBackfill, Start, SubscribeOptions},
    start_point::{First, backfill_end},
    subscription::{JoinedView, Subscription},
};
use crate::{
    hub::{Hub, core::HubState, replay::LongHistory},
    views::view::{View, ViewKey},
    wake::StreamWaker,
};

/// Something that must be fetched before a subscription can be registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubscribeNeed {
    /// A gate permit: the backlog pins state.
    Permit,
    /// The events after this version, or the answer that upstream does not have them either. A
    /// backfill that was provided before no longer helps.
    Backfill(ResourceVersion),
    /// A [replay](Hub::replay) of the history after this version, which takes long to test. It was
    /// not needed before: a view had this history, and was shortened or dropped since.
    Replay(ResourceVersion),
}

/// The reason why there is no subscription.
#[derive(Debug)]
pub enum NotSubscribed {
    /// The subscription is refused.
    Refused(Refusal),
    /// Something must be fetched first.
    Needs(SubscribeNeed),
}

/// Limit of replays for one subscription. After that its history is tested inside the critical
/// section.
const REPLAYS_ASKED_MAX: usize = 2;

impl From<Refusal> for NotSubscribed {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<Expired> for NotSubscribed {
    fn from(expired: Expired) -> Self {
        Self::Refused(expired.into())
    }
}

impl Hub {
    /// Registers a subscription, or returns what must be provided first. A resume is counted once,
    /// when it is decided.
    pub fn try_subscribe(
        self: &Arc<Self>,
        selection: &Selection,
        format: &Format,
        options: &SubscribeOptions,
        provided: &mut Provided,
        waker: &Arc<StreamWaker>,
    ) -> Result<Subscription, NotSubscribed> {
        let key = ViewKey { selection: selection.clone(), format: format.clone() };
        let mut state = self.lock();
        let mut evicted = Vec::new();
        // Subscriptions before this one may have added much older history to the logs.
        if self.budgets.logs.is_over() {
            let HubState { published, views, .. } = &mut *state;
            let now = Instant::now();
            let log_share = views.shorten_logs(&self.budgets.logs, Some(&key), now);
            evicted = published.evict(now, log_share);
            views.trim(&evicted);
        }
        let (first, resume) = self.first(&state, &key, options, provided)?;
        let permit = if first.needs_permit() {
            let Some(permit) = &provided.permit else { return Err(NotSubscribed::Needs(SubscribeNeed::Permit)) };
            Some(permit.clone())
        } else {
            None
        };
        let HubState { published, views, .. } = &mut *state;
        let cached = published.serving(Instant::now())?;
        // A log that was shortened does not grow at its old end: another view is made. If none may
        // be added, `first` was planned so that it can start in this one.
        let can_start_in = |view: &&Arc<View>| first.log_from(cached).is_none_or(|from| view.can_start_after(from));
        let known = views.get(&key).filter(can_start_in).cloned();
        if known.is_none()
            && let First::History(HistorySource::Log, from) = first
            && provided.replays_asked < REPLAYS_ASKED_MAX
            && !provided.replayed.as_ref().is_some_and(|replayed| replayed.starts_after(cached.epoch, from))
            && LongHistory::after(from, &cached.history, selection).is_some()
        {
            provided.replays_asked += 1;
            return Err(NotSubscribed::Needs(SubscribeNeed::Replay(from)));
        }
        let view = match known {
            Some(view) => view,
            None => {
                let encoder = views.encoder(format, &self.resource, self.parser.tables(), &self.budgets);
                let memory = self.selections.take_view(selection, format, options.holder)?;
                Arc::new(View::new(selection.clone(), encoder, cached.version, &self.budgets, memory))
            }
        };
        let floor = match &first {
            First::Nothing(version) => Some(*version),
            First::Proved { proved, .. } => Some(proved.version),
            _ => None,
        };
        let start = self.start_point(&view, cached, first, provided.replayed.take())?;
        if let Some((version, how)) = resume {
            self.resumed(version, how);
        }
        when_planted!(SubscribedInTwoSections => state = { drop(state); self.lock() });
        let tenant = options.holder.as_ref().and_then(Holder::tenant);
        let waker_id = view.join(waker.clone(), &self.budgets.logs.bytes_of(tenant));
        if !state.views.get(&key).is_some_and(|known| Arc::ptr_eq(known, &view)) {
            state.views.insert(view.clone());
        }
        state.subscribers += 1;
        state.used_at = Instant::now();
        drop(state);
        drop(evicted);
        self.metrics.subscription_started();
        let way = resume.map(|(_, how)| how);
        let joined = JoinedView { view, waker_id, waker: waker.clone(), start, permit, floor, way };
        Ok(Subscription::new(self.clone(), joined, options))
    }

    /// As [`Self::try_subscribe`], for a caller that waits for nothing: it takes a permit only if
    /// one is free, and reads no backfill.
    ///
    /// # Errors
    /// [`Refusal::Exhausted`] if no permit is free.
    pub fn subscribe(
        self: &Arc<Self>,
        selection: Selection,
        format: Format,
        options: impl Into<SubscribeOptions>,
        waker: impl Into<Arc<StreamWaker>>,
    ) -> Result<Subscription, Refusal> {
        let options = options.into();
        let waker = waker.into();
        let mut provided = Provided::default();
        self.start_index(&selection, options.holder);
        if let Some(version) = options.reads_history_after() {
            provided.replayed = self.replay_now(&selection, &format, version);
        }
        loop {
            match self.try_subscribe(&selection, &format, &options, &mut provided, &waker) {
                Ok(subscription) => return Ok(subscription),
                Err(NotSubscribed::Refused(refusal)) => return Err(refusal),
                Err(NotSubscribed::Needs(SubscribeNeed::Permit)) => {
                    provided.permit =
                        Some(Arc::new(self.gate().acquire_now(options.holder).map_err(Refusal::Exhausted)?));
                }
                Err(NotSubscribed::Needs(SubscribeNeed::Backfill(_))) => {
                    provided.backfill = ProvidedBackfill::Unavailable
                }
                Err(NotSubscribed::Needs(SubscribeNeed::Replay(version))) => {
                    provided.replayed = self.replay_now(&selection, &format, version);
                }
            }
        }
    }

    /// Decides what is sent first, and how a resume continues. If no other view with its key may be
    /// added, the subscription must continue in the newest, also if the ring has more history than
    /// the log of that.
    fn first(
        &self,
        HubState { published, views, .. }: &HubState,
        key: &ViewKey,
        options: &SubscribeOptions,
        provided: &Provided,
    ) -> Result<(First, Option<(ResourceVersion, Resume)>), NotSubscribed> {
        let version = match options.start {
            Start::Snapshot => {
                let marks_end = options.marks_end;
                let first = match options.source.instead_of(published.serving(Instant::now())?)? {
                    Some(proved) => First::Proved { proved: proved.clone(), marks_end },
                    None => First::Snapshot { restarted_from: None, marks_end },
                };
                return Ok((first, None));
            }
            Start::Await(version) => {
                let current = published.serving(Instant::now())?.version;
                let is_behind = current < version && planted::is(Bug::AheadIsNow);
                if current.is_at(version) || is_behind { current } else { version.end() }
            }
            Start::Resume(version) | Start::ResumeWithObjects(version) => version,
        };
        let version =
            if options.may_be_complete && version.sub() == 0 { self.place_of(published, version)? } else { version };
        let on_ahead = if matches!(options.start, Start::Await(_)) { OnAhead::Wait } else { OnAhead::Refuse };
        let (position, backfill) = match &provided.other_history {
            Some(refusal) => (Err(refusal.clone()), BackfillState::Unavailable),
            None => {
                let cached = published.serving(Instant::now())?;
                let history = &cached.history;
                let newest = views.newest_at_limit(key);
                let gap_markers = key.format.has_markers() || planted::is(Bug::UnmarkedCatchUp);
                let coverage = |version| {
                    let covered = history.coverage(version, cached.version, gap_markers);
                    newest.map_or(covered, |view| view.limit_coverage(covered))
                };
                // If only the log lacks the version, a backfill does not help: it ends where
                // history can resume, which may be before the log, too.
                let only_log_lacks_it =
                    views.none_can_start_after(key, version) && history.can_resume_from(version, cached.version);
                let backfill = match &provided.backfill {
                    _ if only_log_lacks_it => BackfillState::Unavailable,
                    ProvidedBackfill::Read(backfill) if backfill.epoch == cached.epoch => {
                        BackfillState::EndsAt(coverage(backfill_end(backfill, cached)))
                    }
                    ProvidedBackfill::Read(_) | ProvidedBackfill::Missing => BackfillState::Missing,
                    ProvidedBackfill::Unavailable => BackfillState::Unavailable,
                };
                (Ok(coverage(version)), backfill)
            }
        };
        let situation = Situation::Returns(backfill);
        Ok(match plan(ResumeRequest { position, situation, on_expired: options.on_expired, on_ahead }) {
            ResumePlan::Continue(source) => {
                let how = match source {
                    HistorySource::Log => Resume::Ring,
                    HistorySource::CatchUp => Resume::CatchUp,
                };
                (First::History(source, version), Some((version, how)))
            }
            ResumePlan::Backfill(source) if let ProvidedBackfill::Read(backfill) = &provided.backfill => {
                (First::Backfill(backfill.clone(), version, source), Some((version, Resume::Backfill)))
            }
            ResumePlan::Backfill(_) | ResumePlan::NeedsBackfill => {
                return Err(NotSubscribed::Needs(SubscribeNeed::Backfill(version)));
            }
            ResumePlan::Wait(version) => {
                // It resumes if the cache has a part of its version.
                let has_part = published.serving(Instant::now())?.version.is_at(version);
                (First::Nothing(version), has_part.then_some((version, Resume::Ring)))
            }
            ResumePlan::Restart => {
                let first = First::Snapshot { restarted_from: Some(version), marks_end: false };
                (first, Some((version, Resume::Restart)))
            }
            ResumePlan::Expired(refusal) => {
                self.metrics.resume(Resume::Expired);
                return Err(refusal.into());
            }
            ResumePlan::Future { requested, current } => {
                self.metrics.resume(Resume::Future);
                return Err(Refusal::Future { requested, current }.into());
            }
        })
    }

    /// The place of a version whose client does not know whether it has all of it: the end, if that
    /// is where this history starts.
    fn place_of(&self, published: &PublishedCache, version: ResourceVersion) -> Result<ResourceVersion, Refusal> {
        let cached = published.serving(Instant::now())?;
        let can_resume = |from| cached.history.can_resume_from(from, cached.version);
        Ok(if !can_resume(version) && can_resume(version.end()) { version.end() } else { version })
    }

    fn resumed(&self, from: ResourceVersion, how: Resume) {
        self.metrics.resume(how);
        if how != Resume::Ring {
            info!(resource = self.resource.resource, from = %from.whole(), way = how.as_str(), "resumed");
        }
    }
}
