//! Warm start from a peer: a replica that starts takes state and history from one that runs, so that a rolling update loses no history.
//!
//! What a peer sends is a cache at one version: its objects, what is left of old changes, and its recent events. It is taken whole or not
//! at all, and nobody is served from it before the app has compared its keys, versions, uids and labels with upstream: a peer proves by
//! certificate who it is, which does not prove that it is right. The rest of the objects and the history are believed. Whatever goes wrong here costs time and nothing else, because a cold start is always possible.
//!
//! In the drawing it stands twice: the receiver beside `upstream`, as another source for a cache, and the sender beside `server`.

pub mod decode;
pub mod encode;
pub mod receiver;
pub mod sender;
pub mod server;
pub mod tls;

#[cfg(test)]
mod tests;

use crate::upstream::discovery::SchemaFingerprint;
use kubefan_common::{
    encoding::FrameError,
    proto::v1alpha1::{TransferHeader, TransferRequest},
};
use kubefan_model::{GroupVersionResource, Scope, fields::FieldTable, object::ObjectError};

pub use decode::{Decoder, Restored};
pub use encode::Encoder;
pub use receiver::{Dial, DnsDial, Peers};
pub use sender::{Offer, Sender, Source};

/// What a chunk holds before it is compressed, in bytes; one entry may be longer.
const CHUNK_BYTES: usize = 256 << 10;
/// The longest chunk that is taken, compressed or not, in bytes: above any object that an apiserver stores.
const CHUNK_BYTES_MAX: usize = 32 << 20;

/// Which cache it is: what two replicas must agree on before the one takes over what the other holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheIdentity {
    /// The identity of the cluster.
    pub cluster: String,
    /// The resource.
    pub gvr: GroupVersionResource,
    /// The whole cluster, or one namespace.
    pub scope: Scope,
    /// What everything cached is narrowed by.
    pub upstream_field_selector: String,
    /// What [`schema_text`] gives.
    pub schema: String,
}

/// Why a transfer gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The name of the peers leads nowhere.
    #[error("--peers {name}: {message}")]
    Resolve {
        /// What was asked for.
        name: String,
        /// What the resolver said.
        message: String,
    },
    /// There is none but this one itself.
    #[error("no other replica is there")]
    Alone,
    /// A certificate, a key or the peers' CA cannot be used.
    #[error("--peer-cert-file, --peer-key-file, --peer-ca-file: {0}")]
    Tls(String),
    /// A peer cannot be reached, or is not who it has to be.
    #[error("no connection: {0}")]
    Connect(String),
    /// A peer does not give what it was asked for.
    #[error("refused: {0}")]
    Refused(String),
    /// A peer has something else.
    #[error("it holds another cache: {what} is {theirs:?} there and {ours:?} here")]
    Differs {
        /// Which part of the identity.
        what: &'static str,
        /// The peer's.
        theirs: String,
        /// Ours.
        ours: String,
    },
    /// The transfer ended before all was there, or nothing came for too long.
    #[error("the transfer was cut off: {0}")]
    CutOff(String),
    /// More than is taken.
    #[error("the transfer has more than {0} bytes; raise --peer-transfer-bytes-max")]
    TooLarge(u64),
    /// It is not what was sent, or was never right.
    #[error("the transfer is broken: {0}")]
    Broken(String),
}

impl PeerError {
    fn broken(what: impl std::fmt::Display) -> Self {
        Self::Broken(what.to_string())
    }
}

impl From<FrameError> for PeerError {
    fn from(error: FrameError) -> Self {
        Self::broken(error)
    }
}

impl From<ObjectError> for PeerError {
    fn from(error: ObjectError) -> Self {
        Self::broken(error)
    }
}

/// The schema that objects are read by, in one text: two replicas with the same text read the same from the same bytes. `None` where the
/// server's version or the schema's hash may not be read: what is not known is not the same as what another does not know.
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
    fn of_request(request: TransferRequest) -> Self {
        let TransferRequest { cluster, group, version, resource, namespace, upstream_field_selector, schema } = request;
        let (gvr, scope) = (GroupVersionResource::new(group, version, resource), scope_of(namespace));
        Self { cluster, gvr, scope, upstream_field_selector, schema }
    }

    fn of_header(header: &TransferHeader) -> Self {
        let TransferHeader { cluster, group, version, resource, upstream_field_selector, schema, .. } = header.clone();
        let (gvr, scope) = (GroupVersionResource::new(group, version, resource), scope_of(header.namespace.clone()));
        Self { cluster, gvr, scope, upstream_field_selector, schema }
    }

    fn request(&self) -> TransferRequest {
        let Self { cluster, gvr, scope, upstream_field_selector, schema } = self.clone();
        let GroupVersionResource { group, version, resource } = gvr;
        let namespace = scope.namespace().to_owned();
        TransferRequest { cluster, group, version, resource, namespace, upstream_field_selector, schema }
    }

    /// Whether another replica means the same.
    ///
    /// # Errors
    /// [`PeerError::Differs`] names the first part that it does not.
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
