//! An index of the resources that the apiserver serves, and the answer to a name that it does not
//! have. Pure data: discovery documents are the input.

use kubefan_common::discovery::{self, GroupVersion, Resource, ResourceName};
use kubefan_model::GroupVersionResource;

/// A resource in one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceInfo {
    /// Full name of the resource.
    pub gvr: GroupVersionResource,
    /// The kind, such as `Pod`.
    pub kind: String,
    /// Whether objects have a namespace.
    pub namespaced: bool,
    /// Supported verbs, such as `list` and `watch`.
    pub verbs: Vec<String>,
}

impl ResourceInfo {
    fn new(version: &GroupVersion, resource: &Resource) -> Self {
        Self {
            gvr: GroupVersionResource::new(&version.group, &version.version, &resource.name),
            kind: resource.kind.clone(),
            namespaced: resource.namespaced,
            verbs: resource.verbs.clone(),
        }
    }

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

/// All group versions in order of preference: the core group first, then groups in the server's
/// order; within a group, the preferred version first.
#[derive(Debug, Clone, Default)]
pub struct ResourceIndex {
    versions: Vec<GroupVersion>,
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
    /// Adds a group version, and why its document could not be read.
    pub fn add(&mut self, version: GroupVersion, failure: Option<String>) {
        let stale = || version.is_stale.then(|| "its apiserver is not available".to_owned());
        if let Some(message) = failure.or_else(stale) {
            let GroupVersion { group, version, .. } = &version;
            self.failed.push(FailedGroup { group: group.clone(), version: version.clone(), message });
        }
        self.versions.push(version);
    }

    /// Finds a resource by kubectl's rules ([`ResourceName`]).
    pub fn resolve(&self, name: &str) -> Option<ResourceInfo> {
        let name = ResourceName::new(name);
        let found = name.places().into_iter().find_map(|place| discovery::find(&self.versions, &name, place));
        found.map(|(_, version, resource)| ResourceInfo::new(version, resource))
    }

    /// Finds a resource by its full name; an empty version means the preferred one.
    pub fn find(&self, group: &str, version: &str, resource: &str) -> Option<ResourceInfo> {
        let is_wanted = |of: &GroupVersion| of.group == group && (version.is_empty() || of.version == version);
        let mut resources = self.resources().filter(|(of, _)| is_wanted(of));
        resources.find(|(_, of)| of.name == resource).map(|(version, of)| ResourceInfo::new(version, of))
    }

    fn resources(&self) -> impl Iterator<Item = (&GroupVersion, &Resource)> {
        self.versions.iter().flat_map(|version| version.resources.iter().flatten().map(move |of| (version, of)))
    }

    /// Returns the possible meanings of a name that was not found.
    pub fn no_match(&self, name: &str) -> NoMatch {
        let name = name.to_lowercase();
        let (resource, group) = name.split_once('.').unwrap_or((&name, ""));
        let down = |failed: &&FailedGroup| {
            group.is_empty() || group == failed.group || group.ends_with(&format!(".{}", failed.group))
        };
        let names = self.resources().flat_map(|found @ (_, of)| {
            let names = [of.name.as_str(), of.singular.as_str()].into_iter();
            names.chain(of.short_names.iter().map(String::as_str)).map(move |known| (known, found))
        });
        // At most two typing errors, and fewer than half of the characters, so that short names do
        // not match everything. The lengths come first: the distance takes time with the product of
        // both, and any caller may ask for a long name.
        let length = resource.chars().count();
        let near = names
            .filter(|(known, _)| known.chars().count().abs_diff(length) <= TYPING_ERRORS_MAX)
            .map(|(known, found)| (strsim::damerau_levenshtein(resource, known), found))
            .filter(|(distance, _)| *distance <= TYPING_ERRORS_MAX && *distance * 2 < length)
            .min_by_key(|(distance, _)| *distance);
        let failed: Vec<FailedGroup> = self.failed.iter().filter(down).cloned().collect();
        // A name in an unavailable group is probably right.
        let guess = group.is_empty() || failed.is_empty();
        let suggestion =
            near.filter(|_| guess).map(|(_, (version, of))| ResourceInfo::new(version, of).gvr.to_string());
        NoMatch { suggestion, failed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> ResourceIndex {
        let verbs = ["get", "list", "watch"];
        let document = serde_json::json!({"kind": "APIGroupDiscoveryList", "items": [
            {"metadata": {}, "versions": [{"version": "v1", "resources": [
                {"resource": "pods", "singularResource": "pod", "shortNames": ["po"], "verbs": verbs},
                {"resource": "bindings", "singularResource": "binding", "verbs": ["create"]},
            ]}]},
            {"metadata": {"name": "apps"}, "versions": [{"version": "v1", "resources": [
                {"resource": "deployments", "singularResource": "deployment", "shortNames": ["deploy"], "verbs": verbs},
            ]}]},
            {"metadata": {"name": "example.com"}, "versions": [
                {"version": "v1", "resources": [{"resource": "widgets", "shortNames": ["wd"], "verbs": verbs}]},
                {"version": "v1beta1", "resources": [{"resource": "widgets", "verbs": verbs}]},
            ]},
            {"metadata": {"name": "metrics.k8s.io"}, "versions": [{"version": "v1beta1", "freshness": "Stale"}]},
        ]});
        let mut index = ResourceIndex::default();
        for version in discovery::read_groups("/apis", document.to_string().as_bytes()).unwrap() {
            index.add(version, None);
        }
        index
    }

    #[test]
    fn a_full_name_is_found_and_an_empty_version_means_the_preferred_one() {
        let index = index();
        assert_eq!(index.find("example.com", "", "widgets").unwrap().gvr.version, "v1");
        assert_eq!(index.find("example.com", "v1beta1", "widgets").unwrap().gvr.version, "v1beta1");
        assert!(index.find("", "v1", "po").is_none());
    }

    #[test]
    fn only_a_resource_with_list_and_watch_is_watchable() {
        let index = index();
        assert!(index.resolve("pod").unwrap().is_watchable());
        assert!(!index.resolve("bindings").unwrap().is_watchable());
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
}
