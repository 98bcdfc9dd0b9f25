//! The informer: feeds one cache from one reflector, for one resource and scope.
//!
//! The reflector lists and watches upstream, the writer turns its updates into commits, and the hub
//! publishes them. The hard part is between these: an answer may come from the wrong cluster
//! (behind the same address, or after a restore from a backup), and every kind of failure needs its
//! own reaction. Three places decide this. `standing` decides the needs of the next step, and when
//! the identity of the cluster must be confirmed; `confirmation` does that before any update is
//! applied. `handle` decides for each failure the state that readers see (stale, forbidden, gone)
//! and the next action (retry, relist, stop).
//!
//! Subscribers are not woken for every event. Events that upstream sent together are applied
//! together, and the informer wakes subscribers when it has read everything that has arrived. One
//! wake per event would multiply the wake-ups under load, exactly when they are expensive. Waiting
//! for a timer instead would delay a single event.
//!
//! Every list needs a place of the scheduler. The informer holds it from the first request to the
//! last object, and returns it for the wait after a failure, and if nothing arrives for too long:
//! a resource that hangs must not keep the others from being listed.

mod confirmation;
mod next;
mod standing;

use std::{pin::pin, sync::Arc, task::Poll, time::Duration};

use futures::future::OptionFuture;
use kubefan_cache::{CacheWriter, Phase, RelistReason, StreamEnd, Update};
use kubefan_common::unless_planted;
use kubefan_fanout::{CommitBatch, Served};
use kubefan_model::{Media, ResourceVersion, object::ObjectError, table::TableError};
use kubefan_peer::ReceivedCache;
use kubefan_telemetry::metrics::WatchPurpose;
use kubefan_upstream::{
    SourceReflector, UpstreamError,
    client::FORBIDDEN_GRACE,
    reflector::{ReflectorError, ReflectorEvent},
};
use rand::rngs::StdRng;
use tokio::{
    task::yield_now,
    time::{Instant, sleep_until},
};
use tracing::{info, warn};

use self::{
    next::{Next, Unannounced},
    standing::{Event, ListBegin, Standing},
};
use super::{
    cache_quota::CacheQuota,
    cached_schema::CachedSchema,
    consistency::Prover,
    failure_log::FailureLog,
    list_scheduler::{ListPlace, ListPriority},
    planned_relist::{DueRelist, PlannedRelist},
    retry::Retry,
    shape::{CheckStart, ShapeCheck, check_shape, other_shape_message},
    stop_reason::Stopped,
    upstream_context::CacheContext,
    warm_start::warm_start,
};

/// Time for which a list may hold its place without receiving anything.
const LIST_STALL_MAX: Duration = Duration::from_secs(30);
/// Objects to pack before yielding to other tasks: a few milliseconds of work.
const PREPARE_OBJECTS: usize = 100;

/// The list and watch of one cache.
pub(super) struct Informer {
    context: CacheContext,
    served: Served,
    schema: Arc<CachedSchema>,
    prover: Arc<Prover>,
    allowance: Option<CacheQuota>,
    reflector: SourceReflector,
    writer: CacheWriter,
    retry: Retry,
    random: StdRng,
    planned_relist: Arc<PlannedRelist>,
    failures: FailureLog,
    /// Decides the needs of the next step.
    standing: Standing,
    /// Held for as long as `standing` has a list with a place.
    place: Option<ListPlace>,
    /// Waits for as long as `standing` has a watch.
    due_relist: Option<DueRelist>,
}

/// Yields to the task that reads upstream's socket before concluding that no more data has arrived.
const READ_YIELDS: usize = 2;
/// The most events to apply before waking subscribers, even if more have arrived.
const EVENTS_PER_WAKE_MAX: usize = 64;

