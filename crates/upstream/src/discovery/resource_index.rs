//! An index of the resources that the apiserver serves, and the rules that find one by name.
//!
//! Pure data: discovery documents are the input, and names are resolved by kubectl's rules
//! (RESTMapper and shortcut expander in client-go's `restmapper`), so that `kubefan watch po` and
//! `kubectl get po` mean the same resource.

use serde::Deserialize;

use kubefan_model::GroupVersionResource;

/// A resource in one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceInfo {
    /// Full name of the resource.
    pub gvr: GroupVersionResource,
    /// The kind, such as `Pod`.
    pub kind: String,
    /// The singular name, such as `pod`.
    pub singular: String,
    /// Short names, such as `po`.
    pub short_names: Vec<String>,
    /// Categories, such as `all`.
    pub categories: Vec<String>,
    /// Whether objects have a namespace.
    pub namespaced: bool,
    /// Supported verbs, such as `list` and `watch`.
    pub verbs: Vec<String>,
}

impl ResourceInfo {
    /// Whether it can be listed and watched, and therefore cached.
    pub fn is_watchable(&self) -> bool {
        ["list", "watch"].iter().all(|verb| self.verbs.iter().any(|has| has == verb))
    }
}

/// A group version whose resources are unknown, because its extension apiserver is unavailable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedGroup {
    /// API group.
    pub group: String,
    /// API version.
    pub version: String,
    /// The error.
    pub message: String,
}

/// All resources in order of preference: the core group first, then groups in the server's order;
/// within a group, the preferred version first.
#[derive(Debug, Clone, Default)]
pub struct ResourceIndex {
    resources: Vec<ResourceInfo>,
    failed: Vec<FailedGroup>,
}

/// The result for a name that matches no resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoMatch {
    /// A similar name of an existing resource.
    pub suggestion: Option<String>,
    /// The unavailable group versions that might contain it.
    pub failed: Vec<FailedGroup>,
}

/// A name with more typing errors is another name.
const TYPING_ERRORS_MAX: usize = 2;

impl ResourceIndex {
    /// Adds the groups of an aggregated discovery document (`apidiscovery.k8s.io/v2`).
    pub fn add_aggregated(&mut self, document: &AggregatedDiscovery) {
        for item in &document.items {
            let group = &item.metadata.name;
            for version in &item.versions {
                if version.freshness == "Stale" {
                    self.failed.push(FailedGroup {
                        group: group.clone(),
                        version: version.version.clone(),
                        message: "its apiserver is not available".to_owned(),
                    });
                }
                self.resources.extend(version.resources.iter().map(|resource| resource.info(group, &version.version)));
            }
        }
    }

    /// Adds the document of one group version, as servers before 1.26 send it.
    pub fn add_legacy(&mut self, group: &str, version: &str, document: &LegacyResourceList) {
        let resources = document.resources.iter().filter(|resource| !resource.name.contains('/'));
        self.resources.extend(resources.map(|resource| resource.info(group, version)));
    }

    /// Records a group version that did not answer.
    pub fn add_failed(&mut self, failed: FailedGroup) {
        self.failed.push(failed);
    }

    /// All resources, preferred first.
    pub fn resources(&self) -> &[ResourceInfo] {
        &self.resources
    }

    /// Finds a resource by kubectl's rules: by plural, singular, kind or short name, alone or
    /// followed by `.group` or `.version.group`, ignoring case. An exact group takes precedence
    /// over a prefix (`ingresses.networking`), and full names take precedence over short names.
    pub fn resolve(&self, name: &str) -> Option<&ResourceInfo> {
        let name = name.to_lowercase();
        let mut parts = name.splitn(3, '.');
        if let (Some(resource), Some(version), Some(group)) = (parts.next(), parts.next(), parts.next())
            && let Some(found) = self.lookup(resource, |gvr| gvr.version == version && gvr.group == group)
        {
            return Some(found);
        }
        match name.split_once('.') {
            Some((resource, group)) => self
                .lookup(resource, |gvr| gvr.group == group)
                .or_else(|| self.lookup(resource, |gvr| !group.is_empty() && gvr.group.starts_with(group))),
            None => self.lookup(&name, |_| true),
        }
    }

    /// Finds a resource by its full name; an empty version means the preferred one.
    pub fn find(&self, group: &str, version: &str, resource: &str) -> Option<&ResourceInfo> {
        let wanted = |gvr: &GroupVersionResource| {
            gvr.group == group && (version.is_empty() || gvr.version == version) && gvr.resource == resource
        };
        self.resources.iter().find(|info| wanted(&info.gvr))
    }

    fn lookup(&self, name: &str, wanted: impl Fn(&GroupVersionResource) -> bool) -> Option<&ResourceInfo> {
        let candidates = || self.resources.iter().filter(|info| wanted(&info.gvr));
        candidates()
            .find(|info| info.gvr.resource == name || info.singular.to_lowercase() == name)
            .or_else(|| candidates().find(|info| info.short_names.iter().any(|short| short == name)))
            .or_else(|| candidates().find(|info| info.kind.to_lowercase() == name))
    }

