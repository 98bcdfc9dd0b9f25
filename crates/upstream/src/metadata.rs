//! A list of all objects' metadata at one version, page by page, to compare a cache with.
//!
//! Metadata alone saves most of the network traffic and decoding; the apiserver still reads the
//! full objects. Two hazards would make a comparison worthless, so each page is checked for them: a
//! page of another version shows differences where there are none, and a page from the cache of
//! another kubefan confirms nothing, because that cache may have the same error.

use std::collections::BTreeMap;

use kubefan_common::api_json::{ListJson, ListMeta, check_next_page, null_as_default};
use kubefan_model::{
    GroupVersionResource, ObjectKey, ResourceVersion, Scope, fields::FieldTable, selection::Selection,
};
use serde::Deserialize;

use crate::{
    client::{Upstream, Verb, encode_query},
    error::UpstreamError,
};

/// The media types that `kubectl` and client-go's metadata client request. A server that does not
/// know the first one answers with full objects.
const ACCEPT: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
/// The header that says how caches have handled a request (RFC 9211).
const CACHE_STATUS: &str = "cache-status";
/// Objects per page, unless the caller names another size.
const PAGE_OBJECTS: usize = 500;

/// The objects to list.
#[derive(Debug, Clone)]
pub struct MetadataTarget {
    /// The resource.
    pub gvr: GroupVersionResource,
    /// The whole cluster, or one namespace.
    pub scope: Scope,
    /// Empty selects everything.
    pub label_selector: String,
    /// Empty selects everything.
    pub field_selector: String,
}

impl MetadataTarget {
    /// Limits the list to the selected objects, which are in this scope.
    pub fn narrowed_to(mut self, selection: &Selection, fields: &FieldTable) -> Self {
        let namespace = &selection.spec().namespace;
        if !namespace.is_empty() {
            self.scope = Scope::Namespace(namespace.clone());
        }
        self.label_selector = selection.spec().labels.to_string();
        let selector = selection.field_selector(fields).to_string();
        let selectors = [std::mem::take(&mut self.field_selector), selector];
        self.field_selector = selectors.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(",");
        self
    }
}

/// A paginated list.
pub struct MetadataPages {
    upstream: Upstream,
    target: MetadataTarget,
    /// `None` before the first page of a consistent list.
    version: Option<ResourceVersion>,
    page_objects: usize,
    next: NextPage,
}

enum NextPage {
    First,
    Continue(String),
    End,
}

#[derive(Deserialize)]
struct Item {
    metadata: ItemMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ItemMeta {
    name: String,
    #[serde(default, deserialize_with = "null_as_default")]
    namespace: String,
    resource_version: String,
    #[serde(default, deserialize_with = "null_as_default")]
    uid: String,
    #[serde(default, deserialize_with = "null_as_default")]
    labels: BTreeMap<String, String>,
}

/// The metadata that identifies one version of one object.
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
        Self { upstream, target, version: Some(version), page_objects: PAGE_OBJECTS, next: NextPage::First }
    }

    /// A consistent list, at the version that the cluster has reached. No request is sent yet.
    pub fn consistent(upstream: Upstream, target: MetadataTarget) -> Self {
        Self { upstream, target, version: None, page_objects: PAGE_OBJECTS, next: NextPage::First }
    }

    /// Limits pages to this many objects.
    pub fn with_page_objects(self, page_objects: usize) -> Self {
        Self { page_objects, ..self }
    }

    /// Whether the last page was read.
    pub fn is_complete(&self) -> bool {
        matches!(self.next, NextPage::End)
    }

    /// The version of the list. `None` before the first page of a consistent list.
    pub fn version(&self) -> Option<ResourceVersion> {
        self.version
    }

    /// The next page, in key order. `None` after the last page.
    ///
    /// # Errors
    /// `Gone` if upstream no longer has the version, `VersionTooLarge` if it has not reached it,
    /// `Cached` if another kubefan answered from its cache, and every error of a request.
    pub async fn next(&mut self) -> Result<Option<Vec<(ObjectKey, ResourceVersion)>>, UpstreamError> {
        let page = self.next_objects().await?;
        Ok(page.map(|page| page.into_iter().map(|ObjectMetadata { key, version, .. }| (key, version)).collect()))
    }

    /// Like [`Self::next`], with the objects' uids and labels.
    ///
    /// # Errors
    /// As [`Self::next`].
    pub async fn next_objects(&mut self) -> Result<Option<Vec<ObjectMetadata>>, UpstreamError> {
        let MetadataTarget { gvr, scope, label_selector, field_selector } = &self.target;
        let version = self.version.map(|version| version.whole().to_string()).unwrap_or_default();
        let limit = self.page_objects.to_string();
        let position: &[_] = match &self.next {
            NextPage::First if version.is_empty() => &[],
            NextPage::First => &[("resourceVersion", version.as_str()), ("resourceVersionMatch", "Exact")],
            NextPage::Continue(token) => &[("continue", token.as_str())],
            NextPage::End => return Ok(None),
        };
        let selectors = [("labelSelector", label_selector.as_str()), ("fieldSelector", field_selector)];
        let query = [("limit", limit.as_str())].into_iter().chain(position.iter().copied()).chain(selectors);
        let path = gvr.collection_path(scope) + &encode_query(query);
        let answer = self.upstream.get_accept(Verb::List, &path, ACCEPT).await?;
        if is_from_kubefan(answer.headers()) {
            return Err(UpstreamError::Cached { server: self.upstream.server().to_owned() });
        }
        let page: ListJson<Item> = serde_json::from_slice(answer.body()).map_err(UpstreamError::invalid_json)?;
        let ListMeta { resource_version: got, continue_token: next, .. } = page.metadata.unwrap_or_default();
        if version.is_empty() {
            self.version = Some(got.parse().map_err(UpstreamError::invalid)?);
        } else if got != version {
            return Err(UpstreamError::invalid(format_args!("a list at version {got:?} instead of exactly {version}")));
        }
        if let NextPage::Continue(requested) = &self.next {
            check_next_page(&next, requested).map_err(UpstreamError::invalid)?;
        }
        self.next = if next.is_empty() { NextPage::End } else { NextPage::Continue(next) };
        let item = |Item { metadata }: Item| {
            let ItemMeta { name, namespace, resource_version, uid, labels } = metadata;
            let version = resource_version.parse().map_err(UpstreamError::invalid)?;
            Ok(ObjectMetadata { key: ObjectKey::new(&namespace, &name), version, uid, labels })
        };
        page.items.unwrap_or_default().into_iter().map(item).collect::<Result<_, _>>().map(Some)
    }
}

