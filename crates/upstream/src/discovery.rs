//! Discovery: which resources the apiserver serves, fetched on demand and cached.
//!
//! Resources appear and disappear with their CRDs, so an unknown name triggers a new request. These
//! requests are rate limited; otherwise clients with a misspelt name would flood the apiserver with
//! discovery requests. An unavailable extension apiserver must not hide the other groups.

pub mod resource_index;
mod shared_request;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::{StreamExt, stream};
use kubefan_common::{
    discovery::{ACCEPT, GroupVersion, read_groups, read_resources},
    text::without_value,
};
use kubefan_model::GroupVersionResource;
use serde::Deserialize;
use tokio::time::{Instant, sleep};

pub use crate::discovery::resource_index::{FailedGroup, NoMatch, ResourceIndex, ResourceInfo};
use crate::discovery::shared_request::SharedRequest;
use crate::{
    client::{Upstream, Verb},
    error::UpstreamError,
};

/// The limit for a discovery document, in bytes. A cluster with a thousand CRDs has about 2 MiB.
const DOCUMENT_BYTES_MAX: usize = 64 << 20;
/// The number of concurrent requests for legacy documents.
const LEGACY_CONCURRENCY: usize = 8;

/// Time for which caches share the documents that reveal schema changes. All caches need the same
/// ones.
const SCHEMA_DOCUMENTS_AGE_MAX: Duration = Duration::from_secs(2);

/// The refresh intervals of discovery.
#[derive(Debug, Clone)]
pub struct DiscoveryOptions {
    /// The interval of [`Discovery::keep_fresh`].
    pub age_max: Duration,
    /// The minimum time between two attempts, successful or not, for any name; longer if the
    /// apiserver asks for it.
    pub refresh_interval_min: Duration,
}

impl Default for DiscoveryOptions {
    fn default() -> Self {
        Self { age_max: Duration::from_secs(600), refresh_interval_min: Duration::from_secs(2) }
    }
}

/// The reason why a name cannot be resolved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryError {
    /// The apiserver has no such resource.
    #[error("the apiserver has no resource {name:?}{}; `kubectl api-resources` lists all", suggest(.suggestion))]
    UnknownResource {
        /// The requested name.
        name: String,
        /// A similar name.
        suggestion: Option<String>,
    },
    /// The resource is unknown, but the group that would contain it is unavailable.
    #[error("the resource {name:?} is unknown: API group {}/{}: {}", .failed.group, .failed.version, .failed.message)]
    GroupUnavailable {
        /// The requested name.
        name: String,
        /// The unavailable group.
        failed: FailedGroup,
    },
    /// The resource cannot be listed and watched.
    #[error("the resource {name:?} cannot be watched; it supports only {}", .verbs.join(", "))]
    NotWatchable {
        /// The requested name.
        name: String,
        /// Verbs that the resource supports.
        verbs: Vec<String>,
    },
    /// The request to the apiserver failed.
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
}

fn suggest(suggestion: &Option<String>) -> String {
    suggestion.as_ref().map(|name| format!("; did you mean {name:?}?")).unwrap_or_default()
}

/// Identifies the server version and the schema. If either changes, the bytes of objects may change
/// without a new resource version.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SchemaFingerprint {
    /// `gitVersion` of `/version`; `None` if kubefan may not read it.
    pub server_version: Option<String>,
    /// The hash in `/openapi/v3` for the group version; `None` if kubefan may not read it, or if
    /// there is none.
    pub schema_hash: Option<String>,
}

/// Resolves resource names from cached discovery documents. Shared by reference.
///
/// A known name is answered at once from the cache, because reads of cached resources must not
/// depend on an available apiserver. [`Self::keep_fresh`] refreshes the cached documents.
pub struct Discovery {
    upstream: Upstream,
    options: DiscoveryOptions,
    /// The last index. It stays if a refresh fails, because it may be all that is available.
    index: Mutex<Option<Arc<ResourceIndex>>>,
    refreshes: SharedRequest<()>,
    schema_documents: SharedRequest<Arc<SchemaDocuments>>,
}

