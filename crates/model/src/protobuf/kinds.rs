//! The built-in types that are cached as protobuf, and the numbers of their selectable fields.
//!
//! Protobuf has no field names, so a field is found only by its number. A type that is missing here
//! has no protobuf cache: with a wrong or unknown number a selector would silently match nothing.
//! The numbers are those of the `generated.proto` files in `k8s.io/api`, which are never reused;
//! `metadata` is field 1 of every type.

use crate::{GroupVersionResource, fields::FieldTable};

/// The type of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scalar {
    /// A string.
    Text,
    /// A varint, 0 or 1.
    Bool,
    /// A varint, in two's complement of 64 bits.
    Int,
}

use Scalar::{Bool, Int, Text};

/// The location of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    /// The field numbers from the object's message down to the field.
    pub path: &'static [u32],
    /// The type of the field.
    pub scalar: Scalar,
}

/// A field's path in JSON, its path in protobuf, and its type.
type Row = (&'static str, &'static [u32], Scalar);
/// Group, versions, and resources with their rows. The numbers are the same in all versions.
type Group = (&'static str, &'static [&'static str], &'static [(&'static str, &'static [Row])]);

const PODS: &[Row] = &[
    ("spec.restartPolicy", &[2, 3], Text),
    ("spec.serviceAccountName", &[2, 8], Text),
    ("spec.nodeName", &[2, 10], Text),
    ("spec.hostNetwork", &[2, 11], Bool),
    ("spec.schedulerName", &[2, 19], Text),
    ("status.phase", &[3, 1], Text),
    ("status.podIP", &[3, 6], Text),
    ("status.nominatedNodeName", &[3, 11], Text),
];
const EVENTS: &[Row] = &[
    ("involvedObject.kind", &[2, 1], Text),
    ("involvedObject.namespace", &[2, 2], Text),
    ("involvedObject.name", &[2, 3], Text),
    ("involvedObject.uid", &[2, 4], Text),
    ("involvedObject.apiVersion", &[2, 5], Text),
    ("involvedObject.resourceVersion", &[2, 6], Text),
    ("involvedObject.fieldPath", &[2, 7], Text),
    ("reason", &[3], Text),
    ("source.component", &[5, 1], Text),
    ("type", &[9], Text),
    ("reportingComponent", &[14], Text),
];
const EVENTS_K8S_IO: &[Row] = &[
    ("reportingController", &[4], Text),
    ("reason", &[7], Text),
    ("regarding.kind", &[8, 1], Text),
    ("regarding.namespace", &[8, 2], Text),
    ("regarding.name", &[8, 3], Text),
    ("regarding.uid", &[8, 4], Text),
    ("regarding.apiVersion", &[8, 5], Text),
    ("regarding.resourceVersion", &[8, 6], Text),
    ("regarding.fieldPath", &[8, 7], Text),
    ("type", &[11], Text),
];
const POD_CERTIFICATES: &[Row] =
    &[("spec.signerName", &[2, 1], Text), ("spec.podName", &[2, 2], Text), ("spec.nodeName", &[2, 6], Text)];
const NONE: &[Row] = &[];

const GROUPS: &[Group] = &[
    (
        "",
        &["v1"],
        &[
            ("configmaps", NONE),
            ("endpoints", NONE),
            ("events", EVENTS),
            ("limitranges", NONE),
            ("namespaces", &[("status.phase", &[3, 1], Text)]),
            ("nodes", &[("spec.unschedulable", &[2, 4], Bool)]),
            ("persistentvolumeclaims", NONE),
            ("persistentvolumes", NONE),
            ("pods", PODS),
            ("podtemplates", NONE),
            ("replicationcontrollers", &[("status.replicas", &[3, 1], Int)]),
            ("resourcequotas", NONE),
            ("secrets", &[("type", &[3], Text)]),
            ("serviceaccounts", NONE),
            ("services", &[("spec.clusterIP", &[2, 3], Text), ("spec.type", &[2, 4], Text)]),
        ],
    ),
    (
        "admissionregistration.k8s.io",
        &["v1", "v1beta1", "v1alpha1"],
        &[
            ("mutatingadmissionpolicies", NONE),
            ("mutatingadmissionpolicybindings", NONE),
            ("mutatingwebhookconfigurations", NONE),
            ("validatingadmissionpolicies", NONE),
            ("validatingadmissionpolicybindings", NONE),
            ("validatingwebhookconfigurations", NONE),
        ],
    ),
    ("apiextensions.k8s.io", &["v1"], &[("customresourcedefinitions", NONE)]),
    ("apiregistration.k8s.io", &["v1"], &[("apiservices", NONE)]),
    (
        "apps",
        &["v1"],
        &[
            ("controllerrevisions", NONE),
            ("daemonsets", NONE),
            ("deployments", NONE),
            ("replicasets", NONE),
            ("statefulsets", NONE),
        ],
    ),
    ("autoscaling", &["v1", "v2"], &[("horizontalpodautoscalers", NONE)]),
    ("batch", &["v1"], &[("cronjobs", NONE), ("jobs", &[("status.succeeded", &[3, 5], Int)])]),
    (
        "certificates.k8s.io",
        &["v1", "v1beta1", "v1alpha1"],
        &[
            ("certificatesigningrequests", &[("spec.signerName", &[2, 7], Text)]),
            ("clustertrustbundles", &[("spec.signerName", &[2, 1], Text)]),
            ("podcertificaterequests", POD_CERTIFICATES),
        ],
    ),
    ("coordination.k8s.io", &["v1", "v1beta1", "v1alpha2"], &[("leasecandidates", NONE), ("leases", NONE)]),
    ("discovery.k8s.io", &["v1"], &[("endpointslices", NONE)]),
    ("events.k8s.io", &["v1"], &[("events", EVENTS_K8S_IO)]),
    ("flowcontrol.apiserver.k8s.io", &["v1"], &[("flowschemas", NONE), ("prioritylevelconfigurations", NONE)]),
    ("internal.apiserver.k8s.io", &["v1alpha1"], &[("storageversions", NONE)]),
    (
        "networking.k8s.io",
        &["v1", "v1beta1"],
        &[
            ("ingressclasses", NONE),
            ("ingresses", NONE),
            ("ipaddresses", NONE),
            ("networkpolicies", NONE),
            ("servicecidrs", NONE),
        ],
    ),
    ("node.k8s.io", &["v1"], &[("runtimeclasses", NONE)]),
    ("policy", &["v1"], &[("poddisruptionbudgets", NONE)]),
    (
        "rbac.authorization.k8s.io",
        &["v1"],
        &[("clusterrolebindings", NONE), ("clusterroles", NONE), ("rolebindings", NONE), ("roles", NONE)],
    ),
    (
        "resource.k8s.io",
        &["v1", "v1beta2", "v1beta1", "v1alpha3"],
        &[
            ("deviceclasses", NONE),
            ("devicetaintrules", NONE),
            ("resourceclaims", NONE),
            ("resourceclaimtemplates", NONE),
            ("resourceslices", &[("spec.driver", &[2, 1], Text), ("spec.nodeName", &[2, 3], Text)]),
        ],
    ),
    ("scheduling.k8s.io", &["v1", "v1alpha1"], &[("priorityclasses", NONE), ("workloads", NONE)]),
    (
        "storage.k8s.io",
        &["v1", "v1beta1", "v1alpha1"],
        &[
            ("csidrivers", NONE),
            ("csinodes", NONE),
            ("csistoragecapacities", NONE),
            ("storageclasses", NONE),
            ("volumeattachments", NONE),
            ("volumeattributesclasses", NONE),
        ],
    ),
    ("storagemigration.k8s.io", &["v1beta1"], &[("storageversionmigrations", NONE)]),
];

/// Whether a resource can be cached as protobuf.
pub fn is_known(gvr: &GroupVersionResource) -> bool {
    rows(gvr).is_some()
}

fn rows(gvr: &GroupVersionResource) -> Option<&'static [Row]> {
    let group = |(group, versions, _): &&Group| *group == gvr.group && versions.contains(&gvr.version.as_str());
    let (_, _, resources) = GROUPS.iter().find(group)?;
    resources.iter().find(|(resource, _)| *resource == gvr.resource).map(|(_, rows)| *rows)
}

