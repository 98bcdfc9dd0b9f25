//! The selectable fields of each resource, and where they lie in an object's JSON.
//!
//! Kubernetes fixes them per type (`AddFieldLabelConversionFunc` and `ToSelectableFields` in
//! `pkg/apis` and `pkg/registry`); custom resources declare theirs as `selectableFields`. The
//! hazard is a field that is missing here: a selector on it must be refused, as the apiserver
//! refuses unknown fields, and must never silently match nothing.

use super::GroupVersionResource;

/// A field that selectors of a resource may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// The name in a selector, such as `spec.nodeName`.
    pub name: String,
    /// Possible paths of the field in the object. The first one with a non-empty value counts. No
    /// paths: the apiserver accepts the name, but the value is empty for every object.
    pub paths: Vec<Vec<String>>,
    /// Value of the field if the object has none: the zero value of the Go type, as text.
    pub default: &'static str,
}

/// The selectable fields of a resource, besides `metadata.name` and `metadata.namespace`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FieldTable {
    fields: Vec<Field>,
    namespaced: bool,
}

/// The field that a name in a selector refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FieldRef {
    /// `metadata.name`.
    Name,
    /// `metadata.namespace`.
    Namespace,
    /// The field at this position of the table.
    Index(usize),
}

/// The resource cannot be selected by this field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("field label not supported: {name:?}; {resource} can be selected by {known}")]
pub struct UnsupportedField {
    name: String,
    resource: String,
    known: String,
}

/// Name in a selector; paths in the JSON, separated by `|`; default.
type Row = (&'static str, &'static str, &'static str);

const PODS: &[Row] = &[
    ("spec.nodeName", "spec.nodeName", ""),
    ("spec.host", "spec.nodeName", ""),
    ("spec.restartPolicy", "spec.restartPolicy", ""),
    ("spec.schedulerName", "spec.schedulerName", ""),
    ("spec.serviceAccountName", "spec.serviceAccountName", ""),
    ("spec.hostNetwork", "spec.hostNetwork", "false"),
    ("status.phase", "status.phase", ""),
    ("status.podIP", "status.podIP", ""),
    ("status.podIPs", "", ""),
    ("status.nominatedNodeName", "status.nominatedNodeName", ""),
];
const EVENTS: &[Row] = &[
    ("involvedObject.kind", "involvedObject.kind", ""),
    ("involvedObject.namespace", "involvedObject.namespace", ""),
    ("involvedObject.name", "involvedObject.name", ""),
    ("involvedObject.uid", "involvedObject.uid", ""),
    ("involvedObject.apiVersion", "involvedObject.apiVersion", ""),
    ("involvedObject.resourceVersion", "involvedObject.resourceVersion", ""),
    ("involvedObject.fieldPath", "involvedObject.fieldPath", ""),
    ("reason", "reason", ""),
    ("reportingComponent", "reportingComponent", ""),
    ("source", "source.component|reportingComponent", ""),
    ("type", "type", ""),
];
const EVENTS_K8S_IO: &[Row] = &[
    ("regarding.kind", "regarding.kind", ""),
    ("regarding.namespace", "regarding.namespace", ""),
    ("regarding.name", "regarding.name", ""),
    ("regarding.uid", "regarding.uid", ""),
    ("regarding.apiVersion", "regarding.apiVersion", ""),
    ("regarding.resourceVersion", "regarding.resourceVersion", ""),
    ("regarding.fieldPath", "regarding.fieldPath", ""),
    ("reason", "reason", ""),
    ("reportingController", "reportingController", ""),
    ("type", "type", ""),
];
const SIGNER: Row = ("spec.signerName", "spec.signerName", "");
const NODE_NAME: Row = ("spec.nodeName", "spec.nodeName", "");

/// The rows of a built-in resource; empty if it has only name and namespace.
fn built_in(gvr: &GroupVersionResource) -> &'static [Row] {
    match (gvr.group.as_str(), gvr.resource.as_str()) {
        ("", "pods") => PODS,
        ("", "events") => EVENTS,
        ("events.k8s.io", "events") => EVENTS_K8S_IO,
        ("", "nodes") => &[("spec.unschedulable", "spec.unschedulable", "false")],
        ("", "namespaces") => &[("status.phase", "status.phase", "")],
        ("", "secrets") => &[("type", "type", "")],
        ("", "services") => &[("spec.clusterIP", "spec.clusterIP", ""), ("spec.type", "spec.type", "")],
        ("", "replicationcontrollers") => &[("status.replicas", "status.replicas", "0")],
        ("batch", "jobs") => &[("status.successful", "status.succeeded", "0")],
        ("certificates.k8s.io", "certificatesigningrequests" | "clustertrustbundles") => &[SIGNER],
        ("certificates.k8s.io", "podcertificaterequests") => &[SIGNER, ("spec.podName", "spec.podName", ""), NODE_NAME],
        ("resource.k8s.io", "resourceslices") => &[NODE_NAME, ("spec.driver", "spec.driver", "")],
        _ => &[],
    }
}

