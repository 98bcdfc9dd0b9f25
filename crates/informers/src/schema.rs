//! The check that notices a new schema.
//!
//! After a schema change or an upgrade the apiserver may write the same object version with other
//! bytes. A cache that missed the change would mix both.

use std::time::Duration;

use kubefan_cache::RelistReason;
use kubefan_fanout::Served;
use kubefan_model::GroupVersionResource;
use kubefan_upstream::discovery::SchemaFingerprint;
use rand::RngExt;
use tokio::time::{Instant, sleep};
use tracing::info;

use super::{
    cached_schema::CachedSchema,
    planned_relist::PlannedRelist,
    shape::{CheckStart, ShapeCheck, check_shape, other_shape_message},
    upstream_context::CacheContext,
};

/// The time over which the relists of all caches are spread after an upgrade of the apiserver.
const RELIST_SPREAD: Duration = Duration::from_secs(300);

/// Plans a relist of a watched cache whenever the schema of its resource or the server's version
/// differs from `known`, or is known for the first time. Completes when the cache no longer has the
/// shape of its resource and must be set up again.
///
/// A new server version concerns all caches at once, so their relists are spread over
/// [`RELIST_SPREAD`].
pub(super) async fn follow_schema(
    context: &CacheContext,
    served: &Served,
    cached: &CachedSchema,
    planned_relist: &PlannedRelist,
    known: Option<SchemaFingerprint>,
) -> String {
    let gvr = &served.gvr;
    let mut random = context.generator();
    let mut checks = Checks { known, seen: None };
    loop {
        let (now, is_upgrade) = next_schema(context, gvr, &mut checks).await;
        cached.changes_to(now);
        // If another cluster answers, or none, the list retries until this one answers.
        if context.upstream.confirm().await.is_ok()
            && check_shape(context, served, cached, CheckStart::Discovery).await == ShapeCheck::Changed
        {
            return other_shape_message(served);
        }
        let is_fallen_back = context.source.is_fallen_back();
        if context.source.is_grpc() && !is_fallen_back {
            // The other kubefan lists again, and sends the changes.
            continue;
        }
        // While that one is away, each kubefan behind it lists.
        let delay = if is_upgrade || is_fallen_back { RELIST_SPREAD.mul_f64(random.random()) } else { Duration::ZERO };
        info!(resource = %gvr, ?delay, "the schema or the server's version may have changed; listing again");
        planned_relist.request(Instant::now() + delay, RelistReason::SchemaChanged);
    }
}

/// Completes when the schema of a resource or the server's version is no longer `known`.
pub(super) async fn schema_changes(
    context: &CacheContext,
    gvr: &GroupVersionResource,
    known: Option<SchemaFingerprint>,
) {
    next_schema(context, gvr, &mut Checks { known, seen: None }).await;
}

/// Completes with the next schema that the cache's objects may not have been read with, and with
/// whether the server's version has changed.
async fn next_schema(
    context: &CacheContext,
    gvr: &GroupVersionResource,
    checks: &mut Checks,
) -> (SchemaFingerprint, bool) {
    loop {
        // A failed check says nothing about the schema.
        if let Ok(now) = context.discovery.schema_fingerprint(gvr).await
            && let Some(is_upgrade) = checks.take(&now)
        {
            return (now, is_upgrade);
        }
        sleep(context.source.schema_check_interval(context.schema_check_interval)).await;
    }
}

/// The results of the checks of the schema so far.
#[derive(Default)]
struct Checks {
    known: Option<SchemaFingerprint>,
    /// The other schema that the last check found.
    seen: Option<SchemaFingerprint>,
}

impl Checks {
    /// Takes the result of a check. If the objects may have been read with another schema, returns
    /// whether the server's version has changed. Two checks in a row must agree on a change,
    /// because during an upgrade apiservers of two versions answer in turn.
    ///
    /// The first schema after failed checks counts as a change, because it may have changed since
    /// the objects were read. If they were not read yet, their first list is the planned one.
    fn take(&mut self, now: &SchemaFingerprint) -> Option<bool> {
        let is_upgrade = match &self.known {
            None => false,
            Some(known) if known == now => {
                self.seen = None;
                return None;
            }
            Some(known) if self.seen.as_ref() == Some(now) => known.server_version != now.server_version,
            Some(_) => {
                self.seen = Some(now.clone());
                return None;
            }
        };
        *self = Self { known: Some(now.clone()), seen: None };
        Some(is_upgrade)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema(server_version: &str, schema_hash: &str) -> SchemaFingerprint {
        let text = |text: &str| Some(text.to_owned());
        SchemaFingerprint { server_version: text(server_version), schema_hash: text(schema_hash) }
    }

    #[test]
    fn two_checks_must_agree_on_a_change() {
        let mut checks = Checks { known: Some(schema("1", "a")), seen: None };
        assert_eq!(checks.take(&schema("1", "a")), None);
        assert_eq!(checks.take(&schema("1", "b")), None);
        assert_eq!(checks.take(&schema("1", "a")), None, "apiservers of two versions answer in turn");
        assert_eq!(checks.take(&schema("1", "b")), None);
        assert_eq!(checks.take(&schema("1", "b")), Some(false));
        assert_eq!(checks.take(&schema("1", "b")), None);
        assert_eq!(checks.take(&schema("2", "b")), None);
        assert_eq!(checks.take(&schema("2", "b")), Some(true), "an upgrade");
    }

    #[test]
    fn a_schema_that_is_known_only_after_a_list_may_not_be_that_of_the_list() {
        let mut checks = Checks::default();
        assert_eq!(checks.take(&schema("1", "a")), Some(false));
        assert_eq!(checks.take(&schema("1", "a")), None);
    }
}
