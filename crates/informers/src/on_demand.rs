//! Caches that readers start: for resources that are not configured, and for encodings other than
//! JSON.
//!
//! A reader that may start an informer could fill the memory by naming resources. So everything is
//! limited: the number of resources, the objects of each, and the bytes of all together. Limits
//! apply during the first list and afterwards. A resource that was too large is refused for a while
//! without asking upstream again, and before the next attempt upstream is asked for its size. A
//! cache without readers is dropped, and its place is given away much sooner if another resource
//! needs one.
//!
//! With passthrough, a request over HTTP that is refused here is forwarded. So a limit costs
//! upstream a request, and no client of HTTP an error.
//!
//! A protobuf or table cache starts on demand unless `--resource` names the encoding: only a
//! request shows that a client wants it. Such caches hold the same resources a second time, so
//! they have byte budgets of their own. They do not start for every configured resource, because
//! most are never read in these encodings, and each costs a second watch and a second copy.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, PoisonError},
    time::{Duration, SystemTime},
};

use kubefan_cache::{Phase, Refusal, StreamEnd};
use kubefan_fanout::{HubStatus, Served};
use kubefan_model::{
    GroupVersionResource, Media,
    object::ObjectParser,
    protobuf::kinds,
    table::{self, Tables},
};
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::{
    cache_entry::{Cache, CacheEnd, CacheId, StartedBy},
    cache_quota::{CacheLimits, CacheQuota, EncodingBudget, EncodingLimits},
    discovered::{DiscoveredResource, not_built_in},
    informer::StartFrom,
    on_demand_eviction::{self, OnDemandPlace, Room, ScopedResource},
    registry::{RefusedCache, Registry},
    resource_media::CONFIGURABLE,
};

/// Maximum wait of a reader for the first sync of a cache that it has started.
const FIRST_SYNC_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum wait for encodings other than JSON, which the reader can get from upstream instead.
/// Clients' informers should start within 3 s.
const ENCODING_SYNC_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for which a cache that was too large or not available is refused before the next attempt.
const REFUSED_FOR: Duration = Duration::from_secs(60);
/// Time for which such a refusal is remembered. Meanwhile upstream is asked for the size of the
/// resource before each new list.
const REFUSAL_REMEMBERED_FOR: Duration = Duration::from_secs(3600);
/// Time without a reader after which another resource may take a place. A client that opens its
/// watch again, or lists again first, is back sooner.
const PLACE_IDLE_MIN: Duration = Duration::from_secs(10);
/// Time without a reader for a cache whose first list is not complete: readers may be waiting for
/// it.
const PLACE_SYNCING_MIN: Duration = Duration::from_secs(60);
/// The most resources that are named in metrics because a limit left them without a cache.
const WITHOUT_ROOM_MAX: usize = 1000;

/// Removes a cache from the map when its task ends, even by a panic. A cache that stayed in the map
/// would be served and never change.
struct RemoveOnDrop {
    registry: Arc<Registry>,
    cache: Arc<Cache>,
    id: CacheId,
    /// `None` until the task has ended without a panic.
    ended: Option<CacheEnd>,
}

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let Self { registry, cache, id, ended } = self;
        // A cache whose place was given away is no longer in the map.
        let removed = registry.caches.remove(cache);
        match ended.take() {
            Some(ended) if removed && ended.refused => {
                registry.note_without_room(&id.gvr);
                let refused = RefusedCache { at: Instant::now(), message: ended.reason.message };
                registry.refused.insert(id.clone(), refused);
            }
            Some(_) => {}
            None => {
                let message = format!("the informer of {} has failed", id.gvr);
                cache.served.hub.close(Phase::Syncing, StreamEnd::Stopped(message));
            }
        }
        cache.stop.cancel();
        registry.changed();
    }
}

/// The permission to start a cache, with its limits.
pub(super) struct StartPermit {
    limits: CacheLimits,
    /// The limit for resources that are cached on demand. `None` if the resource is configured.
    resources_max: Option<usize>,
}

