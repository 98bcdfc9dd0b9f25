//! The projections of subscribers, and the oracle's own reading of them. It shares no code with the
//! projections under test.

use kubefan_common::proto::v1alpha1::{self, ProjectionType};
use serde_json::{Map, Value, json};

/// The parts of each object that a subscriber gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Projected {
    pub(crate) parts: Parts,
    pub(crate) drop_managed_fields: bool,
    pub(crate) drop_last_applied: bool,
    /// Changes that leave the parts unchanged are not sent.
    pub(crate) only_changes: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Parts {
    #[default]
    Whole,
    Metadata,
    Paths(&'static [&'static str]),
}

const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

impl Projected {
    /// All parts that a seed draws from.
    pub(crate) const PARTS: [Parts; 5] = [
        Parts::Whole,
        Parts::Metadata,
        Parts::Paths(&["metadata.name", "spec.nodeName"]),
        Parts::Paths(&["metadata.labels", "status.phase"]),
        Parts::Paths(&["metadata.labels.app", "spec.containers.image", "status.reason"]),
    ];

    /// Whether objects have their canonical form.
    pub(crate) fn is_canonical(&self) -> bool {
        self.parts != Parts::Whole || self.drop_managed_fields || self.drop_last_applied
    }

    /// The projection as a subscriber requests it.
    pub(crate) fn request(&self) -> Option<v1alpha1::Projection> {
        let Projected { parts, drop_managed_fields, drop_last_applied, only_changes } = *self;
        let (r#type, paths) = match parts {
            Parts::Whole => (ProjectionType::Full, &[][..]),
            Parts::Metadata => (ProjectionType::Metadata, &[][..]),
            Parts::Paths(paths) => (ProjectionType::FieldMask, paths),
        };
        let paths = paths.iter().map(|path| (*path).to_owned()).collect();
        let r#type = r#type.into();
        let projection = v1alpha1::Projection { r#type, paths, drop_managed_fields, drop_last_applied, only_changes };
        (*self != Projected::default()).then_some(projection)
    }

    /// The parts of an object, in canonical form.
    pub(crate) fn of(&self, object: &Value) -> Value {
        let mut canonical = object.clone();
        if let Some(metadata) = canonical["metadata"].as_object_mut() {
            metadata.remove("resourceVersion");
            metadata.remove("managedFields");
            if self.drop_last_applied
                && let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut)
            {
                annotations.remove(LAST_APPLIED);
                if annotations.is_empty() {
                    metadata.remove("annotations");
                }
            }
        }
        match self.parts {
            Parts::Whole => canonical,
            Parts::Metadata => json!({
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": canonical["metadata"],
            }),
            Parts::Paths(paths) => {
                let paths: Vec<Vec<&str>> = paths.iter().map(|path| path.split('.').collect()).collect();
                let paths: Vec<&[&str]> = paths.iter().map(Vec::as_slice).collect();
                masked(&canonical, &paths).unwrap_or_else(|| json!({}))
            }
        }
    }

    /// Whether `bytes` are the parts of an object. The order of fields is not judged.
    pub(crate) fn is(&self, object: &Value, bytes: &[u8]) -> bool {
        let right = self.of(object);
        serde_json::from_slice::<Value>(bytes).is_ok_and(|value| value == right)
            && right.to_string().len() == bytes.len()
    }
}

/// The part of a value that the paths name; `None` if there is nothing.
fn masked(value: &Value, paths: &[&[&str]]) -> Option<Value> {
    if paths.iter().any(|path| path.is_empty()) {
        return Some(value.clone());
    }
    match value {
        Value::Object(fields) => {
            let kept: Map<String, Value> = fields
                .iter()
                .filter_map(|(name, value)| {
                    let inside: Vec<&[&str]> =
                        paths.iter().filter(|path| path[0] == name).map(|path| &path[1..]).collect();
                    Some((name.clone(), masked(value, &inside).filter(|_| !inside.is_empty())?))
                })
                .collect();
            (!kept.is_empty()).then_some(Value::Object(kept))
        }
        Value::Array(items) => {
            let kept: Vec<_> = items.iter().map(|item| masked(item, paths)).collect();
            let is_empty = kept.iter().all(Option::is_none);
            (!is_empty).then(|| kept.into_iter().map(|item| item.unwrap_or_else(|| json!({}))).collect())
        }
        _ => None,
    }
}
