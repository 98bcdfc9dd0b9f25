//! Names of resources, scopes and objects.

use std::{
    cmp::Ordering,
    fmt,
    hash::{Hash, Hasher},
    sync::Arc,
};

use crate::ApiPath;

/// A resource by its full name, such as `apps/v1 deployments`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupVersionResource {
    /// API group; empty for the core group.
    pub group: String,
    /// API version, such as `v1`.
    pub version: String,
    /// Plural name, such as `deployments`.
    pub resource: String,
}

impl GroupVersionResource {
    /// A resource by group, version and plural name.
    pub fn new(group: impl Into<String>, version: impl Into<String>, resource: impl Into<String>) -> Self {
        Self { group: group.into(), version: version.into(), resource: resource.into() }
    }

    /// The API path of the resource's group and version: `/api/v1` or `/apis/apps/v1`.
    pub fn group_version_path(&self) -> String {
        match self.group.as_str() {
            "" => format!("/api/{}", self.version),
            group => format!("/apis/{group}/{}", self.version),
        }
    }

    /// The path of the resource's collection in a scope.
    pub fn collection_path(&self, scope: &Scope) -> String {
        match scope {
            Scope::Cluster => format!("{}/{}", self.group_version_path(), self.resource),
            Scope::Namespace(namespace) => {
                format!("{}/namespaces/{namespace}/{}", self.group_version_path(), self.resource)
            }
        }
    }

    /// Whether the apiserver reads [`Self::collection_path`] as the path of this collection. It
    /// does not if the resource has the name of something else in a path.
    pub fn has_collection_path(&self, scope: &Scope) -> bool {
        let path = self.collection_path(scope);
        ApiPath::split(&path).is_some_and(|path| {
            path.parts == [self.resource.as_str()]
                && path.namespace.unwrap_or_default() == scope.namespace()
                && path.verb.is_none()
        })
    }

    /// Whether the apiserver has a watch cache of the resource. It has none of events, because
    /// there are too many. They may be in an etcd of their own, and all reads of them go there.
    pub fn has_watch_cache(&self) -> bool {
        self.resource != "events" || !matches!(self.group.as_str(), "" | "events.k8s.io")
    }

    /// `v1` or `apps/v1`, as in an object's `apiVersion`.
    pub fn api_version(&self) -> String {
        match self.group.as_str() {
            "" => self.version.clone(),
            group => format!("{group}/{}", self.version),
        }
    }
}

/// `deployments.apps`, as kubectl writes it; `pods` in the core group.
impl fmt::Display for GroupVersionResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group.as_str() {
            "" => f.write_str(&self.resource),
            group => write!(f, "{}.{group}", self.resource),
        }
    }
}

/// The scope of one cache. Versions of different scopes are never compared.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// All namespaces, or a cluster-scoped resource.
    Cluster,
    /// One namespace.
    Namespace(String),
}

impl Scope {
    /// The namespace, or empty for the whole cluster.
    pub fn namespace(&self) -> &str {
        match self {
            Self::Cluster => "",
            Self::Namespace(namespace) => namespace,
        }
    }
}

/// Namespace and name, which identify an object within a resource.
///
/// Keys order like etcd's keys, as the bytes of `namespace/name`, because that is the order of the
/// apiserver's lists: `a-b/x` comes before `a/x`. Clones share the text.
#[derive(Clone)]
pub struct ObjectKey {
    text: Arc<str>,
    namespace_len: u32,
}

impl ObjectKey {
    /// The key of an object; `namespace` is empty for cluster-scoped resources.
    pub fn new(namespace: &str, name: &str) -> Self {
        let text = if namespace.is_empty() { Arc::from(name) } else { Arc::from(format!("{namespace}/{name}")) };
        Self { text, namespace_len: u32::try_from(namespace.len()).unwrap_or(0) }
    }

    /// The namespace; empty for cluster-scoped resources.
    pub fn namespace(&self) -> &str {
        &self.text[..self.namespace_len as usize]
    }

    /// The name.
    pub fn name(&self) -> &str {
        match self.namespace_len {
            0 => &self.text,
            len => &self.text[len as usize + 1..],
        }
    }

    /// `namespace/name`, or the name alone.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl PartialEq for ObjectKey {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for ObjectKey {}

impl PartialOrd for ObjectKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ObjectKey {
    fn cmp(&self, other: &Self) -> Ordering {
        self.text.cmp(&other.text)
    }
}

impl Hash for ObjectKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.text.hash(state);
    }
}

impl std::borrow::Borrow<str> for ObjectKey {
    fn borrow(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_as_etcd_orders_them() {
        let mut keys = [ObjectKey::new("a", "x"), ObjectKey::new("a-b", "x"), ObjectKey::new("a", "b")];
        keys.sort();
        assert_eq!(keys.map(|key| key.to_string()), ["a-b/x", "a/b", "a/x"]);
    }

    #[test]
    fn keys_return_their_namespace_and_name() {
        let key = ObjectKey::new("kube-system", "dns");
        assert_eq!((key.namespace(), key.name(), key.as_str()), ("kube-system", "dns", "kube-system/dns"));
        let key = ObjectKey::new("", "node-1");
        assert_eq!((key.namespace(), key.name()), ("", "node-1"));
    }

    #[test]
    fn the_apiserver_has_a_watch_cache_of_everything_but_events() {
        let has_watch_cache =
            |group: &str, resource: &str| GroupVersionResource::new(group, "v1", resource).has_watch_cache();
        assert!(!has_watch_cache("", "events") && !has_watch_cache("events.k8s.io", "events"));
        assert!(has_watch_cache("", "pods") && has_watch_cache("example.com", "events"));
    }

    #[test]
    fn a_resource_named_like_a_part_of_a_path_is_listed_only_where_the_apiserver_finds_it() {
        let has =
            |resource: &str, scope: Scope| GroupVersionResource::new("x.y", "v1", resource).has_collection_path(&scope);
        let namespace = || Scope::Namespace("a".to_owned());
        for (resource, in_cluster, in_namespace) in [
            ("pods", true, true),
            ("namespaces", true, true),
            ("watch", false, true),
            ("proxy", false, true),
            ("status", true, false),
            ("finalize", true, false),
        ] {
            assert_eq!(has(resource, Scope::Cluster), in_cluster, "{resource}");
            assert_eq!(has(resource, namespace()), in_namespace, "{resource}");
        }
    }

    #[test]
    fn paths_and_names_are_those_of_kubernetes() {
        let pods = GroupVersionResource::new("", "v1", "pods");
        let deployments = GroupVersionResource::new("apps", "v1", "deployments");
        assert_eq!((pods.group_version_path(), pods.to_string()), ("/api/v1".into(), "pods".into()));
        assert_eq!(deployments.group_version_path(), "/apis/apps/v1");
        assert_eq!((deployments.api_version(), deployments.to_string()), ("apps/v1".into(), "deployments.apps".into()));
    }
}
