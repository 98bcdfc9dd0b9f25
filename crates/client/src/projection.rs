//! What of each object a caller asks for, in the words of the contract. The server checks it; nothing is decided here.

use kubefan_common::proto::v1alpha1::{self, ProjectionType};

/// Which parts of an object are sent.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Parts {
    /// Everything.
    #[default]
    Full,
    /// The metadata, as a PartialObjectMetadata.
    Metadata,
    /// The fields at these paths, such as `spec.nodeName` or `metadata.annotations.example\.com/name`; a path through a list
    /// applies to each object in it.
    Fields(Vec<String>),
}

/// What of each object is sent. Whatever leaves anything out also leaves out `metadata.resourceVersion`, which stands beside the
/// object, and `metadata.managedFields`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Projection {
    /// Which parts.
    pub parts: Parts,
    /// Leave out `metadata.managedFields`.
    pub drop_managed_fields: bool,
    /// Leave out the annotation in which `kubectl apply` keeps its manifest.
    pub drop_last_applied: bool,
}

impl Projection {
    /// The message that asks for it; none where everything is wanted.
    pub(super) fn message(&self, only_changes: bool) -> Option<v1alpha1::Projection> {
        let (kind, paths) = match &self.parts {
            Parts::Full => (ProjectionType::Full, Vec::new()),
            Parts::Metadata => (ProjectionType::Metadata, Vec::new()),
            Parts::Fields(paths) => (ProjectionType::FieldMask, paths.clone()),
        };
        let message = v1alpha1::Projection {
            r#type: kind.into(),
            paths,
            drop_managed_fields: self.drop_managed_fields,
            drop_last_applied: self.drop_last_applied,
            only_changes,
        };
        (only_changes || *self != Self::default()).then_some(message)
    }
}