impl Registry {
    /// Checks whether a reader may start this cache. Costs no request to upstream.
    pub(super) fn may_start(&self, id: &CacheId, tenant: Option<&str>) -> Result<StartPermit, Refusal> {
        let permit = self.start_permit(id)?;
        if let Some(refused) = self.refused.get(id).filter(|refused| refused.at.elapsed() < REFUSED_FOR) {
            return Err(exhausted(id.media, refused.message.clone()));
        }
        self.find_room(id, permit.resources_max, tenant)?;
        Ok(permit)
    }

    /// Returns the budget of a cache in an encoding other than JSON. Fails if the configuration or
    /// the resource's name rules out the encoding.
    pub(super) fn encoding_budget(&self, gvr: &GroupVersionResource, media: Media) -> Result<EncodingBudget, Refusal> {
        let is_table = media == Media::Table;
        let (limits, off) = if is_table {
            (self.options.tables, "no tables are cached; start kubefan with --cache-tables")
        } else {
            (self.options.protobuf, "nothing is cached as protobuf (tuning.protobuf=off); request JSON")
        };
        let EncodingLimits { bytes_max, .. } = limits.ok_or_else(|| Refusal::NotCached(off.to_owned()))?;
        if !self.context.source.has(media) {
            let message = "only JSON is read from the kubefan at --upstream over gRPC; request JSON";
            return Err(Refusal::NotCached(message.to_owned()));
        }
        if is_table {
            check_table(gvr)?;
            return Ok(EncodingBudget { media, bytes_max, used: self.tables_bytes.clone() });
        }
        if !kinds::is_known(gvr) {
            return Err(Refusal::NotEncoded(not_built_in(gvr)));
        }
        Ok(EncodingBudget { media, bytes_max, used: self.protobuf_bytes.clone() })
    }

    fn start_permit(&self, id: &CacheId) -> Result<StartPermit, Refusal> {
        if let Some(message) = self.not_cached(&id.gvr) {
            return Err(Refusal::NotCached(message));
        }
        // A configured resource may be cached in every encoding, and needs no place for that.
        let is_configured = self.is_configured(id);
        if !is_configured && is_secret(&id.gvr) {
            return Err(Refusal::NotCached(
                "secrets are not cached on demand, because without authorization every client could read them; \
                 start kubefan with --resource secrets to accept that"
                    .to_owned(),
            ));
        }
        let on_demand = || self.options.on_demand.ok_or_else(|| needs_a_flag(&id.gvr, is_configured));
        let checks_first = self.refused.contains_key(id);
        let budget = match id.media {
            Media::Json => EncodingBudget {
                media: Media::Json,
                bytes_max: on_demand()?.size.on_demand_bytes_max,
                used: self.on_demand_bytes.clone(),
            },
            media => self.encoding_budget(&id.gvr, media)?,
        };
        // A configured resource has no limit of objects in a further encoding.
        let limits = if is_configured && id.media != Media::Json { None } else { Some(on_demand()?) };
        let objects_max = limits.map(|limits| limits.size.on_demand_objects_max);
        let resources_max = limits.filter(|_| !is_configured).map(|limits| limits.on_demand_resources_max);
        let limits = CacheLimits { objects_max, budget, checks_first, is_configured };
        Ok(StartPermit { limits, resources_max })
    }

    /// Whether this resource is configured in this scope, in any encoding.
    fn is_configured(&self, id: &CacheId) -> bool {
        CONFIGURABLE.into_iter().any(|media| {
            let configured = CacheId { media, ..id.clone() };
            self.caches.get(&configured).is_some_and(|cache| !cache.on_demand())
        })
    }

    /// Waits a limited time for the first sync of a cache that a reader has started.
    pub(super) async fn first_sync(
        self: &Arc<Self>,
        cache: &Cache,
        id: &CacheId,
        tenant: Option<&str>,
    ) -> Result<Served, Refusal> {
        let mut phase = cache.served.hub.phase();
        let sync_timeout = match id.media {
            Media::Json => FIRST_SYNC_TIMEOUT,
            Media::Protobuf | Media::Table => ENCODING_SYNC_TIMEOUT,
        };
        tokio::select! {
            biased;
            // After the timeout the reader gets an error with a retry delay.
            _ = timeout(sync_timeout, phase.wait_for(|phase| *phase != Phase::Syncing)) => {}
            () = cache.stop.cancelled() => {}
        }
        self.may_start(id, tenant)?;
        Ok(cache.read_by(tenant))
    }