impl FieldTable {
    /// The fields of a resource. `selectable` are the `selectableFields` of a custom resource, such
    /// as `.spec.color`.
    pub fn new(gvr: &GroupVersionResource, namespaced: bool, selectable: &[String]) -> Self {
        let split = |path: &str| path.split('.').map(str::to_owned).collect::<Vec<_>>();
        let known = built_in(gvr).iter().map(|&(name, paths, default)| Field {
            name: name.to_owned(),
            paths: paths.split('|').filter(|path| !path.is_empty()).map(split).collect(),
            default,
        });
        let declared = selectable.iter().map(|path| {
            let name = path.trim_start_matches('.');
            Field { name: name.to_owned(), paths: vec![split(name)], default: "" }
        });
        Self { fields: known.chain(declared).collect(), namespaced }
    }

    /// The fields that a custom resource declares: `selectable` of [`Self::new`], which makes the
    /// same table of them.
    pub fn declared(&self, gvr: &GroupVersionResource) -> Vec<String> {
        self.fields.iter().skip(built_in(gvr).len()).map(|field| field.name.clone()).collect()
    }

    /// The fields, by position.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// The name of a field of this table.
    pub fn name(&self, field: FieldRef) -> &str {
        match field {
            FieldRef::Name => "metadata.name",
            FieldRef::Namespace => "metadata.namespace",
            FieldRef::Index(position) => self.fields.get(position).map_or("", |field| &field.name),
        }
    }

    /// The field that `name` refers to. `resource` is for the error message.
    ///
    /// # Errors
    /// If the resource cannot be selected by this field.
    pub fn resolve(&self, name: &str, resource: &GroupVersionResource) -> Result<FieldRef, UnsupportedField> {
        match name {
            "metadata.name" => Ok(FieldRef::Name),
            "metadata.namespace" if self.namespaced => Ok(FieldRef::Namespace),
            name => self.fields.iter().position(|field| field.name == name).map(FieldRef::Index).ok_or_else(|| {
                let meta = if self.namespaced { "metadata.name, metadata.namespace" } else { "metadata.name" };
                let names = std::iter::once(meta).chain(self.fields.iter().map(|field| field.name.as_str()));
                UnsupportedField {
                    name: name.chars().take(128).collect(),
                    resource: resource.to_string(),
                    known: names.collect::<Vec<_>>().join(", "),
                }
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_field_is_refused_and_the_known_ones_are_listed() {
        let nodes = GroupVersionResource::new("", "v1", "nodes");
        let table = FieldTable::new(&nodes, false, &[]);
        let error = table.resolve("spec.podCIDR", &nodes).unwrap_err().to_string();
        assert_eq!(
            error,
            "field label not supported: \"spec.podCIDR\"; nodes can be selected by metadata.name, spec.unschedulable"
        );
        assert!(table.resolve("metadata.namespace", &nodes).is_err(), "nodes have no namespace");
    }

    #[test]
    fn a_custom_resource_is_selected_by_its_declared_fields() {
        let widgets = GroupVersionResource::new("example.com", "v1", "widgets");
        let table = FieldTable::new(&widgets, true, &[".spec.color".into()]);
        assert_eq!(table.resolve("spec.color", &widgets), Ok(FieldRef::Index(0)));
        assert_eq!(table.fields()[0].paths, [["spec", "color"]]);
        let declared = table.declared(&widgets);
        assert_eq!(declared, ["spec.color"]);
        assert_eq!(FieldTable::new(&widgets, true, &declared), table);
        let nodes = GroupVersionResource::new("", "v1", "nodes");
        assert!(FieldTable::new(&nodes, false, &[]).declared(&nodes).is_empty());
    }
}
