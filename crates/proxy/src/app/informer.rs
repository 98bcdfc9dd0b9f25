//! One informer: reflector → writer → hub, for one resource and scope, for as long as it is wanted.
//!
//! Every way upstream can fail ends in one place, `Informer::handle`, which decides what readers are told and what is tried next.

use std::{pin::pin, sync::Arc, task::Poll, time::Duration};

use rand::{SeedableRng, rngs::StdRng};
use tokio::{
    task::yield_now,
    time::{Instant, sleep},
};
use tracing::{info, warn};

use super::{
    freshness::Prover,
    on_demand::Allowance,
    warm_start::{HeldSchema, warm_start},
};
use crate::{
    cache::{CacheWriter, Update},
    fanout::{CommitBatch, Phase, Served, StreamEnd},
    peer::{Peers, Restored},
    telemetry::metrics::WatchPurpose,
    upstream::{
        Reflector, Upstream, UpstreamError,
        backoff::{Backoff, BackoffOptions},
        discovery::{Discovery, DiscoveryError, SchemaFingerprint},
        identity::Doubt,
        metadata::MetadataTarget,
        reflector::{ReflectorError, ReflectorOptions, Step, Target},
    },
};
use kubefan_model::{GroupVersionResource, Media, ResourceVersion, object::ObjectError, table::TableError};

/// How long a 403 is taken for a passing one while there is something to serve: an apiserver that has just started answers 403
/// until its authorizer has read its rules.
const FORBIDDEN_GRACE: Duration = Duration::from_secs(30);

/// How many objects are packed before other tasks get their turn: a few milliseconds.
const PREPARE_OBJECTS: usize = 100;

/// What all informers share.
#[derive(Clone)]
pub struct Shared {
    /// The apiserver.
    pub upstream: Upstream,
    /// What it serves.
    pub discovery: Arc<Discovery>,
    /// How it is listed and watched.
    pub reflector: ReflectorOptions,
    /// Narrows every cache; empty for everything.
    pub upstream_field_selector: String,
    /// How often the schema is compared.
    pub schema_check_interval: Duration,
    /// Whether the current objects are kept packed too.
    pub cache_compression: bool,
    /// Whom configured caches are taken over from at their begin; `None` where each begins with a list.
    pub peers: Option<Peers>,
    /// Decides the jitter, for simulations; unset means by chance.
    pub seed: Option<u64>,
}

impl Shared {
    /// A generator for jitter, for one retry loop.
    #[expect(clippy::disallowed_methods, reason = "the wiring is where chance comes in; below it is passed")]
    pub(super) fn generator(&self) -> StdRng {
        self.seed.map_or_else(|| StdRng::from_rng(&mut rand::rng()), StdRng::seed_from_u64)
    }

    /// What upstream is asked for, for a cache.
    pub(super) fn target(&self, served: &Served) -> Target {
        Target {
            gvr: served.gvr.clone(),
            kind: served.hub.resource().kind.clone(),
            namespaced: served.namespaced,
            scope: served.scope.clone(),
            field_selector: self.upstream_field_selector.clone(),
        }
    }

    /// Who lists and watches it; the watches are counted by what they are for.
    pub(super) fn reflector_for(&self, served: &Served, purpose: WatchPurpose) -> Reflector<StdRng> {
        let (hub, parser) = (served.hub.clone(), served.parser.clone());
        let open_watch = Arc::new(move || hub.metrics().upstream_watch(purpose));
        let (upstream, target) = (self.upstream.clone(), self.target(served));
        Reflector::new(upstream, target, parser, self.reflector, open_watch, self.generator())
    }

    /// The same as [`target`](Self::target), where only metadata is asked for.
    pub(super) fn metadata_target(&self, served: &Served) -> MetadataTarget {
        MetadataTarget {
            gvr: served.gvr.clone(),
            scope: served.scope.clone(),
            label_selector: String::new(),
            field_selector: self.upstream_field_selector.clone(),
        }
    }

