//! Label, field and shard selectors, in Kubernetes' syntax.
//!
//! The grammar is that of apimachinery's `labels.Parse` and `fields.ParseSelector`, including its
//! quirks: a selector that means one thing to the apiserver and another here would silently lose
//! events. Only the stored form differs: requirements are sorted and deduplicated, so that
//! equivalent texts compare equal and share a view.

mod field;
mod label;
mod label_tokens;
mod shard;
mod validate;
mod value_set;

pub use field::{FieldOperator, FieldSelector, FieldTerm, NAME_FIELD, ParsedFields, RequiredName};
pub use label::{LabelSelector, Operator, Requirement};
pub use shard::{ShardSelector, Shards};
pub use value_set::ValueSet;

/// Maximum length of a selector, in bytes. kube-apiserver only limits the request line.
pub const SELECTOR_BYTES_MAX: usize = 16 * 1024;

/// The reason why a text is not a selector.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message} (at byte {position})")]
pub struct SelectorError {
    position: usize,
    message: String,
}

impl SelectorError {
    fn new(position: usize, message: impl Into<String>) -> Self {
        Self { position, message: message.into() }
    }

    /// Byte offset of the error in the text.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The unexpected text and the expected one, in the words of kube-apiserver's error for the
    /// same selector.
    pub fn message(&self) -> &str {
        &self.message
    }
}

fn check_length(text: &str) -> Result<(), SelectorError> {
    if text.len() <= SELECTOR_BYTES_MAX {
        return Ok(());
    }
    let message = format!("the selector has {} bytes; the maximum is {SELECTOR_BYTES_MAX}", text.len());
    Err(SelectorError::new(SELECTOR_BYTES_MAX, message))
}
