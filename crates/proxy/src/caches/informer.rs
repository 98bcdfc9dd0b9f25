//! The informer: feeds one cache from one reflector, for one resource and scope.
//!
//! The reflector lists and watches upstream, the writer turns its updates into commits, and the hub
//! publishes them. The hard part is between these: an answer may come from the wrong cluster
//! (behind the same address, or after a restore from a backup), and every kind of failure needs its
//! own reaction. Two places decide this. `is_confirmed` confirms the identity of the cluster after
//! each event that may have changed it, before any update is applied. `handle` decides for each
//! failure what readers see (stale, forbidden, gone) and what happens next (retry, relist, stop).
//!
//! Subscribers are not woken for every event. Events that upstream sent together are applied
//! together, and the informer wakes subscribers when it has read everything that has arrived. One
//! wake per event would multiply the wake-ups under load, exactly when they are expensive. Waiting
//! for a timer instead would delay a single event.

use std::{pin::pin, sync::Arc, task::Poll, time::Duration};

use rand::rngs::StdRng;
use tokio::{
    task::yield_now,
    time::{Instant, sleep},
};
use tracing::{info, warn};

use super::{
    allowance::{Allowance, TooLarge},
    consistency::Prover,
    context::CacheContext,
    schema::CachedSchema,
    warm_start::warm_start,
};
use crate::{
    cache::{CacheWriter, Commit, Update, UpdateError, writer::SCHEMA_CHANGED},
    fanout::{CommitBatch, Phase, Served, StreamEnd},
    peer::ReceivedCache,
    telemetry::metrics::WatchPurpose,
    upstream::{
        Reflector, UpstreamError,
        backoff::{Backoff, BackoffOptions},
        discovery::{Discovery, DiscoveryError},
        identity::Doubt,
        reflector::{ReflectorError, Step},
    },
};
use kubefan_model::{GroupVersionResource, Media, ResourceVersion, object::ObjectError, table::TableError};

/// How long a cache with a state keeps serving it after a 403. An apiserver that has just started
/// answers 403 until its authorizer has read its rules.
const FORBIDDEN_GRACE: Duration = Duration::from_secs(30);

/// Objects to pack before yielding to other tasks: a few milliseconds of work.
const PREPARE_OBJECTS: usize = 100;

/// Why an informer stopped by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stopped {
    /// The apiserver does not serve the resource, or no longer does.
    NotFound(String),
    /// The cache exceeds its allowance.
    TooLarge(String),
    /// The apiserver does not serve this encoding, or not in a form that can be cached.
    NotAcceptable(String),
    /// The encoding of the cached objects has changed, so subscribers must start over.
    Rewritten(String),
}

impl From<TooLarge> for Stopped {
    fn from(TooLarge(message): TooLarge) -> Self {
        Self::TooLarge(message)
    }
}

/// The list and watch of one cache.
pub(super) struct Informer {
    context: CacheContext,
    served: Served,
    schema: Arc<CachedSchema>,
    prover: Arc<Prover>,
    allowance: Option<Allowance>,
    reflector: Reflector<StdRng>,
    writer: CacheWriter,
    backoff: Backoff,
    random: StdRng,
    forbidden_since: Option<Instant>,
    /// Whether the first run may start with the state of a peer.
    warm: bool,
    /// The reason of the list in progress, and the time of its request; no time if its state is of
    /// the past and proves nothing about now.
    listing: Option<(&'static str, Option<Instant>)>,
    /// Set if a connection may have broken. Later updates count only after upstream has confirmed
    /// that it is still the same cluster.
    doubt: Option<Doubt>,
}

/// How often to yield to the task that reads upstream's socket before concluding that no more data
/// has arrived.
const READ_YIELDS: usize = 2;
/// The most events to apply before waking subscribers, even if more have arrived.
const EVENTS_PER_WAKE_MAX: usize = 64;

/// Commits whose subscribers are not woken yet. Dropping it wakes them.
struct Unannounced {
    batch: CommitBatch,
    /// The reflector's steps since the last wake-up.
    steps: usize,
}

impl Informer {
    /// An informer that does not run yet. It stops if it exceeds the `allowance`. If `warm` is set,
    /// it asks peers before it lists.
    pub(super) fn new(
        context: CacheContext,
        served: Served,
        schema: Arc<CachedSchema>,
        prover: Arc<Prover>,
        allowance: Option<Allowance>,
        warm: bool,
    ) -> Self {
        let reflector = context.reflector_for(&served, WatchPurpose::Standing);
        let (writer, random) = (CacheWriter::new(context.cache_compression), context.generator());
        let doubt = Some(context.upstream.doubt());
        Self {
            context,
            served,
            schema,
            prover,
            allowance,
            reflector,
            writer,
            backoff: Backoff::new(BackoffOptions::default()),
            random,
            forbidden_since: None,
            warm,
            listing: None,
            doubt,
        }
    }

