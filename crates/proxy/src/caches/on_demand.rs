//! Caches that readers start: for resources that are not configured, and for encodings other than
//! JSON.
//!
//! A reader that may start an informer could fill the memory by naming resources. So everything is
//! limited: the number of resources, the objects of each, and the bytes of all together. Limits
//! apply before the first list (by the apiserver's own count), during it and afterwards. A resource
//! that was too large is refused for a while without asking upstream again, and a cache without
//! readers is dropped.
//!
//! Protobuf and table caches always start on demand, because only a request shows that a client
//! wants the encoding. They hold the same resources a second time, so they have byte budgets of
//! their own. Why not start them for every configured resource? Most are never read in these
//! encodings, and each costs a second watch and a second copy.

use std::{
    collections::HashSet,
    sync::{Arc, PoisonError},
    time::{Duration, SystemTime},
};

use tokio::time::{Instant, sleep, timeout};
use tracing::info;

use super::{
    allowance::{Allowance, EncodingBudget, OnDemandLimits},
    cache_entry::{Cache, CacheEnd, CacheId},
    discovered::DiscoveredResource,
    registry::Registry,
};
use crate::fanout::{Phase, Refusal, Served, StreamEnd};
use kubefan_model::{
    GroupVersionResource, Media, Scope,
    object::ObjectParser,
    protobuf::kinds,
    table::{self, Tables},
};

/// How long a reader waits for the first sync of a cache that it has started.
const FIRST_SYNC_TIMEOUT: Duration = Duration::from_secs(5);
/// The same for encodings other than JSON, which the reader can get from upstream instead. Clients'
/// informers should start within 3 s.
const ENCODING_SYNC_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a cache that was too large or not available is refused before the next attempt.
const REFUSED_MEMORY: Duration = Duration::from_secs(60);

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
        // A cache that was dropped for being idle is no longer in the map.
        let removed = registry.caches.remove_if(id, |_, current| Arc::ptr_eq(current, cache));
        match ended.take() {
            Some(ended) if removed.is_some() && ended.refused => {
                registry.refused.insert(id.clone(), (Instant::now(), ended.reason.message));
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
    allowance: Allowance,
    /// The limit for resources that are cached on demand. `None` if the resource is configured.
    resources_max: Option<usize>,
}

impl Registry {
    /// Checks whether a reader may start this cache.
    pub(super) fn may_start(&self, id: &CacheId) -> Result<StartPermit, Refusal> {
        let permit = self.start_permit(id)?;
        match self.refused.get(id).filter(|refused| refused.0.elapsed() < REFUSED_MEMORY) {
            Some(refused) => Err(exhausted(id.media, refused.1.clone())),
            None => Ok(permit),
        }
    }

    /// The budget of a cache in an encoding other than JSON. Fails if the configuration or the
    /// resource's name rules out the encoding.
    pub(super) fn encoding_budget(&self, gvr: &GroupVersionResource, media: Media) -> Result<EncodingBudget, Refusal> {
        let (limits, unit, flag, used) = match media {
            Media::Json | Media::Protobuf => {
                (self.options.protobuf, "bytes of protobuf", "--protobuf-bytes-max", &self.protobuf_bytes)
            }
            Media::Table => (self.options.tables, "bytes of tables", "--cache-tables-bytes-max", &self.tables_bytes),
        };
        let off = match media {
            Media::Json | Media::Protobuf => "nothing is cached as protobuf (--protobuf=off)",
            Media::Table => "no tables are cached; start kubefan with --cache-tables",
        };
        let limits = limits.ok_or_else(|| Refusal::NotCached(off.to_owned()))?;
        match media {
            Media::Json | Media::Protobuf => check_protobuf(gvr)?,
            Media::Table => check_table(gvr)?,
        }
        Ok(EncodingBudget { bytes_max: limits.bytes_max, unit, flag, used: used.clone() })
    }

    fn start_permit(&self, id: &CacheId) -> Result<StartPermit, Refusal> {
        let on_demand = || self.options.on_demand.ok_or_else(|| not_cached(&id.gvr));
        if id.media == Media::Json {
            let OnDemandLimits { size, on_demand_resources_max, .. } = on_demand()?;
            let budget = EncodingBudget {
                bytes_max: size.on_demand_bytes_max,
                unit: "bytes",
                flag: "--on-demand-bytes-max",
                used: self.on_demand_bytes.clone(),
            };
            let allowance = Allowance::new(size.on_demand_objects_max, budget);
            return Ok(StartPermit { allowance, resources_max: Some(on_demand_resources_max) });
        }
        let budget = self.encoding_budget(&id.gvr, id.media)?;
        // A configured resource may be cached in every encoding.
        let on_demand = if self.is_configured(id) { None } else { Some(on_demand()?) };
        let objects_max = on_demand.map_or(usize::MAX, |on_demand| on_demand.size.on_demand_objects_max);
        let allowance = Allowance::new(objects_max, budget);
        Ok(StartPermit { allowance, resources_max: on_demand.map(|on_demand| on_demand.on_demand_resources_max) })
    }

    /// Whether this resource is configured in this scope.
    fn is_configured(&self, id: &CacheId) -> bool {
        let json = CacheId { media: Media::Json, ..id.clone() };
        self.caches.get(&json).is_some_and(|cache| !cache.on_demand)
    }

    /// Starts a cache for a reader, and waits a limited time for its first sync.
    pub(super) async fn start_for_reader(
        self: &Arc<Self>,
        discovered: &DiscoveredResource,
        id: CacheId,
    ) -> Result<Served, Refusal> {
        let cache = self.start(discovered, &id)?;
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
        self.may_start(&id)?;
        Ok(cache.served.clone())
    }

    fn start(self: &Arc<Self>, discovered: &DiscoveredResource, id: &CacheId) -> Result<Arc<Cache>, Refusal> {
        let StartPermit { allowance, resources_max } = self.may_start(id)?;
        let CacheId { gvr, scope, media } = id;
        let parser = match media {
            Media::Json => ObjectParser::new(&discovered.fields),
            Media::Protobuf => {
                let parser = ObjectParser::protobuf(gvr, &discovered.fields);
                parser.ok_or_else(|| {
                    Refusal::NotCached(format!("{gvr} has selectable fields that kubefan cannot read from protobuf"))
                })?
            }
            Media::Table => ObjectParser::table(Tables::new(gvr, wall_clock), &discovered.fields),
        };
        let _one_at_a_time = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cache) = self.caches.get(id) {
            return Ok(cache.clone());
        }
        if let Some(limit) = resources_max {
            let others = self.cached_on_demand().into_iter().filter(|other| *other != (gvr.clone(), scope.clone()));
            if others.count() >= limit {
                let message = format!(
                    "{limit} resources are cached on demand, the most this kubefan allows (--on-demand-resources-max)"
                );
                return Err(exhausted(*media, message));
            }
        }
        info!(resource = %gvr, scope = scope.namespace(), media = media.as_str(), "caching on demand");
        let cache = self.insert(&gvr.to_string(), discovered, scope.clone(), parser, true);
        let mut guard = RemoveOnDrop { registry: self.clone(), cache: cache.clone(), id: id.clone(), ended: None };
        let known = discovered.schema.clone();
        tokio::spawn(async move {
            // No warm start: a peer's cache may exceed the allowance.
            let ended = guard.registry.clone().supervise(guard.cache.clone(), Some(allowance), known, false).await;
            guard.ended = Some(ended);
            drop(guard);
        });
        Ok(cache)
    }

    /// The resources and scopes that are cached only because readers started them, in any encoding.
    fn cached_on_demand(&self) -> HashSet<(GroupVersionResource, Scope)> {
        let of = |cache: &Cache| (cache.on_demand, (cache.served.gvr.clone(), cache.served.scope.clone()));
        let (started, configured): (Vec<_>, Vec<_>) =
            self.caches.iter().map(|cache| of(&cache)).partition(|(on_demand, _)| *on_demand);
        let mut started: HashSet<_> = started.into_iter().map(|(_, of)| of).collect();
        started.retain(|of| !configured.iter().any(|(_, configured)| configured == of));
        started
    }

    /// How long a cache that a reader started may stay without readers. `None` if readers cannot
    /// start caches.
    pub(super) fn idle_timeout(&self) -> Option<Duration> {
        let on_demand = self.options.on_demand.map(|on_demand| on_demand.on_demand_idle_timeout);
        let encoding = self.options.protobuf.or(self.options.tables);
        on_demand.or(encoding.map(|encoding| encoding.idle_timeout))
    }
}

