//! Which resources the apiserver serves, asked and remembered.
//!
//! Resources come and go with their CRDs, so a name that is not known is asked for again; but not at every call, or readers of a
//! misspelt name would flood the apiserver with discovery. One extension apiserver that is down must not hide all others.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::{StreamExt, stream};
use serde::Deserialize;
use tokio::time::{Instant, sleep};

use super::{
    client::{Upstream, Verb},
    error::UpstreamError,
};
use kubefan_model::GroupVersionResource;

use super::resource_index::{AggregatedDiscovery, LegacyResourceList};
pub use super::resource_index::{FailedGroup, NoMatch, ResourceIndex, ResourceInfo};

/// Aggregated discovery: all groups in two requests. Servers that do not know it answer with the legacy document.
const ACCEPT: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,\
    application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json";
/// The longest discovery document. A cluster with a thousand CRDs has about 2 MiB.
const DOCUMENT_BYTES_MAX: usize = 64 << 20;
/// Legacy documents asked for at a time.
const LEGACY_CONCURRENCY: usize = 8;

/// How long the documents that tell of changed schemas are shared: every cache asks for the same ones.
const SCHEMA_DOCUMENTS_AGE_MAX: Duration = Duration::from_secs(2);

/// How long discovery is believed.
#[derive(Debug, Clone)]
pub struct DiscoveryOptions {
    /// How often [`Discovery::keep_fresh`] asks again.
    pub age_max: Duration,
    /// After an answer or a failure, so long none is asked for again, whatever the name; longer where the apiserver says so.
    pub refresh_interval_min: Duration,
}

impl Default for DiscoveryOptions {
    fn default() -> Self {
        Self { age_max: Duration::from_secs(600), refresh_interval_min: Duration::from_secs(2) }
    }
}

/// Why a name could not be resolved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryError {
    /// The apiserver has no such resource.
    #[error("the apiserver has no resource {name:?}{}; `kubectl api-resources` lists all", suggest(.suggestion))]
    UnknownResource {
        /// As it was asked for.
        name: String,
        /// A similar name.
        suggestion: Option<String>,
    },
    /// The resource is not known, but the group it would be in is down.
    #[error("the resource {name:?} is not known: API group {}/{}: {}", .failed.group, .failed.version, .failed.message)]
    GroupUnavailable {
        /// As it was asked for.
        name: String,
        /// The group that is down.
        failed: FailedGroup,
    },
    /// The resource cannot be listed and watched.
    #[error("the resource {name:?} cannot be watched; it only takes {}", .verbs.join(", "))]
    NotWatchable {
        /// As it was asked for.
        name: String,
        /// What it can do.
        verbs: Vec<String>,
    },
    /// The apiserver could not be asked.
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
}

fn suggest(suggestion: &Option<String>) -> String {
    suggestion.as_ref().map(|name| format!("; did you mean {name:?}?")).unwrap_or_default()
}

/// What tells that the bytes of objects may change without their versions: another server version, or another schema.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SchemaFingerprint {
    /// `gitVersion` of `/version`; `None` where it may not be read.
    pub server_version: Option<String>,
    /// The hash that `/openapi/v3` gives for the group version; `None` where it may not be read or has none.
    pub schema_hash: Option<String>,
}

/// Resolves names, remembering what the apiserver said. Shared by reference.
///
/// A name that is known is answered at once, from what is remembered: readers of what is cached must not wait for an apiserver that
/// is away. [`Self::keep_fresh`] brings what is remembered up to date.
pub struct Discovery {
    upstream: Upstream,
    options: DiscoveryOptions,
    known: Mutex<Known>,
    // Held while asking, so that many who ask at once make one request.
    asking: tokio::sync::Mutex<Option<LastTry>>,
    // Held while asking, too.
    schema_documents: tokio::sync::Mutex<Option<(Instant, SharedDocuments)>>,
}

#[derive(Default, Clone)]
struct Known {
    index: Option<Arc<ResourceIndex>>,
    /// Something in it was said to be gone.
    doubted: bool,
}

type SharedDocuments = Result<Arc<SchemaDocuments>, UpstreamError>;

/// What a [`SchemaFingerprint`] is made of; `None` for what may not be read.
struct SchemaDocuments {
    server: Option<ServerVersion>,
    schemas: Option<OpenApi>,
}

type LastTry = (Instant, Result<(), UpstreamError>);

impl Discovery {
    /// Discovery of one apiserver; nothing is asked yet.
    pub fn new(upstream: Upstream, options: DiscoveryOptions) -> Self {
        Self {
            upstream,
            options,
            known: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
            schema_documents: tokio::sync::Mutex::default(),
        }
    }

    /// The watchable resource that a name means, by kubectl's rules ([`ResourceIndex::resolve`]).
    pub async fn resolve(&self, name: &str) -> Result<ResourceInfo, DiscoveryError> {
        self.lookup(name, |index| index.resolve(name)).await
    }

    /// The watchable resource of a full name; an empty version means the preferred one.
    pub async fn find(&self, group: &str, version: &str, resource: &str) -> Result<ResourceInfo, DiscoveryError> {
        let name = [resource, version, group].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(".");
        self.lookup(&name, |index| index.find(group, version, resource)).await
    }

