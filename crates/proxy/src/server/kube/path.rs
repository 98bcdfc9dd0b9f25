//! Parses paths of the Kubernetes API (`RequestInfoFactory` in the apiserver's `requestinfo.go`).
//!
//! Only paths of collections and single objects are parsed, because only those can be cached.
//! Subresources, discovery and unusual spellings are left to upstream.

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
        // Escapes are left to upstream.
        if path.contains('%') {
            return None;
        }
        let mut parts = path.strip_prefix('/')?.split('/').peekable();
        let group = match parts.next()? {
            "api" => "",
            "apis" => parts.next().filter(|group| !group.is_empty())?,
            _ => return None,
        };
        let version = parts.next()?;
        let is_watch = parts.next_if_eq(&"watch").is_some();
        let rest: Vec<_> = parts.collect();
        // Upstream refuses segments that are not names.
        if version.is_empty() || rest.iter().any(|part| matches!(*part, "" | "." | "..")) {
            return None;
        }
        let (namespace, resource, name) = match *rest {
            // A namespace is an object too; after its name comes a collection inside it, or one of
            // its subresources.
            ["namespaces"] => ("", "namespaces", ""),
            ["namespaces", name] => ("", "namespaces", name),
            ["namespaces", _, "status" | "finalize"] => return None,
            ["namespaces", namespace, resource] => (namespace, resource, ""),
            ["namespaces", namespace, resource, name] => (namespace, resource, name),
            [resource] => ("", resource, ""),
            [resource, name] => ("", resource, name),
            _ => return None,
        };
        // Deprecated verbs.
        if resource == "proxy" || resource == "redirect" {
            return None;
        }
        let own = str::to_owned;
        let (group, version, resource) = (own(group), own(version), own(resource));
        Some(Self { group, version, resource, namespace: own(namespace), name: own(name), is_watch })
    }
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
