//! The schema that a cache's objects were read with, and newer schemas that were found since.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kubefan_cache::{CacheWriter, Commit, Update, UpdateError};
use kubefan_fanout::Served;
use kubefan_peer::schema_text;
use kubefan_upstream::discovery::SchemaFingerprint;
use tokio::sync::Notify;

use super::planned_relist::PlannedRelist;

/// The schema that the cached objects were read with.
#[derive(Default)]
pub(super) struct CachedSchema {
    schemas: Mutex<Schemas>,
    /// Notified of a sign that the resource has another shape now.
    doubt: Notify,
}

#[derive(Default)]
struct Schemas {
    current: Option<SchemaFingerprint>,
    /// The schema of the relist that is due or under way.
    next: Option<SchemaFingerprint>,
    /// Whether the objects were read with another schema, and wait for the next version.
    awaits_version: bool,
}

impl CachedSchema {
    pub(super) fn new(current: Option<SchemaFingerprint>) -> Self {
        Self { schemas: Mutex::new(Schemas { current, ..Schemas::default() }), doubt: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Schemas> {
        self.schemas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the next list reads all objects with another schema.
    pub(super) fn changes_to(&self, next: SchemaFingerprint) {
        self.lock().next = Some(next);
    }

    /// Whether this is the schema that all objects and the shape of the cache were read with. False
    /// if it is unknown.
    pub(super) fn is_of(&self, found: &SchemaFingerprint) -> bool {
        let schemas = self.lock();
        let known = schemas.current.as_ref().and_then(|current| current.schema_hash.as_ref());
        known.is_some() && known == found.schema_hash.as_ref()
    }

    /// Notes a sign that the resource has another shape now.
    pub(super) fn request_check(&self) {
        self.doubt.notify_one();
    }

    /// Waits for the next sign. For one task only.
    pub(super) async fn check_requested(&self) {
        self.doubt.notified().await;
    }

    /// Notes that a list is complete.
    fn list_completed(&self) {
        let mut schemas = self.lock();
        if let Some(next) = schemas.next.take() {
            schemas.current = Some(next);
        }
    }

    /// Whether the cache will have other bytes at its next version.
    pub(super) fn awaits_version(&self) -> bool {
        self.lock().awaits_version
    }

    /// Applies an update to the cache, and notes when its objects are those of a new schema.
    pub(super) fn write(
        &self,
        writer: &mut CacheWriter,
        planned_relist: &PlannedRelist,
        update: Update,
    ) -> Result<Option<Commit>, UpdateError> {
        let may_end_old_schema = matches!(update, Update::ListEnd(_)) || writer.awaits_version();
        let applied = writer.apply(update);
        let is_complete = !writer.awaits_version() && !writer.is_listing();
        if may_end_old_schema {
            self.lock().awaits_version = writer.awaits_version();
        }
        // A list does not show a change of the schema that was noticed while it ran. The relist
        // that is planned then does.
        if may_end_old_schema && applied.is_ok() && is_complete && !planned_relist.is_planned() {
            self.list_completed();
        }
        applied
    }

    /// Returns the schema of all cached objects. `None` if it is unknown, or if the objects are
    /// still of an older one.
    pub(super) fn of_all_objects(&self) -> Option<SchemaFingerprint> {
        let schemas = self.lock();
        schemas.current.clone().filter(|_| schemas.next.is_none())
    }

    /// Returns the text that peers compare. `None` if the schema is unknown, or if the cached
    /// objects are still of an older one.
    pub(super) fn text(&self, served: &Served) -> Option<String> {
        let schemas = self.lock();
        let kind = &served.hub.resource().kind;
        let current = schemas.current.as_ref().filter(|_| schemas.next.is_none());
        schema_text(kind, &served.fields, current)
    }
}
