//! What readers start: which caches may come to be without having been configured, how much they may hold, and when they go again.
//!
//! An informer that any reader could start would be an attack on memory, so everything here is bounded: the number of resources, the
//! objects of each, and the bytes of all together, before the first list, during it, and ever after. A cache in protobuf or of tables
//! is always started by a reader, because only there it is known whether anyone asks for it; it is another form of what may be cached as
//! JSON, within a budget of its own.

use std::{
    collections::HashSet,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use serde::Deserialize;
use tokio::time::{Instant, sleep, timeout};
use tracing::info;

use super::{
    catalog::{known_as_protobuf, known_as_table},
    informer::{Shared, Stopped},
    registry::{Cache, CacheId, Ended, Registry, Resolved},
};
use crate::{
    fanout::{Phase, Refusal, Served, StreamEnd},
    upstream::client::{Verb, encode_query},
};
use kubefan_model::{GroupVersionResource, Media, Scope, object::ObjectParser, table::Tables};

/// How long a reader waits for a cache that it has started.
const FIRST_SYNC_TIMEOUT: Duration = Duration::from_secs(5);
/// The same for other forms than JSON, where what is not synced by then can be had upstream: informers are to start within 3 s.
const FORM_SYNC_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a resource that was too large, or not to be had, is refused before it is tried again.
const REFUSED_MEMORY: Duration = Duration::from_secs(60);

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

/// What may be cached in another form than JSON.
#[derive(Debug, Clone, Copy)]
pub struct Form {
    /// Bytes of all objects of all resources together.
    pub bytes_max: usize,
    /// After so long without a reader a cache is dropped.
    pub idle_timeout: Duration,
}

/// The limits of a form, what its bytes are called, the flag that allows more, and the bytes of all its caches.
type FormBudget = (Form, &'static str, &'static str, Arc<AtomicUsize>);

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
    objects_max: usize,
    bytes_max: usize,
    /// What the bytes are called, and the flag that allows more.
    what: &'static str,
    flag: &'static str,
    /// The bytes that all hold.
    used: Arc<AtomicUsize>,
    /// Those of this one.
    bytes: usize,
}

impl Allowance {
    /// An allowance of which nothing is used; `used` counts the bytes of all.
    fn on_demand(limits: SizeLimits, used: Arc<AtomicUsize>) -> Self {
        let SizeLimits { on_demand_objects_max: objects_max, on_demand_bytes_max: bytes_max } = limits;
        Self { objects_max, bytes_max, what: "bytes", flag: "--on-demand-bytes-max", used, bytes: 0 }
    }

    /// The same for another form than JSON.
    fn form(objects_max: usize, (form, what, flag, used): FormBudget) -> Self {
        Self { objects_max, bytes_max: form.bytes_max, what, flag, used, bytes: 0 }
    }

