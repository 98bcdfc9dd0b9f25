//! Which caches there are: one per resource and scope, started by the configuration or by a reader, and the tasks that keep them.
//!
//! A map from resource to cache that readers look into without waiting; no guard of it is held across an await.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicUsize},
    time::Duration,
};

use dashmap::DashMap;
use tokio::{
    sync::Notify,
    task::JoinSet,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    backfill::Backfiller,
    cluster_version::ClusterVersion,
    freshness::Prover,
    informer::{Informer, Shared, Stopped, schema_changed},
    on_demand::{Allowance, Form, OnDemand},
    warm_start::HeldSchema,
};
use crate::{
    cache::{RingLimits, writer::SELF_CHECK},
    fanout::{Gate, GateLimits, Hub, HubOptions, HubStatus, Phase, Served, StreamEnd},
    server::admin::Readiness,
    telemetry::metrics::Metrics,
    upstream::{
        backoff::Backoff,
        discovery::{Custom, DiscoveryError, ResourceInfo, SchemaFingerprint},
    },
};
use kubefan_common::proto::v1alpha1::ResolvedResource;
use kubefan_common::sync::watch;
use kubefan_model::{GroupVersionResource, Media, Scope, fields::FieldTable, object::ObjectParser};

/// What the registry is told.
#[derive(Clone)]
pub struct RegistryOptions {
    /// Resources to cache, by any name kubectl takes.
    pub resources: Vec<String>,
    /// Empty: the whole cluster.
    pub namespaces: Vec<String>,
    /// How much history each cache keeps.
    pub ring: RingLimits,
    /// How long a wave of wake-ups may be held back under load.
    pub coalesce_max: Duration,
    /// How many may pin state at once.
    pub gate: GateLimits,
    /// `None`: only the configured resources.
    pub on_demand: Option<OnDemand>,
    /// `None`: nothing is cached as protobuf.
    pub protobuf: Option<Form>,
    /// `None`: no tables are cached.
    pub tables: Option<Form>,
    /// How old the proof of a state may be that is read; `None`: as old as it gets.
    pub staleness_max: Option<Duration>,
    /// Whether reads that are to be consistent may be answered from caches, once those are proved to be fresh.
    pub proves: bool,
    /// How often each cache is compared with upstream; `None`: never.
    pub self_check_interval: Option<Duration>,
}

/// The longest wait before a configured resource that does not exist is looked for again: its CRD may have been created.
const NOT_FOUND_WAIT_MAX: Duration = Duration::from_secs(10);

/// What one cache is of. There is at most one with each.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct CacheId {
    pub(super) gvr: GroupVersionResource,
    pub(super) scope: Scope,
    pub(super) media: Media,
}

impl CacheId {
    pub(super) fn of(served: &Served) -> Self {
        Self { gvr: served.gvr.clone(), scope: served.scope.clone(), media: served.parser.media() }
    }
}

/// One cache and its task.
pub(super) struct Cache {
    /// The name it was asked for by.
    pub(super) name: String,
    pub(super) served: Served,
    pub(super) backfiller: Arc<Backfiller>,
    pub(super) cluster_version: ClusterVersion,
    pub(super) prover: Arc<Prover>,
    /// A reader has started it, and it goes when nobody reads it any more.
    pub(super) on_demand: bool,
    /// Cancelled when it is to end, and when it has.
    pub(super) stop: CancellationToken,
    /// What everything it holds was read by.
    pub(super) schema: Arc<HeldSchema>,
    /// Told when a self-check has found a difference.
    pub(super) suspect: Notify,
}

/// A resource that was found, and the fields it can be selected by.
pub(super) struct Resolved {
    pub(super) info: ResourceInfo,
    pub(super) fields: Arc<FieldTable>,
    /// The kind that its lists name.
    pub(super) list_kind: Arc<str>,
    /// The schema that the fields are of, or an older one; `None` where it could not be had.
    pub(super) schema: Option<SchemaFingerprint>,
}

