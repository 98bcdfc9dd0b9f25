//! Discovery: the documents in which a server lists its resources, and kubectl's rules that find
//! one by name (RESTMapper and shortcut expander in client-go's `restmapper`), so that
//! `kubefan watch po`, an informer of `po` and `kubectl get po` mean the same resource.
//!
//! Servers since 1.27 answer at `/api` and `/apis` with all resources (aggregated discovery).
//! Others answer with the names of groups, and each group's version has a document of its own.

use serde::{Deserialize, de::DeserializeOwned};

use crate::text::without_value;

/// The media types of discovery, as kubectl requests them. Servers without aggregated discovery
/// answer with the last one.
pub const ACCEPT: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,\
    application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json";

/// A resource in one version.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "ResourceJson")]
pub struct Resource {
    /// The plural name, such as `pods`.
    pub name: String,
    /// The singular name, such as `pod`.
    pub singular: String,
    /// Short names, such as `po`.
    pub short_names: Vec<String>,
    /// The kind, such as `Pod`.
    pub kind: String,
    /// Whether objects have a namespace.
    pub namespaced: bool,
    /// Supported verbs, such as `list` and `watch`.
    pub verbs: Vec<String>,
}

/// A version of an API group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupVersion {
    /// API group; empty for the core group.
    pub group: String,
    /// API version, such as `v1`.
    pub version: String,
    /// Resources of the version. `None` if they are in the document at [`Self::path`].
    pub resources: Option<Vec<Resource>>,
    /// Whether its extension apiserver is unavailable, so that resources may be missing.
    pub is_stale: bool,
}

/// Quality of a match between a name and a resource. The smallest is the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fit {
    /// The plural or singular name.
    Name,
    /// A short name.
    ShortName,
    /// The kind.
    Kind,
}

/// A name as kubectl takes it: a plural, singular, kind or short name, alone or followed by
/// `.group` or `.version.group`. The case does not matter.
#[derive(Debug, Clone)]
pub struct ResourceName {
    text: String,
}

/// The group versions in which a name may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place<'a> {
    /// All.
    Everywhere,
    /// One version of a group.
    Version {
        /// API group; empty for the core group.
        group: &'a str,
        /// API version.
        version: &'a str,
    },
    /// All versions of a group.
    Group(&'a str),
    /// All versions of the groups whose names start like this.
    GroupPrefix(&'a str),
}

/// Reads the document at `/api` or `/apis`. Group versions come in order of preference.
///
/// # Errors
/// A text that names the path, if this is no such document.
pub fn read_groups(path: &str, json: &[u8]) -> Result<Vec<GroupVersion>, String> {
    let document: GroupsJson = parse(path, json)?;
    let groups = match document.kind.as_str() {
        "APIGroupDiscoveryList" => document.items,
        "APIGroupList" => document.groups,
        "APIVersions" => {
            let versions = document.versions.into_iter().flatten();
            let versions = versions.map(|version| VersionJson { version, ..VersionJson::default() }).collect();
            Some(vec![GroupJson { versions: Some(versions), ..GroupJson::default() }])
        }
        other => return Err(format!("{path} answers with kind {other:?}; is this an apiserver?")),
    };
    Ok(groups.into_iter().flatten().flat_map(GroupJson::into_versions).collect())
}

/// Reads the document of one group version.
///
/// # Errors
/// A text that names the path, if this is no such document.
pub fn read_resources(path: &str, json: &[u8]) -> Result<Vec<Resource>, String> {
    let VersionJson { resources, .. } = parse(path, json)?;
    // Legacy documents have subresources, too, such as `pods/log`.
    Ok(resources.into_iter().flatten().filter(|resource| !resource.name.contains('/')).collect())
}

fn parse<T: DeserializeOwned>(path: &str, json: &[u8]) -> Result<T, String> {
    serde_json::from_slice(json).map_err(|error| format!("{path}: {}", without_value(&error)))
}

/// The resource of a place that fits a name best; the first one, if several fit equally.
pub fn find<'a>(
    versions: &'a [GroupVersion],
    name: &ResourceName,
    place: Place<'_>,
) -> Option<(Fit, &'a GroupVersion, &'a Resource)> {
    let candidates = versions.iter().filter(|version| place.contains(version));
    let resources = candidates.flat_map(|version| version.resources.iter().flatten().map(move |of| (version, of)));
    let fits = resources.filter_map(|(version, of)| Some((of.fit(name.resource())?, version, of)));
    fits.min_by_key(|(fit, ..)| *fit)
}

