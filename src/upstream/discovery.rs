//! Which resources the apiserver serves, asked and remembered.
//!
//! Resources come and go with their CRDs, so a name that is not known is asked for again; but not at every call, or readers of a
//! misspelt name would flood the apiserver with discovery. One extension apiserver that is down must not hide all others.

use std::{sync::Arc, time::Duration};

use futures::{StreamExt, stream};
use serde::Deserialize;
use tokio::{sync::Mutex, time::Instant};

use super::{
    client::{Upstream, Verb},
    error::UpstreamError,
};
use crate::model::GroupVersionResource;

use super::resource_index::{AggregatedDiscovery, LegacyResourceList};
pub use super::resource_index::{FailedGroup, NoMatch, ResourceIndex, ResourceInfo};

/// Aggregated discovery: all groups in two requests. Servers that do not know it answer with the legacy document.
const ACCEPT: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,\
    application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json";
/// The longest discovery document. A cluster with a thousand CRDs has about 2 MiB.
const DOCUMENT_BYTES_MAX: usize = 64 << 20;
/// Legacy documents asked for at a time.
const LEGACY_CONCURRENCY: usize = 8;

/// How long discovery is believed.
#[derive(Debug, Clone)]
pub struct DiscoveryOptions {
    /// Older answers are asked for again, even for names that they know.
    pub age_max: Duration,
    /// After an answer or a failure, so long none is asked for again, whatever the name.
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
pub struct Discovery {
    upstream: Upstream,
    options: DiscoveryOptions,
    // Held while asking, so that many who ask at once make one request.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    index: Option<(Arc<ResourceIndex>, Instant)>,
    last_try: Option<(Instant, Result<(), UpstreamError>)>,
}

impl Discovery {
    /// Discovery of one apiserver; nothing is asked yet.
    pub fn new(upstream: Upstream, options: DiscoveryOptions) -> Self {
        Self { upstream, options, state: Mutex::default() }
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
    pub async fn invalidate(&self) {
        let mut state = self.state.lock().await;
        if let Some((index, _)) = state.index.take() {
            // Kept for the case that the apiserver cannot be asked; too old to be believed otherwise.
            let long_ago = Instant::now().checked_sub(self.options.age_max);
            state.index = long_ago.map(|fetched| (index, fetched));
        }
    }

    async fn lookup<F>(&self, name: &str, find: F) -> Result<ResourceInfo, DiscoveryError>
    where
        F: Fn(&ResourceIndex) -> Result<&ResourceInfo, NoMatch>,
    {
        let mut state = self.state.lock().await;
        let fresh =
            |state: &State| state.index.as_ref().is_some_and(|(_, fetched)| fetched.elapsed() < self.options.age_max);
        let known = state.index.as_ref().is_some_and(|(index, _)| find(index).is_ok());
        if !(known && fresh(&state)) {
            self.refresh(&mut state).await;
        }
        let Some((index, _)) = &state.index else {
            return Err(match &state.last_try {
                Some((_, Err(error))) => error.clone().into(),
                _ => UpstreamError::invalid("discovery gave no answer").into(),
            });
        };
        match (find(index), &state.last_try) {
            (Ok(info), _) if info.is_watchable() => Ok(info.clone()),
            (Ok(info), _) => Err(DiscoveryError::NotWatchable { name: name.to_owned(), verbs: info.verbs.clone() }),
            // An old index cannot tell that there is no such resource.
            (Err(_), Some((_, Err(error)))) => Err(error.clone().into()),
            (Err(no_match), _) => Err(match no_match.failed.into_iter().next() {
                Some(failed) if no_match.suggestion.is_none() => {
                    DiscoveryError::GroupUnavailable { name: name.to_owned(), failed }
                }
                _ => DiscoveryError::UnknownResource { name: name.to_owned(), suggestion: no_match.suggestion },
            }),
        }
    }

    async fn refresh(&self, state: &mut State) {
        let too_soon = |(last, _): &(Instant, _)| last.elapsed() < self.options.refresh_interval_min;
        if state.last_try.as_ref().is_some_and(too_soon) {
            return;
        }
        let result = self.fetch().await;
        let now = Instant::now();
        state.last_try = Some((now, result.as_ref().map(|_| ()).map_err(Clone::clone)));
        match result {
            Ok(index) => state.index = Some((Arc::new(index), now)),
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
        let path = if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") };
        let server: Option<ServerVersion> = self.get_where_allowed("/version").await?;
        let schemas: Option<OpenApi> = self.get_where_allowed("/openapi/v3").await?;
        Ok(SchemaFingerprint {
            server_version: server.map(|server| server.git_version),
            schema_hash: schemas.and_then(|schemas| schemas.hash(&path)),
        })
    }

    /// The `selectableFields` of a custom resource, such as `.spec.color`, as the apiserver publishes them in OpenAPI v3
    /// (`x-kubernetes-selectable-fields`). Empty for built-in types, and where schemas may not be read.
    pub async fn selectable_fields(
        &self,
        gvr: &GroupVersionResource,
        kind: &str,
    ) -> Result<Vec<String>, UpstreamError> {
        // A CRD's group has a dot; of the built-in groups those without one have the large documents.
        if !gvr.group.contains('.') {
            return Ok(Vec::new());
        }
        let path = format!("/openapi/v3/apis/{}/{}", gvr.group, gvr.version);
        let document: Option<OpenApiSchemas> = self.get_where_allowed(&path).await?;
        let schemas = document.into_iter().flat_map(|document| document.components.schemas.into_values());
        let of_kind = |schema: &OpenApiSchema| schema.kinds.iter().any(|k| k.kind == kind && k.group == gvr.group);
        let fields = schemas.filter(of_kind).flat_map(|schema| schema.selectable_fields);
        Ok(fields.map(|field| field.field_path).collect())
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

#[derive(Deserialize)]
struct OpenApiSchemas {
    #[serde(default)]
    components: OpenApiComponents,
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
mod tests {
    use std::sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    };

    use bytes::Bytes;
    use http_body_util::{BodyExt, Full};
    use serde_json::{Value, json};
    use tower::{BoxError, service_fn, util::BoxCloneSyncService};

    use super::*;
    use crate::upstream::client::UpstreamOptions;

    /// A server that answers by path from a map that the test may change, and counts requests for `/apis`.
    #[derive(Clone, Default)]
    struct Server {
        documents: Arc<Mutex<std::collections::BTreeMap<String, Value>>>,
        asked: Arc<AtomicUsize>,
    }

    impl Server {
        fn set(&self, path: &str, document: Value) {
            self.documents.lock().unwrap().insert(path.to_owned(), document);
        }

        fn upstream(&self) -> Upstream {
            let server = self.clone();
            let service = service_fn(move |request: http::Request<Bytes>| {
                let path = request.uri().path().to_owned();
                server.asked.fetch_add(usize::from(path == "/apis"), Ordering::Relaxed);
                let document = server.documents.lock().unwrap().get(&path).cloned();
                let code = match &document {
                    None => 404,
                    Some(Value::Number(code)) => code.as_u64().unwrap() as u16,
                    Some(_) => 200,
                };
                let body = Full::new(Bytes::from(document.unwrap_or_default().to_string()))
                    .map_err(BoxError::from)
                    .boxed_unsync();
                async move { Ok::<_, BoxError>(http::Response::builder().status(code).body(body).unwrap()) }
            });
            Upstream::from_service(
                BoxCloneSyncService::new(service),
                &http::Uri::from_static("http://sim"),
                UpstreamOptions::default(),
            )
        }

        fn discovery(&self) -> Discovery {
            Discovery::new(self.upstream(), DiscoveryOptions::default())
        }
    }

    fn aggregated(group: &str, resources: &[&str]) -> Value {
        let resources: Vec<Value> = resources
            .iter()
            .map(|name| json!({"resource": name, "responseKind": {"kind": name}, "scope": "Namespaced", "verbs": ["list", "watch"]}))
            .collect();
        json!({"kind": "APIGroupDiscoveryList", "items": [{"metadata": {"name": group}, "versions": [{"version": "v1", "resources": resources}]}]})
    }

    fn server() -> Server {
        let server = Server::default();
        server.set("/api", aggregated("", &["pods"]));
        server.set("/apis", aggregated("example.com", &[]));
        server
    }

    #[tokio::test(start_paused = true)]
    async fn a_resource_made_while_running_is_found_and_a_misspelt_one_does_not_flood() {
        let server = server();
        let discovery = server.discovery();
        assert!(discovery.resolve("pods").await.is_ok());
        for _ in 0..100 {
            let error = discovery.resolve("widgets").await.unwrap_err();
            assert_eq!(
                error.to_string(),
                "the apiserver has no resource \"widgets\"; `kubectl api-resources` lists all"
            );
        }
        assert_eq!(server.asked.load(Ordering::Relaxed), 1);
        server.set("/apis", aggregated("example.com", &["widgets"]));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(discovery.resolve("widgets").await.unwrap().gvr.group, "example.com");
    }

    #[tokio::test(start_paused = true)]
    async fn a_resource_that_went_is_known_until_it_is_said_to_be_gone() {
        let server = server();
        let discovery = server.discovery();
        assert!(discovery.resolve("pods").await.is_ok());
        server.set("/api", aggregated("", &[]));
        tokio::time::advance(Duration::from_secs(5)).await;
        assert!(discovery.resolve("pods").await.is_ok());
        discovery.invalidate().await;
        assert!(matches!(discovery.resolve("pods").await, Err(DiscoveryError::UnknownResource { .. })));
    }

    #[tokio::test(start_paused = true)]
    async fn an_apiserver_that_is_down_leaves_what_is_known_and_says_why_it_knows_no_more() {
        let server = server();
        let discovery = server.discovery();
        assert!(discovery.resolve("pods").await.is_ok());
        server.set("/api", json!(503));
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert!(discovery.resolve("pods").await.is_ok());
        assert!(matches!(
            discovery.resolve("nodes").await,
            Err(DiscoveryError::Upstream(UpstreamError::Server { code: 503, .. }))
        ));
    }

    #[tokio::test]
    async fn a_legacy_server_is_understood_and_one_broken_group_hides_no_other() {
        let server = Server::default();
        let resources = |name: &str| json!({"resources": [{"name": name, "kind": name, "namespaced": true, "verbs": ["list", "watch"]}]});
        server.set("/api", json!({"kind": "APIVersions", "versions": ["v1"]}));
        server.set("/api/v1", resources("pods"));
        server.set(
            "/apis",
            json!({"kind": "APIGroupList", "groups": [
                {"name": "metrics.k8s.io", "versions": [{"groupVersion": "metrics.k8s.io/v1beta1", "version": "v1beta1"}]},
                {"name": "example.com", "versions": [{"version": "v1"}, {"version": "v2"}], "preferredVersion": {"version": "v2"}},
            ]}),
        );
        server.set("/apis/metrics.k8s.io/v1beta1", json!(503));
        server.set("/apis/example.com/v1", resources("widgets"));
        server.set("/apis/example.com/v2", resources("widgets"));
        let discovery = server.discovery();
        assert_eq!(discovery.resolve("widgets").await.unwrap().gvr.version, "v2");
        assert!(discovery.resolve("pods").await.is_ok());
        let error = discovery.resolve("nodes.metrics.k8s.io").await.unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("the resource \"nodes.metrics.k8s.io\" is not known: API group metrics.k8s.io/v1beta1"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn a_changed_schema_changes_the_fingerprint_and_what_is_forbidden_is_none() {
        let server = server();
        let discovery = server.discovery();
        assert_eq!(discovery.schema_fingerprint("", "v1").await.unwrap(), SchemaFingerprint::default());
        server.set("/version", json!({"gitVersion": "v1.35.4"}));
        let schemas = |hash: &str| json!({"paths": {"apis/example.com/v1": {"serverRelativeURL": format!("/openapi/v3/apis/example.com/v1?hash={hash}")}}});
        server.set("/openapi/v3", schemas("A1"));
        let first = discovery.schema_fingerprint("example.com", "v1").await.unwrap();
        assert_eq!((first.server_version.as_deref(), first.schema_hash.as_deref()), (Some("v1.35.4"), Some("A1")));
        server.set("/openapi/v3", schemas("B2"));
        assert_ne!(discovery.schema_fingerprint("example.com", "v1").await.unwrap(), first);
        server.set("/openapi/v3", json!(500));
        assert!(discovery.schema_fingerprint("example.com", "v1").await.is_err());
    }
}
