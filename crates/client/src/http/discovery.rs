//! Finds the path of a resource by its name, as kubectl does: in the server's discovery documents.
//!
//! Servers since 1.27 answer with all resources in two documents (aggregated discovery). Others
//! answer with names of groups, and each group's version is one more request.

use serde::{Deserialize, de::DeserializeOwned};

use super::endpoint::{HttpClient, ReadLimits};
use crate::error::{ApiStatus, ClientError};
use kubefan_common::text::without_value;

/// The media types of discovery, as kubectl requests them.
const ACCEPT: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,\
    application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json";

/// The API path of a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ResourcePath {
    /// `api/v1` or `apis/GROUP/VERSION`.
    pub(super) api: String,
    /// The plural name.
    pub(super) resource: String,
    /// `None` if it is not known.
    pub(super) namespaced: Option<bool>,
}

/// A resource of a discovery document.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Resource {
    /// Legacy documents: the plural name, or `pods/log`.
    name: String,
    /// Aggregated documents: the plural name.
    resource: String,
    #[serde(alias = "singularName")]
    singular_resource: String,
    short_names: Option<Vec<String>>,
    kind: String,
    /// Aggregated documents.
    response_kind: Option<ResponseKind>,
    /// Legacy documents.
    namespaced: bool,
    /// Aggregated documents: `Namespaced` or `Cluster`.
    scope: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct ResponseKind {
    kind: String,
}

/// The document at `/api` or `/apis`, in either form.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Groups {
    /// Aggregated.
    items: Option<Vec<Group>>,
    /// Legacy, at `/apis`.
    groups: Option<Vec<Group>>,
    /// Legacy, at `/api`.
    versions: Option<Vec<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Group {
    /// Legacy.
    name: String,
    /// Aggregated.
    metadata: GroupMetadata,
    /// Aggregated: the preferred one is the first.
    versions: Vec<Version>,
    /// Legacy.
    preferred_version: Option<Version>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct GroupMetadata {
    name: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Version {
    version: String,
    /// Aggregated.
    resources: Option<Vec<Resource>>,
}

/// A document of one group version.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Resources {
    resources: Vec<Resource>,
}

/// A group version, in order of preference.
struct GroupVersion {
    group: String,
    version: String,
    /// `None` if its document has not been read.
    resources: Option<Vec<Resource>>,
}

/// Quality of a match between a name and a resource. The smallest is the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    Name,
    ShortName,
    Kind,
}

/// Finds a resource by plural, singular, short name or kind, alone or followed by `.group` or
/// `.version.group`, ignoring case. The core group comes first, then the groups in the server's
/// order, and a group's preferred version before its others. A full name takes precedence over a
/// short name in an earlier group, and a whole group over the start of one
/// (`ingresses.networking`).
///
/// # Errors
/// [`ClientError::Api`] with the reason `NotFound` if there is none, and every error of a request.
/// A group whose own apiserver does not answer matters only if no other has the resource.
pub(super) async fn resolve(client: &HttpClient, limits: ReadLimits, name: &str) -> Result<ResourcePath, ClientError> {
    let name = name.to_lowercase();
    let (resource, qualifier) = name.split_once('.').unwrap_or((&name, ""));
    let mut index = Index { client, limits, versions: Vec::new(), failed: None };
    if qualifier.is_empty() {
        index.add("/api").await?;
        // Most names without a group are of the core group: that saves a request.
        if let Some((Fit::Name, path)) = index.find(resource, |_, _| true).await? {
            return Ok(path);
        }
        index.add("/apis").await?;
        if let Some((_, path)) = index.find(resource, |_, _| true).await? {
            return Ok(path);
        }
    } else if is_version(qualifier) {
        index.add("/api").await?;
        if let Some((_, path)) = index.find(resource, |_, version| version == qualifier).await? {
            return Ok(path);
        }
    } else {
        index.add("/apis").await?;
        if let Some((version, group)) = qualifier.split_once('.').filter(|(version, _)| is_version(version))
            && let Some((_, path)) = index.find(resource, |of, has| of == group && has == version).await?
        {
            return Ok(path);
        }
        if let Some((_, path)) = index.find(resource, |group, _| group == qualifier).await? {
            return Ok(path);
        }
        if let Some((_, path)) = index.find(resource, |group, _| group.starts_with(qualifier)).await? {
            return Ok(path);
        }
    }
    Err(index.failed.unwrap_or_else(|| {
        let message = format!("the server doesn't have a resource type {name:?}");
        ApiStatus::new(404, "NotFound", &message).into()
    }))
}