    /// Returns the possible meanings of a name that was not found.
    pub fn no_match(&self, name: &str) -> NoMatch {
        let name = name.to_lowercase();
        let (resource, group) = name.split_once('.').unwrap_or((&name, ""));
        let down = |failed: &&FailedGroup| {
            group.is_empty() || group == failed.group || group.ends_with(&format!(".{}", failed.group))
        };
        let names = self.resources.iter().flat_map(|info| {
            let names = [info.gvr.resource.as_str(), info.singular.as_str()].into_iter();
            names.chain(info.short_names.iter().map(String::as_str)).map(move |known| (known, info))
        });
        // At most two typing errors, and fewer than half of the characters, so that short names do
        // not match everything. The lengths come first: the distance takes time with the product of
        // both, and any caller may ask for a long name.
        let length = resource.chars().count();
        let near = names
            .filter(|(known, _)| known.chars().count().abs_diff(length) <= TYPING_ERRORS_MAX)
            .map(|(known, info)| (strsim::damerau_levenshtein(resource, known), info))
            .filter(|(distance, _)| *distance <= TYPING_ERRORS_MAX && *distance * 2 < length)
            .min_by_key(|(distance, _)| *distance);
        let failed: Vec<FailedGroup> = self.failed.iter().filter(down).cloned().collect();
        // A name in an unavailable group is probably right.
        let guess = group.is_empty() || failed.is_empty();
        NoMatch { suggestion: near.filter(|_| guess).map(|(_, info)| info.gvr.to_string()), failed }
    }
}

