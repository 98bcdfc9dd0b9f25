//! Scans of a store in slices.
//!
//! A selector of a hundred terms that no object matches is a million tests in a cache of 10,000
//! objects. A task that runs them all without a break holds up every other task of its thread. So a
//! scan ends after a number of tests and returns the place where it stopped. The caller lets other
//! tasks run, and continues the scan from there, in the same state.

use std::sync::Arc;

use kubefan_model::{ObjectKey, object::Object, selection::Selection};

/// The tests of one slice, in terms × objects: some hundred microseconds of work.
pub const SLICE_TESTS: usize = 10_000;

/// The selected objects among candidates, until all are tested or the slice is over.
pub struct Scan<'a, C> {
    candidates: C,
    selection: &'a Selection,
    tests_left: usize,
    last: Option<&'a Arc<Object>>,
    is_complete: bool,
}

impl<'a, C: Iterator<Item = &'a Arc<Object>>> Scan<'a, C> {
    /// A slice of at most `tests_max` tests, and at least one object.
    pub(super) fn new(candidates: C, selection: &'a Selection, tests_max: usize) -> Self {
        Self { candidates, selection, tests_left: tests_max.max(1), last: None, is_complete: false }
    }

    /// Whether no candidate is left.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// The last object that was tested: the next slice starts after it.
    pub fn tested(&self) -> Option<&'a ObjectKey> {
        self.last.map(|object| object.key())
    }
}

impl<'a, C: Iterator<Item = &'a Arc<Object>>> Iterator for Scan<'a, C> {
    type Item = &'a Arc<Object>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.tests_left > 0 && !self.is_complete {
            let Some(object) = self.candidates.next() else {
                self.is_complete = true;
                break;
            };
            self.tests_left = self.tests_left.saturating_sub(self.selection.tests());
            self.last = Some(object);
            if self.selection.matches(object) {
                return Some(object);
            }
        }
        None
    }
}