impl Informer {
    /// Creates an informer that does not run yet. With `warm` it asks peers before it lists.
    pub(super) fn new(
        context: CacheContext,
        served: Served,
        schema: Arc<CachedSchema>,
        prover: Arc<Prover>,
        planned_relist: Arc<PlannedRelist>,
        allowance: Option<CacheQuota>,
        warm: bool,
    ) -> Self {
        let reflector = context.reflector_for(&served, WatchPurpose::Standing);
        let random = context.generator();
        let retry = Retry::new(context.source.http().cloned(), context.generator());
        Self {
            writer: CacheWriter::new(context.cache_compression),
            context,
            served,
            schema,
            prover,
            allowance,
            reflector,
            retry,
            random,
            planned_relist,
            failures: FailureLog::default(),
            standing: Standing::Starting { asks_peers: warm },
            place: None,
            due_relist: None,
        }
    }

    /// Runs until the informer stops by itself. The future may be dropped at any time.
    pub(super) async fn run(mut self) -> Stopped {
        // Every return drops it, so no commit stays without a wake-up.
        let mut unannounced = Unannounced { batch: self.served.hub.batch(), steps: 0 };
        let Served { gvr, scope, .. } = &self.served;
        if !gvr.has_collection_path(scope) {
            let path = gvr.collection_path(scope);
            let message = format!("{gvr} is not cached: to the apiserver, {path} is not the path of this collection");
            return Stopped::NotCached(message);
        }
        if let Some(allowance) = &self.allowance
            && let Err(too_large) = allowance.check_size_upstream(&self.context, &self.served).await
        {
            return too_large.into();
        }
        if matches!(self.standing, Standing::Starting { asks_peers: true }) {
            self.start_warm(&mut unannounced.batch).await;
        }
        self.follow(Event::Started);
        loop {
            if !self.may_request(&mut unannounced.batch).await {
                continue;
            }
            let stopped = match self.step(&mut unannounced).await {
                Ok(ReflectorEvent::Update { update, received }) => {
                    self.apply(&mut unannounced.batch, update, received).await
                }
                Ok(ReflectorEvent::Watching { proven_at }) => {
                    self.follow(Event::WatchOpened);
                    if self.standing.is_confirmed() || self.confirm(&mut unannounced.batch, None).await {
                        self.served.hub.warn(&self.reflector.warnings());
                        self.served.hub.live();
                        if let Some(at) = proven_at {
                            self.served.hub.proved(at);
                        }
                    }
                    None
                }
                Ok(ReflectorEvent::Proved { at }) => {
                    self.follow(Event::Updated);
                    self.retry.watched();
                    self.served.hub.proved(at);
                    None
                }
                Ok(ReflectorEvent::Ended { reason }) => {
                    self.interrupted(Event::WatchEnded);
                    self.served.hub.metrics().watch_restart(reason);
                    None
                }
                Err(error) => self.handle(&mut unannounced.batch, error).await,
            };
            if let Some(stopped) = stopped {
                return stopped;
            }
        }
    }

    /// Starts with the state and history of a peer, if one can send them. Otherwise the first step
    /// lists.
    async fn start_warm(&mut self, batch: &mut CommitBatch) {
        let taken = warm_start(&self.context, &self.served, &self.schema, &mut self.random).await;
        let Some((ReceivedCache { commit, writer, .. }, proven_at)) = taken else { return };
        self.reflector.resume_from(commit.version);
        self.writer = writer;
        if let Some(at) = proven_at {
            self.served.hub.proved(at);
        }
        batch.commit(commit, Instant::now());
    }

    /// Notes an event. Drops the place and the wait for a planned relist if the informer may no
    /// longer hold them.
    fn follow(&mut self, event: Event) {
        self.standing = self.standing.after(event, self.reflector.next_step());
        if self.standing.list_progress().is_none() {
            self.place = None;
        }
        // Without a watch, a place for the planned relist would be held for nothing.
        if !self.standing.has_watch() {
            self.due_relist = None;
        }
    }

    /// Notes that a watch or a request has ended, and plans to read the objects again for the
    /// schema, if the list for it has ended early.
    fn interrupted(&mut self, event: Event) {
        if self.standing.gives_up_reread(self.reflector.next_step()) {
            unless_planted!(RereadGivenUp => self.plan_reread());
        }
        self.follow(event);
    }

