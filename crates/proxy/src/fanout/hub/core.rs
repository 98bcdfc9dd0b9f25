//! The meeting point of one writer and many subscribers, for one resource and scope.
//!
//! State, history and views change together, in one short critical section per commit; a subscription is registered in the same
//! section that takes its snapshot, so that there is no gap and no repeat between the two. The head version is published after the
//! last view's log was appended, and bookmarks read only that. No lock is held across an await.

use std::{
    sync::{Arc, PoisonError, atomic::Ordering},
    time::{Duration, SystemTime},
};

use tokio::time::{Instant, sleep_until};

use crate::{
    cache::{
        History, HistoryCopy, Record, RingLimits, Store,
        writer::{Change, Commit},
    },
    fanout::{
        gate::Gate,
        hub::status::Phase,
        stream_end::{Refusal, StreamEnd},
        sync::{Mutex, MutexGuard},
        views::{
            set::Views,
            view::{View, ViewBytes},
        },
        wake::pacer::Pacer,
    },
    telemetry::metrics::{CacheGauges, CacheMetrics},
    upstream::warnings::Warnings,
};
use kubefan_common::sync::watch;
use kubefan_common::{
    planted::{self, Bug},
    proto::v1alpha1::ResolvedResource,
};
use kubefan_model::{GroupVersionResource, ResourceVersion, event::Transition, object::ObjectParser};

/// State, history and views of one resource and scope.
pub struct Hub {
    pub(in crate::fanout) resource: ResolvedResource,
    pub(in crate::fanout) parser: Arc<ObjectParser>,
    pub(in crate::fanout) limits: RingLimits,
    pub(in crate::fanout) gate: Arc<Gate>,
    pub(in crate::fanout) cluster: ClusterName,
    pub(in crate::fanout) metrics: CacheMetrics,
    pub(in crate::fanout) head: watch::Sender<Option<ResourceVersion>>,
    pub(in crate::fanout) phase: watch::Sender<Phase>,
    pub(in crate::fanout) view_bytes: ViewBytes,
    pub(in crate::fanout) inner: Mutex<Inner>,
}

pub(in crate::fanout) struct Inner {
    pub(in crate::fanout) message: String,
    pub(in crate::fanout) warnings: Warnings,
    pub(in crate::fanout) synced_since: Option<SystemTime>,
    pub(in crate::fanout) cache: Option<Cached>,
    /// How many histories there were.
    pub(in crate::fanout) epochs: u64,
    pub(in crate::fanout) views: Views,
    pub(in crate::fanout) pacer: Pacer,
    /// A wave of wake-ups is scheduled.
    pub(in crate::fanout) scheduled: bool,
    pub(in crate::fanout) subscribers: usize,
    pub(in crate::fanout) used_at: Instant,
    /// As of when upstream has proved the version.
    pub(in crate::fanout) proven_at: Option<Instant>,
    /// Beyond this age of the proof nobody reads; `None`: whatever the age.
    pub(in crate::fanout) staleness_max: Option<Duration>,
    /// Lists of upstream that have begun.
    pub(in crate::fanout) lists: u64,
    /// When the views last let go of what has served its time.
    pub(in crate::fanout) tidied_at: Instant,
}

pub(in crate::fanout) struct Cached {
    /// Grows with each history that has nothing to do with the one before.
    pub(in crate::fanout) epoch: u64,
    pub(in crate::fanout) store: Store,
    pub(in crate::fanout) history: History,
    pub(in crate::fanout) version: ResourceVersion,
}

impl Inner {
    pub(in crate::fanout) fn age(&self) -> Option<Duration> {
        self.proven_at.map(|at| at.elapsed())
    }
}

/// Where a cache stands, for a backfill that is to lead up to it.
pub struct CachePosition {
    /// Which history it is.
    pub epoch: u64,
    /// The version reached.
    pub version: ResourceVersion,
    /// The objects.
    pub store: Store,
}

/// For people who ask since when; nothing is decided by it.
#[expect(clippy::disallowed_methods, reason = "a timestamp to show, which no test compares")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}

impl Cached {
    /// Takes the new state, and lets go of the history that is over the limits, in the ring and in every view.
    fn advance(
        &mut self,
        store: Store,
        version: ResourceVersion,
        views: &mut Views,
        view_bytes: &ViewBytes,
        now: Instant,
    ) {
        self.store = store;
        self.version = version;
        let log_bytes = view_bytes.logs.load(Ordering::Relaxed);
        for gone in self.history.evict(now, self.store.json_bytes(), log_bytes) {
            views.trim(&gone);
        }
    }
}

