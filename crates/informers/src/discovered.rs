//! A resource as upstream's discovery describes it, with everything that a cache of it needs.

use std::sync::Arc;

use kubefan_fanout::Served;
use kubefan_model::{GroupVersionResource, fields::FieldTable, object::ObjectParser, protobuf::kinds};
use kubefan_upstream::discovery::{CustomResourceSchema, DiscoveryError, ResourceInfo, SchemaFingerprint};

use super::upstream_context::CacheContext;

/// A resource that upstream serves.
pub(super) struct DiscoveredResource {
    pub(super) info: ResourceInfo,
    /// The fields that selectors may name.
    pub(super) fields: Arc<FieldTable>,
    /// The kind of its lists.
    pub(super) list_kind: Arc<str>,
    /// The schema of `fields`, or an older one. `None` if it could not be read.
    pub(super) schema: Option<SchemaFingerprint>,
}

impl DiscoveredResource {
    /// Finds a resource and its selectable fields. If `group` and `version` are empty, `resource`
    /// may be any name that kubectl accepts.
    pub(super) async fn find(
        context: &CacheContext,
        group: &str,
        version: &str,
        resource: &str,
    ) -> Result<Self, DiscoveryError> {
        let discovery = &context.discovery;
        let info = match (group, version) {
            ("", "") => discovery.resolve(resource).await?,
            _ => discovery.find(group, version, resource).await?,
        };
        let info = if kinds::is_known(&info.gvr) { info } else { discovery.find_recent(&info.gvr).await? };
        Self::of(context, info).await
    }

    /// Returns a resource that discovery has found, with its selectable fields.
    pub(super) async fn of(context: &CacheContext, info: ResourceInfo) -> Result<Self, DiscoveryError> {
        let discovery = &context.discovery;
        // Read before the fields, so that a change in between counts as a change.
        let schema = discovery.schema_fingerprint(&info.gvr).await.ok();
        let CustomResourceSchema { selectable_fields, list_kind } =
            discovery.custom_resource_schema(&info.gvr, &info.kind).await?;
        let fields = Arc::new(FieldTable::new(&info.gvr, info.namespaced, &selectable_fields));
        let list_kind = list_kind.unwrap_or_else(|| format!("{}List", info.kind)).into();
        Ok(Self { info, fields, list_kind, schema })
    }

    /// Returns a parser for its objects in protobuf.
    ///
    /// # Errors
    /// The reason why kubefan cannot read them, as a sentence about the resource.
    pub(super) fn protobuf_parser(&self) -> Result<ObjectParser, String> {
        let gvr = &self.info.gvr;
        if !kinds::is_known(gvr) {
            return Err(not_built_in(gvr));
        }
        ObjectParser::protobuf(gvr, &self.fields)
            .ok_or_else(|| format!("{gvr} has selectable fields that kubefan cannot read from protobuf"))
    }

    /// Whether a cache is of this resource, and can serve it without being set up again.
    pub(super) fn is_of(&self, served: &Served) -> bool {
        self.info.gvr == served.gvr && self.matches(served)
    }

    /// Whether a cache can serve this resource without being set up again: its names and selectable
    /// fields are the same.
    pub(super) fn matches(&self, served: &Served) -> bool {
        let Self { info, fields, list_kind, .. } = self;
        info.kind == served.hub.resource().kind
            && info.namespaced == served.namespaced
            && *fields == served.fields
            && *list_kind == served.list_kind
    }
}

/// Returns the reason why a resource is not cached as protobuf, if kubefan has no protobuf type for
/// it.
pub(super) fn not_built_in(gvr: &GroupVersionResource) -> String {
    format!("{gvr} is not cached as protobuf: it is no built-in type that kubefan knows")
}
