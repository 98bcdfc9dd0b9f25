//! The registry as the catalog of the servers: it finds the cache of a requested resource, or
//! refuses with a message that names the remedy.

use std::{sync::Arc, time::SystemTime};

use async_trait::async_trait;
use kubefan_cache::{Backfill, Phase, Refusal};
use kubefan_common::{
    proto::v1alpha1::{ResourceState, ResourceStatus},
    sync::watch,
};
use kubefan_fanout::{CacheRequest, Catalog, Patience, ReadSource, Served};
use kubefan_model::{GroupVersionResource, Media, ObjectKey, ResourceVersion, Scope, selection::Selection};
use kubefan_upstream::discovery::DiscoveryError;
use tokio::time::Instant;

use super::{
    cache_entry::{Cache, CacheId},
    registry::Registry,
};

/// All caches, as servers and peers find them.
#[derive(Clone)]
pub struct CacheCatalog(pub Arc<Registry>);

#[async_trait]
impl Catalog for CacheCatalog {
    async fn find(&self, request: CacheRequest<'_>) -> Result<Served, Refusal> {
        let CacheRequest { group, version, resource, media, tenant, .. } = request;
        // A cached resource is found without discovery, so that it is served while upstream is
        // down.
        if let Some(cache) = self.0.by_name(request)? {
            return Ok(cache.read_by(tenant));
        }
        // A cache that is configured in this encoding may be about to start.
        let is_configured = || self.0.options.resources.iter().any(|resource| resource.media.contains(&media));
        if media != Media::Json && !version.is_empty() && !is_configured() {
            // Checked before discovery, because clients that prefer such an encoding request it for
            // every resource.
            self.0.encoding_budget(&GroupVersionResource::new(group, version, resource), media)?;
        }
        // Boxed because this future is large and rarely needed; else every request would reserve
        // its size.
        Box::pin(self.0.look_up(request)).await
    }

    async fn full_name(&self, group: &str, version: &str, resource: &str) -> Option<GroupVersionResource> {
        let is_short = group.is_empty() && version.is_empty();
        if let Some(gvr) = self.0.caches.named(resource).filter(|_| is_short) {
            return Some(gvr);
        }
        let discovery = &self.0.context.discovery;
        let info =
            if is_short { discovery.resolve(resource).await } else { discovery.find(group, version, resource).await };
        info.ok().map(|info| info.gvr)
    }

    async fn backfill(
        &self,
        served: &Served,
        version: ResourceVersion,
        needs_state: bool,
    ) -> Result<Arc<Backfill>, Refusal> {
        self.0.cache_of(served)?.backfiller.backfill(version, needs_state).await
    }

    async fn cluster_version(&self, served: &Served, asked: Instant) -> Result<ResourceVersion, Refusal> {
        self.0.cache_of(served)?.cluster_version.known_after(asked).await
    }

    async fn prove(
        &self,
        served: &Served,
        listed: Option<&Selection>,
        patience: Patience,
    ) -> Result<ReadSource, Refusal> {
        self.0.cache_of(served)?.prover.prove(listed, patience).await
    }

    async fn advance(&self, served: &Served, patience: Patience) -> Result<(), Refusal> {
        self.0.cache_of(served)?.prover.advance(patience).await
    }

    fn exists(&self, gvr: &GroupVersionResource, key: &ObjectKey, uid: &str) -> Option<bool> {
        if !self.0.context.upstream_field_selector.is_empty() {
            return None;
        }
        let scope = self.0.scope_of(self.0.caches.is_namespaced(gvr)?, key.namespace()).ok()?;
        [Media::Json, Media::Protobuf].into_iter().find_map(|media| {
            let cache = self.0.caches.get(&CacheId { gvr: gvr.clone(), scope: scope.clone(), media })?;
            let (objects, _) = cache.served.hub.state()?;
            Some(objects.get(key.as_str()).is_some_and(|object| object.uid() == uid))
        })
    }

