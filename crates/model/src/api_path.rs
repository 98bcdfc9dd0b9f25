//! Paths of the Kubernetes API, split as the apiserver splits them (`RequestInfoFactory` in
//! `requestinfo.go`).
//!
//! The hazard is a resource with the name of something else in a path: a CRD may have the plural
//! `watch`, `namespaces` or `status`. Its objects must be found where the apiserver finds them, and
//! nowhere else.

/// The most segments after the version that are looked at: a namespace, a resource, a name, a
/// subresource, and one more.
const SEGMENTS_MAX: usize = 6;

/// The path of a resource, split into its segments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiPath<'a> {
    /// API group; `None` for the core group.
    pub group: Option<&'a str>,
    /// API version.
    pub version: &'a str,
    /// The deprecated verb in front of the rest: `watch` or `proxy`.
    pub verb: Option<&'a str>,
    /// The namespace in front of the resource.
    pub namespace: Option<&'a str>,
    /// The resource, and if the path is longer, the name, the subresource and the rest.
    pub parts: Vec<&'a str>,
}

impl<'a> ApiPath<'a> {
    /// Splits a path. `None` if it names no resource.
    pub fn split(path: &'a str) -> Option<Self> {
        let mut segments = path.strip_prefix('/')?.split('/').peekable();
        let group = match segments.next()? {
            "api" => None,
            "apis" => Some(segments.next()?),
            _ => return None,
        };
        let version = segments.next()?;
        let verb = segments.next_if(|segment| matches!(*segment, "watch" | "proxy"));
        let rest: Vec<_> = segments.take(SEGMENTS_MAX).collect();
        let (namespace, parts) = match &*rest {
            [] => return None,
            // A namespace is an object too, which has these subresources. Anything else after its
            // name is a resource inside it.
            ["namespaces", _, "status" | "finalize", ..] => (None, rest),
            ["namespaces", namespace, parts @ ..] if !parts.is_empty() => (Some(*namespace), parts.to_vec()),
            _ => (None, rest),
        };
        Some(Self { group, version, verb, namespace, parts })
    }

    /// The plural name.
    pub fn resource(&self) -> &'a str {
        self.parts.first().copied().unwrap_or_default()
    }

    /// The name of an object; empty for a collection.
    pub fn name(&self) -> &'a str {
        self.parts.get(1).copied().unwrap_or_default()
    }

    /// The subresource, if there is one.
    pub fn subresource(&self) -> Option<&'a str> {
        match self.verb {
            Some("proxy") => None,
            _ => self.parts.get(2).copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_split_as_the_apiserver_splits_them() {
        let split = |path: &str| {
            let path = ApiPath::split(path)?;
            let [group, verb, namespace] = [path.group, path.verb, path.namespace].map(|part| part.unwrap_or("-"));
            Some(format!("{group} {} {verb} {namespace} {}", path.version, path.parts.join(" ")))
        };
        for (path, expected) in [
            ("/api/v1/pods", "- v1 - - pods"),
            ("/api/v1/namespaces", "- v1 - - namespaces"),
            ("/api/v1/namespaces/a", "- v1 - - namespaces a"),
            ("/api/v1/namespaces/a/finalize", "- v1 - - namespaces a finalize"),
            ("/api/v1/namespaces/a/pods/p/log", "- v1 - a pods p log"),
            ("/api/v1/watch/namespaces/a/pods/p", "- v1 watch a pods p"),
            ("/api/v1/proxy/nodes/n/metrics", "- v1 proxy - nodes n metrics"),
            ("/apis/x.y/v1/namespaces/a/watch", "x.y v1 - a watch"),
            ("/apis/x.y/v1/watch/watch", "x.y v1 watch - watch"),
            ("/apis/x.y/v1/watch/x", "x.y v1 watch - x"),
            ("/apis/x.y/v1/namespaces/a/namespaces/b", "x.y v1 - a namespaces b"),
            ("/apis/x.y/v1/status", "x.y v1 - - status"),
            ("/apis/x.y/v1/namespaces/a/status", "x.y v1 - - namespaces a status"),
            ("/apis/x.y/v1/namespaces/a/status/b", "x.y v1 - - namespaces a status b"),
        ] {
            assert_eq!(split(path).as_deref(), Some(expected), "{path}");
        }
        for other in ["", "/", "/api", "/api/v1", "/apis/x.y/v1", "/apis/x.y/v1/watch", "/version", "api/v1/pods"] {
            assert_eq!(split(other), None, "{other:?}");
        }
    }
}
