//! The reasons why bytes cannot be parsed as an object.

use crate::{protobuf::Malformed, table::TableError, version::InvalidVersion};
use kubefan_common::text::without_value;

/// The reason why bytes cannot be parsed as an object of a resource.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// Not valid JSON, or not a JSON object.
    #[error("object is not valid JSON: {}", without_value(.0))]
    Json(#[from] serde_json::Error),
    /// Not protobuf in the Kubernetes envelope.
    #[error("cannot parse object: {0}")]
    Protobuf(#[from] Malformed),
    /// Not a row of a Table that can be cached.
    #[error("Table cannot be cached: {0}")]
    Table(#[from] TableError),
    /// A field that every object must have is missing or invalid.
    #[error("object has no usable metadata.{0}")]
    Metadata(&'static str),
    /// A version that does not compare with others.
    #[error("object has no usable metadata.resourceVersion: {0}")]
    Version(#[from] InvalidVersion),
    /// Offsets are 31-bit numbers. Objects of an apiserver are below 3 MiB.
    #[error("object of {0} bytes is too large")]
    TooLarge(usize),
}

/// Refuses bytes whose offsets do not fit into 31 bits.
pub(super) fn check_len(bytes: &[u8]) -> Result<(), ObjectError> {
    i32::try_from(bytes.len()).map(|_| ()).map_err(|_| ObjectError::TooLarge(bytes.len()))
}
