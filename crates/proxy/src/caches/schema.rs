//! The schema that a cache's objects were read with, and the check that notices a new one.
//!
//! After a schema change or an upgrade the apiserver may write the same object version with other
//! bytes. A cache that missed the change would mix both.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::time::sleep;

use super::context::CacheContext;
use crate::{fanout::Served, peer::schema_text, upstream::discovery::SchemaFingerprint};
use kubefan_model::GroupVersionResource;

/// The schema that the cached objects were read with.
#[derive(Default)]
pub(super) struct CachedSchema(Mutex<Schemas>);

#[derive(Default)]
struct Schemas {
    current: Option<SchemaFingerprint>,
    /// The schema of the relist that is due or under way.
    next: Option<SchemaFingerprint>,
}

impl CachedSchema {
    pub(super) fn new(current: Option<SchemaFingerprint>) -> Self {
        Self(Mutex::new(Schemas { current, next: None }))
    }

    fn lock(&self) -> MutexGuard<'_, Schemas> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the next list reads all objects with another schema.
    pub(super) fn changes_to(&self, next: SchemaFingerprint) {
        self.lock().next = Some(next);
    }

    /// Notes that a list is complete.
    pub(super) fn list_completed(&self) {
        let mut schemas = self.lock();
        if let Some(next) = schemas.next.take() {
            schemas.current = Some(next);
        }
    }

    /// The text that peers compare. `None` if the schema is unknown, or if the cached objects are
    /// still of an older one.
    pub(super) fn text(&self, served: &Served) -> Option<String> {
        let schemas = self.lock();
        let kind = &served.hub.resource().kind;
        let current = schemas.current.as_ref().filter(|_| schemas.next.is_none());
        schema_text(kind, &served.fields, current)
    }
}

/// Completes when the schema of a resource or the server's version differs from `known`, or from
/// the first answer if `known` is `None`. Two checks in a row must agree on the change, because
/// during an upgrade apiservers of two versions answer in turn.
pub(super) async fn schema_changed(
    context: CacheContext,
    gvr: GroupVersionResource,
    mut known: Option<SchemaFingerprint>,
) -> SchemaFingerprint {
    let mut seen = None;
    loop {
        // A failed check says nothing about the schema.
        if let Ok(now) = context.discovery.recent_schema_fingerprint(&gvr.group, &gvr.version).await {
            match &known {
                Some(before) if *before == now => seen = None,
                Some(_) if seen.as_ref() == Some(&now) => return now,
                Some(_) => seen = Some(now),
                None => known = Some(now),
            }
        }
        sleep(context.schema_check_interval).await;
    }
}