    /// Performs the reflector's next step. Wakes subscribers when everything that has arrived is
    /// applied.
    async fn step(&mut self, unannounced: &mut Unannounced) -> Result<ReflectorEvent, ReflectorError> {
        loop {
            if self.standing.needs_place() {
                unannounced.batch.wake();
                let priority = if self.writer.version().is_none() { ListPriority::First } else { ListPriority::Relist };
                self.place = Some(self.context.lists.acquire(priority).await);
                self.follow(Event::PlaceGiven(Instant::now()));
            }
            let mut advanced_to = None;
            let next = self.step_or_advance(&mut advanced_to, unannounced).await;
            if let Some(version) = advanced_to {
                self.reflector.advance_to(version);
            }
            match next {
                Next::Step(step) => return step,
                Next::Relist(reason, place) => {
                    self.place = Some(place);
                    self.due_relist = None;
                    match reason {
                        RelistReason::SchemaChanged => self.reflector.reread(reason),
                        _ => self.reflector.relist(reason),
                    }
                    self.follow(Event::PlaceGiven(Instant::now()));
                }
            }
        }
    }

    /// Like [`Self::step`]. Meanwhile a freshness proof may advance the version of the cache, but
    /// only in the middle of a watch, because a list without one may be older than the proof.
    async fn step_or_advance(
        &mut self,
        advanced_to: &mut Option<ResourceVersion>,
        unannounced: &mut Unannounced,
    ) -> Next {
        let watching = self.standing.has_watch();
        let in_progress = self.reflector.next_step();
        let mut stalls_at = self.standing.list_progress().map(|at| at + LIST_STALL_MAX);
        let mut step = pin!(self.reflector.step());
        if unannounced.steps < EVENTS_PER_WAKE_MAX {
            for _ in 0..=READ_YIELDS {
                if let Poll::Ready(done) = futures::poll!(&mut step) {
                    unannounced.steps += 1;
                    return Next::Step(done);
                }
                yield_now().await;
            }
        }
        unannounced.steps = 0;
        unannounced.batch.wake();
        let due_relist = || self.planned_relist.clone().due_with_place(self.context.lists.clone());
        let due_relist = self.due_relist.get_or_insert_with(due_relist);
        loop {
            let range = tokio::select! {
                biased;
                done = &mut step => return Next::Step(done),
                range = self.prover.next_empty_range(), if watching => range,
                (reason, place) = &mut *due_relist, if watching => return Next::Relist(reason, place),
                Some(()) = OptionFuture::from(stalls_at.map(sleep_until)) => {
                    // The request continues.
                    self.standing = self.standing.after(Event::Stalled, in_progress);
                    self.place = None;
                    stalls_at = None;
                    continue;
                }
            };
            let hub = &self.served.hub;
            let Some(version) = range.target_for(hub) else { continue };
            let bookmark = Update::Bookmark(version);
            if let Ok(Some(commit)) = self.schema.write(&mut self.writer, &self.planned_relist, bookmark) {
                unannounced.batch.commit(commit, range.received);
                hub.proved(range.received);
                *advanced_to = Some(version);
            }
        }
    }

