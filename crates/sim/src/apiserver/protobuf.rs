//! Kubernetes protobuf for pods: the fields of `k8s.io/api/core/v1/generated.proto` that a workload
//! of pods uses. A pod with other fields loses them.

use bytes::{BufMut, Bytes, BytesMut};
use kubefan_model::{
    GroupVersionResource,
    protobuf::{
        self, ENTRY_KEY, ENTRY_VALUE, ListMeta, META_LABELS, META_NAME, META_NAMESPACE, META_RESOURCE_VERSION,
        META_UID, METADATA, wire::put_bytes,
    },
};
use serde_json::Value;

use super::{object::Object, status::Status};

// `metav1.ObjectMeta`, `v1.Pod`, `v1.PodSpec`, `v1.Container` and `v1.PodStatus`.
const META_ANNOTATIONS: u32 = 12;
const POD_SPEC: u32 = 2;
const POD_STATUS: u32 = 3;
const SPEC_CONTAINERS: u32 = 2;
const SPEC_NODE_NAME: u32 = 10;
const CONTAINER_NAME: u32 = 1;
const CONTAINER_IMAGE: u32 = 2;
const STATUS_PHASE: u32 = 1;
const STATUS_MESSAGE: u32 = 3;

/// Whether a resource is served as protobuf.
pub(super) fn is_served(gvr: &GroupVersionResource) -> bool {
    gvr.group.is_empty() && gvr.resource == "pods"
}

/// The message of a pod, at its own version or at `version`.
fn message(object: &Object, version: Option<u64>) -> Vec<u8> {
    let value = object.value();
    let text = |value: &Value, pointer: &str| value.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
    let put_text = |field: u32, text: Option<String>, out: &mut Vec<u8>| {
        if let Some(text) = text {
            put_bytes(field, text.as_bytes(), out);
        }
    };
    let version = version.unwrap_or(object.version).to_string();
    let mut metadata = Vec::new();
    put_text(META_NAME, text(&value, "/metadata/name"), &mut metadata);
    put_text(META_NAMESPACE, text(&value, "/metadata/namespace"), &mut metadata);
    put_text(META_UID, text(&value, "/metadata/uid"), &mut metadata);
    put_bytes(META_RESOURCE_VERSION, version.as_bytes(), &mut metadata);
    for (field, name) in [(META_LABELS, "labels"), (META_ANNOTATIONS, "annotations")] {
        // serde_json's maps are sorted, as Go sorts the keys of maps.
        for (key, value) in value["metadata"][name].as_object().into_iter().flatten() {
            let mut entry = Vec::new();
            put_bytes(ENTRY_KEY, key.as_bytes(), &mut entry);
            put_bytes(ENTRY_VALUE, value.as_str().unwrap_or_default().as_bytes(), &mut entry);
            put_bytes(field, &entry, &mut metadata);
        }
    }
    let mut spec = Vec::new();
    for container in value["spec"]["containers"].as_array().into_iter().flatten() {
        let mut message = Vec::new();
        put_text(CONTAINER_NAME, text(container, "/name"), &mut message);
        put_text(CONTAINER_IMAGE, text(container, "/image"), &mut message);
        put_bytes(SPEC_CONTAINERS, &message, &mut spec);
    }
    put_text(SPEC_NODE_NAME, text(&value, "/spec/nodeName"), &mut spec);
    let mut status = Vec::new();
    put_text(STATUS_PHASE, text(&value, "/status/phase"), &mut status);
    put_text(STATUS_MESSAGE, text(&value, "/status/message"), &mut status);
    let mut pod = Vec::new();
    put_bytes(METADATA, &metadata, &mut pod);
    put_bytes(POD_SPEC, &spec, &mut pod);
    put_bytes(POD_STATUS, &status, &mut pod);
    pod
}

/// Writes an event of a watch, with its length. The object is at its own version or at `version`.
pub(super) fn put_event(out: &mut BytesMut, kind: &str, object: &Object, version: Option<u64>) {
    out.put_slice(&protobuf::watch_frame(kind, &protobuf::enveloped("v1", "Pod", &message(object, version))));
}

/// A bookmark of a watch, with its length.
pub(super) fn bookmark(version: u64, ends_initial: bool) -> Bytes {
    protobuf::watch_frame("BOOKMARK", &protobuf::bookmark("v1", "Pod", version, ends_initial))
}

/// An ERROR event of a watch, with its length.
pub(super) fn error_event(status: &Status) -> Bytes {
    let status = protobuf::Status {
        status: "Failure".to_owned(),
        message: status.message.clone(),
        reason: status.reason.to_owned(),
        code: i32::from(status.http_code()),
        ..Default::default()
    };
    protobuf::watch_frame("ERROR", &status.to_bytes())
}

/// A page of a list of pods.
pub(super) fn list<'a>(
    version: u64,
    next: String,
    remaining: Option<usize>,
    items: impl Iterator<Item = &'a Object>,
) -> Bytes {
    let items: Vec<_> = items.map(|object| message(object, None)).collect();
    let items_len = items.iter().map(|item| protobuf::item_len(item.len())).sum();
    let remaining_item_count = remaining.map(|count| count as u64);
    let meta = ListMeta { resource_version: version.to_string(), next, remaining_item_count, ..ListMeta::default() };
    let mut out = BytesMut::new();
    protobuf::put_list_head("v1", "PodList", &meta, items_len, &mut out);
    for item in items {
        protobuf::put_item_head(item.len(), &mut out);
        out.put_slice(&item);
    }
    out.put_slice(protobuf::TAIL);
    out.freeze()
}