    /// The version that the cluster has reached; how far another cluster is says nothing, and is an error.
    pub(super) async fn cluster_version(&self, target: &Target) -> Result<ResourceVersion, String> {
        let doubt = self.upstream.doubt();
        let version = self.upstream.cluster_version(target).await.map_err(|error| error.to_string())?;
        self.upstream.confirm(doubt).await.map_err(|error| error.to_string())?;
        Ok(version)
    }
}

/// Why an informer stopped by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stopped {
    /// The apiserver does not serve the resource (any more).
    NotFound(String),
    /// It holds more than it may.
    TooLarge(String),
    /// The apiserver does not give it in this encoding, or not as it could be kept.
    NotAcceptable(String),
    /// What is held is written in another way now: whoever reads on begins anew.
    Rewritten(String),
}

/// A running list and watch, and the cache it feeds.
pub struct Informer {
    shared: Shared,
    served: Served,
    schema: Arc<HeldSchema>,
    prover: Arc<Prover>,
    allowance: Option<Allowance>,
    reflector: Reflector<StdRng>,
    writer: CacheWriter,
    backoff: Backoff,
    random: StdRng,
    forbidden_since: Option<Instant>,
    /// It has not run yet, and may begin with what a peer holds.
    warm: bool,
    /// Why the list under way has begun, and as of when it is true.
    listing: Option<(&'static str, Instant)>,
    /// Set where a connection may have broken: nothing that came after it is believed before upstream was asked who it is.
    doubt: Option<Doubt>,
}

/// How often the task that reads upstream's socket gets its turn before it is believed that there is nothing more.
const READ_YIELDS: usize = 2;
/// The events after which subscribers are woken, although upstream has sent more already.
const UNANNOUNCED_MAX: usize = 64;

/// What subscribers have not been woken for yet.
struct Unannounced {
    batch: CommitBatch,
    /// The reflector's steps since the last wake-up.
    steps: usize,
}

impl Informer {
    /// An informer that has not begun; with an allowance it stops when it holds more. A `warm` one asks peers first.
    pub(super) fn new(
        shared: Shared,
        served: Served,
        schema: Arc<HeldSchema>,
        prover: Arc<Prover>,
        allowance: Option<Allowance>,
        warm: bool,
    ) -> Self {
        let reflector = shared.reflector_for(&served, WatchPurpose::Standing);
        let (writer, random) = (CacheWriter::new(shared.cache_compression), shared.generator());
        let doubt = Some(shared.upstream.doubt());
        Self {
            shared,
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

    /// Lists again at the next step, comparing bytes; subscribers see a marked gap.
    pub fn relist(&mut self, reason: &'static str) {
        self.reflector.relist(reason);
    }

    /// Runs until the resource is gone or too large. May be dropped at any time; [`Self::relist`] must come before it is run again.
    pub async fn run(&mut self) -> Stopped {
        // Dropped on every way out of here, so that nothing stays committed without a wake-up.
        let mut unannounced = Unannounced { batch: self.served.hub.batch(), steps: 0 };
        if let Some(allowance) = &self.allowance
            && let Err(stopped) = allowance.look(&self.shared, &self.served).await
        {
            return stopped;
        }
        if std::mem::take(&mut self.warm) {
            self.begin_warm(&mut unannounced.batch).await;
        }
        loop {
            let stopped = match self.step(&mut unannounced).await {
                Ok(Step::Update { update, received }) => self.apply(&mut unannounced.batch, update, received).await,
                Ok(Step::Watching { proven_at }) => {
                    self.forbidden_since = None;
                    if self.is_believed(&mut unannounced.batch, None).await {
                        self.served.hub.warn(self.reflector.warnings());
                        self.served.hub.live();
                        proven_at.into_iter().for_each(|at| self.served.hub.proved(at));
                    }
                    None
                }
                Ok(Step::Ended { reason }) => {
                    self.doubt = Some(self.shared.upstream.doubt());
                    self.served.hub.metrics().watch_restart(reason);
                    None
                }
                Err(error) => {
                    self.doubt = Some(self.shared.upstream.doubt());
                    self.handle(&mut unannounced.batch, error).await
                }
            };
            if let Some(stopped) = stopped {
                return stopped;
            }
        }
    }

    /// Takes state and history over from a peer, if there is one that can give them; else the first step lists.
    async fn begin_warm(&mut self, batch: &mut CommitBatch) {
        let taken = warm_start(&self.shared, &self.served, &self.schema, &mut self.random).await;
        let Some((Restored { commit, writer, .. }, proven_at)) = taken else { return };
        self.reflector.go_on_from(commit.version);
        self.writer = writer;
        proven_at.into_iter().for_each(|at| self.served.hub.proved(at));
        batch.commit(commit, Instant::now());
    }

    /// The reflector's next step. Subscribers are woken when upstream has nothing more at hand: what it sent at once is told at once.
    async fn step(&mut self, unannounced: &mut Unannounced) -> Result<Step, ReflectorError> {
        let (watching, mut moved) = (self.reflector.is_watching(), None);
        let step = self.step_or_move(watching, &mut moved, unannounced).await;
        moved.into_iter().for_each(|version| self.reflector.nothing_until(version));
        step
    }

    /// As [`Self::step`]. Meanwhile the cache may be told that nothing has changed, which moves its version: but only in the middle of a watch,
    /// because a list that is under way may be of before that.
    async fn step_or_move(
        &mut self,
        watching: bool,
        moved: &mut Option<ResourceVersion>,
        unannounced: &mut Unannounced,
    ) -> Result<Step, ReflectorError> {
        let mut step = pin!(self.reflector.step());
        if unannounced.steps < UNANNOUNCED_MAX {
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
            let quiet = tokio::select! {
                biased;
                done = &mut step => return done,
                quiet = self.prover.quiet(), if watching => quiet,
            };
            let hub = &self.served.hub;
            let Some(version) = quiet.moves(hub) else { continue };
            if let Ok(Some(commit)) = self.writer.apply(Update::Bookmark(version)) {
                hub.proved(quiet.received);
                unannounced.batch.commit(commit, quiet.received);
                *moved = Some(version);
            }
        }
    }

    /// Whether what was read is of the cluster that this cache is of. If not, or if that cannot be told, it is as if it had not been
    /// read, and after a wait it is read again. `list` is why a list has just begun.
    async fn is_believed(&mut self, batch: &mut CommitBatch, list: Option<&'static str>) -> bool {
        let Some(doubt) = self.doubt else { return true };
        let Err(error) = self.shared.upstream.confirm(doubt).await else {
            self.doubt = None;
            return true;
        };
        let hub = &self.served.hub;
        batch.wake();
        hub.metrics().watch_restart(error.reason());
        warn!(resource = %self.served.gvr, scope = self.served.scope.namespace(), %error, "not believed");
        hub.trouble(error.to_string());
        match (list.or(self.listing.take().map(|(reason, _)| reason)), self.writer.version()) {
            (None, Some(version)) => self.reflector.go_on_from(version),
            (reason, _) => self.reflector.relist(reason.unwrap_or("initial")),
        }
        self.wait(error.retry_after()).await;
        self.doubt = Some(self.shared.upstream.doubt());
        false
    }

    async fn apply(&mut self, batch: &mut CommitBatch, update: Update, received: Instant) -> Option<Stopped> {
        let list = if let Update::ListBegin { reason } = update { Some(reason) } else { None };
        if !matches!(update, Update::ListItem(_)) && !self.is_believed(batch, list).await {
            return None;
        }
        let hub = &self.served.hub;
        match &update {
            Update::ListBegin { reason } => {
                hub.listing(reason);
                self.listing = Some((reason, received));
                // Its pages may come from more than one connection: it is asked about again when they are all there.
                self.doubt = Some(self.shared.upstream.doubt());
                info!(resource = %self.served.gvr, media = self.media().as_str(), reason, "listing");
            }
            Update::Event(kind, _) => hub.metrics().received(*kind),
            Update::WentBack { reached } => {
                let message = format!("the cluster is at version {reached}, below what it had told; listing again");
                warn!(resource = %self.served.gvr, message);
                batch.wake();
                hub.trouble(message);
            }
            _ => {}
        }
        let first = self.writer.version().is_none();
        if matches!(update, Update::ListEnd(_)) {
            // Much may have gone: other tasks get their turn in between.
            while self.writer.prepare(PREPARE_OBJECTS) {
                tokio::task::yield_now().await;
            }
        }
        let proven_at = match &update {
            Update::Event(..) | Update::Bookmark(_) => Some(received),
            // Consistent when it was asked for; it may have taken long.
            Update::ListEnd(_) => self.listing.take().map(|(_, begun)| begun),
            Update::ListBegin { .. } | Update::ListItem(_) | Update::WentBack { .. } => None,
        };
        let listed = matches!(update, Update::ListEnd(_));
        if listed {
            hub.warn(self.reflector.warnings());
        }
        let applied = self.writer.apply(update);
        if listed && applied.is_ok() {
            self.schema.listed();
        }
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
                // Passing it on would repeat or reorder; only a list tells what is true.
                warn!(resource = %self.served.gvr, %error, "listing again");
                batch.wake();
                hub.trouble(error.to_string());
                self.reflector.relist("out_of_order");
                self.wait(None).await;
            }
        }
        let (objects, bytes) = self.writer.size_with_list();
        self.allowance.as_mut()?.hold(&self.served.gvr, objects, bytes).err()
    }