/// What the hubs of one kubefan share.
#[derive(Clone)]
pub struct HubOptions {
    /// How much history is kept.
    pub limits: RingLimits,
    /// How long a wave of wake-ups may be held back under load.
    pub coalesce_max: Duration,
    /// Who may pin state.
    pub gate: Arc<Gate>,
    /// Names the cluster that versions are of, where that is known.
    pub cluster: ClusterName,
}

/// Names a cluster, where that is known by then.
pub type ClusterName = Arc<dyn Fn() -> Option<String> + Send + Sync>;

/// How long a wave of wake-ups may be held back under load, unless the configuration says otherwise.
pub const COALESCE_MAX: Duration = Duration::from_millis(20);

/// How often views let go of what has served its time.
const TIDY_INTERVAL: Duration = Duration::from_secs(30);

impl Hub {
    /// A hub without state yet.
    pub fn new(
        resource: ResolvedResource,
        parser: Arc<ObjectParser>,
        options: HubOptions,
        metrics: CacheMetrics,
    ) -> Arc<Self> {
        let HubOptions { limits, coalesce_max, gate, cluster } = options;
        let inner = Inner {
            message: "the first list has not begun".to_owned(),
            warnings: Warnings::default(),
            synced_since: None,
            cache: None,
            epochs: 0,
            views: Views::default(),
            pacer: Pacer::new(coalesce_max),
            scheduled: false,
            subscribers: 0,
            used_at: Instant::now(),
            proven_at: None,
            staleness_max: None,
            lists: 0,
            tidied_at: Instant::now(),
        };
        Arc::new(Self {
            resource,
            parser,
            limits,
            gate,
            cluster,
            metrics,
            head: watch::Sender::new(None),
            phase: watch::Sender::new(Phase::Syncing),
            view_bytes: ViewBytes::default(),
            inner: Mutex::new(inner),
        })
    }

    /// The resource, as messages name it.
    pub fn resource(&self) -> &ResolvedResource {
        &self.resource
    }

    /// The cluster that versions are of; `None` where that is not known.
    pub fn cluster(&self) -> Option<String> {
        (self.cluster)()
    }

    /// The metrics of this cache.
    pub fn metrics(&self) -> &CacheMetrics {
        &self.metrics
    }

    /// Keeps what upstream warns of whoever reads this resource.
    pub fn warn(&self, warnings: &Warnings) {
        self.inner().warnings = warnings.clone();
    }

    /// What readers are warned of, over HTTP.
    pub fn warnings(&self) -> Warnings {
        self.inner().warnings.clone()
    }

    pub(in crate::fanout) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes a new state; `received` is when upstream's line was read. Called by the one writer only, which then calls
    /// [`Self::wake`]: after each commit, or after several that came together.
    pub fn commit(&self, commit: Commit, received: Instant) {
        let Commit { store, version, change } = commit;
        if let Change::Record(Record::Event(event)) = &change {
            // Made before the critical section, where it is then found.
            let comparing = self.inner().views.comparing();
            for encoder in comparing {
                encoder.tells(event, Transition::Change);
            }
        }
        let mut inner = self.inner();
        if inner.cache.is_none() {
            inner.synced_since = Some(wall_clock());
        }
        inner.message.clear();
        let Inner { cache, views, epochs, .. } = &mut *inner;
        if planted::is(Bug::HeadBeforeAppend) {
            self.head.send_replace(Some(version));
        }
        let (mut dispatched, mut closed) = (0, Vec::new());
        match (change, cache) {
            (Change::Record(record), Some(cached)) => {
                dispatched = views.append(&record, received);
                cached.history.push(record, received);
                cached.advance(store, version, views, &self.view_bytes, received);
            }
            (Change::Version, Some(cached)) => cached.advance(store, version, views, &self.view_bytes, received),
            (change, cache) => {
                let fresh = || History::new(self.limits, version, self.parser.clone());
                let (history, because) = match change {
                    Change::Restored(history) => (*history, "it was taken over from a peer".to_owned()),
                    Change::Start { because } => (fresh(), because),
                    Change::Record(_) | Change::Version => (fresh(), String::new()),
                };
                if cache.is_some() && !planted::is(Bug::RewoundSilently) {
                    closed = views.drain();
                    let end = StreamEnd::Rewritten(because);
                    closed.iter().for_each(|view| view.close(&end));
                }
                *epochs += 1;
                *cache = Some(Cached { epoch: *epochs, store, history, version });
            }
        }
        // Published after the last append, and inside the section, so that nobody subscribes in between.
        self.head.send_replace(Some(version));
        self.enter(Phase::Synced);
        // Upstream's bookmarks are commits too, so a quiet resource comes by here every minute.
        if received.saturating_duration_since(inner.tidied_at) > TIDY_INTERVAL {
            inner.tidied_at = received;
            inner.views.tidy(received);
        }
        drop(inner);
        closed.iter().for_each(|view| {
            view.wake();
        });
        self.metrics.dispatched(dispatched);
    }

