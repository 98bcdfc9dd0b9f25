//! The meeting point of one writer and many subscribers, for one resource and scope.
//!
//! State, history and views change together, in one short critical section per commit; a subscription is registered in the same
//! section that takes its snapshot, so that there is no gap and no repeat between the two. The head version is published after the
//! last view's log was appended, and bookmarks read only that. No lock is held across an await.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::{Duration, SystemTime},
};

use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::{
    bell::Bell,
    budget::Budgets,
    outcome::{Refusal, StreamEnd},
    pacer::Pacer,
    subscription::{Start, Subscription, SubscriptionStart},
    view::{View, ViewBytes, ViewKey},
    views::Views,
};
use crate::{
    cache::{
        EventRing, Record, RingLimits, Store,
        writer::{Change, Commit},
    },
    model::{GroupVersionResource, ResourceVersion, event::Transition, format::Format, selection::Selection},
    proto::v1alpha1::ResolvedResource,
    telemetry::metrics::{CacheGauges, CacheMetrics, Resume},
    watched::Watched,
};

/// Whether a resource is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The first list is not complete.
    Syncing,
    /// Served; the upstream watch is live.
    Synced,
    /// Served from the cache; the upstream watch is being started again.
    Stale,
    /// The apiserver does not serve it.
    NotFound,
    /// The apiserver denies it.
    Forbidden,
}

impl Phase {
    /// Whether readers are answered.
    pub fn serves(self) -> bool {
        matches!(self, Self::Synced | Self::Stale)
    }

    /// The name in logs, readyz and the status page.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Syncing => "syncing",
            Self::Synced => "synced",
            Self::Stale => "stale",
            Self::NotFound => "not found",
            Self::Forbidden => "forbidden",
        }
    }
}

/// The state of a hub, for people and probes.
#[derive(Debug, Clone)]
pub struct HubStatus {
    /// Whether it serves.
    pub phase: Phase,
    /// Why not, or the last error upstream.
    pub message: String,
    /// The version; `None` before the first list.
    pub version: Option<ResourceVersion>,
    /// The oldest version to resume from.
    pub oldest: Option<ResourceVersion>,
    /// Objects held.
    pub objects: usize,
    /// Their JSON bytes.
    pub object_bytes: usize,
    /// Since when it serves.
    pub synced_since: Option<SystemTime>,
    /// Subscribers now.
    pub subscribers: usize,
    /// When there was last a subscriber or a reader.
    pub used_at: Instant,
}

/// State, history and views of one resource and scope.
pub struct Hub {
    resource: ResolvedResource,
    limits: RingLimits,
    metrics: CacheMetrics,
    head: Watched<Option<ResourceVersion>>,
    phase: watch::Sender<Phase>,
    view_bytes: ViewBytes,
    inner: Mutex<Inner>,
}

struct Inner {
    message: String,
    synced_since: Option<SystemTime>,
    cache: Option<Cached>,
    views: Views,
    pacer: Pacer,
    /// A wave of wake-ups is scheduled.
    scheduled: bool,
    subscribers: usize,
    used_at: Instant,
    /// When the views last let go of what has served its time.
    tidied_at: Instant,
}

struct Cached {
    store: Store,
    ring: EventRing,
    version: ResourceVersion,
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
        for gone in self.ring.evict(now, self.store.json_bytes(), log_bytes) {
            views.trim(&gone);
        }
    }
}

/// How long a wave of wake-ups may be held back under load, unless the configuration says otherwise.
pub const COALESCE_MAX: Duration = Duration::from_millis(20);

/// How often views let go of what has served its time.
const TIDY_INTERVAL: Duration = Duration::from_secs(30);

impl Hub {
    /// A hub without state yet.
    pub fn new(
        resource: ResolvedResource,
        limits: RingLimits,
        coalesce_max: Duration,
        metrics: CacheMetrics,
    ) -> Arc<Self> {
        let inner = Inner {
            message: "the first list has not begun".to_owned(),
            synced_since: None,
            cache: None,
            views: Views::default(),
            pacer: Pacer::new(coalesce_max),
            scheduled: false,
            subscribers: 0,
            used_at: Instant::now(),
            tidied_at: Instant::now(),
        };
        Arc::new(Self {
            resource,
            limits,
            metrics,
            head: Watched::new(None),
            phase: watch::Sender::new(Phase::Syncing),
            view_bytes: ViewBytes::default(),
            inner: Mutex::new(inner),
        })
    }