    async fn apply(&mut self, batch: &mut CommitBatch, update: Update, received: Instant) -> Option<Stopped> {
        let begins = if let Update::ListBegin { reason } = update { Some(reason) } else { None };
        if self.standing.must_confirm(&update) && !self.confirm(batch, begins).await {
            return None;
        }
        let listed = matches!(update, Update::ListEnd(_));
        let is_event = matches!(update, Update::Event(..));
        // A list is consistent as of its request, which may be long ago. If it only repeats the
        // objects for a new schema, it proves nothing: see `listed_at`.
        let listing = self.standing.list_begin().filter(|_| listed);
        match &update {
            &Update::ListBegin { reason } => {
                let begin = ListBegin { reason, requested_at: received };
                self.follow(Event::ListBegun { begin, at: Instant::now() });
            }
            Update::ListItem(_) => self.follow(Event::ItemReceived(Instant::now())),
            // Its place is held until it is applied.
            Update::ListEnd(_) => {}
            _ => self.follow(Event::Updated),
        }
        let hub = &self.served.hub;
        match &update {
            &Update::ListBegin { reason } => {
                hub.listing(reason);
                self.planned_relist.list_begun(received);
                info!(resource = %self.served.gvr, media = self.served.parser.media().as_str(), reason = reason.as_str(), "listing");
            }
            Update::Event(kind, _) => hub.metrics().received(*kind),
            Update::WentBack { reached } => {
                let message = format!("the cluster is at version {reached}, below one that it had sent; listing again");
                warn!(resource = %self.served.gvr, message);
                batch.wake();
                hub.trouble(message);
            }
            _ => {}
        }
        let first = self.writer.version().is_none();
        if listed {
            // A list may remove many objects, so other tasks get a turn in between.
            while self.writer.prepare(PREPARE_OBJECTS) {
                yield_now().await;
            }
        }
        let proven_at = self.context.source.proof_in(&update, received);
        let listed_at = listing.filter(|begin| begin.reason != RelistReason::SchemaChanged);
        let listed_at = listed_at.map(|begin| begin.requested_at);
        // A snapshot may be as old as the state of the kubefan that sent it.
        let listed_at = listed_at.filter(|_| !self.context.source.marks());
        let applied = self.schema.write(&mut self.writer, &self.planned_relist, update);
        if listed {
            self.follow(Event::ListEnded);
            self.served.hub.warn(&self.reflector.warnings());
            if self.standing.has_watch() {
                self.served.hub.live();
            }
        }
        let hub = &self.served.hub;
        // A new watch repeats the events of a version that may have more of them. Repeated events
        // prove nothing new.
        let is_again = is_event && matches!(applied, Ok(None));
        let is_applied = applied.is_ok() && !is_again;
        if is_applied && begins.is_none() {
            self.retry.served();
        }
        match applied {
            Ok(Some(commit)) => {
                if first {
                    info!(resource = %self.served.gvr, scope = self.served.scope.namespace(), media = self.served.parser.media().as_str(), version = %commit.version.whole(), objects = commit.store.len(), bytes = commit.store.json_bytes(), "synced");
                    // Before the commit: readers that have waited for the first state also find the
                    // time of its list.
                    if let Some(at) = listed_at {
                        hub.listed(at);
                    }
                }
                batch.commit(commit, received);
            }
            Ok(None) => {}
            Err(error) => {
                // Applying it would repeat or reorder events. Only a list restores the true state.
                warn!(resource = %self.served.gvr, %error, "listing again");
                batch.wake();
                hub.trouble(error.to_string());
                self.relist(RelistReason::OutOfOrder);
                self.retry.wait_after(None).await;
            }
        }
        // After the commit: a proved state is served at once, and this proof does not hold for the
        // state before.
        if let Some(at) = proven_at.filter(|_| is_applied) {
            self.retry.watched();
            self.served.hub.proved(at);
        }
        if let Some(at) = listed_at.filter(|_| is_applied) {
            self.served.hub.listed(at);
        }
        let (objects, bytes) = self.writer.size_with_list();
        self.allowance.as_ref()?.record(&self.served.gvr, objects, bytes).err().map(Stopped::from)
    }

