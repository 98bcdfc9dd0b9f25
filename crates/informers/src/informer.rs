//! The informer: feeds one cache from one reflector, for one resource and scope.
//!
//! The reflector lists and watches upstream, the writer turns its updates into commits, and the hub
//! publishes them. The hard part is between these: an answer may come from the wrong cluster
//! (behind the same address, or after a restore from a backup), and every kind of failure needs its
//! own reaction. Three places decide this. `informer_state` decides the needs of the next step, and
//! when the identity of the cluster must be confirmed; `confirmation` does that before any update
//! is applied. `handle` decides for each failure the state that readers see (stale, forbidden,
//! gone) and the next action (retry, relist, stop).
//!
//! Subscribers are not woken for every event. Events that upstream sent together are applied
//! together, and the informer wakes subscribers when it has read everything that has arrived. One
//! wake per event would multiply the wake-ups under load, exactly when they are expensive. Waiting
//! for a timer instead would delay a single event.
//!
//! Every list needs a permit of the scheduler. The informer holds it from the first request to the
//! last object, and returns it for the wait after a failure, and if nothing arrives for too long:
//! a resource that hangs must not keep the others from being listed.

mod apply;
mod confirmation;
mod informer_state;
mod next;
mod start_saved;

use std::{pin::pin, sync::Arc, task::Poll, time::Duration};

use futures::future::OptionFuture;
use kubefan_cache::{CacheWriter, Phase, RelistReason, StreamEnd, Update};
use kubefan_common::unless_planted;
use kubefan_fanout::{CommitBatch, Served};
use kubefan_model::{Media, ResourceVersion, object::ObjectError, table::TableError};
use kubefan_peer::ReceivedCache;
use kubefan_upstream::{
    TieredReflector, UpstreamError,
    client::FORBIDDEN_GRACE,
    reflector::{NextStep, ReflectorError, ReflectorEvent},
};
use rand::rngs::StdRng;
use tokio::{
    task::yield_now,
    time::{Instant, sleep_until},
};

use self::{
    informer_state::{Event, InformerState},
    next::{Next, Unannounced},
};
use super::{
    cache_quota::CacheQuota,
    cached_schema::CachedSchema,
    consistency::Prover,
    failure_log::FailureLog,
    list_scheduler::{ListPermit, ListPriority},
    planned_relist::{DueRelist, PlannedRelist},
    retry::Retry,
    saved_resource::UnconfirmedState,
    shape::{CheckStart, ShapeCheck, check_shape, other_shape_message},
    stop_reason::Stopped,
    upstream_context::CacheContext,
    warm_start::warm_start,
};

/// The state that an informer starts with.
#[derive(Default)]
pub(super) enum StartFrom {
    /// None: it lists.
    #[default]
    List,
    /// The state of a peer, or else of the process before, once upstream has confirmed it.
    Peers,
    /// A state of the process before that is served already, because upstream did not answer.
    Saved(Box<UnconfirmedState>),
}

/// Time for which a list may hold its permit without receiving anything.
const LIST_STALL_MAX: Duration = Duration::from_secs(30);

/// The list and watch of one cache.
pub(super) struct Informer {
    context: CacheContext,
    served: Served,
    schema: Arc<CachedSchema>,
    prover: Arc<Prover>,
    quota: Option<CacheQuota>,
    reflector: TieredReflector,
    writer: CacheWriter,
    retry: Retry,
    random: StdRng,
    planned_relist: Arc<PlannedRelist>,
    failures: FailureLog,
    /// The state that the first step continues from.
    start: StartFrom,
    /// Decides the needs of the next step.
    state: InformerState,
    /// Held for as long as `state` has a list with a permit.
    permit: Option<ListPermit>,
    /// Waits for as long as `state` has a watch.
    due_relist: Option<DueRelist>,
}

