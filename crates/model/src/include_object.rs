//! The `includeObject` parameter of Table requests. It is below both `format` and `table`.

/// The part of its object that a row contains (`includeObject` of `metav1.TableOptions`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum IncludeObject {
    /// No part of the object.
    None,
    /// The metadata, as a `PartialObjectMetadata`.
    #[default]
    Metadata,
    /// The whole object.
    Object,
}

impl IncludeObject {
    /// Parses the value of the query parameter. `None` if the apiserver would refuse it.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "None" => Some(Self::None),
            "" | "Metadata" => Some(Self::Metadata),
            "Object" => Some(Self::Object),
            _ => None,
        }
    }
}