    /// Decides how to react to a failure.
    async fn handle(&mut self, batch: &mut CommitBatch, error: ReflectorError) -> Option<Stopped> {
        let hub = &self.served.hub;
        // Events from before the failure must not wait for its end.
        batch.wake();
        if let ReflectorError::Object(ObjectError::Table(table)) = &error {
            let resource = &self.served.gvr;
            return Some(match table {
                TableError::ColumnsChanged => {
                    Stopped::Rewritten(format!("the table columns of {resource} have changed"))
                }
                TableError::Malformed(_) | TableError::UnknownAge(_) => {
                    Stopped::NotAcceptable(format!("{resource} is not cached as tables: {table}"))
                }
            });
        }
        if error.is_of_versions() && !self.served.is_built_in() {
            let message = format!("{} is not cached, because its versions do not compare: {error}", self.served.gvr);
            return Some(Stopped::NotCached(message));
        }
        if matches!(error, ReflectorError::Watch(_) | ReflectorError::VeryShortWatch) {
            hub.metrics().watch_restart(error.reason());
        }
        let is_kubefan = self.context.source.is_kubefan();
        self.failures.log(&self.served, &error, is_kubefan, self.standing.denied_since().is_some());
        let is_denied = matches!(error.upstream(), Some(UpstreamError::Forbidden { .. }));
        self.interrupted(Event::Failed { denied_at: is_denied.then(Instant::now) });
        if self.standing.has_watch() {
            // The objects could not be read again, but the watch is open.
            return None;
        }
        if let Some(stopped) = self.look_again(&error).await {
            return Some(stopped);
        }
        let hub = &self.served.hub;
        match error.upstream() {
            Some(UpstreamError::Forbidden { message }) => self.forbidden(message),
            Some(UpstreamError::NotCached { message }) => {
                let resource = &self.served.gvr;
                let message = format!("{resource} is not cached by the kubefan at --upstream: {message}");
                return Some(Stopped::NotCached(message));
            }
            Some(UpstreamError::Refused { code: 406, message }) if self.served.parser.media() != Media::Json => {
                let resource = &self.served.gvr;
                return Some(Stopped::NotAcceptable(format!(
                    "the apiserver does not give {resource} as {}: {message}",
                    self.served.parser.media().as_str()
                )));
            }
            failure => match failure.and_then(UpstreamError::cause) {
                Some(cause) => hub.failing(error.to_string(), cause.to_owned()),
                None => hub.trouble(error.to_string()),
            },
        }
        self.retry.wait_after(error.upstream()).await;
        None
    }

    /// Queries discovery after a 404, or after a watch's 410: signs that the resource was deleted,
    /// and possibly created again with another shape.
    async fn look_again(&mut self, error: &ReflectorError) -> Option<Stopped> {
        let is_missing = matches!(error.upstream(), Some(UpstreamError::NotFound { .. }));
        let may_be_other =
            matches!(error, ReflectorError::Watch(UpstreamError::Gone { .. })) && !self.served.is_built_in();
        if !is_missing && !may_be_other {
            return None;
        }
        let served = &self.served;
        // Until there is an answer, the cache is not known to be current.
        served.hub.trouble(error.to_string());
        self.schema.request_check();
        let stopped = match check_shape(&self.context, served, &self.schema, CheckStart::Discovery).await {
            ShapeCheck::Changed => Stopped::Rewritten(other_shape_message(served)),
            ShapeCheck::Missing if is_missing => {
                Stopped::NotFound(format!("the apiserver no longer serves {}", served.gvr))
            }
            ShapeCheck::Unchanged | ShapeCheck::Missing => return None,
        };
        match self.context.upstream.confirm().await {
            Ok(()) => Some(stopped),
            // Another cluster may not serve a resource that this one does.
            Err(error) => {
                served.hub.trouble(error.to_string());
                None
            }
        }
    }

    fn forbidden(&mut self, message: &str) {
        let hub = &self.served.hub;
        let message = format!("the apiserver denies kubefan {}: {message}", self.served.gvr);
        let is_recent = self.standing.denied_since().is_none_or(|since| since.elapsed() < FORBIDDEN_GRACE);
        if hub.head().is_some() && is_recent {
            hub.trouble(message);
            return;
        }
        // Objects that kubefan may not read must not be served from memory either.
        hub.close(Phase::Forbidden, StreamEnd::Forbidden(message));
        self.writer = CacheWriter::new(self.context.cache_compression);
        self.relist(RelistReason::Forbidden);
    }
}