    fn holds(&self, gvr: &GroupVersionResource, media: Media) -> bool {
        self.0.caches.holds(gvr, media)
    }

    fn is_known_uncached(&self, gvr: &GroupVersionResource) -> bool {
        self.0.without_room.contains_key(gvr) || self.0.not_cached(gvr).is_some()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.0.changes()
    }

    fn list(&self) -> Vec<(Media, ResourceStatus)> {
        let mut all: Vec<_> = self.0.caches.iter().map(|cache| (cache.key().media, status(&cache))).collect();
        all.extend(self.0.uncached.iter().map(|uncached| {
            let status = ResourceStatus {
                name: uncached.key().clone(),
                state: state(uncached.phase).into(),
                message: uncached.message.clone(),
                ..ResourceStatus::default()
            };
            (Media::Json, status)
        }));
        let by =
            |(media, status): &(Media, ResourceStatus)| (status.name.clone(), status.namespace.clone(), media.as_str());
        all.sort_by_cached_key(by);
        all
    }
}

impl Registry {
    /// Returns the cache that `served` belongs to, unless another one has replaced it.
    fn cache_of(&self, served: &Served) -> Result<Arc<Cache>, Refusal> {
        let cache = self.caches.get(&CacheId::of(served));
        let cache = cache.filter(|cache| Arc::ptr_eq(&cache.served.hub, &served.hub));
        cache.ok_or_else(|| Refusal::Unavailable(format!("{} is being set up again", served.gvr)))
    }

    /// Finds a resource by discovery, and starts its cache if that is allowed.
    async fn look_up(self: &Arc<Self>, request: CacheRequest<'_>) -> Result<Served, Refusal> {
        let CacheRequest { group, version, resource, namespace, media, tenant } = request;
        let discovery = &self.context.discovery;
        let info = match (group, version) {
            ("", "") => discovery.resolve(resource).await,
            _ => discovery.find(group, version, resource).await,
        };
        let mut info = info.map_err(refusal)?;
        // Before a cache is started for it.
        if !info.namespaced && !namespace.is_empty() {
            // It may have been created again with another scope.
            info = discovery.find_recent(&info.gvr).await.map_err(refusal)?;
        }
        if !info.namespaced && !namespace.is_empty() {
            return Err(not_namespaced(&info.gvr));
        }
        let scope = self.scope_of(info.namespaced, namespace)?;
        let id = CacheId { gvr: info.gvr.clone(), scope, media };
        let started = || self.caches.get(&id);
        if let Some(cache) = started() {
            // It may have started during the discovery. Then this reader waits as its first does.
            let is_new = cache.on_demand() && *cache.served.hub.phase().borrow() == Phase::Syncing;
            return if is_new { self.first_sync(&cache, &id, tenant).await } else { Ok(cache.read_by(tenant)) };
        }
        // The configured name may be that of another group's resource.
        let is_other = (group, version) != ("", "")
            && self.uncached.contains_key(resource)
            && discovery.resolve(resource).await.is_ok_and(|named| named.gvr != info.gvr);
        let named = if is_other { None } else { self.uncached.get(resource) };
        if let Some(uncached) = named.or_else(|| self.uncached.get(&info.gvr.to_string())) {
            return Err(match uncached.phase {
                Phase::NotCached => Refusal::NotCached(uncached.message.clone()),
                _ => not_synced(resource, &uncached.message),
            });
        }
        let turn = self.discovering.entry(id.clone()).or_default().clone();
        let turn = turn.lock().await;
        let cache = match started() {
            Some(cache) => cache,
            None => {
                self.may_start(&id, tenant)?;
                let GroupVersionResource { group, version, resource } = &info.gvr;
                let discovered = self.discover(group, version, resource).await.map_err(refusal)?;
                self.start(&discovered, &id, tenant)?
            }
        };
        drop(turn);
        self.first_sync(&cache, &id, tenant).await
    }