    /// Starts a cache for a reader of a tenant.
    pub(super) fn start(
        self: &Arc<Self>,
        discovered: &DiscoveredResource,
        id: &CacheId,
        tenant: Option<&str>,
    ) -> Result<Arc<Cache>, Refusal> {
        let StartPermit { limits, resources_max } = self.may_start(id, tenant)?;
        let CacheId { gvr, scope, media } = id;
        let parser = match media {
            Media::Json => ObjectParser::new(&discovered.fields),
            Media::Protobuf => discovered.protobuf_parser().map_err(Refusal::NotEncoded)?,
            Media::Table => ObjectParser::table(Tables::new(gvr, wall_clock), &discovered.fields),
        };
        let _one_at_a_time = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cache) = self.caches.get(id) {
            return Ok(cache);
        }
        let given_up = match self.find_room(id, resources_max, tenant)? {
            Room::Free => None,
            Room::Idle(place) => Some((place, "idle; no longer cached")),
            Room::OfLargest(place) => Some((place, "no longer cached: its tenant has the most places")),
        };
        if let Some(((resource, scope), reason)) = given_up {
            info!(%resource, scope = scope.namespace(), taken_by = %gvr, "{reason}");
            self.drop_cached(|cache| (&cache.served.gvr, &cache.served.scope) == (&resource, &scope));
        }
        info!(resource = %gvr, scope = scope.namespace(), media = media.as_str(), "caching on demand");
        let started_by = StartedBy::Reader { tenant: tenant.map(Arc::from), at: Instant::now() };
        let cache = self.insert(&gvr.to_string(), discovered, scope.clone(), parser, started_by);
        // Counted before the first sync: the bytes count from the first page of the list on.
        drop(cache.tenants.begin(tenant));
        let quota = CacheQuota::new(limits, cache.tenants.clone());
        let mut guard = RemoveOnDrop { registry: self.clone(), cache: cache.clone(), id: id.clone(), ended: None };
        let known = discovered.schema.clone();
        tokio::spawn(async move {
            // No warm start: a peer's cache may exceed the quota.
            let ended = guard
                .registry
                .clone()
                .supervise(guard.cache.clone(), Some(quota), known.clone(), StartFrom::List)
                .await;
            let is_not_cached = ended.reason.phase == Phase::NotCached;
            guard.ended = Some(ended);
            let registry = guard.registry.clone();
            let gvr = guard.id.gvr.clone();
            drop(guard);
            if is_not_cached {
                registry.until_it_may_be_cached(&gvr, known).await;
            }
        });
        Ok(cache)
    }

    /// Finds room for a cache, which may have a place already. Fails if there is none.
    fn find_room(&self, id: &CacheId, limit: Option<usize>, tenant: Option<&str>) -> Result<Room, Refusal> {
        let Some(limit) = limit else { return Ok(Room::Free) };
        let CacheId { gvr, scope, media } = id;
        let mut others = self.places();
        others.remove(&(gvr.clone(), scope.clone()));
        if let Some(room) = on_demand_eviction::find(&others, limit, tenant) {
            return Ok(room);
        }
        let message = format!(
            "{gvr} is not cached: {limit} resources are cached on demand, the most this kubefan allows, and all of them \
             are in use; raise limits.onDemandResourcesMax, name {gvr} with --resource, or let requests over HTTP go to the \
             apiserver (--access)"
        );
        if self.note_without_room(gvr) {
            warn!(resource = %gvr, message, "no place for another resource on demand");
        }
        Err(exhausted(*media, message))
    }

    /// Returns the places that readers have taken.
    fn places(&self) -> HashMap<ScopedResource, OnDemandPlace> {
        let mut places = HashMap::<ScopedResource, OnDemandPlace>::new();
        let mut configured = HashSet::new();
        for cache in self.caches.iter() {
            let place = (cache.served.gvr.clone(), cache.served.scope.clone());
            let StartedBy::Reader { tenant, at } = &cache.started_by else {
                configured.insert(place);
                continue;
            };
            let HubStatus { phase, subscribers, used_at, .. } = cache.served.hub.status();
            let idle_min = if phase == Phase::Syncing { PLACE_SYNCING_MIN } else { PLACE_IDLE_MIN };
            let idle_since = (subscribers == 0 && used_at.elapsed() >= idle_min).then_some(used_at);
            let taken = OnDemandPlace { idle_since, subscribers, tenant: tenant.clone(), at: *at };
            places.entry(place).and_modify(|known| known.add(&taken)).or_insert(taken);
        }
        places.retain(|place, _| !configured.contains(place));
        places
    }

    /// Drops the caches that readers started and that fulfil `is_dropped`.
    fn drop_cached(&self, is_dropped: impl Fn(&Cache) -> bool) {
        // Removed from the map first, so that a new reader starts a new cache.
        let dropped = self.caches.remove_all(|cache| cache.on_demand() && is_dropped(cache));
        for cache in &dropped {
            cache.stop.cancel();
        }
    }

    /// Remembers that a limit left a resource without a cache. Returns true if that is new, and
    /// there was room to remember it.
    fn note_without_room(&self, gvr: &GroupVersionResource) -> bool {
        self.without_room.len() < WITHOUT_ROOM_MAX && self.without_room.insert(gvr.clone(), ()).is_none()
    }

    /// Returns the time that a cache which a reader started may stay without readers. `None` if
    /// readers cannot start caches.
    pub(super) fn idle_timeout(&self) -> Option<Duration> {
        let on_demand = self.options.on_demand.map(|on_demand| on_demand.on_demand_idle_timeout);
        let encoding = self.options.protobuf.or(self.options.tables);
        on_demand.or(encoding.map(|encoding| encoding.idle_timeout))
    }
}