impl GroupVersion {
    /// The path below which its resources are, such as `api/v1` or `apis/apps/v1`.
    pub fn path(&self) -> String {
        match self.group.as_str() {
            "" => format!("api/{}", self.version),
            group => format!("apis/{group}/{}", self.version),
        }
    }
}

impl Resource {
    /// Compares the resource with a name in lower case.
    fn fit(&self, name: &str) -> Option<Fit> {
        if name.is_empty() {
            None
        } else if self.name == name || self.singular.to_lowercase() == name {
            Some(Fit::Name)
        } else if self.short_names.iter().any(|short| short == name) {
            Some(Fit::ShortName)
        } else {
            (self.kind.to_lowercase() == name).then_some(Fit::Kind)
        }
    }
}

impl ResourceName {
    /// Reads a name. Every text is one.
    pub fn new(text: &str) -> Self {
        Self { text: text.to_lowercase() }
    }

    /// The name without its group and version.
    pub fn resource(&self) -> &str {
        self.text.split('.').next().unwrap_or_default()
    }

    /// The places to look at, the preferred first. The next one counts only if the name is in none
    /// of those before: a whole group takes precedence over the start of one
    /// (`ingresses.networking`).
    pub fn places(&self) -> Vec<Place<'_>> {
        let qualifier = self.text.split_once('.').map_or("", |(_, qualifier)| qualifier);
        if qualifier.is_empty() {
            return vec![Place::Everywhere];
        }
        if is_version(qualifier) {
            return vec![Place::Version { group: "", version: qualifier }];
        }
        let version = qualifier.split_once('.').map(|(version, group)| Place::Version { group, version });
        version.into_iter().chain([Place::Group(qualifier), Place::GroupPrefix(qualifier)]).collect()
    }
}

/// Whether a part of a name is an API version, such as `v1` or `v2beta1`. No group looks like it.
fn is_version(text: &str) -> bool {
    let number = text.strip_prefix('v').filter(|number| !number.contains('.'));
    number.is_some_and(|number| number.starts_with(|first: char| first.is_ascii_digit()))
}

impl Place<'_> {
    /// Whether a group version is in this place.
    pub fn contains(self, of: &GroupVersion) -> bool {
        match self {
            Place::Everywhere => true,
            Place::Version { group, version } => of.group == group && of.version == version,
            Place::Group(group) => of.group == group,
            Place::GroupPrefix(start) => of.group.starts_with(start),
        }
    }
}