/// Yields to the task that reads upstream's socket before concluding that no more data has arrived.
const READ_YIELDS: usize = 2;
/// The most events to apply before waking subscribers, even if more have arrived.
const EVENTS_PER_WAKE_MAX: usize = 64;

impl Informer {
    /// Creates an informer that does not run yet.
    pub(super) fn new(
        context: CacheContext,
        served: Served,
        schema: Arc<CachedSchema>,
        prover: Arc<Prover>,
        planned_relist: Arc<PlannedRelist>,
        quota: Option<CacheQuota>,
        start: StartFrom,
    ) -> Self {
        let reflector = context.standing_reflector_for(&served);
        let random = context.generator();
        // With a fallback, no single server is the one to wait for.
        let probed = context.source.http().filter(|_| context.source.fallback().is_none());
        let retry = Retry::new(probed.cloned(), context.generator());
        let retry = retry.with_replicas(context.source.is_kubefan());
        Self {
            writer: CacheWriter::new(context.cache_compression),
            context,
            served,
            schema,
            prover,
            quota,
            reflector,
            retry,
            random,
            planned_relist,
            failures: FailureLog::default(),
            state: InformerState::Starting { asks_peers: matches!(start, StartFrom::Peers) },
            start,
            permit: None,
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
        if let Some(quota) = &self.quota
            && let Err(too_large) = quota.check_size_upstream(&self.context, &self.served).await
        {
            return too_large.into();
        }
        match std::mem::take(&mut self.start) {
            StartFrom::List => {}
            StartFrom::Peers => self.start_warm(&mut unannounced.batch).await,
            StartFrom::Saved(state) => self.start_saved(&mut unannounced.batch, *state).await,
        }
        self.follow(Event::Started);
        loop {
            self.choose_server(&mut unannounced.batch).await;
            if !self.may_request(&mut unannounced.batch).await {
                continue;
            }
            let stopped = match self.step(&mut unannounced).await {
                Ok(ReflectorEvent::Update { update, received }) => {
                    self.apply(&mut unannounced.batch, update, received).await
                }
                Ok(ReflectorEvent::Watching { proven_at }) => {
                    self.follow(Event::WatchOpened);
                    if self.state.is_confirmed() || self.confirm(&mut unannounced.batch, None).await {
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

    /// Starts with the state and history of a peer, or of the process before, if there are any.
    /// Otherwise the first step lists.
    async fn start_warm(&mut self, batch: &mut CommitBatch) {
        let taken = warm_start(&self.context, &self.served, &self.schema, &mut self.random).await;
        let Some((ReceivedCache { commit, writer, .. }, proven_at)) = taken else {
            self.start_from_file(batch).await;
            return;
        };
        self.reflector.resume_from(commit.version);
        self.writer = writer;
        if let Some(at) = proven_at {
            self.served.hub.proved(at);
        }
        batch.commit(commit, Instant::now());
    }

    /// Chooses the server of the next request, and waits until it may be sent there.
    async fn choose_server(&mut self, batch: &mut CommitBatch) {
        if !matches!(self.reflector.next_step(), NextStep::RequestList | NextStep::OpenWatch) {
            return;
        }
        let has_state = self.writer.version().is_some();
        if futures::poll!(pin!(self.reflector.choose_server(has_state))).is_ready() {
            return;
        }
        // Events from before the wait must not wait for its end, nor the lists of others.
        batch.wake();
        if self.state.list_progress().is_some() {
            self.follow(Event::Stalled);
        }
        self.reflector.choose_server(has_state).await;
    }

    /// Waits until a request makes sense after a failure: here, or at another server.
    async fn wait_after(&mut self, error: Option<&UpstreamError>) {
        tokio::select! {
            biased;
            () = self.reflector.until_misplaced() => {}
            () = self.retry.wait_after(error) => {}
        }
    }

    /// Notes an event. Drops the permit and the wait for a planned relist if the informer may no
    /// longer hold them.
    fn follow(&mut self, event: Event) {
        self.state = self.state.after(event, self.reflector.next_step());
        if self.state.list_progress().is_none() {
            self.permit = None;
        }
        // Without a watch, a permit for the planned relist would be held for nothing.
        if !self.state.has_watch() {
            self.due_relist = None;
        }
    }

    /// Notes that a watch or a request has ended, and plans to read the objects again for the
    /// schema, if the list for it has ended early.
    fn interrupted(&mut self, event: Event) {
        if self.state.gives_up_reread(self.reflector.next_step()) {
            unless_planted!(RereadGivenUp => self.plan_reread());
        }
        self.follow(event);
    }

    /// Performs the reflector's next step. Wakes subscribers when everything that has arrived is
    /// applied.
    async fn step(&mut self, unannounced: &mut Unannounced) -> Result<ReflectorEvent, ReflectorError> {
        loop {
            if self.state.needs_permit() {
                unannounced.batch.wake();
                let priority = if self.writer.version().is_none() { ListPriority::First } else { ListPriority::Relist };
                self.permit = Some(self.context.lists.acquire(priority).await);
                self.follow(Event::PermitAcquired(Instant::now()));
            }
            let mut advanced_to = None;
            let next = self.step_or_advance(&mut advanced_to, unannounced).await;
            if let Some(version) = advanced_to {
                self.reflector.advance_to(version);
            }
            match next {
                Next::Step(step) => return step,
                Next::Relist(reason, permit) => {
                    self.permit = Some(permit);
                    self.due_relist = None;
                    match reason {
                        RelistReason::SchemaChanged => self.reflector.reread(reason),
                        _ => self.reflector.relist(reason),
                    }
                    self.follow(Event::PermitAcquired(Instant::now()));
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
        let watching = self.state.has_watch();
        let in_progress = self.reflector.next_step();
        let mut stalls_at = self.state.list_progress().map(|at| at + LIST_STALL_MAX);
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
        let due_relist = || self.planned_relist.clone().due_with_permit(self.context.lists.clone());
        let due_relist = self.due_relist.get_or_insert_with(due_relist);
        loop {
            let range = tokio::select! {
                biased;
                done = &mut step => return Next::Step(done),
                range = self.prover.next_empty_range(), if watching => range,
                (reason, permit) = &mut *due_relist, if watching => return Next::Relist(reason, permit),
                Some(()) = OptionFuture::from(stalls_at.map(sleep_until)) => {
                    // The request continues.
                    self.state = self.state.after(Event::Stalled, in_progress);
                    self.permit = None;
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
        let is_kubefan = self.reflector.source().is_kubefan();
        self.failures.log(&self.served, &error, is_kubefan, self.state.denied_since().is_some());
        let is_denied = matches!(error.upstream(), Some(UpstreamError::Forbidden { .. }));
        self.interrupted(Event::Failed { denied_at: is_denied.then(Instant::now) });
        if self.state.has_watch() {
            // The objects could not be read again, but the watch is open.
            return None;
        }
        if let Some(stopped) = self.look_again(&error).await {
            return Some(stopped);
        }
        let hub = &self.served.hub;
        match error.upstream() {
            Some(UpstreamError::Forbidden { message }) => self.forbidden(message).await,
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
        self.wait_after(error.upstream()).await;
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

    async fn forbidden(&mut self, message: &str) {
        let hub = &self.served.hub;
        let message = format!("the apiserver denies kubefan {}: {message}", self.served.gvr);
        let is_recent = self.state.denied_since().is_none_or(|since| since.elapsed() < FORBIDDEN_GRACE);
        if hub.head().is_some() && is_recent {
            hub.trouble(message);
            return;
        }
        // Objects that kubefan may not read must not be served from memory either.
        hub.close(Phase::Forbidden, StreamEnd::Forbidden(message));
        self.context.remove_saved(&self.served).await;
        self.writer = CacheWriter::new(self.context.cache_compression);
        self.relist(RelistReason::Forbidden);
    }
}
