//! The self-check: every few minutes each cache is compared with upstream's metadata at exactly the
//! cache's version.
//!
//! A lost event is a defect without symptoms: the cache stays wrong until the next relist. The
//! check finds it and relists. It reads one resource at a time and a few pages per second, so that
//! it is never a burst of load.

use std::{sync::Arc, time::Duration};

use kubefan_cache::{
    Phase, RelistReason,
    comparison::{Comparison, Differences},
};
use kubefan_fanout::{CachePosition, Served};
use kubefan_telemetry::metrics::SelfCheck;
use kubefan_upstream::{UpstreamError, metadata::MetadataPages};
use rand::RngExt;
use tokio::time::{Instant, sleep};
use tracing::{debug, warn};

use super::{cache_entry::Cache, registry::Registry, upstream_context::CacheContext};

/// The wait between two pages.
const PAGE_INTERVAL: Duration = Duration::from_millis(250);
/// Wait of a check for the rest of a version that the cache may have in part.
const REST_TIMEOUT: Duration = Duration::from_secs(30);
/// The most keys that a log line names.
const KEYS_MAX: usize = 10;

/// The result of one check.
#[derive(Debug)]
enum CheckResult {
    Equal,
    Different(Differences),
    /// Upstream no longer has the version: the resource is too quiet, or the list too long.
    Expired,
    /// kubefan may not list the resource.
    Forbidden(String),
    Failed(String),
}

/// Checks all caches, one after the other, about every `interval`, without end.
pub(super) async fn check_all(registry: Arc<Registry>, interval: Duration) {
    let context = &registry.context;
    // The jitter keeps replicas that started together from checking together.
    sleep(interval.mul_f64(context.generator().random_range(0.5..1.0))).await;
    loop {
        for cache in registry.caches.in_order() {
            check(context, &cache).await;
            sleep(PAGE_INTERVAL).await;
        }
        sleep(interval).await;
    }
}

async fn check(context: &CacheContext, cache: &Cache) {
    let Served { gvr, scope, hub, .. } = &cache.served;
    // A stale cache means that upstream has trouble; a check would only add load.
    if *hub.phase().borrow() != Phase::Synced {
        return;
    }
    if context.source.is_fallen_back() {
        // Each kubefan behind the one that is away would list.
        return;
    }
    let Some(result) = compare(context, &cache.served).await else { return };
    match &result {
        CheckResult::Forbidden(error) => cache.missing_right.list_is_forbidden(&cache.served, error),
        _ => cache.missing_right.list_is_allowed(),
    }
    let scope = scope.namespace();
    let label = match result {
        CheckResult::Equal => SelfCheck::Equal,
        CheckResult::Different(differences) => {
            warn!(resource = %gvr, scope, count = differences.count, keys = %differences, "the cache differs from upstream; listing again");
            cache.planned_relist.request(Instant::now(), RelistReason::SelfCheck);
            SelfCheck::Different
        }
        CheckResult::Expired => SelfCheck::Expired,
        CheckResult::Forbidden(_) => SelfCheck::Failed,
        CheckResult::Failed(error) => {
            debug!(resource = %gvr, scope, error, "no self-check");
            SelfCheck::Failed
        }
    };
    hub.metrics().self_check(label);
}

/// Compares one cache with upstream. `None` if it has no state, or if a relist replaced the
/// compared state.
async fn compare(context: &CacheContext, served: &Served) -> Option<CheckResult> {
    let lists = served.hub.lists();
    let CachePosition { store, version, .. } = served.hub.position()?;
    let target = context.metadata_target(served);
    let mut pages = MetadataPages::new(context.upstream.clone(), target, version);
    let mut comparison = Comparison::new(store.into_versions(), KEYS_MAX);
    loop {
        match pages.next().await {
            Ok(None) => break,
            Ok(Some(page)) => {
                for (key, version) in page {
                    if let Err(error) = comparison.compare(key, version) {
                        return Some(CheckResult::Failed(error.to_string()));
                    }
                }
            }
            Err(UpstreamError::Gone { .. }) => return Some(CheckResult::Expired),
            Err(UpstreamError::Forbidden { message }) => return Some(CheckResult::Forbidden(message)),
            Err(error) => return Some(CheckResult::Failed(error.to_string())),
        }
        sleep(PAGE_INTERVAL).await;
    }
    let mut differences = comparison.finish();
    if differences.count > 0 && !version.is_end() {
        if let Err(error) = served.hub.reached(version.above(), REST_TIMEOUT).await {
            return Some(CheckResult::Failed(format!("the cache may have a part of version {version}: {error}")));
        }
        // The rest of the version has arrived. An object whose event was lost still has the version
        // that was compared. An object that the cache has neither then nor now may have been
        // created and deleted meanwhile. If not, the next check finds it.
        let (now, _) = served.hub.state()?;
        differences.retain(|found| {
            let version = now.get(found.key.as_str()).map(|object| object.version());
            version.is_some() && version == found.cached
        });
    }
    // A relist has fixed any difference, and after a rewind of the cluster a difference means
    // nothing.
    if served.hub.lists() != lists {
        return None;
    }
    if differences.count == 0 {
        return Some(CheckResult::Equal);
    }
    // Another cluster's objects are not a difference.
    match context.upstream.confirm().await {
        Ok(()) => Some(CheckResult::Different(differences)),
        Err(error) => Some(CheckResult::Failed(error.to_string())),
    }
}
