//! Discovery (aggregated and legacy), the OpenAPI v3 index and `/version`.

use std::{collections::BTreeMap, sync::atomic::Ordering};

use serde_json::{Value, json};

use super::{resource::SimResource, server::Inner};

/// The media type of aggregated discovery.
pub(super) const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

fn verbs(resource: &SimResource) -> Value {
    if resource.custom {
        json!(["delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"])
    } else if resource.kind == "Namespace" {
        json!(["create", "delete", "get", "list", "patch", "update", "watch"])
    } else {
        json!(["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"])
    }
}

impl Inner {
    /// Groups, their versions, and the resources of each.
    fn groups(&self) -> BTreeMap<String, BTreeMap<String, Vec<SimResource>>> {
        let mut groups = BTreeMap::<String, BTreeMap<String, Vec<SimResource>>>::new();
        for collection in self.store.collections() {
            let gvr = &collection.resource.gvr;
            let versions = groups.entry(gvr.group.clone()).or_default();
            versions.entry(gvr.version.clone()).or_default().push(collection.resource.clone());
        }
        groups
    }

    /// `/api` or `/apis` as an APIGroupDiscoveryList.
    pub(super) fn aggregated(&self, core: bool) -> Value {
        let groups = self.groups().into_iter().filter(|(group, _)| group.is_empty() == core);
        let items: Vec<Value> = groups
            .map(|(group, versions)| {
                let versions: Vec<Value> = versions
                    .iter()
                    .map(|(version, resources)| {
                        let resources: Vec<Value> = resources.iter().map(aggregated_resource).collect();
                        json!({"version": version, "resources": resources, "freshness": "Current"})
                    })
                    .collect();
                let metadata = if group.is_empty() { json!({}) } else { json!({"name": group}) };
                json!({"metadata": metadata, "versions": versions})
            })
            .collect();
        json!({"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items})
    }

    /// `/apis` as an APIGroupList.
    pub(super) fn group_list(&self) -> Value {
        let groups = self.groups();
        let groups: Vec<Value> = groups
            .iter()
            .filter(|(group, _)| !group.is_empty())
            .map(|(group, versions)| group_entry(group, versions.keys()))
            .collect();
        json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
    }

    /// `/apis/apps` as an APIGroup.
    pub(super) fn group(&self, group: &str) -> Option<Value> {
        let groups = self.groups();
        let mut entry = group_entry(group, groups.get(group)?.keys());
        entry["kind"] = "APIGroup".into();
        entry["apiVersion"] = "v1".into();
        Some(entry)
    }

    /// `/api/v1` or `/apis/apps/v1` as an APIResourceList.
    pub(super) fn resource_list(&self, group: &str, version: &str) -> Option<Value> {
        let groups = self.groups();
        let resources = groups.get(group)?.get(version)?;
        let mut entries = Vec::new();
        for resource in resources {
            let mut entry = json!({
                "name": resource.gvr.resource, "singularName": resource.singular, "namespaced": resource.namespaced,
                "kind": resource.kind, "verbs": verbs(resource),
            });
            if !resource.short_names.is_empty() {
                entry["shortNames"] = json!(resource.short_names);
            }
            if !resource.categories.is_empty() {
                entry["categories"] = json!(resource.categories);
            }
            entries.push(entry);
            if resource.status_subresource {
                entries.push(json!({
                    "name": format!("{}/status", resource.gvr.resource), "singularName": "",
                    "namespaced": resource.namespaced, "kind": resource.kind, "verbs": ["get", "patch", "update"],
                }));
            }
        }
        let group_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
        Some(json!({
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": entries,
        }))
    }

    /// `/openapi/v3`: one URL per group version. Its hash changes with any schema of that group
    /// version.
    pub(super) fn openapi_index(&self) -> Value {
        let mut hashes = BTreeMap::<String, u64>::new();
        for collection in self.store.collections() {
            let gvr = &collection.resource.gvr;
            let path = gvr.group_version_path().trim_start_matches('/').to_owned();
            let schema = collection.schema.load(Ordering::Relaxed);
            let text = format!("{:?} {schema} {}", collection.resource, self.options.git_version);
            let hash = hashes.entry(path).or_insert(0xcbf2_9ce4_8422_2325);
            // FNV-1a: stable across builds.
            *hash = text.bytes().fold(*hash, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        }
        let paths: serde_json::Map<String, Value> = hashes
            .into_iter()
            .map(|(path, hash)| {
                let url = format!("/openapi/v3/{path}?hash={hash:016X}");
                (path, json!({"serverRelativeURL": url}))
            })
            .collect();
        json!({"paths": paths})
    }

    /// `/openapi/v3/apis/…` of a group version with custom resources: only the facts that discovery
    /// lacks.
    pub(super) fn openapi(&self, group: &str, version: &str) -> Option<Value> {
        let groups = self.groups();
        let resources = groups.get(group)?.get(version)?;
        let mut schemas = serde_json::Map::new();
        for resource in resources.iter().filter(|resource| resource.custom) {
            let SimResource { kind, list_kind, selectable_fields, .. } = resource;
            let of = |kind: &str| json!([{"group": group, "version": version, "kind": kind}]);
            let fields: Vec<Value> =
                selectable_fields.iter().map(|field| json!({"fieldPath": format!(".{}", field.path)})).collect();
            schemas.insert(
                kind.clone(),
                json!({"x-kubernetes-group-version-kind": of(kind), "x-kubernetes-selectable-fields": fields}),
            );
            let items = json!({"items": {"$ref": format!("#/components/schemas/{kind}")}});
            let list = json!({"x-kubernetes-group-version-kind": of(list_kind), "properties": {"items": items}});
            schemas.insert(list_kind.clone(), list);
        }
        (!schemas.is_empty()).then(|| json!({"openapi": "3.0.0", "components": {"schemas": schemas}}))
    }

    /// `/version`.
    pub(super) fn version(&self) -> Value {
        let version = &self.options.git_version;
        let mut numbers = version.trim_start_matches('v').split('.');
        json!({
            "major": numbers.next(), "minor": numbers.next(), "gitVersion": version, "gitCommit": "", "gitTreeState": "clean",
            "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "", "platform": "linux/amd64",
        })
    }
}

fn group_entry<'a>(group: &str, versions: impl Iterator<Item = &'a String>) -> Value {
    let entry = |version: &String| json!({"groupVersion": format!("{group}/{version}"), "version": version});
    let versions: Vec<Value> = versions.map(entry).collect();
    json!({"name": group, "preferredVersion": versions.first(), "versions": versions})
}

fn aggregated_resource(resource: &SimResource) -> Value {
    // For built-in resources kube-apiserver leaves the group and version of `responseKind` empty:
    // the enclosing list implies them.
    let kind = if resource.custom {
        json!({"group": resource.gvr.group, "version": resource.gvr.version, "kind": resource.kind})
    } else {
        json!({"group": "", "version": "", "kind": resource.kind})
    };
    let mut entry = json!({
        "resource": resource.gvr.resource, "responseKind": kind, "singularResource": resource.singular,
        "scope": if resource.namespaced { "Namespaced" } else { "Cluster" }, "verbs": verbs(resource),
    });
    if !resource.short_names.is_empty() {
        entry["shortNames"] = json!(resource.short_names);
    }
    if !resource.categories.is_empty() {
        entry["categories"] = json!(resource.categories);
    }
    if resource.status_subresource {
        let kind = entry["responseKind"].clone();
        entry["subresources"] =
            json!([{"subresource": "status", "responseKind": kind, "verbs": ["get", "patch", "update"]}]);
    }
    entry
}
