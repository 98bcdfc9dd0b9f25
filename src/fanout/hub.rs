//! The meeting point of one writer and many subscribers, for one resource and scope.
//!
//! State, history and views change together, in one short critical section per commit; a subscription is registered in the same
//! section that takes its snapshot, so that there is no gap and no repeat between the two. The head version is published after the
//! last view's log was appended, and bookmarks read only that. No lock is held across an await.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use tokio::{sync::watch, time::Instant};

use super::{
    outcome::{Refusal, StreamEnd},
    subscription::{Start, Subscription, SubscriptionStart},
    view::View,
};
use crate::{
    cache::{
        EventRing, RingLimits, Store,
        writer::{Change, Commit},
    },
    model::{
        GroupVersionResource, ResourceVersion,
        selection::{Selection, SelectionSpec},
    },
    proto::v1alpha1::ResolvedResource,
    telemetry::metrics::{CacheGauges, CacheMetrics, Resume},
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
    head: watch::Sender<Option<ResourceVersion>>,
    phase: watch::Sender<Phase>,
    inner: Mutex<Inner>,
}

struct Inner {
    message: String,
    synced_since: Option<SystemTime>,
    cache: Option<Cached>,
    views: HashMap<SelectionSpec, Arc<View>>,
    subscribers: usize,
    used_at: Instant,
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
        views: &HashMap<SelectionSpec, Arc<View>>,
        now: Instant,
    ) {
        self.store = store;
        self.version = version;
        let log_bytes = views.values().map(|view| view.log_bytes()).sum();
        if self.ring.evict(now, self.store.json_bytes(), log_bytes) {
            views.values().for_each(|view| view.trim(self.ring.floor()));
        }
    }
}

impl Hub {
    /// A hub without state yet.
    pub fn new(resource: ResolvedResource, limits: RingLimits, metrics: CacheMetrics) -> Arc<Self> {
        let inner = Inner {
            message: "the first list has not begun".to_owned(),
            synced_since: None,
            cache: None,
            views: HashMap::new(),
            subscribers: 0,
            used_at: Instant::now(),
        };
        Arc::new(Self {
            resource,
            limits,
            metrics,
            head: watch::Sender::new(None),
            phase: watch::Sender::new(Phase::Syncing),
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

    /// Publishes a new state; `received` is when upstream's line was read. Called by the one writer only.
    pub fn commit(&self, commit: Commit, received: Instant) {
        let Commit { store, version, change } = commit;
        let mut inner = self.inner();
        if inner.cache.is_none() {
            inner.synced_since = Some(wall_clock());
        }
        inner.message.clear();
        let Inner { cache, views, .. } = &mut *inner;
        // The views that have something to send: only theirs are woken.
        let (mut told, mut dispatched) = (Vec::new(), 0);
        match (change, cache) {
            (Change::Record(record), Some(cached)) => {
                for view in views.values() {
                    let messages = view.append(&record, received);
                    if messages > 0 {
                        dispatched += messages;
                        told.push(view.clone());
                    }
                }
                cached.ring.push(record, received);
                cached.advance(store, version, views, received);
            }
            (Change::Version, Some(cached)) => cached.advance(store, version, views, received),
            (_, cache) => {
                if let Some(before) = cache {
                    let end =
                        StreamEnd::Rewritten(format!("version {} was followed by a list at {version}", before.version));
                    views.drain().for_each(|(_, view)| view.close(end.clone()));
                }
                *cache = Some(Cached { store, ring: EventRing::new(self.limits, version), version });
            }
        }
        // Published after the last append, and inside the section, so that nobody subscribes in between.
        self.head.send_replace(Some(version));
        self.enter(Phase::Synced);
        drop(inner);
        told.iter().for_each(|view| view.wake());
        self.metrics.dispatched(dispatched);
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
        let views: Vec<_> = inner.views.drain().map(|(_, view)| view).collect();
        self.head.send_replace(None);
        self.enter(phase);
        drop(inner);
        views.iter().for_each(|view| view.close(end.clone()));
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

    /// Registers a subscription; state and position are taken in one critical section.
    pub fn subscribe(self: &Arc<Self>, selection: Selection, start: Start) -> Result<Subscription, Refusal> {
        let mut inner = self.inner();
        self.serving(&inner)?;
        let Inner { cache: Some(cached), views, .. } = &mut *inner else {
            return Err(self.not_synced("no state"));
        };
        let new = || Arc::new(View::new(selection.clone(), cached.version));
        let view = views.get(selection.spec()).cloned().unwrap_or_else(new);
        let (cursor, start) = match start {
            Start::Snapshot => {
                let store = cached.store.clone();
                let resource = self.resource.clone();
                (view.state().log.end(), SubscriptionStart::Snapshot { store, version: cached.version, resource })
            }
            Start::After(requested) if requested > cached.version => {
                self.metrics.resume(Resume::Future);
                return Err(Refusal::Future { requested, current: cached.version });
            }
            Start::After(version) => match view.cursor_after(version, &cached.ring) {
                Ok(cursor) => {
                    self.metrics.resume(Resume::Ring);
                    (cursor, SubscriptionStart::After(version))
                }
                Err(expired) => {
                    self.metrics.resume(Resume::Expired);
                    return Err(expired.into());
                }
            },
        };
        view.join();
        views.entry(selection.spec().clone()).or_insert_with(|| view.clone());
        inner.subscribers += 1;
        inner.used_at = Instant::now();
        drop(inner);
        self.metrics.subscription_started();
        Ok(Subscription::new(self.clone(), view, cursor, start))
    }

    /// Unregisters a subscription; a view that nobody uses any more is dropped.
    pub(super) fn leave(&self, view: &Arc<View>) {
        let mut inner = self.inner();
        inner.subscribers -= 1;
        inner.used_at = Instant::now();
        let spec = view.selection().spec();
        // A view that was closed may have a successor of the same selection.
        if view.leave() == 0 && inner.views.get(spec).is_some_and(|current| Arc::ptr_eq(current, view)) {
            inner.views.remove(spec);
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
            gauges.log_bytes = inner.views.values().map(|view| view.log_bytes()).sum();
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