/// The documents behind a [`SchemaFingerprint`]; `None` for those that kubefan may not read.
struct SchemaDocuments {
    server: Option<ServerVersion>,
    schemas: Option<OpenApi>,
}

impl SchemaDocuments {
    fn fingerprint(&self, gvr: &GroupVersionResource) -> SchemaFingerprint {
        let path = gvr.group_version_path();
        SchemaFingerprint {
            server_version: self.server.as_ref().map(|server| server.git_version.clone()),
            schema_hash: self.schemas.as_ref().and_then(|schemas| schemas.hash(path.trim_start_matches('/'))),
        }
    }
}

impl Discovery {
    /// Discovery of one apiserver. No request is sent yet.
    pub fn new(upstream: Upstream, options: DiscoveryOptions) -> Self {
        Self {
            upstream,
            refreshes: SharedRequest::new(options.refresh_interval_min),
            options,
            index: Mutex::default(),
            schema_documents: SharedRequest::new(SCHEMA_DOCUMENTS_AGE_MAX),
        }
    }

    /// The watchable resource for a name, by kubectl's rules ([`ResourceIndex::resolve`]).
    pub async fn resolve(&self, name: &str) -> Result<ResourceInfo, DiscoveryError> {
        self.lookup(name, |index| index.resolve(name)).await
    }

    /// The watchable resource with a full name; an empty version means the preferred one.
    pub async fn find(&self, group: &str, version: &str, resource: &str) -> Result<ResourceInfo, DiscoveryError> {
        let name = [resource, version, group].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(".");
        self.lookup(&name, |index| index.find(group, version, resource)).await
    }

    /// Finds the resource in documents that were requested at most a moment ago, if there are any.
    pub async fn find_recent(&self, gvr: &GroupVersionResource) -> Result<ResourceInfo, DiscoveryError> {
        let _ = self.refresh().await;
        self.find(&gvr.group, &gvr.version, &gvr.resource).await
    }

    /// Finds the resource in documents that were requested at `since` or later, because upstream
    /// seems to serve the resource no longer, or in another way. Waits if discovery was asked a
    /// moment before.
    pub async fn find_since(&self, gvr: &GroupVersionResource, since: Instant) -> Result<ResourceInfo, DiscoveryError> {
        self.refreshes.since(since, self.fetch_index()).await?;
        self.find(&gvr.group, &gvr.version, &gvr.resource).await
    }

    /// Refreshes the index periodically while it is polled, because new resources can change the
    /// meaning of a name.
    pub async fn keep_fresh(&self) {
        loop {
            sleep(self.options.age_max).await;
            // The old index stays in use.
            let _ = self.refresh().await;
        }
    }

    fn index(&self) -> MutexGuard<'_, Option<Arc<ResourceIndex>>> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn lookup<F>(&self, name: &str, find: F) -> Result<ResourceInfo, DiscoveryError>
    where
        F: Fn(&ResourceIndex) -> Option<ResourceInfo>,
    {
        let is_known = self.index().as_ref().is_some_and(|index| find(index).is_some());
        let refreshed = if is_known { Ok(()) } else { self.refresh().await };
        let Some(index) = self.index().clone() else {
            let no_answer = || UpstreamError::invalid("discovery gave no answer");
            return Err(refreshed.err().unwrap_or_else(no_answer).into());
        };
        match find(&index) {
            Some(info) if info.is_watchable() => Ok(info),
            Some(info) => Err(DiscoveryError::NotWatchable { name: name.to_owned(), verbs: info.verbs }),
            None => {
                // An old index does not prove that the resource does not exist.
                refreshed?;
                let no_match = index.no_match(name);
                Err(match no_match.failed.into_iter().next() {
                    Some(failed) if no_match.suggestion.is_none() => {
                        DiscoveryError::GroupUnavailable { name: name.to_owned(), failed }
                    }
                    _ => DiscoveryError::UnknownResource { name: name.to_owned(), suggestion: no_match.suggestion },
                })
            }
        }
    }

