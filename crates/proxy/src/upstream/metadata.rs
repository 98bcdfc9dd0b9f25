//! Lists the metadata of all objects at one version, page by page, to compare a cache with it.
//!
//! Names and versions spare the network and the reader most of the object data, although the
//! apiserver still reads whole objects. Every page must have the requested version, because another
//! version would show differences that do not exist.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::upstream::{
    client::{Upstream, Verb, encode_query},
    error::UpstreamError,
};
use kubefan_model::{GroupVersionResource, ObjectKey, ResourceVersion, Scope};

/// The media types that client-go's metadata client requests. A server without
/// PartialObjectMetadata answers with full objects.
const ACCEPT: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
/// The response header that marks an answer from a kubefan's cache (RFC 9211).
const CACHE_STATUS: (&str, &str) = ("cache-status", "kubefan");
/// Objects per page.
const PAGE_OBJECTS: &str = "500";

/// The objects to list.
#[derive(Debug, Clone)]
pub struct MetadataTarget {
    /// The resource.
    pub gvr: GroupVersionResource,
    /// The whole cluster, or one namespace.
    pub scope: Scope,
    /// Narrows the list; empty for everything.
    pub label_selector: String,
    /// Narrows the list; empty for everything.
    pub field_selector: String,
}

/// A paged list in progress.
pub struct MetadataPages {
    upstream: Upstream,
    target: MetadataTarget,
    /// `None` before the first page of a consistent list.
    version: Option<ResourceVersion>,
    next: Next,
    is_cached: bool,
}

enum Next {
    First,
    Continue(String),
    End,
}

#[derive(Deserialize)]
struct Page {
    metadata: PageMeta,
    #[serde(default)]
    items: Option<Vec<Item>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMeta {
    #[serde(default)]
    resource_version: String,
    #[serde(default, rename = "continue")]
    next: String,
}

#[derive(Deserialize)]
struct Item {
    metadata: ItemMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ItemMeta {
    name: String,
    #[serde(default)]
    namespace: String,
    resource_version: String,
    #[serde(default)]
    uid: String,
    #[serde(default)]
    labels: Option<BTreeMap<String, String>>,
}

/// The metadata that distinguishes an object from its other versions and from other objects of the
/// same name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectMetadata {
    /// Namespace and name.
    pub key: ObjectKey,
    /// `metadata.resourceVersion`.
    pub version: ResourceVersion,
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
}

impl MetadataPages {
    /// A list at exactly `version`. No request is sent yet.
    pub fn new(upstream: Upstream, target: MetadataTarget, version: ResourceVersion) -> Self {
        Self { upstream, target, version: Some(version), next: Next::First, is_cached: false }
    }

    /// A consistent list, at the version that the cluster has reached. No request is sent yet.
    pub fn consistent(upstream: Upstream, target: MetadataTarget) -> Self {
        Self { upstream, target, version: None, next: Next::First, is_cached: false }
    }

    /// The version of the list; `None` before the first page of a consistent list.
    pub fn version(&self) -> Option<ResourceVersion> {
        self.version
    }

    /// Whether the last page came from a kubefan's cache, which makes it useless as a check against
    /// the apiserver.
    pub fn is_cached(&self) -> bool {
        self.is_cached
    }

    /// The next page, in key order; `None` after the last.
    ///
    /// # Errors
    /// `Gone` if upstream no longer has the version, `VersionTooLarge` if upstream has not reached
    /// it; otherwise any error of a request.
    pub async fn next(&mut self) -> Result<Option<Vec<(ObjectKey, ResourceVersion)>>, UpstreamError> {
        let page = self.next_told().await?;
        Ok(page.map(|page| page.into_iter().map(|ObjectMetadata { key, version, .. }| (key, version)).collect()))
    }

    /// As [`Self::next`], with the objects' uids and labels.
    ///
    /// # Errors
    /// As [`Self::next`].
    pub async fn next_told(&mut self) -> Result<Option<Vec<ObjectMetadata>>, UpstreamError> {
        let MetadataTarget { gvr, scope, label_selector, field_selector } = &self.target;
        let version = self.version.map(|version| version.to_string()).unwrap_or_default();
        let position: &[_] = match &self.next {
            Next::First if version.is_empty() => &[],
            Next::First => &[("resourceVersion", version.as_str()), ("resourceVersionMatch", "Exact")],
            Next::Continue(token) => &[("continue", token.as_str())],
            Next::End => return Ok(None),
        };
        let selectors = [("labelSelector", label_selector.as_str()), ("fieldSelector", field_selector)];
        let selectors = selectors.into_iter().filter(|(_, selector)| !selector.is_empty());
        let query = [("limit", PAGE_OBJECTS)].into_iter().chain(position.iter().copied()).chain(selectors);
        let path = gvr.collection_path(scope) + &encode_query(query);
        let answer = self.upstream.get_accept(Verb::List, &path, ACCEPT).await?;
        let (header, cache) = CACHE_STATUS;
        self.is_cached = answer.headers().get(header).is_some_and(|by| by.as_bytes().starts_with(cache.as_bytes()));
        let Page { metadata, items } = serde_json::from_slice(answer.body()).map_err(UpstreamError::invalid)?;
        if version.is_empty() {
            self.version = Some(metadata.resource_version.parse().map_err(UpstreamError::invalid)?);
        } else if metadata.resource_version != version {
            let got = metadata.resource_version;
            return Err(UpstreamError::invalid(format_args!("a list at version {got:?} instead of exactly {version}")));
        }
        self.next = if metadata.next.is_empty() { Next::End } else { Next::Continue(metadata.next) };
        let item = |Item { metadata }: Item| {
            let ItemMeta { name, namespace, resource_version, uid, labels } = metadata;
            let version = resource_version.parse().map_err(UpstreamError::invalid)?;
            Ok(ObjectMetadata {
                key: ObjectKey::new(&namespace, &name),
                version,
                uid,
                labels: labels.unwrap_or_default(),
            })
        };
        items.unwrap_or_default().into_iter().map(item).collect::<Result<_, _>>().map(Some)
    }
}