    /// Wakes those who have something to take: at once, or a moment later where the wave before is still on its way. Must be called in
    /// a tokio runtime.
    pub fn wake(self: &Arc<Self>) {
        let mut inner = self.inner();
        if inner.views.all_announced() || inner.scheduled {
            return;
        }
        match inner.pacer.hold(Instant::now()) {
            None => {
                let (views, records) = inner.views.take_unannounced();
                drop(inner);
                self.ring(&views, records);
            }
            Some(until) => {
                inner.scheduled = true;
                drop(inner);
                let hub = self.clone();
                tokio::spawn(async move {
                    sleep_until(until).await;
                    let (views, records) = {
                        let mut inner = hub.inner();
                        inner.scheduled = false;
                        inner.views.take_unannounced()
                    };
                    hub.ring(&views, records);
                });
            }
        }
    }

    fn ring(&self, views: &[Arc<View>], records: usize) {
        // The time at which the wave begins: ringing is part of its work.
        let now = Instant::now();
        let woken = views.iter().map(|view| view.wake()).sum();
        self.inner().pacer.begin(woken, records, now);
    }

    /// Keeps less, or as much as ever: of its usual size history keeps a `share`, from 0 to 1, and what only saves work is kept or not.
    pub fn shed(&self, share: f64, keeps: bool) {
        let mut inner = self.inner();
        let Inner { cache, views, .. } = &mut *inner;
        if let Some(cached) = cache {
            cached.history.keep(share);
            let (store, version) = (cached.store.clone(), cached.version);
            cached.advance(store, version, views, &self.view_bytes, Instant::now());
        }
        self.view_bytes.kept.open(keeps);
        if !keeps {
            views.forget();
        }
    }

    /// Says that the upstream watch is down, or why there is no state yet; what is cached is served on.
    pub fn trouble(&self, message: String) {
        let mut inner = self.inner();
        inner.message = message;
        self.enter(if inner.cache.is_some() { Phase::Stale } else { Phase::Syncing });
    }

    /// Says that the upstream watch is live again.
    pub fn live(&self) {
        let mut inner = self.inner();
        if inner.cache.is_some() {
            inner.message.clear();
            self.enter(Phase::Synced);
        }
    }

    /// From here on nobody reads what upstream has not proved for longer than `staleness_max`. Streams that are open go on.
    pub fn limit_staleness(&self, staleness_max: Option<Duration>) {
        self.inner().staleness_max = staleness_max;
    }

    /// Upstream's word, as of `at`, that the version reached is not behind: an event, a bookmark (one that repeats the version too), a
    /// complete list as of its first request, or a consistent read that finds the cluster at this very version. An open watch alone
    /// is none: from a version that its apiserver has not reached it would be just as silent.
    pub fn proved(&self, at: Instant) {
        let mut inner = self.inner();
        inner.proven_at = inner.proven_at.max(Some(at));
    }

    /// Upstream is being listed, because of `reason`: what was held until now will be replaced.
    pub fn listing(&self, reason: &'static str) {
        self.metrics.relist(reason);
        self.inner().lists += 1;
    }

    /// How many lists of upstream have begun.
    pub fn lists(&self) -> u64 {
        self.inner().lists
    }

    /// Called inside the critical section, so that phase and state agree.
    fn enter(&self, phase: Phase) {
        self.phase.send_if_modified(|current| std::mem::replace(current, phase) != phase);
    }

