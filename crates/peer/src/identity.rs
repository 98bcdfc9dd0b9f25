//! The identity of a cache: everything that two replicas must agree on before one may use the
//! other's data.

use kubefan_common::proto::v1alpha1::{TransferHeader, TransferRequest};
use kubefan_model::{GroupVersionResource, Scope, fields::FieldTable};
use kubefan_upstream::discovery::SchemaFingerprint;

use super::error::PeerError;

/// Identifies a cache. Two replicas must agree on every field before one uses the other's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheIdentity {
    /// The identity of the cluster.
    pub cluster: String,
    /// The resource.
    pub gvr: GroupVersionResource,
    /// The whole cluster, or one namespace.
    pub scope: Scope,
    /// The field selector that limits the cached objects; empty for everything.
    pub upstream_field_selector: String,
    /// The result of [`schema_text`].
    pub schema: String,
}

/// The schema of objects, as text: two replicas with the same text read the same bytes the same
/// way. `None` if the server version or the schema hash is unknown, because two unknown schemas are
/// not necessarily equal.
pub fn schema_text(kind: &str, fields: &FieldTable, schema: Option<&SchemaFingerprint>) -> Option<String> {
    let SchemaFingerprint { server_version: Some(server), schema_hash: Some(hash) } = schema? else { return None };
    let mut text = format!("{kind}; apiserver {server}; schema {hash}; fields");
    for field in fields.fields() {
        let paths = field.paths.iter().map(|path| path.join(".")).collect::<Vec<_>>().join("|");
        text += &format!(" {}={paths}:{}", field.name, field.default);
    }
    Some(text)
}

impl CacheIdentity {
    pub(super) fn of_request(request: TransferRequest) -> Self {
        let TransferRequest { cluster, group, version, resource, namespace, upstream_field_selector, schema } = request;
        let gvr = GroupVersionResource::new(group, version, resource);
        let scope = scope_of(namespace);
        Self { cluster, gvr, scope, upstream_field_selector, schema }
    }

    /// Returns the identity of a cache that is sent or saved.
    pub fn of_header(header: &TransferHeader) -> Self {
        let TransferHeader { cluster, group, version, resource, upstream_field_selector, schema, .. } = header.clone();
        let gvr = GroupVersionResource::new(group, version, resource);
        let scope = scope_of(header.namespace.clone());
        Self { cluster, gvr, scope, upstream_field_selector, schema }
    }

    pub(super) fn request(&self) -> TransferRequest {
        let Self { cluster, gvr, scope, upstream_field_selector, schema } = self.clone();
        let GroupVersionResource { group, version, resource } = gvr;
        let namespace = scope.namespace().to_owned();
        TransferRequest { cluster, group, version, resource, namespace, upstream_field_selector, schema }
    }

    /// Compares this identity with another replica's.
    ///
    /// # Errors
    /// [`PeerError::Differs`] names the first part that differs.
    pub fn agrees_with(&self, theirs: &Self) -> Result<(), PeerError> {
        let scope = |of: &Self| format!("{} in {:?}", of.gvr, of.scope.namespace());
        let parts = [
            ("the cluster", theirs.cluster.clone(), self.cluster.clone()),
            ("the resource", scope(theirs), scope(self)),
            ("its version", theirs.gvr.version.clone(), self.gvr.version.clone()),
            ("the field selector", theirs.upstream_field_selector.clone(), self.upstream_field_selector.clone()),
            ("the schema", theirs.schema.clone(), self.schema.clone()),
        ];
        match parts.into_iter().find(|(_, theirs, ours)| theirs != ours) {
            None => Ok(()),
            Some((what, theirs, ours)) => Err(PeerError::Differs { what, theirs, ours }),
        }
    }
}

fn scope_of(namespace: String) -> Scope {
    if namespace.is_empty() { Scope::Cluster } else { Scope::Namespace(namespace) }
}