/// Drops caches that readers started and that have had no reader for `idle_timeout`, without end.
pub(super) async fn drop_idle(registry: Arc<Registry>, idle_timeout: Duration) {
    loop {
        sleep((idle_timeout / 4).max(Duration::from_millis(100))).await;
        registry.refused.retain(|_, (at, _)| at.elapsed() < REFUSED_MEMORY);
        let idle = |cache: &Cache| {
            let status = cache.served.hub.status();
            cache.on_demand && status.subscribers == 0 && status.used_at.elapsed() >= idle_timeout
        };
        // Removed from the map first, so that a new reader starts a new cache.
        registry.caches.retain(|_, cache| {
            let idle = idle(cache);
            if idle {
                let media = cache.served.parser.media().as_str();
                info!(resource = %cache.served.gvr, media, "idle; no longer cached");
                cache.stop.cancel();
            }
            !idle
        });
    }
}

/// The clock for ages in tables.
#[expect(clippy::disallowed_methods, reason = "the time enters here; code below takes it as a parameter")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}

fn not_cached(gvr: &GroupVersionResource) -> Refusal {
    Refusal::NotCached(format!(
        "{gvr} is not cached; start kubefan with --resource {gvr}, or with --on-demand to cache every resource that is requested"
    ))
}

/// The refusal for a limit. For encodings other than JSON it is the refusal that makes the reader
/// fall back to upstream or to JSON.
fn exhausted(media: Media, message: String) -> Refusal {
    match media {
        Media::Json => Refusal::Exhausted(message),
        Media::Protobuf | Media::Table => Refusal::NotCached(message),
    }
}

/// Fails if the resource's tables cannot be cached, by its name.
fn check_table(gvr: &GroupVersionResource) -> Result<(), Refusal> {
    match table::columns_with_other_ages(gvr) {
        None => Ok(()),
        Some(columns) => Err(Refusal::NotCached(format!(
            "{gvr} is not cached as tables: kubefan cannot recompute {columns}, so they would be as old as the last event"
        ))),
    }
}

/// Fails if kubefan has no protobuf type for the resource.
fn check_protobuf(gvr: &GroupVersionResource) -> Result<(), Refusal> {
    if kinds::is_known(gvr) {
        return Ok(());
    }
    Err(Refusal::NotCached(format!("{gvr} is not cached as protobuf: it is no built-in type that kubefan knows")))
}
