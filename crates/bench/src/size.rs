//! Pods of a given size: what is least missed is cut, and what is missing is padded, so that tables can name one size for all.

use serde_json::Value;

/// What the server adds to what is written: uid, creation time and version.
const ADDED_BYTES: usize = 130;
/// What is cut, in this order. What remains is what selectors, and readers of a pod's state, look at.
const CUT: [(&str, &str); 9] = [
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

/// Makes a pod's JSON about so large once it is stored, if its bare bones are not larger. Every change changes the bytes still: the
/// annotation that counts revisions, the restarts and the readiness stay, in the padding if nowhere else.
pub(super) fn fit(pod: &mut Value, bytes: usize) {
    let bytes = bytes.saturating_sub(ADDED_BYTES);
    let state = pod["status"]["containerStatuses"][0].clone();
    let note = format!("{}/{}", state["ready"], state["restartCount"]);
    for (part, field) in CUT {
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

/// Text that compresses as badly as real identifiers do, and is the same for every object.
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
    fn pods_are_made_as_large_as_is_asked_and_keep_what_selectors_read() {
        let mut workload = Workload::new(1, WorkloadOptions { objects: 50, nodes: 3, namespaces: 2, apps: 4 });
        let setup: Vec<_> = std::iter::from_fn(|| workload.next_setup()).collect();
        let churn = (0..200).map(|_| workload.next_change());
        for mut change in setup.into_iter().chain(churn).filter(|change| change.resource.resource == "pods") {
            let (Operation::Create(pod) | Operation::Update(pod) | Operation::UpdateStatus(pod)) =
                &mut change.operation
            else {
                continue;
            };
            let (labels, node) = (pod["metadata"]["labels"].clone(), pod["spec"]["nodeName"].clone());
            for bytes in [1536, 8192] {
                fit(pod, bytes);
                assert_eq!(length(pod) + ADDED_BYTES, bytes);
            }
            assert_eq!((&pod["metadata"]["labels"], &pod["spec"]["nodeName"]), (&labels, &node));
        }
    }
}
