//! Finds the path of a resource by its name, as kubectl does: in the server's discovery documents.

use kubefan_common::discovery::{self, ACCEPT, Fit, GroupVersion, Place, ResourceName, read_groups, read_resources};

use super::endpoint::{HttpClient, ReadLimits};
use crate::error::{ApiStatus, ClientError};

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

/// Finds a resource by kubectl's rules. The core group comes first, then the groups in the server's
/// order, and a group's preferred version before its others. A full name takes precedence over a
/// short name in an earlier group.
///
/// # Errors
/// [`ClientError::Api`] with the reason `NotFound` if there is none, and every error of a request.
/// A group whose own apiserver does not answer matters only if no other has the resource.
pub(super) async fn resolve(client: &HttpClient, limits: ReadLimits, name: &str) -> Result<ResourcePath, ClientError> {
    let wanted = ResourceName::new(name);
    let mut index = Index { client, limits, roots: Vec::new(), versions: Vec::new(), failed: None };
    for place in wanted.places() {
        let root = match place {
            Place::Everywhere => {
                index.add("/api").await?;
                // Most names without a group are of the core group: that saves a request.
                if let Some((Fit::Name, path)) = index.find(&wanted, place).await {
                    return Ok(path);
                }
                "/apis"
            }
            Place::Version { group: "", .. } => "/api",
            _ => "/apis",
        };
        index.add(root).await?;
        if let Some((_, path)) = index.find(&wanted, place).await {
            return Ok(path);
        }
    }
    Err(index.failed.unwrap_or_else(|| {
        let message = format!("the server doesn't have a resource type {:?}", name.to_lowercase());
        ApiStatus::new(404, "NotFound", &message).into()
    }))
}

/// The group versions that are known so far.
struct Index<'a> {
    client: &'a HttpClient,
    limits: ReadLimits,
    /// The documents with the names of groups that were read.
    roots: Vec<&'static str>,
    versions: Vec<GroupVersion>,
    /// Error of the first document that could not be read.
    failed: Option<ClientError>,
}

impl Index<'_> {
    /// Adds the groups of the document at `/api` or `/apis`.
    async fn add(&mut self, root: &'static str) -> Result<(), ClientError> {
        if !self.roots.contains(&root) {
            self.versions.extend(self.read(root, read_groups).await?);
            self.roots.push(root);
        }
        Ok(())
    }

    /// The best fit in a place. Documents after one with the full name are not read.
    async fn find(&mut self, name: &ResourceName, place: Place<'_>) -> Option<(Fit, ResourcePath)> {
        for at in 0..self.versions.len() {
            if !place.contains(&self.versions[at]) {
                continue;
            }
            if self.versions[at].resources.is_none() {
                let path = format!("/{}", self.versions[at].path());
                let resources = match self.read(&path, read_resources).await {
                    Ok(resources) => resources,
                    Err(error) => {
                        self.failed.get_or_insert(error);
                        Vec::new()
                    }
                };
                self.versions[at].resources = Some(resources);
            }
            if let Some((Fit::Name, ..)) = discovery::find(&self.versions[at..=at], name, place) {
                break;
            }
        }
        let (fit, version, resource) = discovery::find(&self.versions, name, place)?;
        let path = ResourcePath {
            api: version.path(),
            resource: resource.name.clone(),
            namespaced: Some(resource.namespaced),
        };
        Some((fit, path))
    }

    async fn read<T>(&self, path: &str, parse: fn(&str, &[u8]) -> Result<T, String>) -> Result<T, ClientError> {
        let body = self.client.read(path.to_owned(), ACCEPT, self.limits).await?;
        parse(path, &body)
            .map_err(|message| ClientError::HttpProtocol { address: self.client.address().to_owned(), message })
    }
}
