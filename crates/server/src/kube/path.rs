//! Parses paths of the Kubernetes API.
//!
//! Only paths of collections and single objects are parsed, because only those can be cached.
//! Subresources, discovery and unusual spellings are left to upstream.

use kubefan_model::ApiPath;

/// The objects that a path names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Path {
    /// API group; empty for the core group.
    pub group: String,
    /// API version.
    pub version: String,
    /// Plural name.
    pub resource: String,
    /// Empty for all namespaces, and for cluster-scoped resources.
    pub namespace: String,
    /// Empty for a collection.
    pub name: String,
    /// Whether it has the deprecated `/watch/` prefix.
    pub is_watch: bool,
}

impl Path {
    /// Parses a path. `None` if it names nothing that can be cached.
    pub fn parse(path: &str) -> Option<Self> {
        let path = ApiPath::split(path)?;
        if path.parts.len() > 2 { None } else { Self::of(&path) }
    }

    /// Returns the object of a path, and its subresource.
    pub fn parse_subresource(path: &str) -> Option<(Self, &str)> {
        let path = ApiPath::split(path)?;
        let subresource = path.subresource().filter(|subresource| !subresource.is_empty())?;
        Self::of(&path).map(|path| (path, subresource))
    }

    /// Whether the apiserver reads the query as `ListOptions`: it is a path of a collection, or of
    /// a single object with the prefix `/watch/`.
    pub fn has_list_options(&self) -> bool {
        self.name.is_empty() || self.is_watch
    }

    fn of(path: &ApiPath<'_>) -> Option<Self> {
        let ApiPath { group, version, verb, namespace, parts } = path;
        let mut names = parts.iter().take(2).chain(namespace).chain(group).chain([version]);
        if *verb == Some("proxy") || !names.all(|name| is_name(name)) {
            return None;
        }
        let resource = path.resource();
        let name = path.name();
        // The path of a namespace names it twice. In another group these are the namespace and the
        // name of an object.
        let namespace = match namespace {
            None if resource == "namespaces" && group.is_some() => name,
            namespace => namespace.unwrap_or_default(),
        };
        let own = |text: &str| text.to_owned();
        Some(Self {
            group: own(group.unwrap_or_default()),
            version: own(version),
            resource: own(resource),
            namespace: own(namespace),
            name: own(name),
            is_watch: verb.is_some(),
        })
    }
}

/// Whether a segment is a name. Upstream refuses other segments, and handles escapes.
fn is_name(segment: &str) -> bool {
    !matches!(segment, "" | "." | "..") && !segment.contains('%')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &str) -> Option<(String, String, String, bool)> {
        let Path { group, version, resource, namespace, name, is_watch } = Path::parse(path)?;
        Some((format!("{group}/{version}/{resource}"), namespace, name, is_watch))
    }

    #[test]
    fn only_collections_and_objects_are_parsed() {
        let is = |gvr: &str, namespace: &str, name: &str, watch| {
            Some((gvr.to_owned(), namespace.to_owned(), name.to_owned(), watch))
        };
        assert_eq!(read("/api/v1/pods"), is("/v1/pods", "", "", false));
        assert_eq!(read("/api/v1/namespaces/a/pods"), is("/v1/pods", "a", "", false));
        assert_eq!(read("/api/v1/namespaces/a/pods/p"), is("/v1/pods", "a", "p", false));
        assert_eq!(read("/api/v1/nodes/n"), is("/v1/nodes", "", "n", false));
        assert_eq!(read("/api/v1/namespaces"), is("/v1/namespaces", "", "", false));
        assert_eq!(read("/api/v1/namespaces/a"), is("/v1/namespaces", "", "a", false));
        assert_eq!(read("/apis/apps/v1/deployments"), is("apps/v1/deployments", "", "", false));
        assert_eq!(read("/api/v1/watch/namespaces/a/pods/p"), is("/v1/pods", "a", "p", true));
        // A namespace and the name of an object, although there is no such path of namespaces.
        assert_eq!(read("/apis/x.y/v1/namespaces/a"), is("x.y/v1/namespaces", "a", "a", false));
        assert_eq!(read("/apis/x.y/v1/namespaces/a/namespaces"), is("x.y/v1/namespaces", "a", "", false));
        assert_eq!(read("/apis/x.y/v1/namespaces/a/watch"), is("x.y/v1/watch", "a", "", false));
        assert_eq!(read("/apis/x.y/v1/watch/watch"), is("x.y/v1/watch", "", "", true));
        assert_eq!(read("/apis/x.y/v1/status/b"), is("x.y/v1/status", "", "b", false));
        assert_eq!(read("/apis/apps/v1/watch/deployments"), is("apps/v1/deployments", "", "", true));
        for other in [
            "",
            "/",
            "/api",
            "/api/v1",
            "/apis",
            "/apis/apps",
            "/apis/apps/v1",
            "/apis//v1/pods",
            "/version",
            "/openapi/v3",
            "/api/v1/namespaces/a/pods/p/log",
            "/api/v1/namespaces/a/status",
            "/apis/x.y/v1/namespaces/a/status",
            "/apis/x.y/v1/namespaces/a/status/b",
            "/apis/x.y/v1/watch",
            "/apis/x.y/v1/proxy/pods",
            "/api/v1/namespaces/a/pods/p/proxy/x",
            "/api/v1/pods/",
            "/api/v1/namespaces//pods",
            "/api/v1/namespaces/a%2Fb/pods",
            "api/v1/pods",
        ] {
            assert_eq!(read(other), None, "{other:?}");
        }
    }
}
