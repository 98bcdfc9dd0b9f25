//! Which caches there are: one per resource and scope, started by the configuration or by a reader, and the tasks that keep them.
//!
//! A map from resource to cache that readers look into without waiting; no guard of it is held across an await.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use dashmap::DashMap;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::informer::{Informer, Shared, SizeLimits, Stopped, schema_changed};
use crate::{
    cache::RingLimits,
    fanout::{Catalog, Hub, HubStatus, Phase, Refusal, Served, StreamEnd},
    model::{GroupVersionResource, Scope, fields::FieldTable, object::ObjectParser},
    proto::v1alpha1::{ResolvedResource, ResourceState, ResourceStatus},
    server::admin::Readiness,
    telemetry::metrics::Metrics,
    upstream::discovery::{DiscoveryError, ResourceInfo},
};

/// What may be cached beyond the configured resources.
#[derive(Debug, Clone, Copy)]
pub struct OnDemand {
    /// Resources at once.
    pub on_demand_resources_max: usize,
    /// What each may hold.
    pub size: SizeLimits,
    /// After so long without a reader a cache is dropped.
    pub on_demand_idle_timeout: Duration,
}

/// What the registry is told.
#[derive(Clone)]
pub struct RegistryOptions {
    /// Resources to cache, by any name kubectl takes.
    pub resources: Vec<String>,
    /// Empty: the whole cluster.
    pub namespaces: Vec<String>,
    /// How much history each cache keeps.
    pub ring: RingLimits,
    /// `None`: only the configured resources.
    pub on_demand: Option<OnDemand>,
}

/// How long a resource that could not be set up is left alone before it is tried again.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(2);
/// How long a reader waits for a cache that it has started.
const FIRST_SYNC_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a resource that was too large is refused before it is tried again.
const TOO_LARGE_MEMORY: Duration = Duration::from_secs(60);

type CacheId = (GroupVersionResource, Scope);

/// One cache and its task.
struct Cache {
    /// The name it was asked for by.
    name: String,
    served: Served,
    on_demand: bool,
    stop: CancellationToken,
}

/// A resource that was found, and the fields it can be selected by.
struct Resolved {
    info: ResourceInfo,
    fields: Arc<FieldTable>,
}

/// What is known of a configured resource that has no cache.
#[derive(Clone)]
struct Missing {
    phase: Phase,
    message: String,
}

/// All caches.
pub struct Registry {
    shared: Shared,
    options: RegistryOptions,
    metrics: Arc<Metrics>,
    caches: DashMap<CacheId, Arc<Cache>>,
    missing: DashMap<String, Missing>,
    too_large: DashMap<CacheId, (Instant, String)>,
    /// Held while a cache is started by a reader, so that the limit on their number holds.
    starting: Mutex<()>,
    changes: watch::Sender<u64>,
    stop: CancellationToken,
}

impl Registry {
    /// A registry whose tasks end when `stop` is cancelled.
    pub fn new(shared: Shared, options: RegistryOptions, metrics: Arc<Metrics>, stop: CancellationToken) -> Arc<Self> {
        let missing = options.resources.iter().map(|name| {
            (name.clone(), Missing { phase: Phase::Syncing, message: "the apiserver was not asked yet".to_owned() })
        });
        let missing = missing.collect();
        Arc::new(Self {
            shared,
            options,
            metrics,
            caches: DashMap::new(),
            missing,
            too_large: DashMap::new(),
            starting: Mutex::new(()),
            changes: watch::Sender::new(0),
            stop,
        })
    }

