//! How far the cluster is, by a look-up that cannot be behind.
//!
//! A watch from a version that an apiserver has not reached is silent, and a replica that has not reached a version may lag or may be
//! asked for what never was: only this tells one from the other.

use serde::Deserialize;

use super::{
    client::{Upstream, Verb, encode_query},
    error::UpstreamError,
    reflector::Target,
};
use kubefan_model::{ResourceVersion, Scope};

/// A name that no object has; if one has, no harm is done.
const NO_NAME: &str = "kubefan-asks-for-the-version";

#[derive(Deserialize)]
struct Head {
    metadata: HeadMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct HeadMeta {
    resource_version: String,
}

impl Upstream {
    /// The version that the cluster has reached: a consistent list of one name, which is one look-up for the apiserver, and also moves
    /// its watch cache of the resource, so that bookmarks can follow.
    ///
    /// # Errors
    /// `Refused` where the server does not take the selector; whatever a request can meet.
    pub async fn cluster_version(&self, target: &Target) -> Result<ResourceVersion, UpstreamError> {
        let Head { metadata } = self.get_json(Verb::List, &version_path(target, None)).await?;
        metadata.resource_version.parse().map_err(UpstreamError::invalid)
    }
}

/// The list that tells it, with another parameter perhaps.
pub(super) fn version_path(target: &Target, with: Option<(&str, &str)>) -> String {
    let Target { gvr, scope, namespaced, field_selector, .. } = target;
    // In all namespaces a name would be a scan. This one is in every cluster, and no object needs to be in it.
    let default = Scope::Namespace("default".to_owned());
    let scope = if *namespaced && *scope == Scope::Cluster { &default } else { scope };
    let comma = if field_selector.is_empty() { "" } else { "," };
    let selector = format!("metadata.name={NO_NAME}{comma}{field_selector}");
    let query = [("limit", "1"), ("fieldSelector", selector.as_str())];
    gvr.collection_path(scope) + &encode_query(query.into_iter().chain(with))
}