    /// The one place that decides what a failure means.
    async fn handle(&mut self, batch: &mut CommitBatch, error: ReflectorError) -> Option<Stopped> {
        let hub = &self.served.hub;
        // What came before the failure does not wait for what follows it.
        batch.wake();
        if let ReflectorError::Object(ObjectError::Table(table)) = &error {
            let resource = &self.served.gvr;
            return Some(match table {
                TableError::Changed => Stopped::Rewritten(format!("{resource} is shown in other columns")),
                TableError::Malformed(_) | TableError::Relative(_) => {
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
            Some(UpstreamError::NotFound { .. }) if is_gone(&self.shared.discovery, &self.served.gvr).await => {
                let resource = &self.served.gvr;
                let doubt = self.doubt.unwrap_or_else(|| self.shared.upstream.doubt());
                match self.shared.upstream.confirm(doubt).await {
                    Ok(()) => return Some(Stopped::NotFound(format!("the apiserver no longer serves {resource}"))),
                    // What another cluster does not serve says nothing about this one.
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
        // What may not be read is not served from memory either.
        hub.close(Phase::Forbidden, StreamEnd::Forbidden(message));
        self.writer = CacheWriter::new(self.shared.cache_compression);
        self.reflector.relist("forbidden");
    }

    fn media(&self) -> Media {
        self.served.parser.media()
    }

    async fn wait(&mut self, retry_after: Option<Duration>) {
        sleep(self.backoff.next_delay(Instant::now(), retry_after, &mut self.random)).await;
    }
}

/// Whether discovery agrees that the resource is not served: a 404 alone may come from an apiserver that is starting.
async fn is_gone(discovery: &Discovery, gvr: &GroupVersionResource) -> bool {
    discovery.doubt();
    let found = discovery.find(&gvr.group, &gvr.version, &gvr.resource).await;
    matches!(found, Err(DiscoveryError::UnknownResource { .. }))
}

/// Completes when the schema of a resource, or the server's version, is another than `known`, or than when it was first asked for:
/// then the bytes of objects may have changed without their versions. A change is believed when two checks in a row agree on it,
/// because during an upgrade apiservers of two versions answer in turn.
pub async fn schema_changed(
    shared: Shared,
    gvr: GroupVersionResource,
    mut known: Option<SchemaFingerprint>,
) -> SchemaFingerprint {
    let mut seen = None;
    loop {
        // A failure tells nothing about the schema.
        if let Ok(now) = shared.discovery.recent_schema_fingerprint(&gvr.group, &gvr.version).await {
            match &known {
                Some(before) if *before == now => seen = None,
                Some(_) if seen.as_ref() == Some(&now) => return now,
                Some(_) => seen = Some(now),
                None => known = Some(now),
            }
        }
        sleep(shared.schema_check_interval).await;
    }
}