    /// Keeps every configured resource cached, and drops idle ones, until the registry is stopped.
    pub async fn run(self: Arc<Self>) {
        let mut tasks = JoinSet::new();
        for name in self.options.resources.clone() {
            tasks.spawn(self.clone().keep(name));
        }
        if let Some(on_demand) = self.options.on_demand {
            tasks.spawn(self.clone().drop_idle(on_demand.on_demand_idle_timeout));
        }
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = async { while tasks.join_next().await.is_some() {} } => self.stop.cancelled().await,
        }
    }

    /// Keeps one configured resource: resolves it, caches it in each scope, and begins again when it is gone or has changed.
    async fn keep(self: Arc<Self>, name: String) {
        loop {
            match self.resolve("", "", &name).await {
                Ok(resolved) => {
                    let mut informers = JoinSet::new();
                    for scope in self.scopes(&resolved.info) {
                        let cache = self.insert(&name, &resolved, scope, false);
                        informers.spawn(self.clone().supervise(cache, None));
                    }
                    self.missing.remove(&name);
                    // All scopes begin again together: they share the resource's names.
                    if let Some(Ok(missing)) = informers.join_next().await {
                        self.set_missing(&name, missing);
                    }
                    informers.shutdown().await;
                    let old = |cache: &Cache| !cache.on_demand && cache.name == name;
                    for cache in self.caches.iter().filter(|cache| old(cache)) {
                        let end = StreamEnd::Stopped(format!("{name} is being set up again"));
                        cache.served.hub.close(Phase::Syncing, end);
                    }
                    self.caches.retain(|_, cache| !old(cache));
                }
                Err(error) => {
                    let phase = match error {
                        DiscoveryError::UnknownResource { .. } => Phase::NotFound,
                        _ => Phase::Syncing,
                    };
                    if self.set_missing(&name, Missing { phase, message: error.to_string() }) {
                        warn!(resource = name, %error, "not cached yet");
                    }
                }
            }
            sleep(RESOLVE_INTERVAL).await;
        }
    }

    fn scopes(&self, info: &ResourceInfo) -> Vec<Scope> {
        match self.options.namespaces.as_slice() {
            [] => vec![Scope::Cluster],
            _ if !info.namespaced => vec![Scope::Cluster],
            namespaces => namespaces.iter().cloned().map(Scope::Namespace).collect(),
        }
    }

    /// Notes why a configured resource has no cache; tells whether that is news.
    fn set_missing(&self, name: &str, missing: Missing) -> bool {
        let message = missing.message.clone();
        let before = self.missing.insert(name.to_owned(), missing);
        let news = before.is_none_or(|before| before.message != message);
        if news {
            self.changed();
        }
        news
    }

    /// Wakes those who follow the readiness.
    fn changed(&self) {
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// Changes whenever a cache comes, goes or enters another phase.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn insert(self: &Arc<Self>, name: &str, resolved: &Resolved, scope: Scope, on_demand: bool) -> Arc<Cache> {
        let Resolved { info, fields } = resolved;
        let gvr = &info.gvr;
        let resource = ResolvedResource {
            group: gvr.group.clone(),
            version: gvr.version.clone(),
            resource: gvr.resource.clone(),
            kind: info.kind.clone(),
            namespaced: info.namespaced,
        };
        let served = Served {
            gvr: gvr.clone(),
            namespaced: info.namespaced,
            parser: Arc::new(ObjectParser::new(fields)),
            fields: fields.clone(),
            hub: Hub::new(resource, self.options.ring, self.metrics.cache(gvr, &scope)),
            scope: scope.clone(),
        };
        let cache = Arc::new(Cache { name: name.to_owned(), served, on_demand, stop: self.stop.child_token() });
        if let Some(before) = self.caches.insert((gvr.clone(), scope), cache.clone()) {
            // A configured resource takes the place of the cache that a reader had started.
            before.stop.cancel();
        }
        let (registry, mut phase) = (Arc::downgrade(self), cache.served.hub.phase());
        tokio::spawn(async move {
            // Ends with the hub.
            while phase.changed().await.is_ok() {
                let Some(registry) = registry.upgrade() else { return };
                registry.changed();
            }
        });
        self.changed();
        cache
    }

    /// Runs one cache until it cannot go on; says why.
    async fn supervise(self: Arc<Self>, cache: Arc<Cache>, limits: Option<SizeLimits>) -> Missing {
        let served = &cache.served;
        let mut informer = Informer::new(self.shared.clone(), served.clone(), limits);
        loop {
            let stopped = tokio::select! {
                () = cache.stop.cancelled() => {
                    let message = format!("{} is no longer cached on demand", served.gvr);
                    served.hub.close(Phase::Syncing, StreamEnd::Stopped(message.clone()));
                    return Missing { phase: Phase::Syncing, message };
                }
                stopped = informer.run() => stopped,
                () = schema_changed(self.shared.clone(), served.gvr.clone()) => {
                    if self.is_same(served).await {
                        info!(resource = %served.gvr, "the schema or the server's version has changed; listing again");
                        informer.relist("schema_changed");
                        continue;
                    }
                    let message = format!("{} is served with another schema", served.gvr);
                    served.hub.close(Phase::Syncing, StreamEnd::Rewritten(message.clone()));
                    return Missing { phase: Phase::Syncing, message };
                }
            };
            return match stopped {
                Stopped::NotFound(message) => {
                    info!(resource = %served.gvr, "no longer served by the apiserver");
                    served.hub.close(Phase::NotFound, StreamEnd::NotFound(message.clone()));
                    Missing { phase: Phase::NotFound, message }
                }
                Stopped::TooLarge(message) => {
                    warn!(resource = %served.gvr, message, "not cached");
                    served.hub.close(Phase::Syncing, StreamEnd::Stopped(message.clone()));
                    Missing { phase: Phase::Syncing, message }
                }
            };
        }
    }

    /// Whether a changed schema leaves names and selectable fields as they were.
    async fn is_same(&self, served: &Served) -> bool {
        let GroupVersionResource { group, version, resource } = &served.gvr;
        self.shared.discovery.invalidate().await;
        let Ok(Resolved { info, fields }) = self.resolve(group, version, resource).await else {
            // The list that follows will tell.
            return true;
        };
        info.kind == served.hub.resource().kind && info.namespaced == served.namespaced && fields == served.fields
    }

    async fn drop_idle(self: Arc<Self>, idle_timeout: Duration) {
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

    /// Finds a resource, by any name kubectl takes where group and version are empty, and the fields it can be selected by.
    async fn resolve(&self, group: &str, version: &str, resource: &str) -> Result<Resolved, DiscoveryError> {
        let discovery = &self.shared.discovery;
        let info = match (group, version) {
            ("", "") => discovery.resolve(resource).await?,
            _ => discovery.find(group, version, resource).await?,
        };
        let selectable = discovery.selectable_fields(&info.gvr, &info.kind).await?;
        let fields = Arc::new(FieldTable::new(&info.gvr, info.namespaced, &selectable));
        Ok(Resolved { info, fields })
    }

    fn scope_of(&self, info: &ResourceInfo, namespace: &str) -> Result<Scope, Refusal> {
        let namespaces = &self.options.namespaces;
        if namespaces.is_empty() || !info.namespaced {
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

    /// Whether a reader may start this cache.
    fn may_start(&self, gvr: &GroupVersionResource, scope: &Scope) -> Result<OnDemand, Refusal> {
        let Some(on_demand) = self.options.on_demand else {
            return Err(Refusal::NotCached(format!(
                "{gvr} is not cached; start kubefan with --resource {gvr}, or with --on-demand to cache what is asked for"
            )));
        };
        let id = (gvr.clone(), scope.clone());
        match self.too_large.get(&id).filter(|refused| refused.0.elapsed() < TOO_LARGE_MEMORY) {
            Some(refused) => Err(Refusal::Exhausted(refused.1.clone())),
            None => Ok(on_demand),
        }
    }

    /// Starts a cache for a reader, if that is allowed.
    fn start(self: &Arc<Self>, resolved: &Resolved, scope: Scope) -> Result<Served, Refusal> {
        let gvr = &resolved.info.gvr;
        let on_demand = self.may_start(gvr, &scope)?;
        let id = (gvr.clone(), scope.clone());
        let _one_at_a_time = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cache) = self.caches.get(&id) {
            return Ok(cache.served.clone());
        }
        let limit = on_demand.on_demand_resources_max;
        if self.caches.iter().filter(|cache| cache.on_demand).count() >= limit {
            return Err(Refusal::Exhausted(format!(
                "{limit} resources are cached on demand, the most this kubefan allows (--on-demand-resources-max)"
            )));
        }
        info!(resource = %gvr, scope = scope.namespace(), "caching on demand");
        let cache = self.insert(&gvr.to_string(), resolved, scope, true);
        let (registry, served) = (self.clone(), cache.served.clone());
        tokio::spawn(async move {
            let ended = registry.clone().supervise(cache.clone(), Some(on_demand.size)).await;
            // Still in the map: it was not stopped for being idle, so it could not go on.
            let removed = registry.caches.remove_if(&id, |_, current| Arc::ptr_eq(current, &cache));
            if removed.is_some() && ended.phase != Phase::NotFound {
                registry.too_large.insert(id, (Instant::now(), ended.message));
            }
            registry.changed();
        });
        Ok(served)
    }

    /// Whether every configured resource is answered for, and a line for each.
    pub fn readiness(&self) -> Readiness {
        let mut lines = Vec::new();
        for cache in self.caches.iter().filter(|cache| !cache.on_demand) {
            let HubStatus { phase, message, .. } = cache.served.hub.status();
            // An outage after the first sync does not take a replica out: it serves, and the others are no better off.
            lines.push((phase.serves(), line(&title(&cache.name, &cache.served.scope), phase, &message)));
        }
        for missing in self.missing.iter() {
            // A resource that does not exist is answered with NOT_FOUND, which is an answer.
            lines.push((missing.phase == Phase::NotFound, line(missing.key(), missing.phase, &missing.message)));
        }
        lines.sort_by(|(_, a), (_, b)| a.cmp(b));
        (lines.iter().all(|(ok, _)| *ok), lines)
    }

    /// Every cache's name and hub, for health.
    pub fn hubs(&self) -> Vec<(String, Arc<Hub>)> {
        let title = |cache: &Cache| title(&cache.served.gvr.to_string(), &cache.served.scope);
        self.caches.iter().map(|cache| (title(&cache), cache.served.hub.clone())).collect()
    }

    /// Brings the gauges of all caches up to date.
    pub fn refresh_gauges(&self) {
        self.hubs().iter().for_each(|(_, hub)| hub.refresh_gauges());
    }
}

fn refusal(error: DiscoveryError) -> Refusal {
    let message = error.to_string();
    match error {
        DiscoveryError::UnknownResource { .. } => Refusal::NotFound(message),
        DiscoveryError::NotWatchable { .. } => Refusal::Invalid { field: "target.resource", message },
        DiscoveryError::GroupUnavailable { .. } | DiscoveryError::Upstream(_) => Refusal::Unavailable(message),
    }
}

fn title(name: &str, scope: &Scope) -> String {
    match scope {
        Scope::Cluster => name.to_owned(),
        Scope::Namespace(namespace) => format!("{name}/{namespace}"),
    }
}

fn line(name: &str, phase: Phase, message: &str) -> String {
    let colon = if message.is_empty() { "" } else { ": " };
    format!("{name} {}{colon}{message}", phase.as_str())
}

impl Catalog for Arc<Registry> {
    async fn find(&self, group: &str, version: &str, resource: &str, namespace: &str) -> Result<Served, Refusal> {
        // Found by name first: what is cached is answered without asking anyone.
        let discovery = &self.shared.discovery;
        let info = match (group, version) {
            ("", "") => discovery.resolve(resource).await,
            _ => discovery.find(group, version, resource).await,
        };
        let info = info.map_err(refusal)?;
        let scope = self.scope_of(&info, namespace)?;
        if let Some(cache) = self.caches.get(&(info.gvr.clone(), scope.clone())) {
            return Ok(cache.served.clone());
        }
        if let Some(missing) = self.missing.get(resource).or_else(|| self.missing.get(&info.gvr.to_string())) {
            return Err(Refusal::NotSynced { resource: resource.to_owned(), message: missing.message.clone() });
        }
        self.may_start(&info.gvr, &scope)?;
        let resolved = self.resolve(&info.gvr.group, &info.gvr.version, &info.gvr.resource).await.map_err(refusal)?;
        let served = self.start(&resolved, scope)?;
        let mut phase = served.hub.phase();
        // Not synced by then: the reader is told so, with a delay.
        let _ = timeout(FIRST_SYNC_TIMEOUT, phase.wait_for(|phase| *phase != Phase::Syncing)).await;
        Ok(served)
    }

    fn list(&self) -> Vec<ResourceStatus> {
        let mut all: Vec<_> = self.caches.iter().map(|cache| status(&cache)).collect();
        all.extend(self.missing.iter().map(|missing| ResourceStatus {
            name: missing.key().clone(),
            state: state(missing.phase).into(),
            message: missing.message.clone(),
            ..ResourceStatus::default()
        }));
        all.sort_by(|a, b| (&a.name, &a.namespace).cmp(&(&b.name, &b.namespace)));
        all
    }
}

fn status(cache: &Cache) -> ResourceStatus {
    let status = cache.served.hub.status();
    let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    let text = |version: Option<crate::model::ResourceVersion>| version.map_or_else(String::new, |v| v.to_string());
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
