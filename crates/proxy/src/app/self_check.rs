//! The self-check: every cache against upstream's metadata at the very version of the cache, every few minutes.
//!
//! A lost event is a defect that nobody would notice: the cache looks as good as ever, and is wrong until the next relist. The check is
//! paced, so that it never is a burst: one resource at a time, a few pages per second.

use std::{sync::Arc, time::Duration};

use rand::RngExt;
use tokio::time::sleep;
use tracing::{debug, warn};

use super::{
    informer::Shared,
    registry::{Cache, Registry},
};
use crate::{
    cache::comparison::{Comparison, Differences},
    fanout::{Phase, Served},
    telemetry::metrics::SelfCheck,
    upstream::{UpstreamError, metadata::MetadataPages},
};

/// Between two pages.
const PAGE_INTERVAL: Duration = Duration::from_millis(250);
/// How many keys a log line names.
const KEYS_MAX: usize = 10;

/// What a check has found.
#[derive(Debug)]
enum Found {
    Equal,
    Different(Differences),
    /// The version is no longer held upstream: too quiet a resource, or too long a list. Nothing can be said.
    Expired,
    Failed(String),
}

impl Registry {
    /// Checks all caches, one after the other, about every `interval`.
    pub(super) async fn check_all(self: Arc<Self>, interval: Duration) {
        // Replicas that were started together do not check together.
        sleep(interval.mul_f64(self.shared.generator().random_range(0.5..1.0))).await;
        loop {
            let caches: Vec<Arc<Cache>> = self.caches.iter().map(|cache| cache.clone()).collect();
            for cache in caches {
                check(&self.shared, &cache).await;
                sleep(PAGE_INTERVAL).await;
            }
            sleep(interval).await;
        }
    }
}

async fn check(shared: &Shared, cache: &Cache) {
    let Served { gvr, scope, hub, .. } = &cache.served;
    // What is stale is not asked for a second time.
    if *hub.phase().borrow() != Phase::Synced {
        return;
    }
    let Some(found) = compare(shared, &cache.served).await else { return };
    let scope = scope.namespace();
    let result = match found {
        Found::Equal => SelfCheck::Equal,
        Found::Different(differences) => {
            warn!(resource = %gvr, scope, count = differences.count, keys = %differences, "the cache differs from upstream; listing again");
            cache.suspect.notify_one();
            SelfCheck::Different
        }
        Found::Expired => SelfCheck::Expired,
        Found::Failed(error) => {
            debug!(resource = %gvr, scope, error, "no self-check");
            SelfCheck::Failed
        }
    };
    hub.metrics().self_check(result);
}

/// `None` where nothing is cached, or what was compared is being replaced.
async fn compare(shared: &Shared, served: &Served) -> Option<Found> {
    let lists = served.hub.lists();
    let (store, version) = served.hub.state()?;
    let target = shared.metadata_target(served);
    let mut pages = MetadataPages::new(shared.upstream.clone(), target, version);
    let mut comparison = Comparison::new(store.into_versions(), KEYS_MAX);
    let doubt = shared.upstream.doubt();
    loop {
        match pages.next().await {
            Ok(None) => break,
            Ok(Some(_)) if pages.is_cached() => {
                let error = "the answer came out of a kubefan's cache, and is no word of the apiserver's";
                return Some(Found::Failed(error.to_owned()));
            }
            Ok(Some(page)) => {
                for (key, version) in page {
                    if let Err(error) = comparison.compare(key, version) {
                        return Some(Found::Failed(error.to_string()));
                    }
                }
            }
            Err(UpstreamError::Gone { .. }) => return Some(Found::Expired),
            Err(error) => return Some(Found::Failed(error.to_string())),
        }
        sleep(PAGE_INTERVAL).await;
    }
    // Whatever differs is mended by that, and after a rewind it means nothing.
    if served.hub.lists() != lists {
        return None;
    }
    let differences = comparison.finish();
    if differences.count == 0 {
        return Some(Found::Equal);
    }
    // What another cluster has is no difference.
    match shared.upstream.confirm(doubt).await {
        Ok(()) => Some(Found::Different(differences)),
        Err(error) => Some(Found::Failed(error.to_string())),
    }
}