    /// Lets the next look-up ask again: a resource that was known is answered with 404.
    pub fn doubt(&self) {
        self.known_mut().doubted = true;
    }

    /// Asks again from time to time, for as long as it is polled: names get new meanings with new resources.
    pub async fn keep_fresh(&self) {
        loop {
            sleep(self.options.age_max).await;
            let mut last_try = self.asking.lock().await;
            self.refresh(&mut last_try).await;
        }
    }

    fn known_mut(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn lookup<F>(&self, name: &str, find: F) -> Result<ResourceInfo, DiscoveryError>
    where
        F: Fn(&ResourceIndex) -> Result<&ResourceInfo, NoMatch>,
    {
        let known = || self.known_mut().clone();
        let answers = |known: &Known| !known.doubted && known.index.as_ref().is_some_and(|index| find(index).is_ok());
        let mut last_try = None;
        if !answers(&known()) {
            let mut asking = self.asking.lock().await;
            // Whoever held the lock may have learnt it.
            if !answers(&known()) {
                self.refresh(&mut asking).await;
            }
            last_try = asking.clone();
        }
        let Some(index) = known().index else {
            return Err(match last_try {
                Some((_, Err(error))) => error.into(),
                _ => UpstreamError::invalid("discovery gave no answer").into(),
            });
        };
        match (find(&index), last_try) {
            (Ok(info), _) if info.is_watchable() => Ok(info.clone()),
            (Ok(info), _) => Err(DiscoveryError::NotWatchable { name: name.to_owned(), verbs: info.verbs.clone() }),
            // An old index cannot tell that there is no such resource.
            (Err(_), Some((_, Err(error)))) => Err(error.into()),
            (Err(no_match), _) => Err(match no_match.failed.into_iter().next() {
                Some(failed) if no_match.suggestion.is_none() => {
                    DiscoveryError::GroupUnavailable { name: name.to_owned(), failed }
                }
                _ => DiscoveryError::UnknownResource { name: name.to_owned(), suggestion: no_match.suggestion },
            }),
        }
    }

    async fn refresh(&self, last_try: &mut Option<LastTry>) {
        let too_soon = |(last, result): &LastTry| {
            let asked = result.as_ref().err().and_then(UpstreamError::retry_after).unwrap_or_default();
            last.elapsed() < self.options.refresh_interval_min.max(asked)
        };
        if last_try.as_ref().is_some_and(too_soon) {
            return;
        }
        let result = self.fetch().await;
        *last_try = Some((Instant::now(), result.as_ref().map(|_| ()).map_err(Clone::clone)));
        match result {
            Ok(index) => *self.known_mut() = Known { index: Some(Arc::new(index)), doubted: false },
            // What is known stays, for the case that it is all there is.
            Err(error) => tracing::debug!(%error, "discovery failed"),
        }
    }

    async fn fetch(&self) -> Result<ResourceIndex, UpstreamError> {
        let mut index = ResourceIndex::default();
        for root in ["/api", "/apis"] {
            let body = self.get(root).await?;
            let kind: Kind = parse(root, &body)?;
            match kind.kind.as_str() {
                "APIGroupDiscoveryList" => index.add_aggregated(&parse::<AggregatedDiscovery>(root, &body)?),
                "APIVersions" => {
                    let versions: ApiVersions = parse(root, &body)?;
                    let all = versions.versions.into_iter().map(|version| (String::new(), version)).collect();
                    self.fetch_legacy(&mut index, all).await;
                }
                "APIGroupList" => {
                    let groups: ApiGroupList = parse(root, &body)?;
                    let all = groups.groups.into_iter().flat_map(ApiGroup::preferred_first).collect();
                    self.fetch_legacy(&mut index, all).await;
                }
                other => {
                    return Err(UpstreamError::invalid(format_args!(
                        "{root} answers with kind {other:?}; is this an apiserver?"
                    )));
                }
            }
        }
        Ok(index)
    }

    async fn fetch_legacy(&self, index: &mut ResourceIndex, group_versions: Vec<(String, String)>) {
        let documents = stream::iter(group_versions).map(|(group, version)| async move {
            let path = if group.is_empty() { format!("/api/{version}") } else { format!("/apis/{group}/{version}") };
            let document = async { parse::<LegacyResourceList>(&path, &self.get(&path).await?) }.await;
            (group, version, document)
        });
        let mut documents = documents.buffered(LEGACY_CONCURRENCY);
        while let Some((group, version, document)) = documents.next().await {
            match document {
                Ok(document) => index.add_legacy(&group, &version, &document),
                Err(error) => index.add_failed(FailedGroup { group, version, message: error.to_string() }),
            }
        }
    }

    async fn get(&self, path: &str) -> Result<bytes::Bytes, UpstreamError> {
        Ok(self.upstream.get_limited(Verb::Get, path, ACCEPT, DOCUMENT_BYTES_MAX).await?.into_body())
    }

    /// The present fingerprint of a group version's schema. What may not be read is `None`; other failures are errors, so that a
    /// short outage does not look like a changed schema.
    pub async fn schema_fingerprint(&self, group: &str, version: &str) -> Result<SchemaFingerprint, UpstreamError> {
        self.fingerprint(group, version, Duration::ZERO).await
    }

    /// As [`Self::schema_fingerprint`], but up to two seconds old: for all caches together it costs one look.
    pub async fn recent_schema_fingerprint(
        &self,
        group: &str,
        version: &str,
    ) -> Result<SchemaFingerprint, UpstreamError> {
        self.fingerprint(group, version, SCHEMA_DOCUMENTS_AGE_MAX).await
    }

    async fn fingerprint(
        &self,
        group: &str,
        version: &str,
        age_max: Duration,
    ) -> Result<SchemaFingerprint, UpstreamError> {
        let path = if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") };
        let documents = {
            let mut shared = self.schema_documents.lock().await;
            match &*shared {
                Some((at, documents)) if at.elapsed() < age_max => documents.clone(),
                _ => {
                    let documents = self.fetch_schema_documents().await.map(Arc::new);
                    *shared = Some((Instant::now(), documents.clone()));
                    documents
                }
            }
        }?;
        Ok(SchemaFingerprint {
            server_version: documents.server.as_ref().map(|server| server.git_version.clone()),
            schema_hash: documents.schemas.as_ref().and_then(|schemas| schemas.hash(&path)),
        })
    }

    async fn fetch_schema_documents(&self) -> Result<SchemaDocuments, UpstreamError> {
        Ok(SchemaDocuments {
            server: self.get_where_allowed("/version").await?,
            schemas: self.get_where_allowed("/openapi/v3").await?,
        })
    }

    /// What the apiserver publishes in OpenAPI v3 of a custom resource, and its discovery does not tell. The defaults for built-in types,
    /// and where schemas may not be read.
    pub async fn custom(&self, gvr: &GroupVersionResource, kind: &str) -> Result<Custom, UpstreamError> {
        // A CRD's group has a dot; of the built-in groups those without one have the large documents.
        if !gvr.group.contains('.') {
            return Ok(Custom::default());
        }
        let path = format!("/openapi/v3/apis/{}/{}", gvr.group, gvr.version);
        let document: Option<OpenApiSchemas> = self.get_where_allowed(&path).await?;
        Ok(document.map(|document| document.custom(&gvr.group, kind)).unwrap_or_default())
    }

    async fn get_where_allowed<T: serde::de::DeserializeOwned>(&self, path: &str) -> Result<Option<T>, UpstreamError> {
        match self.upstream.get_limited(Verb::Get, path, "application/json", DOCUMENT_BYTES_MAX).await {
            Ok(response) => parse(path, response.body()).map(Some),
            Err(UpstreamError::NotFound { .. } | UpstreamError::Forbidden { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn parse<T: serde::de::DeserializeOwned>(path: &str, body: &[u8]) -> Result<T, UpstreamError> {
    serde_json::from_slice(body).map_err(|error| UpstreamError::invalid(format_args!("{path}: {error}")))
}

#[derive(Deserialize)]
struct Kind {
    kind: String,
}

#[derive(Deserialize)]
struct ApiVersions {
    versions: Vec<String>,
}

#[derive(Deserialize)]
struct ApiGroupList {
    groups: Vec<ApiGroup>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ApiGroup {
    name: String,
    versions: Vec<ApiGroupVersion>,
    #[serde(default)]
    preferred_version: Option<ApiGroupVersion>,
}

#[derive(Deserialize, PartialEq)]
struct ApiGroupVersion {
    version: String,
}

impl ApiGroup {
    fn preferred_first(mut self) -> Vec<(String, String)> {
        let preferred = self.preferred_version.take();
        self.versions.sort_by_key(|version| Some(version) != preferred.as_ref());
        self.versions.into_iter().map(|version| (self.name.clone(), version.version)).collect()
    }
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

/// What a CRD may say of its objects beyond their names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Custom {
    /// The `selectableFields`, such as `.spec.color` (`x-kubernetes-selectable-fields`).
    pub selectable_fields: Vec<String>,
    /// The `listKind`; `None` where nothing tells it, and it is the kind with `List` after it, as it is by default.
    pub list_kind: Option<String>,
}

#[derive(Deserialize)]
struct OpenApiSchemas {
    #[serde(default)]
    components: OpenApiComponents,
}

impl OpenApiSchemas {
    fn custom(self, group: &str, kind: &str) -> Custom {
        let schemas = self.components.schemas;
        let of_group =
            |schema: &OpenApiSchema| schema.kinds.iter().find(|of| of.group == group).map(|of| of.kind.clone());
        let Some((name, schema)) = schemas.iter().find(|(_, schema)| of_group(schema).is_some_and(|of| of == kind))
        else {
            return Custom::default();
        };
        let reference = format!("#/components/schemas/{name}");
        let is_list = |schema: &OpenApiSchema| {
            schema.properties.items.pointer("/items/$ref").is_some_and(|items| *items == reference)
        };
        let list = schemas.values().find(|schema| is_list(schema));
        Custom {
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

/// Of all properties, the one that a list has. Others may have one of that name too, of any form.
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