/// What is known of a configured resource that has no cache.
#[derive(Clone)]
pub(super) struct Missing {
    pub(super) phase: Phase,
    pub(super) message: String,
}

/// How a cache ended.
pub(super) struct Ended {
    pub(super) missing: Missing,
    /// It would end like this again.
    pub(super) refused: bool,
}

/// All caches.
pub struct Registry {
    pub(super) shared: Shared,
    pub(super) options: RegistryOptions,
    metrics: Arc<Metrics>,
    gate: Arc<Gate>,
    pub(super) caches: DashMap<CacheId, Arc<Cache>>,
    pub(super) missing: DashMap<String, Missing>,
    /// What readers asked for in vain, when, and why.
    pub(super) refused: DashMap<CacheId, (Instant, String)>,
    /// The bytes of all JSON that readers have started.
    pub(super) on_demand_bytes: Arc<AtomicUsize>,
    /// The bytes of all that is cached as protobuf.
    pub(super) protobuf_bytes: Arc<AtomicUsize>,
    /// The bytes of all rows of tables that are cached.
    pub(super) tables_bytes: Arc<AtomicUsize>,
    /// Held while caches are started, so that the limit on their number holds and no two are for the same.
    pub(super) starting: Mutex<()>,
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
        let gate = Gate::new(options.gate, metrics.gate());
        Arc::new(Self {
            shared,
            options,
            gate,
            metrics,
            caches: DashMap::new(),
            missing,
            refused: DashMap::new(),
            on_demand_bytes: Arc::default(),
            protobuf_bytes: Arc::default(),
            tables_bytes: Arc::default(),
            starting: Mutex::new(()),
            changes: watch::Sender::new(0),
            stop,
        })
    }

    fn hub_options(&self) -> HubOptions {
        let RegistryOptions { ring: limits, coalesce_max, .. } = self.options;
        let upstream = self.shared.upstream.clone();
        HubOptions { limits, coalesce_max, gate: self.gate.clone(), cluster: Arc::new(move || upstream.cluster()) }
    }

    /// Who may pin state.
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Keeps every configured resource cached, and drops idle ones, until the registry is stopped.
    pub async fn run(self: Arc<Self>) {
        let mut tasks = JoinSet::new();
        let discovery = self.shared.discovery.clone();
        tasks.spawn(async move { discovery.keep_fresh().await });
        for name in self.options.resources.clone() {
            tasks.spawn(self.clone().keep(name));
        }
        if let Some(idle_timeout) = self.idle_timeout() {
            tasks.spawn(self.clone().drop_idle(idle_timeout));
        }
        if let Some(interval) = self.options.self_check_interval {
            tasks.spawn(self.clone().check_all(interval));
        }
        tokio::select! {
            biased;
            () = self.stop.cancelled() => {}
            () = async { while tasks.join_next().await.is_some() {} } => self.stop.cancelled().await,
        }
    }

    /// Keeps one configured resource: resolves it, caches it in each scope, and begins again when it is gone or has changed.
    async fn keep(self: Arc<Self>, name: String) {
        let (mut backoff, mut random) = (Backoff::default(), self.shared.generator());
        // What has been served here once is not to wait for peers.
        let mut warm = true;
        loop {
            let mut wait_max = Duration::MAX;
            match self.resolve("", "", &name).await {
                Ok(resolved) => {
                    backoff.reset();
                    match self.claim(&name, &resolved) {
                        Ok(caches) => {
                            self.run_caches(&name, caches, &resolved.schema, std::mem::take(&mut warm)).await;
                        }
                        Err(other) => {
                            self.missing.remove(&name);
                            self.changed();
                            warn!(
                                resource = name,
                                same_as = other,
                                "configured under two names; one cache serves both"
                            );
                            self.wait_while_kept_as(&other, &resolved.info.gvr).await;
                        }
                    }
                }
                Err(error) => {
                    let phase = match error {
                        DiscoveryError::UnknownResource { .. } => Phase::NotFound,
                        _ => Phase::Syncing,
                    };
                    if phase == Phase::NotFound {
                        wait_max = NOT_FOUND_WAIT_MAX;
                    }
                    if self.set_missing(&name, Missing { phase, message: error.to_string() }) {
                        warn!(resource = name, %error, "not cached yet");
                    }
                }
            }
            sleep(backoff.next_delay(Instant::now(), None, &mut random).min(wait_max)).await;
        }
    }

    /// Makes the caches of a configured resource, or names who has: two names may mean one resource.
    fn claim(self: &Arc<Self>, name: &str, resolved: &Resolved) -> Result<Vec<Arc<Cache>>, String> {
        let _one_at_a_time = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        let gvr = &resolved.info.gvr;
        let other = |cache: &Cache| !cache.on_demand && cache.name != name && cache.served.gvr == *gvr;
        if let Some(other) = self.caches.iter().find(|cache| other(cache)) {
            return Err(other.name.clone());
        }
        let scopes = self.scopes(&resolved.info).into_iter();
        let json = || ObjectParser::new(&resolved.fields);
        Ok(scopes.map(|scope| self.insert(name, resolved, scope, json(), false)).collect())
    }

    /// Runs the caches of a configured resource until one cannot go on; they begin again together, for they share its names.
    async fn run_caches(
        self: &Arc<Self>,
        name: &str,
        caches: Vec<Arc<Cache>>,
        schema: &Option<SchemaFingerprint>,
        warm: bool,
    ) {
        self.missing.remove(name);
        let mut informers = JoinSet::new();
        for cache in &caches {
            informers.spawn(self.clone().supervise(cache.clone(), None, schema.clone(), warm));
        }
        let missing = match informers.join_next().await {
            Some(Ok(ended)) => ended.missing,
            // It panicked, which is a defect; readers must not be left with a state that no longer moves.
            _ => Missing {
                phase: Phase::Syncing,
                message: format!("the informer of {name} has failed; starting it again"),
            },
        };
        self.set_missing(name, missing);
        informers.shutdown().await;
        for cache in caches {
            let end = StreamEnd::Stopped(format!("{name} is being set up again"));
            cache.served.hub.close(Phase::Syncing, end);
            self.caches.remove_if(&CacheId::of(&cache.served), |_, current| Arc::ptr_eq(current, &cache));
        }
        self.changed();
    }

    async fn wait_while_kept_as(&self, other: &str, gvr: &GroupVersionResource) {
        let mut changes = self.changes();
        let kept = || self.caches.iter().any(|cache| cache.name == other && cache.served.gvr == *gvr);
        while kept() && changes.changed().await.is_ok() {}
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
    pub(super) fn changed(&self) {
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// Changes whenever a cache comes, goes or enters another phase.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub(super) fn insert(
        self: &Arc<Self>,
        name: &str,
        resolved: &Resolved,
        scope: Scope,
        parser: ObjectParser,
        on_demand: bool,
    ) -> Arc<Cache> {
        let Resolved { info, fields, list_kind, .. } = resolved;
        let gvr = &info.gvr;
        let resource = ResolvedResource {
            group: gvr.group.clone(),
            version: gvr.version.clone(),
            resource: gvr.resource.clone(),
            kind: info.kind.clone(),
            namespaced: info.namespaced,
        };
        let parser = Arc::new(parser.of(&info.kind, &gvr.api_version()));
        let metrics = self.metrics.cache(gvr, &scope, parser.media());
        let served = Served {
            gvr: gvr.clone(),
            namespaced: info.namespaced,
            fields: fields.clone(),
            list_kind: list_kind.clone(),
            hub: Hub::new(resource, parser.clone(), self.hub_options(), metrics),
            parser,
            scope: scope.clone(),
        };
        served.hub.limit_staleness(self.options.staleness_max);
        let backfiller = Backfiller::new(self.shared.clone(), served.clone());
        let cluster_version = ClusterVersion::new(self.shared.clone(), &served);
        let prover = Prover::new(self.shared.clone(), served.clone(), self.options.proves);
        let (name, stop, suspect) = (name.to_owned(), self.stop.child_token(), Notify::new());
        let schema = Arc::new(HeldSchema::new(resolved.schema.clone()));
        let cache = Cache { name, served, backfiller, cluster_version, prover, on_demand, stop, schema, suspect };
        let cache = Arc::new(cache);
        if let Some(before) = self.caches.insert(CacheId::of(&cache.served), cache.clone()) {
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

    /// Runs one cache until it cannot go on; says why. `known` is the schema that its fields are of; a `warm` one may begin with what a
    /// peer holds.
    pub(super) async fn supervise(
        self: Arc<Self>,
        cache: Arc<Cache>,
        allowance: Option<Allowance>,
        mut known: Option<SchemaFingerprint>,
        warm: bool,
    ) -> Ended {
        let served = &cache.served;
        let hub = &served.hub;
        let ended = |phase, message, refused| Ended { missing: Missing { phase, message }, refused };
        let (schema, prover) = (cache.schema.clone(), cache.prover.clone());
        let mut informer = Informer::new(self.shared.clone(), served.clone(), schema, prover, allowance, warm);
        loop {
            let stopped = tokio::select! {
                biased;
                () = cache.stop.cancelled() => {
                    let message = format!("{} is no longer cached on demand", served.gvr);
                    hub.close(Phase::Syncing, StreamEnd::Stopped(message.clone()));
                    return ended(Phase::Syncing, message, false);
                }
                stopped = informer.run() => stopped,
                () = cache.suspect.notified() => {
                    informer.relist(SELF_CHECK);
                    continue;
                }
                now = schema_changed(self.shared.clone(), served.gvr.clone(), known.clone()) => {
                    cache.schema.changes_to(now.clone());
                    known = Some(now);
                    let upstream = &self.shared.upstream;
                    if upstream.confirm(upstream.doubt()).await.is_err() {
                        // Another cluster's schema, or nobody's: the list tells when it can be had.
                        informer.relist("schema_changed");
                        continue;
                    }
                    if self.is_same(served).await {
                        info!(resource = %served.gvr, "the schema or the server's version has changed; listing again");
                        informer.relist("schema_changed");
                        continue;
                    }
                    let message = format!("{} is served with another schema", served.gvr);
                    hub.close(Phase::Syncing, StreamEnd::Rewritten(message.clone()));
                    return ended(Phase::Syncing, message, false);
                }
            };
            return match stopped {
                Stopped::NotFound(message) => {
                    info!(resource = %served.gvr, "no longer served by the apiserver");
                    hub.close(Phase::NotFound, StreamEnd::NotFound(message.clone()));
                    ended(Phase::NotFound, message, false)
                }
                Stopped::Rewritten(message) => {
                    info!(resource = %served.gvr, message, "no longer cached");
                    hub.close(Phase::Syncing, StreamEnd::Rewritten(message.clone()));
                    ended(Phase::Syncing, message, false)
                }
                Stopped::TooLarge(message) | Stopped::NotAcceptable(message) => {
                    warn!(resource = %served.gvr, message, "not cached");
                    hub.close(Phase::Syncing, StreamEnd::Stopped(message.clone()));
                    ended(Phase::Syncing, message, true)
                }
            };
        }
    }

    /// Whether a changed schema leaves names and selectable fields as they were.
    async fn is_same(&self, served: &Served) -> bool {
        let GroupVersionResource { group, version, resource } = &served.gvr;
        self.shared.discovery.doubt();
        let Ok(Resolved { info, fields, list_kind, .. }) = self.resolve(group, version, resource).await else {
            // The list that follows will tell.
            return true;
        };
        info.kind == served.hub.resource().kind
            && info.namespaced == served.namespaced
            && fields == served.fields
            && list_kind == served.list_kind
    }

    /// Finds a resource, by any name kubectl takes where group and version are empty, and the fields it can be selected by.
    pub(super) async fn resolve(&self, group: &str, version: &str, resource: &str) -> Result<Resolved, DiscoveryError> {
        let discovery = &self.shared.discovery;
        let info = match (group, version) {
            ("", "") => discovery.resolve(resource).await?,
            _ => discovery.find(group, version, resource).await?,
        };
        // Before the fields are read, so that a change in between is noticed as one.
        let schema = discovery.schema_fingerprint(&info.gvr.group, &info.gvr.version).await.ok();
        let Custom { selectable_fields, list_kind } = discovery.custom(&info.gvr, &info.kind).await?;
        let fields = Arc::new(FieldTable::new(&info.gvr, info.namespaced, &selectable_fields));
        let list_kind = list_kind.unwrap_or_else(|| format!("{}List", info.kind)).into();
        Ok(Resolved { info, fields, list_kind, schema })
    }

    /// Whether every configured resource is answered for, and a line for each.
    pub fn readiness(&self) -> Readiness {
        let mut lines = Vec::new();
        for cache in self.caches.iter().filter(|cache| !cache.on_demand) {
            let HubStatus { phase, message, age, .. } = cache.served.hub.status();
            let proven = match age {
                Some(age) => format!("; proven {}s ago", age.as_secs()),
                None if phase.serves() => "; not proven yet".to_owned(),
                None => String::new(),
            };
            // An outage after the first sync does not take a replica out: it serves, and the others are no better off.
            let refused = self.options.staleness_max.is_some_and(|max| age.is_none_or(|age| age > max));
            lines.push((
                phase.serves() && !refused,
                line(&title(&cache.name, &cache.served.scope), phase, &message) + &proven,
            ));
        }
        for missing in self.missing.iter() {
            // A resource that does not exist is answered with NOT_FOUND, which is an answer.
            lines.push((missing.phase == Phase::NotFound, line(missing.key(), missing.phase, &missing.message)));
        }
        lines.extend(self.shared.upstream.identity().map(|identity| (true, format!("identity {identity}"))));
        lines.sort_by(|(_, a), (_, b)| a.cmp(b));
        (lines.iter().all(|(ok, _)| *ok), lines)
    }

    /// Whether each resource is served, by every name it goes by: alone for all its scopes together, and with each scope.
    pub fn health(&self) -> HashMap<String, bool> {
        let mut health = HashMap::new();
        let mut note = |name: &str, scope: &Scope, serves: bool| {
            for name in [name.to_owned(), title(name, scope)] {
                *health.entry(name).or_insert(true) &= serves;
            }
        };
        for cache in self.caches.iter().filter(|cache| cache.key().media == Media::Json) {
            let Served { gvr, scope, hub, .. } = &cache.served;
            let (full_name, serves) = (gvr.to_string(), hub.phase().borrow().serves());
            note(&full_name, scope, serves);
            if cache.name != full_name {
                note(&cache.name, scope, serves);
            }
        }
        // Whether it has namespaces is not known yet.
        for missing in self.missing.iter() {
            for namespace in &self.options.namespaces {
                note(missing.key(), &Scope::Namespace(namespace.clone()), false);
            }
            note(missing.key(), &Scope::Cluster, false);
        }
        health
    }

    /// Every cache's name and hub.
    pub fn hubs(&self) -> Vec<(String, Arc<Hub>)> {
        let title = |cache: &Cache| {
            let title = title(&cache.served.gvr.to_string(), &cache.served.scope);
            match cache.served.parser.media() {
                Media::Json => title,
                media => format!("{title} ({})", media.as_str()),
            }
        };
        self.caches.iter().map(|cache| (title(&cache), cache.served.hub.clone())).collect()
    }

    /// Keeps less of what is not the state itself, in all caches, or as much as ever: see [`Hub::shed`].
    pub(super) fn shed(&self, share: f64, keeps: bool) {
        let caches: Vec<Arc<Cache>> = self.caches.iter().map(|cache| cache.clone()).collect();
        for cache in caches {
            cache.served.hub.shed(share, keeps);
            if !keeps {
                cache.backfiller.forget();
            }
        }
    }

    /// Brings the gauges of all caches up to date.
    pub fn refresh_gauges(&self) {
        self.hubs().iter().for_each(|(_, hub)| hub.refresh_gauges());
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
