//! Whether a cache still has the shape of its resource: kind, kind of lists, scope and selectable
//! fields. A cache of another shape answers requests that upstream refuses, and differently.
//!
//! The definition of a custom resource can be deleted and created again with another shape.
//! Upstream then ends the watches of the old one, and answers the next with 404 or 410, after which
//! the shape is checked at once. But an apiserver serves the new definition a moment before its
//! discovery shows it, and a second before its schemas do. So the check is repeated for some
//! seconds, and also when a cache is new.
//!
//! A 410 is frequent for other reasons, and a restarted apiserver gives it to all caches at once.
//! So they share the documents, and the repeated checks need only the hashes of the schemas.

use std::time::Duration;

use kubefan_common::backoff::{Backoff, BackoffOptions};
use kubefan_fanout::Served;
use kubefan_upstream::discovery::DiscoveryError;
use tokio::time::{Instant, sleep};

use super::{cached_schema::CachedSchema, discovered::DiscoveredResource, upstream_context::CacheContext};

/// The waits before the checks after a sign.
const LOOKS: [Duration; 3] = [Duration::from_secs(2), Duration::from_secs(2), Duration::from_secs(4)];
/// The pauses before the next sign counts. A resource that fails for long gives one sign after the
/// other.
const PAUSES: BackoffOptions = BackoffOptions {
    initial: Duration::from_secs(2),
    max: Duration::from_secs(300),
    factor: 2.0,
    jitter: 0.0,
    reset_after: Duration::from_secs(600),
};

/// The document that a check begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CheckStart {
    /// The hash of the schema. If that is the known one, the shape is too.
    HashFirst,
    /// Discovery, whose documents are longer and a moment ahead of the hash.
    Discovery,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShapeCheck {
    /// The resource has the shape of the cache, as far as is known.
    Unchanged,
    /// The resource has another shape.
    Changed,
    /// The resource does not exist.
    Missing,
}

/// Looks for another shape whenever there is a sign of one, and once for a new cache. Completes
/// when there is one, and the cache must be set up again.
pub(super) async fn follow_shape(context: &CacheContext, served: &Served, cached: &CachedSchema) -> String {
    if served.is_built_in() {
        return std::future::pending().await;
    }
    let mut start = CheckStart::Discovery;
    let mut pauses = Backoff::new(PAUSES);
    let mut random = context.generator();
    loop {
        for wait in LOOKS {
            sleep(wait).await;
            if check_shape(context, served, cached, start).await == ShapeCheck::Changed
                && context.upstream.confirm().await.is_ok()
            {
                return other_shape_message(served);
            }
        }
        start = CheckStart::HashFirst;
        sleep(pauses.next_delay(Instant::now(), None, &mut random)).await;
        cached.check_requested().await;
    }
}

/// Asks upstream for the shape of a resource. Documents that were requested before this call do not
/// count, so it may wait for the next time that discovery may be asked.
pub(super) async fn check_shape(
    context: &CacheContext,
    served: &Served,
    cached: &CachedSchema,
    start: CheckStart,
) -> ShapeCheck {
    let discovery = &context.discovery;
    let asked_at = Instant::now();
    let is_known = async || {
        let schema = discovery.schema_fingerprint_since(&served.gvr, asked_at).await;
        schema.is_ok_and(|schema| cached.is_of(&schema))
    };
    if start == CheckStart::HashFirst && is_known().await {
        return ShapeCheck::Unchanged;
    }
    let info = match discovery.find_since(&served.gvr, asked_at).await {
        Ok(info) => info,
        Err(DiscoveryError::UnknownResource { .. }) => return ShapeCheck::Missing,
        // The list that follows reports the problem.
        Err(_) => return ShapeCheck::Unchanged,
    };
    if info.kind != served.hub.resource().kind || info.namespaced != served.namespaced {
        return ShapeCheck::Changed;
    }
    if served.is_built_in() || is_known().await {
        return ShapeCheck::Unchanged;
    }
    match DiscoveredResource::of(context, info).await {
        Ok(discovered) if !discovered.matches(served) => ShapeCheck::Changed,
        _ => ShapeCheck::Unchanged,
    }
}

/// Says that a resource has another shape than its cache.
pub(super) fn other_shape_message(served: &Served) -> String {
    format!("{} is served with another schema", served.gvr)
}