    /// The phase, and every change of it.
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Ends every stream and forgets the state.
    pub fn close(&self, phase: Phase, end: StreamEnd) {
        let mut inner = self.inner();
        inner.message = end.to_string();
        inner.cache = None;
        inner.proven_at = None;
        inner.synced_since = None;
        let views = inner.views.drain();
        if planted::is(Bug::WokenBeforeTheEnd) {
            views.iter().for_each(|view| {
                view.wake();
            });
        }
        views.iter().for_each(|view| view.close(&end));
        self.head.send_replace(None);
        self.enter(phase);
        drop(inner);
        let wakes = !planted::is(Bug::WokenBeforeTheEnd);
        views.iter().filter(|_| wakes).for_each(|view| {
            view.wake();
        });
        // Nobody may ask for these gauges again: what is no longer cached must not be shown as if it were.
        self.metrics.set(CacheGauges::default());
    }

    /// The version up to which every view is complete.
    pub fn head(&self) -> Option<ResourceVersion> {
        *self.head.borrow()
    }

    /// Waits until the cache has reached `version`, or until `limit` is over.
    pub async fn reached(&self, version: ResourceVersion, limit: std::time::Duration) -> Result<(), Refusal> {
        let mut head = self.head.subscribe();
        let reached = head.wait_for(|head| head.is_none_or(|head| head >= version));
        match tokio::time::timeout(limit, reached).await {
            Ok(_) => Ok(()),
            Err(_) => match self.head() {
                Some(current) if current < version => Err(Refusal::Future { requested: version, current }),
                _ => Ok(()),
            },
        }
    }

    /// The state, for a list or a get.
    pub fn snapshot(&self) -> Result<(Store, ResourceVersion), Refusal> {
        let mut inner = self.inner();
        inner.used_at = Instant::now();
        let cached = self.serving(&inner)?;
        Ok((cached.store.clone(), cached.version))
    }

    /// The state, for who looks after the cache and is no reader of it; `None` before the first list.
    pub fn state(&self) -> Option<(Store, ResourceVersion)> {
        self.inner().cache.as_ref().map(|cached| (cached.store.clone(), cached.version))
    }

    /// Who may pin state.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// What a backfill has to reach, and what it can share; `None` while there is no state.
    pub fn position(&self) -> Option<CachePosition> {
        let inner = self.inner();
        let Cached { epoch, store, version, .. } = inner.cache.as_ref()?;
        Some(CachePosition { epoch: *epoch, version: *version, store: store.clone() })
    }

    /// Whether something held here leads on from `version`, and the version reached; `None` in another epoch.
    pub fn can_resume_from(&self, epoch: u64, version: ResourceVersion) -> Option<(bool, ResourceVersion)> {
        let inner = self.inner();
        let cached = inner.cache.as_ref().filter(|cached| cached.epoch == epoch)?;
        Some((cached.history.way_from(version).is_ok(), cached.version))
    }

    /// Goes on with a copy of the history of this epoch, as [`History::copy`]; `None` where it is another by now.
    pub fn copy_history(&self, epoch: u64, copy: &mut HistoryCopy, entries_max: usize) -> Option<bool> {
        let inner = self.inner();
        let cached = inner.cache.as_ref().filter(|cached| cached.epoch == epoch)?;
        Some(cached.history.copy(copy, entries_max))
    }

    /// How much history is kept.
    pub fn limits(&self) -> RingLimits {
        self.limits
    }

    pub(in crate::fanout) fn serving<'a>(&self, inner: &'a Inner) -> Result<&'a Cached, Refusal> {
        match (*self.phase.borrow(), &inner.cache) {
            (_, Some(cached)) => match (inner.age(), inner.staleness_max) {
                (age, Some(staleness_max)) if age.is_none_or(|age| age > staleness_max) => {
                    let message = inner.message.clone();
                    Err(Refusal::Stale { resource: self.name(), age, staleness_max, message })
                }
                _ => Ok(cached),
            },
            (Phase::NotFound, None) => Err(Refusal::NotFound(inner.message.clone())),
            (Phase::Forbidden, None) => Err(Refusal::Forbidden(inner.message.clone())),
            (_, None) => Err(self.not_synced(&inner.message)),
        }
    }

    pub(in crate::fanout) fn not_synced(&self, message: &str) -> Refusal {
        Refusal::NotSynced { resource: self.name(), message: message.to_owned() }
    }

    fn name(&self) -> String {
        let ResolvedResource { group, version, resource, .. } = &self.resource;
        GroupVersionResource::new(group, version, resource).to_string()
    }
}