    /// The resource, as messages name it.
    pub fn resource(&self) -> &ResolvedResource {
        &self.resource
    }

    /// The metrics of this cache.
    pub fn metrics(&self) -> &CacheMetrics {
        &self.metrics
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
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
        let Inner { cache, views, .. } = &mut *inner;
        let (mut dispatched, mut closed) = (0, None);
        match (change, cache) {
            (Change::Record(record), Some(cached)) => {
                dispatched = views.append(&record, received);
                cached.ring.push(record, received);
                cached.advance(store, version, views, &self.view_bytes, received);
            }
            (Change::Version, Some(cached)) => cached.advance(store, version, views, &self.view_bytes, received),
            (_, cache) => {
                if let Some(before) = cache {
                    let was = before.version;
                    let end = StreamEnd::Rewritten(format!("version {was} was followed by a list at {version}"));
                    closed = Some((views.drain(), end));
                }
                *cache = Some(Cached { store, ring: EventRing::new(self.limits, version), version });
            }
        }
        // Published after the last append, and inside the section, so that nobody subscribes in between.
        self.head.set(Some(version));
        self.enter(Phase::Synced);
        // Upstream's bookmarks are commits too, so a quiet resource comes by here every minute.
        if received.saturating_duration_since(inner.tidied_at) > TIDY_INTERVAL {
            inner.tidied_at = received;
            inner.views.tidy(received);
        }
        drop(inner);
        if let Some((views, end)) = closed {
            views.iter().for_each(|view| view.close(end.clone()));
        }
        self.metrics.dispatched(dispatched);
    }

