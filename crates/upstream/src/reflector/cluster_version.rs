//! Asks how far the cluster's resource versions have advanced, with a consistent read.
//!
//! An apiserver answers a watch from a version that it has not reached with silence. Either that
//! replica lags, or the version never existed, for example because etcd was restored. Only a
//! consistent read distinguishes the two, because it is never behind.

use kubefan_model::{ResourceVersion, Scope};
use serde::Deserialize;

use crate::{
    client::{Upstream, Verb, encode_query},
    error::UpstreamError,
    reflector::target::Target,
};

/// A name that no object should have. If one does, the answer is the same.
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
    /// Returns the version that the cluster has reached. The request is a consistent list of one
    /// name: a single look-up for the apiserver. It also advances the apiserver's watch cache of
    /// the resource, so that bookmarks can follow.
    ///
    /// # Errors
    /// `Refused` if the server rejects the selector; otherwise any error of a request.
    pub async fn cluster_version(&self, target: &Target) -> Result<ResourceVersion, UpstreamError> {
        let Head { metadata } = self.get_json(Verb::List, &version_path(target, None)).await?;
        metadata.resource_version.parse().map_err(UpstreamError::invalid)
    }
}

/// Returns the path and query of that list, with an optional further parameter.
pub(crate) fn version_path(target: &Target, with: Option<(&str, &str)>) -> String {
    let Target { gvr, scope, namespaced, field_selector, .. } = target;
    // A name selector over all namespaces is a scan. The namespace `default` exists in every
    // cluster and need not contain objects of the resource.
    let default = Scope::Namespace("default".to_owned());
    let scope = if *namespaced && *scope == Scope::Cluster { &default } else { scope };
    let comma = if field_selector.is_empty() { "" } else { "," };
    let selector = format!("metadata.name={NO_NAME}{comma}{field_selector}");
    let query = [("limit", "1"), ("fieldSelector", selector.as_str())];
    gvr.collection_path(scope) + &encode_query(query.into_iter().chain(with))
}
