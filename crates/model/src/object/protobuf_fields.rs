//! Places of a resource's selectable fields in protobuf: their field numbers.

use std::borrow::Cow;

use crate::{
    GroupVersionResource,
    fields::FieldTable,
    protobuf::kinds::{Location, Scalar, locations},
};

/// The selectable fields of a resource: for each, its possible locations, in order of preference.
#[derive(Debug)]
pub(super) struct ProtobufFields {
    pub(super) fields: Vec<Vec<Location>>,
    /// The top-level field numbers that lead to any of them.
    pub(super) roots: Vec<u32>,
}

impl ProtobufFields {
    pub(super) fn new(gvr: &GroupVersionResource, table: &FieldTable) -> Option<Self> {
        let fields = locations(gvr, table)?;
        let mut roots: Vec<_> = fields.iter().flatten().filter_map(|at| at.path.first().copied()).collect();
        roots.sort_unstable();
        roots.dedup();
        Some(Self { fields, roots })
    }

    /// A field's bytes in the form that selectors compare. Invalid UTF-8 is replaced as in JSON.
    pub(super) fn text<'a>(&self, index: usize, bytes: &'a [u8]) -> Cow<'a, str> {
        let scalar =
            self.fields.get(index).and_then(|locations| locations.first()).map_or(Scalar::Text, |at| at.scalar);
        match scalar {
            Scalar::Text => String::from_utf8_lossy(bytes),
            // Zeros are stored as absent.
            Scalar::Bool => Cow::Borrowed("true"),
            Scalar::Int => Cow::Owned((number(bytes) as i64).to_string()),
        }
    }
}

/// Decodes a varint.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 7 | u64::from(byte & 0x7f))
}
