//! The parts of each object that a caller requests. The server validates them.

use kubefan_common::proto::v1alpha1::{self, ProjectionType};

/// The parts of an object to send.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Parts {
    /// The whole object.
    #[default]
    Full,
    /// The metadata, as a `meta.k8s.io/v1` PartialObjectMetadata.
    Metadata,
    /// The fields at these paths, such as `spec.nodeName` or
    /// `metadata.annotations.example\.com/name`: 1 to 64 paths, each of at most 1,024 bytes and 32
    /// names. A backslash escapes a dot or a backslash in a name. A path through a list applies to
    /// each object in it.
    Fields(Vec<String>),
}

/// The parts of each object to send, in the object's own bytes and order. Any projection that
/// leaves something out also leaves out `metadata.managedFields` and `metadata.resourceVersion`;
/// the version is beside the object, in the event.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Projection {
    /// The parts.
    pub parts: Parts,
    /// Leave out `metadata.managedFields`.
    pub drop_managed_fields: bool,
    /// Leave out the annotation `kubectl.kubernetes.io/last-applied-configuration`.
    pub drop_last_applied: bool,
}

impl Projection {
    /// The protobuf message of this projection; `None` if it is the default.
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
