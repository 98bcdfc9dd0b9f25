//! The types that objects are decoded to. kube-rs and this library decode to the same ones.

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube_client::{Resource, core::NamespaceResourceScope};
use serde::{Deserialize, Deserializer};

/// Ten fields of a pod: five of its metadata, two of its spec, three of its status.
#[derive(Debug, Clone, Deserialize)]
#[expect(dead_code, reason = "what counts is that they are decoded and stored")]
pub(crate) struct SmallPod {
    /// kube-rs needs this type, so both have it.
    #[serde(deserialize_with = "five_fields")]
    metadata: ObjectMeta,
    spec: SmallSpec,
    status: SmallStatus,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
#[expect(dead_code, reason = "as above")]
struct SmallSpec {
    node_name: String,
    service_account_name: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
#[expect(dead_code, reason = "as above")]
struct SmallStatus {
    phase: String,
    #[serde(rename = "podIP")]
    pod_ip: String,
    #[serde(rename = "hostIP")]
    host_ip: String,
}

/// Reads five fields of the metadata and skips the others.
fn five_fields<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct FiveFields {
        name: String,
        namespace: String,
        uid: String,
        resource_version: String,
        labels: BTreeMap<String, String>,
    }
    let FiveFields { name, namespace, uid, resource_version, labels } = FiveFields::deserialize(deserializer)?;
    Ok(ObjectMeta {
        name: Some(name),
        namespace: Some(namespace),
        uid: Some(uid),
        resource_version: Some(resource_version),
        labels: Some(labels),
        ..ObjectMeta::default()
    })
}

impl Resource for SmallPod {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind(_: &()) -> Cow<'_, str> {
        Pod::kind(&())
    }

    fn group(_: &()) -> Cow<'_, str> {
        Pod::group(&())
    }

    fn version(_: &()) -> Cow<'_, str> {
        Pod::version(&())
    }

    fn plural(_: &()) -> Cow<'_, str> {
        Pod::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// The paths of [`ProjectedPod`], as the server projects them.
pub(crate) const PROJECTED_PATHS: [&str; 5] =
    ["metadata.labels.app", "spec.nodeName", "spec.serviceAccountName", "status.phase", "status.podIP"];

/// Five fields of a pod. Key, uid and version are beside the value.
#[derive(Debug, Deserialize)]
#[expect(dead_code, reason = "as above")]
pub(crate) struct ProjectedPod {
    metadata: ProjectedMetadata,
    spec: SmallSpec,
    status: ProjectedStatus,
}

#[derive(Debug, Deserialize)]
#[expect(dead_code, reason = "as above")]
struct ProjectedMetadata {
    labels: ProjectedLabels,
}

#[derive(Debug, Deserialize)]
#[expect(dead_code, reason = "as above")]
struct ProjectedLabels {
    app: String,
}

#[derive(Debug, Deserialize)]
#[expect(dead_code, reason = "as above")]
struct ProjectedStatus {
    phase: String,
    #[serde(rename = "podIP")]
    pod_ip: String,
}
