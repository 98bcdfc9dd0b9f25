//! How far the cluster is: a consistent read that costs upstream one look-up.
//!
//! Unlike a watch such a read is never behind, whichever apiserver answers it. So it tells whether versions went back, and how far a cache
//! has to be to be as fresh as a consistent read.

use serde::Deserialize;

use super::{
    client::{Upstream, Verb, encode_query},
    error::UpstreamError,
    reflector::Target,
};
use crate::model::{ResourceVersion, Scope};

/// A name that no object has; if one has, no harm is done.
const NO_NAME: &str = "kubefan-asks-for-the-version";

/// A list without what is in it.
#[derive(Deserialize)]
struct Head {
    metadata: ListMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta {
    resource_version: String,
}

/// The version that the cluster has reached: a consistent list of one name, which is one look-up for the apiserver, and also moves
/// its watch cache of the resource, so that bookmarks can follow.
///
/// # Errors
/// Whatever a list can meet; `Invalid` where the answer has no version.
pub async fn cluster_version(upstream: &Upstream, target: &Target) -> Result<ResourceVersion, UpstreamError> {
    let Target { gvr, scope, namespaced, field_selector, .. } = target;
    // In all namespaces a name would be a scan. This one is in every cluster, and no object needs to be in it.
    let default = Scope::Namespace("default".to_owned());
    let scope = if *namespaced && *scope == Scope::Cluster { &default } else { scope };
    let comma = if field_selector.is_empty() { "" } else { "," };
    let selector = format!("metadata.name={NO_NAME}{comma}{field_selector}");
    let path = gvr.collection_path(scope) + &encode_query([("limit", "1"), ("fieldSelector", &selector)]);
    let body = upstream.get(Verb::List, &path).await?;
    let Head { metadata } = serde_json::from_slice(&body).map_err(UpstreamError::invalid)?;
    metadata.resource_version.parse().map_err(UpstreamError::invalid)
}
