//! Resizes pods to a given JSON size, so that published tables can state one object size. It
//! removes the least important fields first, and pads if the pod is then too small.

use serde_json::Value;

/// Bytes that the apiserver adds: uid, creation time and resource version.
const ADDED_BYTES: usize = 130;
/// Fields to remove, in this order. Selectors and readers of a pod's state use the rest.
const REMOVABLE: [(&str, &str); 9] = [
    ("metadata", "managedFields"),
    ("spec", "volumes"),
    ("spec", "tolerations"),
    ("status", "containerStatuses"),
    ("spec", "containers"),
    ("metadata", "ownerReferences"),
    ("status", "hostIPs"),
    ("status", "conditions"),
    ("spec", "securityContext"),
];
const PADDING: &str = "example.com/padding";

/// Brings a pod to about `bytes` of JSON as stored, unless its remaining fields are larger. Every
/// change still alters the bytes: the annotation that counts revisions stays, and readiness and
/// restart count are repeated in the padding.
pub(super) fn resize(pod: &mut Value, bytes: usize) {
    let bytes = bytes.saturating_sub(ADDED_BYTES);
    let state = pod["status"]["containerStatuses"][0].clone();
    let note = format!("{}/{}", state["ready"], state["restartCount"]);
    for (part, field) in REMOVABLE {
        if length(pod) <= bytes {
            break;
        }
        if let Some(fields) = pod[part].as_object_mut() {
            fields.remove(field);
        }
    }
    pod["metadata"]["annotations"][PADDING] = note.clone().into();
    let missing = bytes.saturating_sub(length(pod));
    pod["metadata"]["annotations"][PADDING] = format!("{note}{}", padding(missing)).into();
}

/// Padding that compresses as badly as real identifiers. It is the same for every object.
fn padding(count: usize) -> String {
    const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let letter = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(LETTERS[(state >> 59) as usize])
    };
    (0..count).map(letter).collect()
}

fn length(pod: &Value) -> usize {
    serde_json::to_vec(pod).map_or(0, |json| json.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kubefan_sim::workload::{Operation, Workload, WorkloadOptions};

    #[test]
    fn pods_get_the_requested_size_and_keep_the_fields_that_selectors_read() {
        let mut workload = Workload::new(1, WorkloadOptions { objects: 50, nodes: 3, namespaces: 2, apps: 4 });
        let setup: Vec<_> = std::iter::from_fn(|| workload.next_setup()).collect();
        let churn = (0..200).map(|_| workload.next_change());
        for mut change in setup.into_iter().chain(churn).filter(|change| change.resource.resource == "pods") {
            let (Operation::Create(pod) | Operation::Update(pod) | Operation::UpdateStatus(pod)) =
                &mut change.operation
            else {
                continue;
            };
            let labels = pod["metadata"]["labels"].clone();
            let node = pod["spec"]["nodeName"].clone();
            for bytes in [1536, 8192] {
                resize(pod, bytes);
                assert_eq!(length(pod) + ADDED_BYTES, bytes);
            }
            assert_eq!((&pod["metadata"]["labels"], &pod["spec"]["nodeName"]), (&labels, &node));
        }
    }
}
