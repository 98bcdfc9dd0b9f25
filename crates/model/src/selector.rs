//! Label and field selectors, in kubectl's syntax.
//!
//! The grammar is that of apimachinery's `labels.Parse` and `fields.ParseSelector`, quirks included: a selector that means one
//! thing to the apiserver and another here would lose events silently. What differs is only the form kept: requirements are sorted
//! and reduced, so that two texts for one selection compare and hash equal and can share a view.

mod field;
mod label;
mod validate;

pub use field::{FieldOperator, FieldSelector, FieldTerm};
pub use label::{LabelSelector, Operator, Requirement};

/// The longest selector that is read, in bytes. kube-apiserver has no limit of its own but that of a request line.
pub const SELECTOR_BYTES_MAX: usize = 16 * 1024;

/// Why a text is no selector.
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

    /// Where in the text, in bytes from 0.
    pub fn position(&self) -> usize {
        self.position
    }

    /// What was found and what was expected, in the words of kube-apiserver's own answer to the same text.
    pub fn message(&self) -> &str {
        &self.message
    }
}

fn check_length(text: &str) -> Result<(), SelectorError> {
    if text.len() <= SELECTOR_BYTES_MAX {
        return Ok(());
    }
    let message = format!("a selector may have {SELECTOR_BYTES_MAX} bytes at most, this one has {}", text.len());
    Err(SelectorError::new(SELECTOR_BYTES_MAX, message))
}