/// Drops each cache that readers started once it has had no reader for `idle_timeout`. Does not
/// return.
pub(super) async fn drop_idle(registry: Arc<Registry>, idle_timeout: Duration) {
    loop {
        sleep((idle_timeout / 4).max(Duration::from_millis(100))).await;
        registry.refused.retain(|_, refused| refused.at.elapsed() < REFUSAL_REMEMBERED_FOR);
        registry.drop_cached(|cache| {
            let status = cache.served.hub.status();
            let idle = status.subscribers == 0 && status.used_at.elapsed() >= idle_timeout;
            if idle {
                let media = cache.served.parser.media().as_str();
                info!(resource = %cache.served.gvr, media, "idle; no longer cached");
            }
            idle
        });
    }
}

/// Returns the time for ages in tables.
#[expect(clippy::disallowed_methods, reason = "the time enters here; code below takes it as a parameter")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// Returns the refusal for a resource that a flag would cache.
fn needs_a_flag(gvr: &GroupVersionResource, is_configured: bool) -> Refusal {
    let message = if is_configured {
        format!(
            "{gvr} is cached only as protobuf; request protobuf, or start kubefan with --resource {gvr}=json+protobuf, or with \
             --on-demand to cache every resource that is requested"
        )
    } else {
        format!(
            "{gvr} is not cached; start kubefan with --resource {gvr}, or with --on-demand to cache every resource that is \
             requested"
        )
    };
    Refusal::NotCached(message)
}

/// Returns the refusal for a limit. Only HTTP reads tables, and falls back to upstream or to JSON.
fn exhausted(media: Media, message: String) -> Refusal {
    match media {
        Media::Json | Media::Protobuf => Refusal::NoRoom(message),
        Media::Table => Refusal::NotCached(message),
    }
}

/// Whether objects of a resource are credentials: without authorization every caller could read
/// them from a cache.
fn is_secret(gvr: &GroupVersionResource) -> bool {
    gvr.group.is_empty() && gvr.resource == "secrets"
}

/// Fails if a resource of this name has tables that cannot be cached.
fn check_table(gvr: &GroupVersionResource) -> Result<(), Refusal> {
    match table::columns_with_other_ages(gvr) {
        None => Ok(()),
        Some(columns) => Err(Refusal::NotCached(format!(
            "{gvr} is not cached as tables: kubefan cannot recompute {columns}, so they would be as old as the last event"
        ))),
    }
}