    /// Refreshes the index, unless that was tried a moment ago.
    async fn refresh(&self) -> Result<(), UpstreamError> {
        self.refreshes.recent(self.fetch_index()).await
    }

    async fn fetch_index(&self) -> Result<(), UpstreamError> {
        let fetched = self.fetch().await.inspect_err(|error| tracing::debug!(%error, "discovery failed"))?;
        *self.index() = Some(Arc::new(fetched));
        Ok(())
    }

    async fn fetch(&self) -> Result<ResourceIndex, UpstreamError> {
        let mut index = ResourceIndex::default();
        for root in ["/api", "/apis"] {
            let versions = read_groups(root, &self.get(root).await?).map_err(UpstreamError::invalid)?;
            let versions = stream::iter(versions).map(|version| self.with_resources(version));
            let mut versions = versions.buffered(LEGACY_CONCURRENCY);
            while let Some((version, failure)) = versions.next().await {
                index.add(version, failure);
            }
        }
        Ok(index)
    }

    /// Reads the resources of a group version from its own document, unless the one with all groups
    /// has them. Also returns why they cannot be read.
    async fn with_resources(&self, mut version: GroupVersion) -> (GroupVersion, Option<String>) {
        if version.resources.is_some() || version.is_stale {
            return (version, None);
        }
        let path = format!("/{}", version.path());
        let body = self.get(&path).await;
        match body.and_then(|body| read_resources(&path, &body).map_err(UpstreamError::invalid)) {
            Ok(resources) => version.resources = Some(resources),
            Err(error) => return (version, Some(error.to_string())),
        }
        (version, None)
    }

    async fn get(&self, path: &str) -> Result<bytes::Bytes, UpstreamError> {
        Ok(self.upstream.get_limited(Verb::Get, path, ACCEPT, DOCUMENT_BYTES_MAX).await?.into_body())
    }

    /// The fingerprint of a group version's schema, up to two seconds old, so that all caches
    /// together cause one request. A document that kubefan may not read counts as `None`. Other
    /// failures are errors, so that a short outage does not look like a schema change.
    pub async fn schema_fingerprint(&self, gvr: &GroupVersionResource) -> Result<SchemaFingerprint, UpstreamError> {
        let documents = self.schema_documents.recent(self.fetch_schema_documents()).await?;
        Ok(documents.fingerprint(gvr))
    }

    /// The fingerprint as of `since` or later. Waits if the schemas were asked for a moment before.
    pub async fn schema_fingerprint_since(
        &self,
        gvr: &GroupVersionResource,
        since: Instant,
    ) -> Result<SchemaFingerprint, UpstreamError> {
        let documents = self.schema_documents.since(since, self.fetch_schema_documents()).await?;
        Ok(documents.fingerprint(gvr))
    }

    async fn fetch_schema_documents(&self) -> Result<Arc<SchemaDocuments>, UpstreamError> {
        Ok(Arc::new(SchemaDocuments {
            server: self.get_if_allowed("/version").await?,
            schemas: self.get_if_allowed("/openapi/v3").await?,
        }))
    }

    /// The facts about a custom resource that OpenAPI v3 has and discovery has not. The default for
    /// built-in types, and if kubefan may not read the schemas.
    pub async fn custom_resource_schema(
        &self,
        gvr: &GroupVersionResource,
        kind: &str,
    ) -> Result<CustomResourceSchema, UpstreamError> {
        // The group of a CRD always has a dot. The built-in groups without one have the large
        // documents.
        if !gvr.group.contains('.') {
            return Ok(CustomResourceSchema::default());
        }
        let path = format!("/openapi/v3/apis/{}/{}", gvr.group, gvr.version);
        let document: Option<OpenApiSchemas> = self.get_if_allowed(&path).await?;
        Ok(document.map(|document| document.custom_resource_schema(&gvr.group, kind)).unwrap_or_default())
    }