    /// Notes what is held now; where that is more than may be, says so.
    pub fn hold(&mut self, gvr: &GroupVersionResource, objects: usize, bytes: usize) -> Result<(), Stopped> {
        let Self { objects_max, bytes_max, what, flag, .. } = *self;
        // Two that grow at once may both be told: neither may grow then.
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        let all = before + bytes - self.bytes;
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
        self.bytes = bytes;
        if objects > objects_max {
            return Err(Stopped::TooLarge(format!(
                "{gvr} has more than {objects_max} objects, the most that is cached on demand; raise \
                 --on-demand-objects-max, or name it with --resource"
            )));
        }
        if all > bytes_max {
            let or_name = if flag.starts_with("--on") { ", or name it with --resource" } else { "" };
            return Err(Stopped::TooLarge(format!(
                "with {gvr} more than {bytes_max} {what} would be cached on demand; raise {flag}{or_name}"
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
        let Self { objects_max, bytes_max, what, flag, .. } = *self;
        // One object says little about the others' size: only a clear case is refused here.
        let clearly_too_large = objects.saturating_mul(body.len()) / 4 > bytes_max;
        if objects > objects_max || clearly_too_large {
            return Err(Stopped::TooLarge(format!(
                "{} has {objects} objects, the first of {} bytes; on demand at most {objects_max} objects and \
                 {bytes_max} {what} are cached; raise --on-demand-objects-max or {flag}, or name it \
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
            Some(ended) if removed.is_some() && ended.refused => {
                registry.refused.insert(id.clone(), (Instant::now(), ended.missing.message));
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

/// That a reader may start a cache, and what it may hold.
pub(super) struct Permit {
    allowance: Allowance,
    /// How many resources may be cached on demand, where it is one.
    resources_max: Option<usize>,
}

impl Registry {
    /// Whether a reader may start this cache.
    pub(super) fn may_start(&self, id: &CacheId) -> Result<Permit, Refusal> {
        let permit = self.permit(id)?;
        match self.refused.get(id).filter(|refused| refused.0.elapsed() < REFUSED_MEMORY) {
            Some(refused) => Err(exhausted(id.media, refused.1.clone())),
            None => Ok(permit),
        }
    }

    /// Whether a resource may be cached in another form than JSON, as far as the configuration and its name tell; within which limits.
    pub(super) fn may_have(&self, gvr: &GroupVersionResource, media: Media) -> Result<FormBudget, Refusal> {
        let (form, what, flag, used) = match media {
            Media::Json | Media::Protobuf => {
                (self.options.protobuf, "bytes of protobuf", "--protobuf-bytes-max", &self.protobuf_bytes)
            }
            Media::Table => (self.options.tables, "bytes of tables", "--cache-tables-bytes-max", &self.tables_bytes),
        };
        let off = match media {
            Media::Json | Media::Protobuf => "nothing is cached as protobuf (--protobuf=off)",
            Media::Table => "no tables are cached; start kubefan with --cache-tables",
        };
        let form = form.ok_or_else(|| Refusal::NotCached(off.to_owned()))?;
        match media {
            Media::Json | Media::Protobuf => known_as_protobuf(gvr)?,
            Media::Table => known_as_table(gvr)?,
        }
        Ok((form, what, flag, used.clone()))
    }

    fn permit(&self, id: &CacheId) -> Result<Permit, Refusal> {
        let on_demand = || self.options.on_demand.ok_or_else(|| not_cached(&id.gvr));
        if id.media == Media::Json {
            let OnDemand { size, on_demand_resources_max, .. } = on_demand()?;
            let allowance = Allowance::on_demand(size, self.on_demand_bytes.clone());
            return Ok(Permit { allowance, resources_max: Some(on_demand_resources_max) });
        }
        let form = self.may_have(&id.gvr, id.media)?;
        // Whoever has configured a resource wants it cached, in whatever form it is asked for.
        let on_demand = if self.is_configured(id) { None } else { Some(on_demand()?) };
        let objects_max = on_demand.map_or(usize::MAX, |on_demand| on_demand.size.on_demand_objects_max);
        let allowance = Allowance::form(objects_max, form);
        Ok(Permit { allowance, resources_max: on_demand.map(|on_demand| on_demand.on_demand_resources_max) })
    }

    /// Whether the configuration asks for this resource, in this scope.
    fn is_configured(&self, id: &CacheId) -> bool {
        let json = CacheId { media: Media::Json, ..id.clone() };
        self.caches.get(&json).is_some_and(|cache| !cache.on_demand)
    }

    /// Starts a cache for a reader, if that is allowed, and waits until it is synced, but not for long.
    pub(super) async fn start_for_reader(
        self: &Arc<Self>,
        resolved: &Resolved,
        id: CacheId,
    ) -> Result<Served, Refusal> {
        let cache = self.start(resolved, &id)?;
        let mut phase = cache.served.hub.phase();
        let sync_timeout = match id.media {
            Media::Json => FIRST_SYNC_TIMEOUT,
            Media::Protobuf | Media::Table => FORM_SYNC_TIMEOUT,
        };
        tokio::select! {
            biased;
            // Not synced by then: the reader is told so, with a delay.
            _ = timeout(sync_timeout, phase.wait_for(|phase| *phase != Phase::Syncing)) => {}
            () = cache.stop.cancelled() => {}
        }
        self.may_start(&id)?;
        Ok(cache.served.clone())
    }

    fn start(self: &Arc<Self>, resolved: &Resolved, id: &CacheId) -> Result<Arc<Cache>, Refusal> {
        let Permit { allowance, resources_max } = self.may_start(id)?;
        let CacheId { gvr, scope, media } = id;
        let parser = match media {
            Media::Json => ObjectParser::new(&resolved.fields),
            Media::Protobuf => {
                let parser = ObjectParser::protobuf(gvr, &resolved.fields);
                parser.ok_or_else(|| Refusal::NotCached(format!("{gvr} has fields that are not known as protobuf")))?
            }
            Media::Table => ObjectParser::table(Tables::new(gvr, wall_clock), &resolved.fields),
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
        let cache = self.insert(&gvr.to_string(), resolved, scope.clone(), parser, true);
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

    /// The resources, with their scopes, that are cached only because readers asked for them, in whatever form.
    fn cached_on_demand(&self) -> HashSet<(GroupVersionResource, Scope)> {
        let of = |cache: &Cache| (cache.on_demand, (cache.served.gvr.clone(), cache.served.scope.clone()));
        let (started, configured): (Vec<_>, Vec<_>) =
            self.caches.iter().map(|cache| of(&cache)).partition(|(on_demand, _)| *on_demand);
        let mut started: HashSet<_> = started.into_iter().map(|(_, of)| of).collect();
        started.retain(|of| !configured.iter().any(|(_, configured)| configured == of));
        started
    }

    /// After which silence what readers have started is let go; `None` where they start nothing.
    pub(super) fn idle_timeout(&self) -> Option<Duration> {
        let on_demand = self.options.on_demand.map(|on_demand| on_demand.on_demand_idle_timeout);
        let form = self.options.protobuf.or(self.options.tables);
        on_demand.or(form.map(|form| form.idle_timeout))
    }

    /// Drops what nobody has read for so long.
    pub(super) async fn drop_idle(self: Arc<Self>, idle_timeout: Duration) {
        loop {
            sleep((idle_timeout / 4).max(Duration::from_millis(100))).await;
            self.refused.retain(|_, (at, _)| at.elapsed() < REFUSED_MEMORY);
            let idle = |cache: &Cache| {
                let status = cache.served.hub.status();
                cache.on_demand && status.subscribers == 0 && status.used_at.elapsed() >= idle_timeout
            };
            // Dropped from the map first, so that a reader who comes now starts it anew.
            self.caches.retain(|_, cache| {
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
}

/// By which the ages in tables are told.
#[expect(clippy::disallowed_methods, reason = "the wiring is where the time comes in; below it is passed")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}

fn not_cached(gvr: &GroupVersionResource) -> Refusal {
    Refusal::NotCached(format!(
        "{gvr} is not cached; start kubefan with --resource {gvr}, or with --on-demand to cache what is asked for"
    ))
}

/// A limit stands against it. Other forms than JSON are second ones: who cannot have it here asks elsewhere, and loses nothing.
fn exhausted(media: Media, message: String) -> Refusal {
    match media {
        Media::Json => Refusal::Exhausted(message),
        Media::Protobuf | Media::Table => Refusal::NotCached(message),
    }
}
