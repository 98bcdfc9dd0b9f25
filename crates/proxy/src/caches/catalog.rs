//! How servers find caches: a name becomes a cache, or a refusal that says what to do.

use std::{sync::Arc, time::SystemTime};

use tokio::time::Instant;

use super::registry::{Cache, CacheId, Registry};
use crate::{
    cache::Backfill,
    fanout::{Catalog, Patience, Phase, Refusal, Served},
    upstream::discovery::DiscoveryError,
};
use kubefan_common::proto::v1alpha1::{ResourceState, ResourceStatus};
use kubefan_common::sync::watch;
use kubefan_model::{GroupVersionResource, Media, ResourceVersion, Scope, protobuf::kinds, table};

impl Catalog for Arc<Registry> {
    async fn find(
        &self,
        group: &str,
        version: &str,
        resource: &str,
        namespace: &str,
        media: Media,
    ) -> Result<Served, Refusal> {
        // What is cached under this name is answered without asking anyone: upstream may be away just now.
        if let Some(served) = self.by_name(group, version, resource, namespace, media)? {
            return Ok(served);
        }
        if media != Media::Json && !version.is_empty() {
            // Before discovery is asked, for those who ask for it first of whatever there is.
            self.may_have(&GroupVersionResource::new(group, version, resource), media)?;
        }
        // In a box: it is rare and large, and every request would have room for it.
        Box::pin(self.look_up(group, version, resource, namespace, media)).await
    }

    async fn backfill(
        &self,
        served: &Served,
        version: ResourceVersion,
        needs_state: bool,
    ) -> Result<Arc<Backfill>, Refusal> {
        Box::pin(self.cache_of(served)?.backfiller.backfill(version, needs_state)).await
    }

    async fn cluster_version(&self, served: &Served, asked: Instant) -> Result<ResourceVersion, Refusal> {
        Box::pin(self.cache_of(served)?.cluster_version.known_after(asked)).await
    }

    async fn prove(&self, served: &Served, patience: Patience) -> Result<(), Refusal> {
        Box::pin(self.cache_of(served)?.prover.prove(patience)).await
    }

    fn holds(&self, gvr: &GroupVersionResource, media: Media) -> bool {
        self.caches.iter().any(|cache| cache.key().media == media && cache.key().gvr == *gvr)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        Registry::changes(self)
    }

    fn list(&self) -> Vec<(Media, ResourceStatus)> {
        let mut all: Vec<_> = self.caches.iter().map(|cache| (cache.key().media, status(&cache))).collect();
        all.extend(self.missing.iter().map(|missing| {
            let status = ResourceStatus {
                name: missing.key().clone(),
                state: state(missing.phase).into(),
                message: missing.message.clone(),
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
    /// The cache that was found for a reader, if it is still the one.
    fn cache_of(&self, served: &Served) -> Result<Arc<Cache>, Refusal> {
        let cache = self.caches.get(&CacheId::of(served)).map(|cache| cache.clone());
        let cache = cache.filter(|cache| Arc::ptr_eq(&cache.served.hub, &served.hub));
        cache.ok_or_else(|| Refusal::Unavailable(format!("{} is being set up again", served.gvr)))
    }

    /// What upstream knows under a name; starts its cache where that is allowed.
    async fn look_up(
        self: &Arc<Self>,
        group: &str,
        version: &str,
        resource: &str,
        namespace: &str,
        media: Media,
    ) -> Result<Served, Refusal> {
        let discovery = &self.shared.discovery;
        let info = match (group, version) {
            ("", "") => discovery.resolve(resource).await,
            _ => discovery.find(group, version, resource).await,
        };
        let info = info.map_err(refusal)?;
        let scope = self.scope_of(info.namespaced, namespace)?;
        let id = CacheId { gvr: info.gvr.clone(), scope, media };
        if let Some(cache) = self.caches.get(&id) {
            return Ok(cache.served.clone());
        }
        if let Some(missing) = self.missing.get(resource).or_else(|| self.missing.get(&info.gvr.to_string())) {
            return Err(not_synced(resource, &missing.message));
        }
        self.may_start(&id)?;
        let resolved = self.resolve(&info.gvr.group, &info.gvr.version, &info.gvr.resource).await.map_err(refusal)?;
        self.start_for_reader(&resolved, id).await
    }

    /// A configured resource by the name it was configured by, or any cached one by its full name.
    fn by_name(
        &self,
        group: &str,
        version: &str,
        resource: &str,
        namespace: &str,
        media: Media,
    ) -> Result<Option<Served>, Refusal> {
        let short = group.is_empty() && version.is_empty();
        let wanted = GroupVersionResource::new(group, version, resource);
        let named = |cache: &Cache| match short {
            true => !cache.on_demand && cache.name == resource,
            false => cache.served.gvr == wanted,
        };
        let found = self.caches.iter().find(|cache| named(cache)).map(|cache| cache.served.clone());
        let Some(served) = found else {
            // Not found is for discovery to say, which may know better by now.
            let missing = self.missing.get(resource).filter(|missing| short && missing.phase == Phase::Syncing);
            return missing.map_or(Ok(None), |missing| Err(not_synced(resource, &missing.message)));
        };
        let scope = self.scope_of(served.namespaced, namespace)?;
        Ok(self.caches.get(&CacheId { gvr: served.gvr, scope, media }).map(|cache| cache.served.clone()))
    }

    /// Which of the scopes a request is for.
    fn scope_of(&self, namespaced: bool, namespace: &str) -> Result<Scope, Refusal> {
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

/// Whether the tables of a resource can be kept, as far as its name tells.
pub(super) fn known_as_table(gvr: &GroupVersionResource) -> Result<(), Refusal> {
    match table::other_times(gvr) {
        None => Ok(()),
        Some(columns) => Err(Refusal::NotCached(format!(
            "{gvr} is not cached as tables: {columns} would stand as of its last change, because kubefan has no printers"
        ))),
    }
}

/// Whether a resource is of a type that is read as protobuf.
pub(super) fn known_as_protobuf(gvr: &GroupVersionResource) -> Result<(), Refusal> {
    if kinds::is_known(gvr) {
        return Ok(());
    }
    Err(Refusal::NotCached(format!("{gvr} is not cached as protobuf: it is of no built-in type that kubefan knows")))
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
    let text = |version: Option<ResourceVersion>| version.map_or_else(String::new, |v| v.to_string());
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
        on_demand: cache.on_demand,
    }
}

fn state(phase: Phase) -> ResourceState {
    match phase {
        Phase::Syncing => ResourceState::Syncing,
        Phase::Synced => ResourceState::Synced,
        Phase::Stale => ResourceState::Stale,
        Phase::NotFound => ResourceState::NotFound,
        Phase::Forbidden => ResourceState::Forbidden,
    }
}
