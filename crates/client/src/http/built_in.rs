//! The paths of resources that every cluster has. client-go's typed clients know theirs, too. So
//! most programs need no discovery, and work where discovery is not served: a kubefan without
//! passthrough serves only the resources that it caches.

use super::discovery::ResourcePath;

/// Namespaced resources by group and version.
const NAMESPACED: &[(&str, &[&str])] = &[
    (
        "api/v1",
        &[
            "configmaps",
            "endpoints",
            "events",
            "limitranges",
            "persistentvolumeclaims",
            "pods",
            "replicationcontrollers",
            "resourcequotas",
            "secrets",
            "serviceaccounts",
            "services",
        ],
    ),
    ("apis/apps/v1", &["controllerrevisions", "daemonsets", "deployments", "replicasets", "statefulsets"]),
    ("apis/batch/v1", &["cronjobs", "jobs"]),
    ("apis/coordination.k8s.io/v1", &["leases"]),
    ("apis/discovery.k8s.io/v1", &["endpointslices"]),
    ("apis/networking.k8s.io/v1", &["ingresses", "networkpolicies"]),
    ("apis/policy/v1", &["poddisruptionbudgets"]),
];

/// Resources that are not in namespaces.
const CLUSTER_SCOPED: &[(&str, &[&str])] = &[
    ("api/v1", &["namespaces", "nodes", "persistentvolumes"]),
    ("apis/storage.k8s.io/v1", &["csidrivers", "csinodes", "storageclasses", "volumeattachments"]),
];

/// The path of a resource by its plural name, alone or with its group: `pods`, `deployments.apps`.
/// Names outside of the core group need their group, as any other group may have them, too.
pub(super) fn path(name: &str) -> Option<ResourcePath> {
    let (resource, group) = name.split_once('.').unwrap_or((name, ""));
    let find = |table: &[(&str, &[&str])], namespaced| {
        let (api, _) = table.iter().find(|(api, resources)| group_of(api) == group && resources.contains(&resource))?;
        Some(ResourcePath { api: (*api).to_owned(), resource: resource.to_owned(), namespaced: Some(namespaced) })
    };
    find(NAMESPACED, true).or_else(|| find(CLUSTER_SCOPED, false))
}

fn group_of(api: &str) -> &str {
    api.strip_prefix("apis/").and_then(|rest| rest.split('/').next()).unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_built_in_resource_needs_no_discovery_and_another_name_does() {
        let found = |name| path(name).map(|path| (format!("{}/{}", path.api, path.resource), path.namespaced));
        assert_eq!(found("pods"), Some(("api/v1/pods".to_owned(), Some(true))));
        assert_eq!(found("nodes"), Some(("api/v1/nodes".to_owned(), Some(false))));
        assert_eq!(found("deployments.apps"), Some(("apis/apps/v1/deployments".to_owned(), Some(true))));
        for name in ["po", "deployments", "pods.metrics.k8s.io", "widgets.example.com", "deployments.v1.apps"] {
            assert_eq!(found(name), None, "{name}");
        }
    }
}
