//! The smallest objects that the apiserver accepts.

use serde_json::{Value, json};

/// The resourceVersion of an object or a list, as a number.
pub(crate) fn version_of(object: &Value) -> u64 {
    let version = object["metadata"]["resourceVersion"].as_str().unwrap_or_else(|| panic!("no version in {object}"));
    version.parse().unwrap_or_else(|_| panic!("an etcd revision is a number: {version}"))
}

/// A pod with this name and the label `app=name`.
pub(crate) fn pod(name: &str) -> Value {
    json!({
        "metadata": { "name": name, "labels": { "app": name } },
        "spec": { "containers": [{ "name": "main", "image": "pause" }] },
    })
}
