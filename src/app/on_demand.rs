//! What readers start: which caches may come to be without having been configured, how much they may hold, and when they go again.
//!
//! An informer that any reader could start would be an attack on memory, so everything here is bounded: the number of resources, the
//! objects of each, and the bytes of all together, before the first list, during it, and ever after.

use std::{
    sync::{
        Arc, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use serde::Deserialize;
use tokio::time::{Instant, sleep, timeout};
use tracing::info;

use super::{
    informer::{Shared, Stopped},
    registry::{Cache, CacheId, Ended, Registry, Resolved},
};
use crate::{
    fanout::{Phase, Refusal, Served, StreamEnd},
    model::{GroupVersionResource, Scope},
    upstream::client::{Verb, encode_query},
};

/// How long a reader waits for a cache that it has started.
const FIRST_SYNC_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a resource that was too large is refused before it is tried again.
const TOO_LARGE_MEMORY: Duration = Duration::from_secs(60);

/// What may be cached beyond the configured resources.
#[derive(Debug, Clone, Copy)]
pub struct OnDemand {
    /// Resources at once.
    pub on_demand_resources_max: usize,
    /// What they may hold.
    pub size: SizeLimits,
    /// After so long without a reader a cache is dropped.
    pub on_demand_idle_timeout: Duration,
}

/// What informers that readers have started may hold.
#[derive(Debug, Clone, Copy)]
pub struct SizeLimits {
    /// Objects of each.
    pub on_demand_objects_max: usize,
    /// JSON bytes of all together.
    pub on_demand_bytes_max: usize,
}

/// What one informer may hold. Its share of the bytes is given back when it is dropped.
pub struct Allowance {
    limits: SizeLimits,
    /// The bytes that all hold.
    used: Arc<AtomicUsize>,
    /// Those of this one.
    bytes: usize,
}

impl Allowance {
    /// An allowance of which nothing is used; `used` counts the bytes of all.
    pub fn new(limits: SizeLimits, used: Arc<AtomicUsize>) -> Self {
        Self { limits, used, bytes: 0 }
    }

    /// Notes what is held now; where that is more than may be, says so.
    pub fn hold(&mut self, gvr: &GroupVersionResource, objects: usize, bytes: usize) -> Result<(), Stopped> {
        let SizeLimits { on_demand_objects_max, on_demand_bytes_max } = self.limits;
        // Two that grow at once may both be told: neither may grow then.
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        let all = before + bytes - self.bytes;
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
        self.bytes = bytes;
        if objects > on_demand_objects_max {
            return Err(Stopped::TooLarge(format!(
                "{gvr} has more than {on_demand_objects_max} objects, the most that is cached on demand; raise \
                 --on-demand-objects-max, or name it with --resource"
            )));
        }
        if all > on_demand_bytes_max {
            return Err(Stopped::TooLarge(format!(
                "with {gvr} more than {on_demand_bytes_max} bytes would be cached on demand; raise --on-demand-bytes-max, or \
                 name it with --resource"
            )));
        }
        Ok(())
    }

    /// Asks for one object and the number of the others, so that what is far too large is not begun.
    pub async fn look(&self, shared: &Shared, served: &Served) -> Result<(), Stopped> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Meta {
            remaining_item_count: Option<usize>,
        }
        #[derive(Deserialize)]
        struct First {
            metadata: Meta,
        }
        let selector = Some(("fieldSelector", shared.upstream_field_selector.as_str()));
        let selector = selector.filter(|(_, selector)| !selector.is_empty());
        let query = encode_query([("limit", "1")].into_iter().chain(selector));
        // A failure here fails the list that follows too, and is handled there.
        let Ok(body) = shared.upstream.get(Verb::List, &(served.gvr.collection_path(&served.scope) + &query)).await
        else {
            return Ok(());
        };
        let Ok(First { metadata }) = serde_json::from_slice(&body) else { return Ok(()) };
        // With a selector the apiserver does not count.
        let objects = 1 + metadata.remaining_item_count.unwrap_or(0);
        let SizeLimits { on_demand_objects_max, on_demand_bytes_max } = self.limits;
        // One object says little about the others' size: only a clear case is refused here.
        let clearly_too_large = objects.saturating_mul(body.len()) / 4 > on_demand_bytes_max;
        if objects > on_demand_objects_max || clearly_too_large {
            return Err(Stopped::TooLarge(format!(
                "{} has {objects} objects, the first of {} bytes; on demand at most {on_demand_objects_max} objects and \
                 {on_demand_bytes_max} bytes are cached; raise --on-demand-objects-max or --on-demand-bytes-max, or name it \
                 with --resource",
                served.gvr,
                body.len()
            )));
        }
        Ok(())
    }
}

impl Drop for Allowance {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Takes a cache out of the map when its task ends, however that is: what is left there would be served and never change.
struct Running {
    registry: Arc<Registry>,
    cache: Arc<Cache>,
    id: CacheId,
    /// `None` until the task has ended by itself.
    ended: Option<Ended>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let Self { registry, cache, id, ended } = self;
        // Still in the map: it was not stopped for being idle, so it could not go on.
        let removed = registry.caches.remove_if(id, |_, current| Arc::ptr_eq(current, cache));
        match ended.take() {
            Some(ended) if removed.is_some() && ended.too_large => {
                registry.too_large.insert(id.clone(), (Instant::now(), ended.missing.message));
            }
            Some(_) => {}
            None => {
                let message = format!("the informer of {} has failed", id.0);
                cache.served.hub.close(Phase::Syncing, StreamEnd::Stopped(message));
            }
        }
        cache.stop.cancel();
        registry.changed();
    }
}

impl Registry {
    /// Whether a reader may start this cache.
    pub(super) fn may_start(&self, id: &CacheId) -> Result<OnDemand, Refusal> {
        let gvr = &id.0;
        let Some(on_demand) = self.options.on_demand else {
            return Err(Refusal::NotCached(format!(
                "{gvr} is not cached; start kubefan with --resource {gvr}, or with --on-demand to cache what is asked for"
            )));
        };
        match self.too_large.get(id).filter(|refused| refused.0.elapsed() < TOO_LARGE_MEMORY) {
            Some(refused) => Err(Refusal::Exhausted(refused.1.clone())),
            None => Ok(on_demand),
        }
    }

    /// Starts a cache for a reader, if that is allowed, and waits until it is synced, but not for long.
    pub(super) async fn start_for_reader(
        self: &Arc<Self>,
        resolved: &Resolved,
        scope: Scope,
    ) -> Result<Served, Refusal> {
        let id = (resolved.info.gvr.clone(), scope);
        let cache = self.start(resolved, &id)?;
        let mut phase = cache.served.hub.phase();
        tokio::select! {
            biased;
            // Not synced by then: the reader is told so, with a delay.
            _ = timeout(FIRST_SYNC_TIMEOUT, phase.wait_for(|phase| *phase != Phase::Syncing)) => {}
            () = cache.stop.cancelled() => {}
        }
        self.may_start(&id)?;
        Ok(cache.served.clone())
    }

    fn start(self: &Arc<Self>, resolved: &Resolved, id: &CacheId) -> Result<Arc<Cache>, Refusal> {
        let on_demand = self.may_start(id)?;
        let (gvr, scope) = id;
        let _one_at_a_time = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cache) = self.caches.get(id) {
            return Ok(cache.clone());
        }
        let limit = on_demand.on_demand_resources_max;
        if self.caches.iter().filter(|cache| cache.on_demand).count() >= limit {
            return Err(Refusal::Exhausted(format!(
                "{limit} resources are cached on demand, the most this kubefan allows (--on-demand-resources-max)"
            )));
        }
        info!(resource = %gvr, scope = scope.namespace(), "caching on demand");
        let cache = self.insert(&gvr.to_string(), resolved, scope.clone(), true);
        let allowance = Allowance::new(on_demand.size, self.on_demand_bytes.clone());
        let mut running = Running { registry: self.clone(), cache: cache.clone(), id: id.clone(), ended: None };
        let known = resolved.schema.clone();
        tokio::spawn(async move {
            // A peer does not know the limits of what a reader has started here.
            let ended = running.registry.clone().supervise(running.cache.clone(), Some(allowance), known, false).await;
            running.ended = Some(ended);
            drop(running);
        });
        Ok(cache)
    }

    /// Drops what nobody has read for so long.
    pub(super) async fn drop_idle(self: Arc<Self>, idle_timeout: Duration) {
        loop {
            sleep((idle_timeout / 4).max(Duration::from_millis(100))).await;
            self.too_large.retain(|_, (at, _)| at.elapsed() < TOO_LARGE_MEMORY);
            let idle = |cache: &Cache| {
                let status = cache.served.hub.status();
                cache.on_demand && status.subscribers == 0 && status.used_at.elapsed() >= idle_timeout
            };
            // Dropped from the map first, so that a reader who comes now starts it anew.
            self.caches.retain(|_, cache| {
                let idle = idle(cache);
                if idle {
                    info!(resource = %cache.served.gvr, "idle; no longer cached");
                    cache.stop.cancel();
                }
                !idle
            });
        }
    }
}