/// For each field of a resource, its possible locations, in order of preference. `None` if the
/// resource, or one of the locations, is not known.
pub fn locations(gvr: &GroupVersionResource, table: &FieldTable) -> Option<Vec<Vec<Location>>> {
    let rows = rows(gvr)?;
    let locate = |path: &Vec<String>| {
        let path = path.join(".");
        let (_, path, scalar) = rows.iter().find(|(json, ..)| *json == path)?;
        Some(Location { path, scalar: *scalar })
    };
    table.fields().iter().map(|field| field.paths.iter().map(locate).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_selectable_field_of_a_known_type_has_its_number() {
        for (group, versions, resources) in GROUPS {
            for version in *versions {
                for (resource, rows) in *resources {
                    let gvr = GroupVersionResource::new(*group, *version, *resource);
                    let table = FieldTable::new(&gvr, true, &[]);
                    let found = locations(&gvr, &table).unwrap_or_else(|| panic!("{gvr} has a field without a number"));
                    let used: Vec<_> = found.iter().flatten().map(|location| location.path).collect();
                    assert!(rows.iter().all(|(_, path, _)| used.contains(path)), "{gvr} has a number without a field");
                    assert!(used.iter().all(|path| path.first() != Some(&super::super::METADATA)));
                }
            }
        }
    }

    #[test]
    fn a_type_that_is_not_built_in_is_not_known() {
        assert!(!is_known(&GroupVersionResource::new("example.com", "v1", "widgets")));
        assert!(!is_known(&GroupVersionResource::new("", "v2", "pods")));
        let gvr = GroupVersionResource::new("", "v1", "configmaps");
        assert_eq!(locations(&gvr, &FieldTable::new(&gvr, true, &[".spec.color".into()])), None);
    }
}