/// Whether the cache of a kubefan has answered. With the parameter `fwd` it has asked the
/// apiserver.
fn is_from_kubefan(headers: &http::HeaderMap) -> bool {
    let values = headers.get_all(CACHE_STATUS).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|member| {
        let mut parts = member.split(';').map(str::trim);
        parts.next() == Some("kubefan") && !parts.any(|parameter| parameter.starts_with("fwd="))
    })
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::{BodyExt, Full};
    use tower::{BoxError, service_fn, util::BoxCloneSyncService};

    use super::*;
    use crate::client::UpstreamOptions;

    /// An upstream that answers every list with one pod, and with a `Cache-Status` header if one is
    /// given.
    fn upstream(cache_status: Option<&'static str>) -> Upstream {
        let body = r#"{"kind": "PartialObjectMetadataList", "metadata": {"resourceVersion": "7"},
            "items": [{"metadata": {"name": "a", "namespace": "x", "resourceVersion": "5", "uid": "u"}}]}"#;
        answering(body, cache_status)
    }

    /// An upstream that answers every list with this page.
    fn answering(body: &'static str, cache_status: Option<&'static str>) -> Upstream {
        let service = service_fn(move |_: http::Request<Bytes>| async move {
            let mut response = http::Response::builder();
            if let Some(value) = cache_status {
                response = response.header(CACHE_STATUS, value);
            }
            Ok::<_, BoxError>(response.body(Full::new(Bytes::from(body)).map_err(BoxError::from).boxed_unsync())?)
        });
        let service = BoxCloneSyncService::new(service);
        let base = http::Uri::from_static("http://sim");
        Upstream::from_service(service, &base, UpstreamOptions::default())
    }

    fn pods() -> MetadataTarget {
        MetadataTarget {
            gvr: GroupVersionResource::new("", "v1", "pods"),
            scope: Scope::Cluster,
            label_selector: String::new(),
            field_selector: String::new(),
        }
    }

    fn lists(cache_status: Option<&'static str>) -> [MetadataPages; 2] {
        let exact = MetadataPages::new(upstream(cache_status), pods(), "7".parse().unwrap());
        [exact, MetadataPages::consistent(upstream(cache_status), pods())]
    }

    #[tokio::test]
    async fn a_page_that_leads_to_itself_ends_the_list() {
        let page = r#"{"metadata": {"resourceVersion": "7", "continue": "next"}, "items": []}"#;
        let mut pages = MetadataPages::consistent(answering(page, None), pods());
        assert_eq!(pages.next().await, Ok(Some(Vec::new())));
        let error = pages.next().await.unwrap_err().to_string();
        assert!(error.contains("leads to the same page"), "{error}");
    }

    #[tokio::test]
    async fn null_is_read_as_client_go_reads_it() {
        let page = r#"{"kind": null, "metadata": {"resourceVersion": "7", "continue": null, "remainingItemCount": null},
            "items": [{"metadata": {"name": "a", "namespace": null, "resourceVersion": "5", "uid": null, "labels": null}}]}"#;
        let mut pages = MetadataPages::consistent(answering(page, None), pods());
        let version = "5".parse().unwrap();
        let node =
            ObjectMetadata { key: ObjectKey::new("", "a"), version, uid: String::new(), labels: BTreeMap::new() };
        assert_eq!(pages.next_objects().await, Ok(Some(vec![node])));
        let no_items = r#"{"metadata": {"resourceVersion": "7"}, "items": null}"#;
        let mut pages = MetadataPages::consistent(answering(no_items, None), pods());
        assert_eq!(pages.next_objects().await, Ok(Some(Vec::new())));
    }

    #[tokio::test]
    async fn a_page_from_the_cache_of_another_kubefan_is_refused() {
        for cache_status in ["kubefan; hit", "cdn; fwd=miss, kubefan;hit"] {
            for mut pages in lists(Some(cache_status)) {
                let error = pages.next_objects().await.unwrap_err();
                assert_eq!(error, UpstreamError::Cached { server: "http://sim".to_owned() }, "{cache_status}");
            }
        }
    }

    #[tokio::test]
    async fn a_page_from_an_apiserver_is_read_also_through_other_caches_and_another_kubefan() {
        for cache_status in [None, Some("ExampleCache; fwd=miss"), Some("kubefan; fwd=bypass")] {
            for mut pages in lists(cache_status) {
                let page = pages.next().await.unwrap().unwrap();
                assert_eq!(page, [(ObjectKey::new("x", "a"), "5".parse().unwrap())]);
                assert_eq!(pages.version().map(ResourceVersion::get), Some(7));
                assert!(pages.next().await.unwrap().is_none());
            }
        }
    }
}