    /// Lists again at the next step and compares bytes. A list for the schema is one at the version
    /// reached, because no event is missing: only objects with other bytes concern subscribers. Any
    /// other list is of now, and subscribers see a marked gap.
    pub(super) fn relist(&mut self, reason: &'static str) {
        match self.writer.version() {
            Some(version) if reason == SCHEMA_CHANGED => self.reflector.list_again_at(version, reason),
            _ => self.reflector.relist(reason),
        }
    }

    /// Runs until the informer stops by itself. The future may be dropped at any time, but then
    /// [`Self::relist`] must be called before the next run.
    pub(super) async fn run(&mut self) -> Stopped {
        // Every return drops it, so no commit stays without a wake-up.
        let mut unannounced = Unannounced { batch: self.served.hub.batch(), steps: 0 };
        if let Some(allowance) = &self.allowance
            && let Err(too_large) = allowance.check_size_upstream(&self.context, &self.served).await
        {
            return too_large.into();
        }
        if std::mem::take(&mut self.warm) {
            self.start_warm(&mut unannounced.batch).await;
        }
        loop {
            let stopped = match self.step(&mut unannounced).await {
                Ok(Step::Update { update, received }) => self.apply(&mut unannounced.batch, update, received).await,
                Ok(Step::Watching { proven_at }) => {
                    self.forbidden_since = None;
                    if self.is_confirmed(&mut unannounced.batch, None).await {
                        self.served.hub.warn(self.reflector.warnings());
                        self.served.hub.live();
                        proven_at.into_iter().for_each(|at| self.served.hub.proved(at));
                    }
                    None
                }
                Ok(Step::Ended { reason }) => {
                    self.doubt = Some(self.context.upstream.doubt());
                    self.served.hub.metrics().watch_restart(reason);
                    None
                }
                Err(error) => {
                    self.doubt = Some(self.context.upstream.doubt());
                    self.handle(&mut unannounced.batch, error).await
                }
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
        proven_at.into_iter().for_each(|at| self.served.hub.proved(at));
        batch.commit(commit, Instant::now());
    }

    /// The reflector's next step. Wakes subscribers when everything that has arrived is applied.
    async fn step(&mut self, unannounced: &mut Unannounced) -> Result<Step, ReflectorError> {
        let (watching, mut advanced_to) = (self.reflector.is_watching(), None);
        let step = self.step_or_advance(watching, &mut advanced_to, unannounced).await;
        advanced_to.into_iter().for_each(|version| self.reflector.advance_to(version));
        step
    }

    /// Like [`Self::step`]. Meanwhile a freshness proof may advance the version of the cache, but
    /// only in the middle of a watch, because a list in progress may be older than the proof.
    async fn step_or_advance(
        &mut self,
        watching: bool,
        advanced_to: &mut Option<ResourceVersion>,
        unannounced: &mut Unannounced,
    ) -> Result<Step, ReflectorError> {
        let mut step = pin!(self.reflector.step());
        if unannounced.steps < EVENTS_PER_WAKE_MAX {
            for _ in 0..=READ_YIELDS {
                if let Poll::Ready(done) = futures::poll!(&mut step) {
                    unannounced.steps += 1;
                    return done;
                }
                yield_now().await;
            }
        }
        unannounced.steps = 0;
        unannounced.batch.wake();
        loop {
            let range = tokio::select! {
                biased;
                done = &mut step => return done,
                range = self.prover.next_empty_range(), if watching => range,
            };
            let hub = &self.served.hub;
            let Some(version) = range.target_for(hub) else { continue };
            if let Ok(Some(commit)) = write(&mut self.writer, &self.schema, Update::Bookmark(version)) {
                hub.proved(range.received);
                unannounced.batch.commit(commit, range.received);
                *advanced_to = Some(version);
            }
        }
    }

    /// Whether the last update is from the cluster of this cache. If it is not, or if upstream does
    /// not confirm it, the update must be discarded: this waits, and the reflector reads it again.
    /// `list` is the reason of a list that has just started.
    async fn is_confirmed(&mut self, batch: &mut CommitBatch, list: Option<&'static str>) -> bool {
        let Some(doubt) = self.doubt else { return true };
        let Err(error) = self.context.upstream.confirm(doubt).await else {
            self.doubt = None;
            return true;
        };
        let hub = &self.served.hub;
        batch.wake();
        hub.metrics().watch_restart(error.reason());
        warn!(resource = %self.served.gvr, scope = self.served.scope.namespace(), %error, "upstream is not confirmed to be the same cluster; reading again");
        hub.trouble(error.to_string());
        match (list.or(self.listing.take().map(|(reason, _)| reason)), self.writer.version()) {
            (None, Some(version)) => self.reflector.resume_from(version),
            (reason, _) => self.relist(reason.unwrap_or("initial")),
        }
        self.wait(error.retry_after()).await;
        self.doubt = Some(self.context.upstream.doubt());
        false
    }

    async fn apply(&mut self, batch: &mut CommitBatch, update: Update, received: Instant) -> Option<Stopped> {
        let list = if let Update::ListBegin { reason } = update { Some(reason) } else { None };
        if !matches!(update, Update::ListItem(_)) && !self.is_confirmed(batch, list).await {
            return None;
        }
        let hub = &self.served.hub;
        match &update {
            Update::ListBegin { reason } => {
                hub.listing(reason);
                self.listing = Some((reason, (!self.reflector.lists_the_past()).then_some(received)));
                // Pages may come over several connections, so the end of the list needs a new
                // confirmation.
                self.doubt = Some(self.context.upstream.doubt());
                info!(resource = %self.served.gvr, media = self.media().as_str(), reason, "listing");
            }
            Update::Event(kind, _) => hub.metrics().received(*kind),
            Update::WentBack { reached } => {
                let message = format!(
                    "the cluster is at version {reached}, below a version that it had already sent; listing again"
                );
                warn!(resource = %self.served.gvr, message);
                batch.wake();
                hub.trouble(message);
            }
            _ => {}
        }
        let first = self.writer.version().is_none();
        if matches!(update, Update::ListEnd(_)) {
            // A list may remove many objects, so other tasks get a turn in between.
            while self.writer.prepare(PREPARE_OBJECTS) {
                yield_now().await;
            }
        }
        let proven_at = match &update {
            Update::Event(..) | Update::Bookmark(_) => Some(received),
            // A list is consistent as of its request. It may have taken long.
            Update::ListEnd(_) => self.listing.take().and_then(|(_, started)| started),
            Update::ListBegin { .. } | Update::ListItem(_) | Update::WentBack { .. } => None,
        };
        let listed = matches!(update, Update::ListEnd(_));
        if listed {
            hub.warn(self.reflector.warnings());
        }
        let applied = write(&mut self.writer, &self.schema, update);
        if let (Some(at), Ok(_)) = (proven_at, &applied) {
            hub.proved(at);
        }
        match applied {
            Ok(Some(commit)) => {
                if first {
                    let (objects, bytes) = (commit.store.len(), commit.store.json_bytes());
                    info!(resource = %self.served.gvr, scope = self.served.scope.namespace(), media = self.media().as_str(), version = %commit.version, objects, bytes, "synced");
                }
                batch.commit(commit, received);
            }
            Ok(None) => {}
            Err(error) => {
                // Applying it would repeat or reorder events. Only a list restores the true state.
                warn!(resource = %self.served.gvr, %error, "listing again");
                batch.wake();
                hub.trouble(error.to_string());
                self.reflector.relist("out_of_order");
                self.wait(None).await;
            }
        }
        let (objects, bytes) = self.writer.size_with_list();
        self.allowance.as_mut()?.record(&self.served.gvr, objects, bytes).err().map(Stopped::from)
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
        if matches!(error, ReflectorError::Watch(_) | ReflectorError::VeryShortWatch) {
            hub.metrics().watch_restart(error.reason());
        }
        warn!(resource = %self.served.gvr, scope = self.served.scope.namespace(), media = self.media().as_str(), reason = error.reason(), %error, "upstream failed");
        let retry_after = error.upstream().and_then(UpstreamError::retry_after);
        match error.upstream() {
            Some(UpstreamError::NotFound { .. }) if is_gone(&self.context.discovery, &self.served.gvr).await => {
                let resource = &self.served.gvr;
                let doubt = self.doubt.unwrap_or_else(|| self.context.upstream.doubt());
                match self.context.upstream.confirm(doubt).await {
                    Ok(()) => return Some(Stopped::NotFound(format!("the apiserver no longer serves {resource}"))),
                    // Another cluster may not serve a resource that this one does.
                    Err(error) => hub.trouble(error.to_string()),
                }
            }
            Some(UpstreamError::Forbidden { message }) => self.forbidden(message),
            Some(UpstreamError::Refused { code: 406, message }) if self.media() != Media::Json => {
                let resource = &self.served.gvr;
                return Some(Stopped::NotAcceptable(format!(
                    "the apiserver does not give {resource} as {}: {message}",
                    self.media().as_str()
                )));
            }
            _ => {
                self.forbidden_since = None;
                hub.trouble(error.to_string());
            }
        }
        self.wait(retry_after).await;
        None
    }

    fn forbidden(&mut self, message: &str) {
        let hub = &self.served.hub;
        let message = format!("the apiserver denies kubefan {}: {message}", self.served.gvr);
        let since = *self.forbidden_since.get_or_insert_with(Instant::now);
        if hub.head().is_some() && since.elapsed() < FORBIDDEN_GRACE {
            hub.trouble(message);
            return;
        }
        // Objects that kubefan may not read must not be served from memory either.
        hub.close(Phase::Forbidden, StreamEnd::Forbidden(message));
        self.writer = CacheWriter::new(self.context.cache_compression);
        self.reflector.relist("forbidden");
    }

    fn media(&self) -> Media {
        self.served.parser.media()
    }

    async fn wait(&mut self, retry_after: Option<Duration>) {
        sleep(self.backoff.next_delay(Instant::now(), retry_after, &mut self.random)).await;
    }
}

/// Applies an update, and notes when the cached objects are those of a new schema.
fn write(writer: &mut CacheWriter, schema: &CachedSchema, update: Update) -> Result<Option<Commit>, UpdateError> {
    let ends_encoding = matches!(update, Update::ListEnd(_)) || writer.awaits_version();
    let applied = writer.apply(update);
    if ends_encoding && applied.is_ok() && !writer.awaits_version() {
        schema.list_completed();
    }
    applied
}

/// Whether discovery confirms that the resource is gone. A 404 alone may come from an apiserver
/// that is starting.
async fn is_gone(discovery: &Discovery, gvr: &GroupVersionResource) -> bool {
    discovery.doubt();
    let found = discovery.find(&gvr.group, &gvr.version, &gvr.resource).await;
    matches!(found, Err(DiscoveryError::UnknownResource { .. }))
}