    /// Wakes those who have something to take: at once, or a moment later where the wave before is still on its way. Must be called in
    /// a tokio runtime.
    pub fn wake(self: &Arc<Self>) {
        let mut inner = self.inner();
        if inner.views.all_told() || inner.scheduled {
            return;
        }
        match inner.pacer.hold(Instant::now()) {
            None => {
                let (views, records) = inner.views.take_untold();
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
                        inner.views.take_untold()
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
        inner.synced_since = None;
        let views = inner.views.drain();
        self.head.set(None);
        self.enter(phase);
        drop(inner);
        views.iter().for_each(|view| view.close(end.clone()));
        // Nobody may ask for these gauges again: what is no longer cached must not be shown as if it were.
        self.metrics.set(CacheGauges::default());
    }

    /// The version up to which every view is complete.
    pub fn head(&self) -> Option<ResourceVersion> {
        self.head.get()
    }

    /// Waits until the cache has reached `version`, or until `limit` is over.
    pub async fn reached(&self, version: ResourceVersion, limit: std::time::Duration) -> Result<(), Refusal> {
        let reached = self.head.wait_for(|head| head.is_none_or(|head| head >= version));
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

    /// Registers a subscription; state and position are taken in one critical section.
    pub fn subscribe(
        self: &Arc<Self>,
        selection: Selection,
        format: Format,
        start: Start,
        bell: Bell,
    ) -> Result<Subscription, Refusal> {
        let mut inner = self.inner();
        self.serving(&inner)?;
        let Inner { cache: Some(cached), views, .. } = &mut *inner else {
            return Err(self.not_synced("no state"));
        };
        let key = ViewKey { selection: selection.spec().clone(), format };
        let view = match views.get(&key) {
            Some(view) => view.clone(),
            None => {
                let encoder = views.encoder(&key.format, &self.view_bytes.kept);
                Arc::new(View::new(selection, encoder, cached.version, &self.view_bytes))
            }
        };
        let (cursor, start) = match start {
            Start::Snapshot => {
                let resource = self.resource.clone();
                if key.format.encoding().compresses_snapshots() {
                    let now = Instant::now();
                    let (chunks, version, cursor) = view.generation(&cached.store, cached.version, &cached.ring, now);
                    (cursor, SubscriptionStart::Chunks { chunks, version, resource })
                } else {
                    let store = cached.store.clone();
                    (view.end(), SubscriptionStart::Objects { store, version: cached.version, resource })
                }
            }
            Start::After(requested) | Start::Kept(requested) if requested > cached.version => {
                self.metrics.resume(Resume::Future);
                return Err(Refusal::Future { requested, current: cached.version });
            }
            Start::After(version) | Start::Kept(version) => match view.cursor_after(version, &cached.ring) {
                Ok(cursor) => {
                    self.metrics.resume(Resume::Ring);
                    (cursor, SubscriptionStart::After { version, kept: matches!(start, Start::Kept(_)) })
                }
                Err(expired) => {
                    self.metrics.resume(Resume::Expired);
                    return Err(expired.into());
                }
            },
        };
        let bell = Arc::new(bell);
        let place = view.join(bell.clone());
        if views.get(&key).is_none() {
            views.insert(view.clone());
        }
        inner.subscribers += 1;
        inner.used_at = Instant::now();
        drop(inner);
        self.metrics.subscription_started();
        Ok(Subscription::new(self.clone(), view, (place, bell), cursor, start))
    }

    /// Unregisters a subscription; a view that nobody uses any more is dropped.
    pub(super) fn leave(&self, view: &Arc<View>, place: usize, waited: Option<u64>) {
        let mut inner = self.inner();
        inner.subscribers -= 1;
        inner.used_at = Instant::now();
        if view.leave(place, waited) == 0 {
            inner.views.remove(view);
        }
    }

    /// The state, for people and probes.
    pub fn status(&self) -> HubStatus {
        let inner = self.inner();
        let cached = inner.cache.as_ref();
        HubStatus {
            phase: *self.phase.borrow(),
            message: inner.message.clone(),
            version: cached.map(|cached| cached.version),
            oldest: cached.map(|cached| cached.ring.floor()),
            objects: cached.map_or(0, |cached| cached.store.len()),
            object_bytes: cached.map_or(0, |cached| cached.store.json_bytes()),
            synced_since: inner.synced_since,
            subscribers: inner.subscribers,
            used_at: inner.used_at,
        }
    }

    /// The number of distinct selections.
    pub fn views(&self) -> usize {
        self.inner().views.len()
    }

    /// What the blocks of all views take, in bytes.
    pub fn block_bytes(&self) -> usize {
        self.view_bytes.blocks.load(Ordering::Relaxed)
    }

    /// Brings the gauges up to date.
    pub fn refresh_gauges(&self) {
        let inner = self.inner();
        let mut gauges = CacheGauges {
            subscribers: inner.subscribers,
            views: inner.views.len(),
            synced: inner.cache.is_some(),
            ..CacheGauges::default()
        };
        if let Some(cached) = &inner.cache {
            gauges.ring_bytes = cached.ring.bytes();
            let Budgets { projected, chunks } = &self.view_bytes.kept;
            gauges.log_bytes =
                self.view_bytes.logs.load(Ordering::Relaxed) + self.block_bytes() + projected.used() + chunks.used();
            gauges.ring_events = cached.ring.len();
            gauges.ring_age = cached.ring.age(Instant::now());
            gauges.objects = cached.store.len();
            gauges.object_bytes = cached.store.json_bytes();
            gauges.object_memory_bytes = cached.store.cost_bytes();
            gauges.version = cached.version.get();
        }
        drop(inner);
        self.metrics.set(gauges);
    }

    fn serving<'a>(&self, inner: &'a Inner) -> Result<&'a Cached, Refusal> {
        match (*self.phase.borrow(), &inner.cache) {
            (_, Some(cached)) => Ok(cached),
            (Phase::NotFound, None) => Err(Refusal::NotFound(inner.message.clone())),
            (Phase::Forbidden, None) => Err(Refusal::Forbidden(inner.message.clone())),
            (_, None) => Err(self.not_synced(&inner.message)),
        }
    }

    fn not_synced(&self, message: &str) -> Refusal {
        let ResolvedResource { group, version, resource, .. } = &self.resource;
        let name = GroupVersionResource::new(group, version, resource);
        Refusal::NotSynced { resource: name.to_string(), message: message.to_owned() }
    }
}