    /// Finds a configured resource by its configured name, or any cached resource by its full name.
    fn by_name(&self, request: CacheRequest<'_>) -> Result<Option<Arc<Cache>>, Refusal> {
        let CacheRequest { group, version, resource, namespace, media, .. } = request;
        let short = group.is_empty() && version.is_empty();
        let gvr =
            if short { self.caches.named(resource) } else { Some(GroupVersionResource::new(group, version, resource)) };
        let known = gvr.and_then(|gvr| Some((self.caches.is_namespaced(&gvr)?, gvr)));
        let Some((namespaced, gvr)) = known else {
            // For a resource that did not exist, discovery is asked again: it may exist now.
            let uncached = self.uncached.get(resource).filter(|uncached| short && uncached.phase == Phase::Syncing);
            return uncached.map_or(Ok(None), |uncached| Err(not_synced(resource, &uncached.message)));
        };
        let scope = self.scope_of(namespaced, namespace)?;
        Ok(self.caches.get(&CacheId { gvr, scope, media }))
    }

    /// Returns the scope of a request. Fails if it is not cached.
    pub(super) fn scope_of(&self, namespaced: bool, namespace: &str) -> Result<Scope, Refusal> {
        let namespaces = &self.options.namespaces;
        if namespaces.is_empty() || !namespaced {
            return Ok(Scope::Cluster);
        }
        if namespaces.iter().any(|known| known == namespace) {
            return Ok(Scope::Namespace(namespace.to_owned()));
        }
        let known = namespaces.join(", ");
        match namespace {
            "" => Err(Refusal::Invalid {
                field: "target.namespace",
                message: format!(
                    "this kubefan caches single namespaces, and versions do not compare across them; name one of {known}"
                ),
            }),
            namespace => Err(Refusal::NotCached(format!(
                "namespace {namespace:?} is not cached (only {known}); start kubefan with --namespace {namespace}"
            ))),
        }
    }
}

fn not_namespaced(gvr: &GroupVersionResource) -> Refusal {
    let message = format!("{gvr} are not namespaced; leave it empty");
    Refusal::Invalid { field: "target.namespace", message }
}

fn not_synced(resource: &str, message: &str) -> Refusal {
    Refusal::NotSynced { resource: resource.to_owned(), message: message.to_owned() }
}

fn refusal(error: DiscoveryError) -> Refusal {
    let message = error.to_string();
    match error {
        DiscoveryError::UnknownResource { .. } => Refusal::NotFound(message),
        DiscoveryError::NotWatchable { .. } => Refusal::Invalid { field: "target.resource", message },
        DiscoveryError::GroupUnavailable { .. } | DiscoveryError::Upstream(_) => Refusal::Unavailable(message),
    }
}

fn status(cache: &Cache) -> ResourceStatus {
    let status = cache.served.hub.status();
    let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    let text = |version: Option<ResourceVersion>| version.map_or_else(String::new, |v| v.least_reached().to_string());
    ResourceStatus {
        name: cache.name.clone(),
        resource: Some(cache.served.hub.resource().clone()),
        namespace: cache.served.scope.namespace().to_owned(),
        state: state(status.phase).into(),
        message: status.message,
        resource_version: text(status.version),
        oldest_resource_version: text(status.oldest),
        object_count: count(status.objects),
        object_bytes: count(status.object_bytes),
        synced_since: status.synced_since.map(|since: SystemTime| since.into()),
        subscribers: count(status.subscribers),
        on_demand: cache.on_demand(),
    }
}

fn state(phase: Phase) -> ResourceState {
    match phase {
        // The message of a resource that cannot be cached has the reason.
        Phase::Syncing | Phase::Failing | Phase::NotCached => ResourceState::Syncing,
        Phase::Synced => ResourceState::Synced,
        Phase::Stale => ResourceState::Stale,
        Phase::NotFound => ResourceState::NotFound,
        Phase::Forbidden => ResourceState::Forbidden,
    }
}