/// The document at `/api` or `/apis`, in either form.
#[derive(Default, Deserialize)]
#[serde(default)]
struct GroupsJson {
    kind: String,
    /// Aggregated.
    items: Option<Vec<GroupJson>>,
    /// Legacy, at `/apis`.
    groups: Option<Vec<GroupJson>>,
    /// Legacy, at `/api`.
    versions: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct GroupJson {
    /// Legacy.
    name: String,
    /// Aggregated.
    metadata: GroupMetadata,
    /// Aggregated: the preferred one is the first.
    versions: Option<Vec<VersionJson>>,
    /// Legacy.
    preferred_version: Option<VersionJson>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct GroupMetadata {
    name: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct VersionJson {
    version: String,
    /// Aggregated, and in legacy documents of one version.
    resources: Option<Vec<Resource>>,
    /// Aggregated: `Current` or `Stale`.
    freshness: String,
}

impl GroupJson {
    fn into_versions(self) -> impl Iterator<Item = GroupVersion> {
        let group = if self.name.is_empty() { self.metadata.name } else { self.name };
        let preferred = self.preferred_version.unwrap_or_default().version;
        let mut versions = self.versions.unwrap_or_default();
        versions.sort_by_key(|version| version.version != preferred);
        versions.into_iter().map(move |VersionJson { version, resources, freshness }| GroupVersion {
            group: group.clone(),
            version,
            resources,
            is_stale: freshness == "Stale",
        })
    }
}

/// A resource in either form.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ResourceJson {
    /// Legacy: the plural name, or `pods/log`.
    name: String,
    /// Aggregated: the plural name.
    resource: String,
    #[serde(alias = "singularName")]
    singular_resource: String,
    short_names: Option<Vec<String>>,
    /// Legacy.
    kind: String,
    /// Aggregated. Null in the documents of some extension apiservers.
    response_kind: Option<ResponseKind>,
    /// Legacy.
    namespaced: bool,
    /// Aggregated: `Namespaced` or `Cluster`.
    scope: String,
    verbs: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ResponseKind {
    kind: String,
}

impl From<ResourceJson> for Resource {
    fn from(json: ResourceJson) -> Self {
        let kind = json.response_kind.map_or(json.kind, |response| response.kind);
        let singular = json.singular_resource;
        Self {
            name: if json.resource.is_empty() { json.name } else { json.resource },
            // Older servers leave the singular of built-in resources empty.
            singular: if singular.is_empty() { kind.to_lowercase() } else { singular },
            short_names: json.short_names.unwrap_or_default(),
            kind,
            namespaced: json.namespaced || json.scope == "Namespaced",
            verbs: json.verbs.unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn resource(resource: &str, kind: &str, short: &[&str], namespaced: bool) -> Value {
        json!({
            "resource": resource, "responseKind": {"group": "", "version": "", "kind": kind}, "shortNames": short,
            "scope": if namespaced { "Namespaced" } else { "Cluster" }, "singularResource": kind.to_lowercase(),
            "verbs": ["get", "list", "watch"], "subresources": [{"subresource": "status"}],
        })
    }

    fn groups(document: &Value) -> Vec<GroupVersion> {
        read_groups("/apis", document.to_string().as_bytes()).unwrap()
    }

    fn aggregated() -> Vec<GroupVersion> {
        groups(&json!({"kind": "APIGroupDiscoveryList", "items": [
            {"metadata": {}, "versions": [{"version": "v1", "freshness": "Current", "resources": [
                resource("pods", "Pod", &["po"], true), resource("events", "Event", &["ev"], true), resource("nodes", "Node", &["no"], false),
            ]}]},
            {"metadata": {"name": "apps"}, "versions": [{"version": "v1", "resources": [resource("deployments", "Deployment", &["deploy"], true)]}]},
            {"metadata": {"name": "events.k8s.io"}, "versions": [{"version": "v1", "resources": [resource("events", "Event", &["ev"], true)]}]},
            {"metadata": {"name": "networking.k8s.io"}, "versions": [{"version": "v1", "resources": [resource("ingresses", "Ingress", &["ing"], true)]}]},
            {"metadata": {"name": "example.com"}, "versions": [
                {"version": "v1", "resources": [resource("widgets", "Widget", &["wd"], true)]},
                {"version": "v1beta1", "resources": [resource("widgets", "Widget", &[], true), resource("gadgets", "Gadget", &["po"], true)]},
                {"version": "stable", "resources": [resource("widgets", "Widget", &[], true)]},
            ]},
            {"metadata": {"name": "metrics.k8s.io"}, "versions": [{"version": "v1beta1", "freshness": "Stale"}]},
        ]}))
    }

    fn resolve(versions: &[GroupVersion], name: &str) -> Option<String> {
        let name = ResourceName::new(name);
        let found = name.places().into_iter().find_map(|place| find(versions, &name, place));
        found.map(|(_, version, resource)| format!("{}/{}", version.path(), resource.name))
    }

    #[test]
    fn names_resolve_as_in_kubectl() {
        let versions = aggregated();
        for (path, names) in [
            ("api/v1/pods", &["pods", "po", "pod", "Pod", "PODS", "pods.v1.", "pods.v1", "pods."][..]),
            ("api/v1/events", &["events", "ev"]),
            ("apis/events.k8s.io/v1/events", &["events.events.k8s.io", "ev.events.k8s.io", "events.v1.events.k8s.io"]),
            ("apis/apps/v1/deployments", &["deploy", "deployments.apps", "deployments.v1.apps", "Deployment.v1.apps"]),
            ("apis/networking.k8s.io/v1/ingresses", &["ingresses.networking"]),
            ("apis/example.com/v1/widgets", &["widgets", "widgets.v1.example.com", "widget.example.com"]),
            ("apis/example.com/v1beta1/widgets", &["widgets.v1beta1.example.com"]),
            ("apis/example.com/stable/widgets", &["widgets.stable.example.com"]),
            ("apis/example.com/v1beta1/gadgets", &["gadgets"]),
        ] {
            for name in names {
                assert_eq!(resolve(&versions, name).as_deref(), Some(path), "{name}");
            }
        }
        for name in ["", ".", "..", "pds", "pods.v2", "pods.apps", "widgets.v3.example.com"] {
            assert_eq!(resolve(&versions, name), None, "{name}");
        }
    }

    #[test]
    fn legacy_documents_name_the_versions_and_the_preferred_one_is_the_first() {
        let core = groups(&json!({"kind": "APIVersions", "versions": ["v1"]}));
        let groups = groups(&json!({"kind": "APIGroupList", "groups": [
            {"name": "apps", "versions": [{"version": "v1beta1"}, {"version": "v1"}], "preferredVersion": {"version": "v1"}},
            {"name": "example.com", "versions": null, "preferredVersion": null},
        ]}));
        let paths: Vec<_> = core.iter().chain(&groups).map(GroupVersion::path).collect();
        assert_eq!(paths, ["api/v1", "apis/apps/v1", "apis/apps/v1beta1"]);
    }

    #[test]
    fn legacy_documents_yield_the_same_resources() {
        let legacy = json!({"groupVersion": "v1", "resources": [
            {"name": "pods", "singularName": "", "namespaced": true, "kind": "Pod", "verbs": ["get", "list", "watch"], "shortNames": ["po"]},
            {"name": "pods/status", "singularName": "", "namespaced": true, "kind": "Pod", "verbs": ["get"]},
        ]});
        let pods: Resource = serde_json::from_value(resource("pods", "Pod", &["po"], true)).unwrap();
        assert_eq!(read_resources("/api/v1", legacy.to_string().as_bytes()), Ok(vec![pods]));
        let nulls = r#"{"resources": [{"resource": "x", "responseKind": null, "shortNames": null, "verbs": null}]}"#;
        assert_eq!(read_resources("/api/v1", nulls.as_bytes()).unwrap()[0].name, "x");
        assert_eq!(read_resources("/api/v1", br#"{"resources": null}"#), Ok(Vec::new()));
    }

    #[test]
    fn a_document_of_another_kind_is_refused_and_not_quoted() {
        let error = read_groups("/api", br#"{"kind": "Status", "message": "very-secret"}"#).unwrap_err();
        assert_eq!(error, "/api answers with kind \"Status\"; is this an apiserver?");
        let error = read_groups("/api", br#""very-secret""#).unwrap_err();
        assert!(error.starts_with("/api: ") && !error.contains("very-secret"), "{error}");
    }
}