    async fn get_if_allowed<T: serde::de::DeserializeOwned>(&self, path: &str) -> Result<Option<T>, UpstreamError> {
        match self.upstream.get_limited(Verb::Get, path, "application/json", DOCUMENT_BYTES_MAX).await {
            Ok(response) => parse(path, response.body()).map(Some),
            Err(UpstreamError::NotFound { .. } | UpstreamError::Forbidden { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn parse<T: serde::de::DeserializeOwned>(path: &str, body: &[u8]) -> Result<T, UpstreamError> {
    serde_json::from_slice(body)
        .map_err(|error| UpstreamError::invalid(format_args!("{path}: {}", without_value(&error))))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ServerVersion {
    git_version: String,
}

#[derive(Deserialize)]
struct OpenApi {
    paths: std::collections::HashMap<String, OpenApiPath>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct OpenApiPath {
    #[serde(rename = "serverRelativeURL")]
    server_relative_url: String,
}

impl OpenApi {
    fn hash(&self, path: &str) -> Option<String> {
        let (_, query) = self.paths.get(path)?.server_relative_url.split_once('?')?;
        form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == "hash").map(|(_, hash)| hash.into_owned())
    }
}

/// Facts from a custom resource's schema.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CustomResourceSchema {
    /// The `selectableFields`, such as `.spec.color` (`x-kubernetes-selectable-fields`).
    pub selectable_fields: Vec<String>,
    /// The `listKind`; `None` if it is unknown. The default is the kind followed by `List`.
    pub list_kind: Option<String>,
}

#[derive(Deserialize)]
struct OpenApiSchemas {
    #[serde(default)]
    components: OpenApiComponents,
}

impl OpenApiSchemas {
    fn custom_resource_schema(self, group: &str, kind: &str) -> CustomResourceSchema {
        let schemas = self.components.schemas;
        let of_group =
            |schema: &OpenApiSchema| schema.kinds.iter().find(|of| of.group == group).map(|of| of.kind.clone());
        let Some((name, schema)) = schemas.iter().find(|(_, schema)| of_group(schema).is_some_and(|of| of == kind))
        else {
            return CustomResourceSchema::default();
        };
        let reference = format!("#/components/schemas/{name}");
        let is_list = |schema: &OpenApiSchema| {
            schema.properties.items.pointer("/items/$ref").is_some_and(|items| *items == reference)
        };
        let list = schemas.values().find(|schema| is_list(schema));
        CustomResourceSchema {
            selectable_fields: schema.selectable_fields.iter().map(|field| field.field_path.clone()).collect(),
            list_kind: list.and_then(of_group),
        }
    }
}

#[derive(Deserialize, Default)]
struct OpenApiComponents {
    #[serde(default)]
    schemas: std::collections::HashMap<String, OpenApiSchema>,
}

#[derive(Deserialize)]
struct OpenApiSchema {
    #[serde(default, rename = "x-kubernetes-group-version-kind")]
    kinds: Vec<OpenApiKind>,
    #[serde(default, rename = "x-kubernetes-selectable-fields")]
    selectable_fields: Vec<SelectableField>,
    #[serde(default)]
    properties: OpenApiProperties,
}

/// Only the property that distinguishes a list. Other types may have a property of that name with
/// any content.
#[derive(Deserialize, Default)]
struct OpenApiProperties {
    #[serde(default)]
    items: serde_json::Value,
}

#[derive(Deserialize)]
struct OpenApiKind {
    group: String,
    kind: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SelectableField {
    field_path: String,
}

#[cfg(test)]
mod tests;