/// `APIGroupDiscoveryList`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct AggregatedDiscovery {
    items: Vec<AggregatedGroup>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct AggregatedGroup {
    metadata: Metadata,
    versions: Vec<AggregatedVersion>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Metadata {
    name: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct AggregatedVersion {
    version: String,
    freshness: String,
    resources: Vec<AggregatedResource>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct AggregatedResource {
    resource: String,
    // Null in the documents of some extension apiservers.
    response_kind: Option<ResponseKind>,
    scope: String,
    singular_resource: String,
    verbs: Vec<String>,
    short_names: Vec<String>,
    categories: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ResponseKind {
    kind: String,
}

impl AggregatedResource {
    fn info(&self, group: &str, version: &str) -> ResourceInfo {
        let kind = self.response_kind.as_ref().map(|kind| kind.kind.clone()).unwrap_or_default();
        ResourceInfo {
            gvr: GroupVersionResource::new(group, version, &self.resource),
            singular: singular(&self.singular_resource, &kind),
            kind,
            short_names: self.short_names.clone(),
            categories: self.categories.clone(),
            namespaced: self.scope == "Namespaced",
            verbs: self.verbs.clone(),
        }
    }
}

/// `APIResourceList`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct LegacyResourceList {
    resources: Vec<LegacyResource>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct LegacyResource {
    name: String,
    singular_name: String,
    namespaced: bool,
    kind: String,
    verbs: Vec<String>,
    short_names: Vec<String>,
    categories: Vec<String>,
}

impl LegacyResource {
    fn info(&self, group: &str, version: &str) -> ResourceInfo {
        ResourceInfo {
            gvr: GroupVersionResource::new(group, version, &self.name),
            kind: self.kind.clone(),
            singular: singular(&self.singular_name, &self.kind),
            short_names: self.short_names.clone(),
            categories: self.categories.clone(),
            namespaced: self.namespaced,
            verbs: self.verbs.clone(),
        }
    }
}

/// Older servers leave the singular of built-in resources empty; it is the kind in lower case.
fn singular(given: &str, kind: &str) -> String {
    if given.is_empty() { kind.to_lowercase() } else { given.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(resource: &str, kind: &str, short: &[&str], namespaced: bool) -> serde_json::Value {
        serde_json::json!({
            "resource": resource, "responseKind": {"group": "", "version": "", "kind": kind}, "shortNames": short,
            "scope": if namespaced { "Namespaced" } else { "Cluster" }, "singularResource": kind.to_lowercase(),
            "verbs": ["get", "list", "watch"], "subresources": [{"subresource": "status"}],
        })
    }

    fn index() -> ResourceIndex {
        let core = serde_json::json!({"items": [{"metadata": {}, "versions": [{"version": "v1", "freshness": "Current", "resources": [
            resource("pods", "Pod", &["po"], true), resource("events", "Event", &["ev"], true), resource("nodes", "Node", &["no"], false),
        ]}]}]});
        let groups = serde_json::json!({"items": [
            {"metadata": {"name": "apps"}, "versions": [{"version": "v1", "resources": [resource("deployments", "Deployment", &["deploy"], true)]}]},
            {"metadata": {"name": "events.k8s.io"}, "versions": [{"version": "v1", "resources": [resource("events", "Event", &["ev"], true)]}]},
            {"metadata": {"name": "networking.k8s.io"}, "versions": [{"version": "v1", "resources": [resource("ingresses", "Ingress", &["ing"], true)]}]},
            {"metadata": {"name": "example.com"}, "versions": [
                {"version": "v1", "resources": [resource("widgets", "Widget", &["wd"], true)]},
                {"version": "v1beta1", "resources": [resource("widgets", "Widget", &[], true), resource("gadgets", "Gadget", &["po"], true)]},
            ]},
            {"metadata": {"name": "metrics.k8s.io"}, "versions": [{"version": "v1beta1", "freshness": "Stale"}]},
        ]});
        let mut index = ResourceIndex::default();
        for document in [core, groups] {
            index.add_aggregated(&serde_json::from_value(document).unwrap());
        }
        index
    }

    #[test]
    fn names_resolve_as_in_kubectl() {
        let index = index();
        let cases = [
            ("pods", "/v1 pods"),
            ("po", "/v1 pods"),
            ("pod", "/v1 pods"),
            ("Pod", "/v1 pods"),
            ("PODS", "/v1 pods"),
            ("pods.v1.", "/v1 pods"),
            ("events", "/v1 events"),
            ("events.events.k8s.io", "events.k8s.io/v1 events"),
            ("ev.events.k8s.io", "events.k8s.io/v1 events"),
            ("events.v1.events.k8s.io", "events.k8s.io/v1 events"),
            ("deploy", "apps/v1 deployments"),
            ("deployments.apps", "apps/v1 deployments"),
            ("deployments.v1.apps", "apps/v1 deployments"),
            ("Deployment.v1.apps", "apps/v1 deployments"),
            ("ingresses.networking", "networking.k8s.io/v1 ingresses"),
            ("widgets", "example.com/v1 widgets"),
            ("widgets.v1.example.com", "example.com/v1 widgets"),
            ("widgets.v1beta1.example.com", "example.com/v1beta1 widgets"),
            ("widget.example.com", "example.com/v1 widgets"),
            ("gadgets", "example.com/v1beta1 gadgets"),
        ];
        for (name, expected) in cases {
            let gvr = &index.resolve(name).unwrap_or_else(|| panic!("{name}")).gvr;
            assert_eq!(format!("{}/{} {}", gvr.group, gvr.version, gvr.resource), expected, "{name}");
        }
    }

    #[test]
    fn a_full_name_is_found_and_an_empty_version_means_the_preferred_one() {
        let index = index();
        assert_eq!(index.find("example.com", "", "widgets").unwrap().gvr.version, "v1");
        assert_eq!(index.find("example.com", "v1beta1", "widgets").unwrap().gvr.version, "v1beta1");
        assert!(index.find("", "v1", "po").is_none());
    }

    #[test]
    fn a_typing_error_gets_a_suggestion_and_nonsense_does_not() {
        let index = index();
        assert!(index.resolve("pds").is_none());
        assert_eq!(index.no_match("pds").suggestion.as_deref(), Some("pods"));
        assert_eq!(index.resolve("deployment.app").unwrap().gvr.resource, "deployments");
        assert_eq!(index.no_match("delpoyments").suggestion.as_deref(), Some("deployments.apps"));
        for nonsense in ["", "x", "xy", "flurbs", ".", "..", "...apps", "a.b.c.d.e"] {
            assert_eq!(index.no_match(nonsense).suggestion, None, "{nonsense}");
        }
    }

    #[test]
    fn an_unavailable_group_is_reported_only_for_names_that_it_may_contain() {
        let index = index();
        assert_eq!(index.no_match("podmetrics.metrics.k8s.io").failed.len(), 1);
        assert_eq!(index.no_match("podmetrics").failed[0].group, "metrics.k8s.io");
        assert_eq!(index.no_match("podmetrics.apps").failed, []);
    }

    #[test]
    fn legacy_documents_yield_the_same_resources() {
        let document = serde_json::json!({"groupVersion": "v1", "resources": [
            {"name": "pods", "singularName": "", "namespaced": true, "kind": "Pod", "verbs": ["list", "watch"], "shortNames": ["po"]},
            {"name": "pods/status", "singularName": "", "namespaced": true, "kind": "Pod", "verbs": ["get"]},
            {"name": "bindings", "singularName": "binding", "namespaced": true, "kind": "Binding", "verbs": ["create"]},
        ]});
        let mut index = ResourceIndex::default();
        index.add_legacy("", "v1", &serde_json::from_value(document).unwrap());
        assert_eq!(index.resources().len(), 2);
        assert!(index.resolve("pod").unwrap().is_watchable());
        assert!(!index.resolve("bindings").unwrap().is_watchable());
    }
}
