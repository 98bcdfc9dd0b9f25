//! Configured resources: keeps a cache of each in every configured scope.
//!
//! A configured resource may not exist yet, may disappear and may change its schema. Its task
//! discovers it, runs its caches, and starts again when they end.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use kubefan_cache::{Phase, StreamEnd};
use kubefan_fanout::Served;
use kubefan_model::{GroupVersionResource, Media, Scope, object::ObjectParser};
use kubefan_upstream::{
    UpstreamError,
    client::FORBIDDEN_GRACE,
    discovery::{DiscoveryError, ResourceInfo, SchemaFingerprint},
    identity::IdentityError,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use super::{
    cache_entry::{Cache, StartedBy, UncachedReason},
    discovered::DiscoveredResource,
    failure_log::DiscoveryLog,
    informer::StartFrom,
    registry::{NOT_ASKED, Registry},
    resource_media::ConfiguredResource,
    retry::Retry,
    saved_resource::{self, SavedResource},
    saved_states::OTHER_CLUSTER,
    upstream_context::CacheContext,
};

/// The longest wait before the next look-up of a resource that does not exist: its CRD may be
/// created meanwhile.
const NOT_FOUND_WAIT_MAX: Duration = Duration::from_secs(10);
/// Time after which a saved state is served if upstream has not answered.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Time between two questions meanwhile.
const ANSWER_INTERVAL: Duration = Duration::from_millis(200);

/// Keeps the configured resources cached, without end, also when others are configured.
pub(super) async fn keep_configured(registry: Arc<Registry>) {
    let mut configured = registry.configured.subscribe();
    let discovery_log = Arc::new(DiscoveryLog::default());
    let mut is_running = false;
    let mut kept: Vec<(ConfiguredResource, AbortOnDropHandle<()>)> = Vec::new();
    loop {
        configured.mark_unchanged();
        let wanted = configured.borrow().clone();
        let (stay, gone): (Vec<_>, Vec<_>) = kept.into_iter().partition(|(resource, _)| wanted.contains(resource));
        kept = stay;
        for (resource, task) in gone {
            task.abort();
            // Until its end, the task could add a cache.
            let _ = task.await;
            forget(&registry, &resource.name);
        }
        for resource in wanted {
            if kept.iter().all(|(known, _)| *known != resource) {
                if is_running {
                    registry.added.insert(resource.name.clone(), ());
                }
                let message = NOT_ASKED.to_owned();
                registry.set_uncached(&resource.name, UncachedReason { phase: Phase::Syncing, message });
                let task = tokio::spawn(keep_cached(registry.clone(), resource.clone(), discovery_log.clone()));
                kept.push((resource, AbortOnDropHandle::new(task)));
            }
        }
        is_running = true;
        if configured.changed().await.is_err() {
            return;
        }
    }
}

/// Ends the caches of a resource that is no longer configured.
fn forget(registry: &Registry, name: &str) {
    info!(resource = name, "no longer cached: it is not configured any more");
    for cache in registry.caches.remove_all(|cache| !cache.on_demand() && cache.name == name) {
        cache.stop.cancel();
        let end = StreamEnd::Stopped(format!("{name} is no longer cached: it is not configured any more"));
        cache.served.hub.close(Phase::Syncing, end);
    }
    registry.uncached.remove(name);
    registry.added.remove(name);
    registry.changed();
}

/// Keeps one configured resource cached, without end.
async fn keep_cached(registry: Arc<Registry>, resource: ConfiguredResource, discovery_log: Arc<DiscoveryLog>) {
    let mut retry = Retry::new(Some(registry.context.upstream.clone()), registry.context.generator());
    // Only the first start asks peers. Later, readers would wait for them.
    let mut warm = !run_saved(&registry, &resource, &mut retry).await;
    let ConfiguredResource { name, media } = resource;
    loop {
        let mut wait_max = Duration::MAX;
        let mut failure = None;
        match registry.discover("", "", &name).await {
            Ok(discovered) => {
                retry.reset();
                match claim(&registry, &name, &media, &discovered) {
                    Ok(caches) => {
                        let warm = std::mem::take(&mut warm);
                        let start = |cache: Arc<Cache>| {
                            // Peers offer JSON only.
                            let is_warm = warm && cache.served.parser.media() == Media::Json;
                            (cache, if is_warm { StartFrom::Peers } else { StartFrom::List })
                        };
                        let caches = caches.into_iter().map(start).collect();
                        let ended = run_caches(&registry, &name, caches, &discovered.schema).await;
                        if ended == Phase::NotCached {
                            registry.until_it_may_be_cached(&discovered.info.gvr, discovered.schema).await;
                        }
                    }
                    Err(other) => {
                        registry.uncached.remove(&name);
                        registry.changed();
                        warn!(resource = name, same_as = other, "configured under two names; one cache serves both");
                        wait_while_cached_as(&registry, &other, &discovered.info.gvr).await;
                    }
                }
            }
            Err(error) => {
                let is_missing = matches!(error, DiscoveryError::UnknownResource { .. });
                if is_missing {
                    wait_max = NOT_FOUND_WAIT_MAX;
                }
                if let DiscoveryError::Upstream(error) = &error {
                    failure = Some(error.clone());
                }
                // A look-up that fails says nothing, so an outage makes no replica unready.
                let was_missing = registry.uncached.get(&name).is_some_and(|before| before.phase == Phase::NotFound);
                let phase = if is_missing || was_missing { Phase::NotFound } else { Phase::Syncing };
                if registry.set_uncached(&name, UncachedReason { phase, message: error.to_string() }) {
                    discovery_log.log(&name, &error);
                }
            }
        }
        // The end of the limit is a reason to look again.
        let _ = timeout(wait_max, retry.wait_after(failure.as_ref())).await;
    }
}

/// Serves the saved states of a configured resource while upstream does not answer, and then runs
/// its caches until one of them ends. Returns false if none ran, so that peers may be asked.
async fn run_saved(registry: &Arc<Registry>, resource: &ConfiguredResource, retry: &mut Retry) -> bool {
    let ConfiguredResource { name, media } = resource;
    let context = &registry.context;
    if context.saved.is_none() {
        return false;
    }
    let Some(unanswered) = unanswered(registry, name).await else { return false };
    let Some(saved) = saved_resource::find(context, name).await else { return false };
    let Ok(caches) = claim(registry, name, media, &saved.discovered) else { return false };
    let mut starts = Vec::new();
    for cache in &caches {
        let start = if cache.served.parser.media() == Media::Json {
            saved_start(context, &cache.served, &saved, &unanswered).await
        } else {
            StartFrom::List
        };
        starts.push((cache.clone(), start));
    }
    let end = |reason: StreamEnd| {
        registry.set_uncached(name, UncachedReason { phase: Phase::Syncing, message: reason.to_string() });
        for cache in &caches {
            cache.served.hub.close(Phase::Syncing, reason.clone());
            registry.caches.remove(cache);
        }
        registry.changed();
    };
    if !starts.iter().any(|(_, start)| matches!(start, StartFrom::Saved(_))) {
        end(StreamEnd::Stopped(unanswered));
        return false;
    }
    registry.uncached.remove(name);
    registry.changed();
    if let Some(stop) = until_answered(registry, resource, &caches, retry).await {
        if matches!(stop, StreamEnd::NotFound(_) | StreamEnd::Forbidden(_)) {
            for cache in &caches {
                context.remove_saved(&cache.served).await;
            }
        }
        end(stop);
        return false;
    }
    let SavedResource { discovered, .. } = saved;
    let ended = run_caches(registry, name, starts, &discovered.schema).await;
    if ended == Phase::NotCached {
        registry.until_it_may_be_cached(&discovered.info.gvr, discovered.schema).await;
    }
    true
}

/// Asks upstream for a resource until it answers. Returns the reason if it does not in time.
async fn unanswered(registry: &Registry, name: &str) -> Option<String> {
    let mut last = format!("no answer from the apiserver within {ANSWER_TIMEOUT:?}");
    let asking = async {
        // Any other answer is better than a file, also if it denies the resource.
        while let Err(DiscoveryError::Upstream(error)) = registry.discover("", "", name).await
            && error.is_passing()
        {
            last = error.to_string();
            sleep(error.retry_after().unwrap_or_default().max(ANSWER_INTERVAL)).await;
        }
    };
    let has_answered = timeout(ANSWER_TIMEOUT, asking).await.is_ok();
    if has_answered { None } else { Some(last) }
}

/// Serves the saved state of a cache. Returns the state that its informer starts from.
async fn saved_start(context: &CacheContext, served: &Served, saved: &SavedResource, message: &str) -> StartFrom {
    if let Some(mut state) = saved_resource::read(context, served, saved.schema.clone()).await
        && state.serve(context, served, message).await
    {
        return StartFrom::Saved(Box::new(state));
    }
    StartFrom::Peers
}

/// Waits until upstream describes the resource of these caches, which are served meanwhile. Returns
/// the reason if they must not be served any longer.
async fn until_answered(
    registry: &Arc<Registry>,
    resource: &ConfiguredResource,
    caches: &[Arc<Cache>],
    retry: &mut Retry,
) -> Option<StreamEnd> {
    let context = &registry.context;
    let name = &resource.name;
    let mut denied_since = None;
    loop {
        let failure = match registry.discover("", "", name).await {
            Ok(found) if caches.iter().all(|cache| found.is_of(&cache.served)) => {
                retry.reset();
                return None;
            }
            Ok(_) => {
                let message = format!("{name} is served with another schema than when its state was saved");
                NotContinued { end: Some(StreamEnd::Rewritten(message.clone())), message, cause: None }
            }
            Err(error) => {
                let is_denied = matches!(error, DiscoveryError::Upstream(UpstreamError::Forbidden { .. }));
                denied_since = is_denied.then(|| denied_since.unwrap_or_else(Instant::now));
                NotContinued::of(error, denied_since)
            }
        };
        let NotContinued { end, message, cause } = failure;
        if let Some(end) = end {
            match context.upstream.confirm().await {
                Ok(()) => return Some(end),
                Err(IdentityError::OtherCluster { .. }) => {
                    context.drop_unconfirmed().await;
                    return Some(StreamEnd::Rewritten(OTHER_CLUSTER.to_owned()));
                }
                // Another cluster may have answered.
                Err(_) => {}
            }
        }
        for cache in caches {
            cache.served.hub.trouble(message.clone());
        }
        retry.wait_after(cause.as_ref()).await;
    }
}

/// The reason why a saved state does not continue yet.
struct NotContinued {
    /// `Some` if it must not be served any longer.
    end: Option<StreamEnd>,
    message: String,
    /// The failed request.
    cause: Option<UpstreamError>,
}

impl NotContinued {
    /// A failure of discovery. Upstream denies it since `denied_since`, if it does.
    fn of(error: DiscoveryError, denied_since: Option<Instant>) -> Self {
        let message = error.to_string();
        let is_missing = matches!(error, DiscoveryError::UnknownResource { .. });
        // An apiserver that has just started denies everything for a moment.
        let is_denied = denied_since.is_some_and(|since| since.elapsed() >= FORBIDDEN_GRACE);
        let end = if is_missing {
            Some(StreamEnd::NotFound(message.clone()))
        } else {
            is_denied.then(|| StreamEnd::Forbidden(message.clone()))
        };
        let cause = if let DiscoveryError::Upstream(error) = error { Some(error) } else { None };
        Self { end, message, cause }
    }
}

/// Adds the caches of a configured resource, one per scope and medium. Fails with the other name if
/// the resource is already cached under one: two configured names may mean the same resource.
fn claim(
    registry: &Arc<Registry>,
    name: &str,
    media: &[Media],
    discovered: &DiscoveredResource,
) -> Result<Vec<Arc<Cache>>, String> {
    let _one_at_a_time = registry.starting.lock().unwrap_or_else(PoisonError::into_inner);
    let gvr = &discovered.info.gvr;
    let other = |cache: &Cache| !cache.on_demand() && cache.name != name && cache.served.gvr == *gvr;
    if let Some(other) = registry.caches.iter().find(|cache| other(cache)) {
        return Err(other.name.clone());
    }
    let json = || ObjectParser::new(&discovered.fields);
    let mut caches = Vec::new();
    for scope in scopes(&registry.options.namespaces, &discovered.info) {
        let mut parsers: Vec<ObjectParser> = Vec::new();
        for media in media {
            let parser = match media {
                Media::Protobuf => discovered.protobuf_parser().unwrap_or_else(|reason| {
                    warn!(resource = name, reason, "cached as JSON although protobuf is configured");
                    json()
                }),
                Media::Json | Media::Table => json(),
            };
            if parsers.iter().all(|other| other.media() != parser.media()) {
                parsers.push(parser);
            }
        }
        caches.extend(
            parsers
                .into_iter()
                .map(|parser| registry.insert(name, discovered, scope.clone(), parser, StartedBy::Configuration)),
        );
    }
    Ok(caches)
}

/// Runs the caches of a configured resource until one of them ends, and returns how. They restart
/// together, because they share the discovered names.
async fn run_caches(
    registry: &Arc<Registry>,
    name: &str,
    starts: Vec<(Arc<Cache>, StartFrom)>,
    schema: &Option<SchemaFingerprint>,
) -> Phase {
    registry.uncached.remove(name);
    let mut informers = JoinSet::new();
    let mut caches = Vec::new();
    for (cache, start) in starts {
        informers.spawn(registry.clone().supervise(cache.clone(), None, schema.clone(), start));
        caches.push(cache);
    }
    let reason = match informers.join_next().await {
        Some(Ok(ended)) => ended.reason,
        // It panicked, which is a defect. Readers must not continue with a state that is frozen.
        _ => UncachedReason {
            phase: Phase::Syncing,
            message: format!("the informer of {name} has failed; starting it again"),
        },
    };
    let phase = reason.phase;
    let end = match phase {
        Phase::NotCached => StreamEnd::Stopped(reason.message.clone()),
        _ => StreamEnd::Stopped(format!("{name} is being set up again")),
    };
    registry.set_uncached(name, reason);
    informers.shutdown().await;
    for cache in caches {
        // Readers of a resource that cannot be cached must not wait.
        let phase = if phase == Phase::NotCached { phase } else { Phase::Syncing };
        cache.served.hub.close(phase, end.clone());
        registry.caches.remove(&cache);
    }
    registry.changed();
    phase
}

async fn wait_while_cached_as(registry: &Registry, other: &str, gvr: &GroupVersionResource) {
    let mut changes = registry.changes();
    let is_cached = || registry.caches.iter().any(|cache| cache.name == other && cache.served.gvr == *gvr);
    while is_cached() && changes.changed().await.is_ok() {}
}

/// Returns the scopes to cache a resource in.
fn scopes(namespaces: &[String], info: &ResourceInfo) -> Vec<Scope> {
    match namespaces {
        [] => vec![Scope::Cluster],
        _ if !info.namespaced => vec![Scope::Cluster],
        namespaces => namespaces.iter().cloned().map(Scope::Namespace).collect(),
    }
}