/// The group versions that are known so far.
struct Index<'a> {
    client: &'a HttpClient,
    limits: ReadLimits,
    versions: Vec<GroupVersion>,
    /// Error of the first document that could not be read.
    failed: Option<ClientError>,
}

impl Index<'_> {
    /// Adds the groups of the document at `/api` or `/apis`.
    async fn add(&mut self, path: &str) -> Result<(), ClientError> {
        let Groups { items, groups, versions } = self.read(path).await?;
        let core = versions.unwrap_or_default().into_iter();
        self.versions.extend(core.map(|version| GroupVersion { group: String::new(), version, resources: None }));
        for mut group in items.into_iter().chain(groups).flatten() {
            let preferred = group.preferred_version.unwrap_or_default().version;
            group.versions.sort_by_key(|version| version.version != preferred);
            let name = if group.name.is_empty() { group.metadata.name } else { group.name };
            self.versions.extend(group.versions.into_iter().map(|Version { version, resources }| GroupVersion {
                group: name.clone(),
                version,
                resources,
            }));
        }
        Ok(())
    }

    /// The best fit among the wanted groups and versions. The first one, if several fit equally.
    async fn find(
        &mut self,
        name: &str,
        wanted: impl Fn(&str, &str) -> bool,
    ) -> Result<Option<(Fit, ResourcePath)>, ClientError> {
        let mut best: Option<(Fit, ResourcePath)> = None;
        for at in 0..self.versions.len() {
            let GroupVersion { group, version, resources } = &self.versions[at];
            if !wanted(group, version) {
                continue;
            }
            let api = if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") };
            if resources.is_none() {
                let resources = match self.read::<Resources>(&format!("/{api}")).await {
                    Ok(Resources { resources }) => resources,
                    Err(error) => {
                        self.failed.get_or_insert(error);
                        Vec::new()
                    }
                };
                self.versions[at].resources = Some(resources);
            }
            for resource in self.versions[at].resources.iter().flatten() {
                let Some(fit) = resource.fit(name).filter(|fit| best.as_ref().is_none_or(|(best, _)| fit < best))
                else {
                    continue;
                };
                let path = ResourcePath {
                    api: api.clone(),
                    resource: resource.plural().to_owned(),
                    namespaced: Some(resource.namespaced || resource.scope == "Namespaced"),
                };
                if fit == Fit::Name {
                    return Ok(Some((fit, path)));
                }
                best = Some((fit, path));
            }
        }
        Ok(best)
    }

    async fn read<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let body = self.client.read(path.to_owned(), ACCEPT, self.limits).await?;
        serde_json::from_slice(&body).map_err(|error| ClientError::HttpProtocol {
            address: self.client.address().to_owned(),
            message: format!("{path}: {}", without_value(&error)),
        })
    }
}

impl Resource {
    fn plural(&self) -> &str {
        if self.resource.is_empty() { &self.name } else { &self.resource }
    }

    /// Compares the resource with a name in lower case. Subresources never fit; a legacy document
    /// may leave a singular name empty.
    fn fit(&self, name: &str) -> Option<Fit> {
        let kind = self.response_kind.as_ref().map_or(&self.kind, |response| &response.kind);
        if name.is_empty() || self.plural().contains('/') {
            None
        } else if self.plural() == name || self.singular_resource.to_lowercase() == name {
            Some(Fit::Name)
        } else if self.short_names.iter().flatten().any(|short| short == name) {
            Some(Fit::ShortName)
        } else {
            (kind.to_lowercase() == name).then_some(Fit::Kind)
        }
    }
}

/// Whether a part of a name is an API version, such as `v1` or `v2beta1`.
fn is_version(text: &str) -> bool {
    let Some(rest) = text.strip_prefix('v') else { return false };
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match rest.split_once("alpha").or_else(|| rest.split_once("beta")) {
        Some((major, minor)) => number(major) && number(minor),
        None => number(rest),
    }
}
