//! The labels of one object, decoded once for all selectors that test it.
//!
//! An object stores its labels as spans of its bytes, one after the other, so each look-up decodes
//! those before it. An event is tested by many selectors, and a selector may have many
//! requirements.

use std::cell::OnceCell;

use super::cached_object::Object;

/// An object and its labels.
pub struct LabelLookup<'a> {
    object: &'a Object,
    labels: OnceCell<Vec<(&'a str, &'a str)>>,
}

impl<'a> LabelLookup<'a> {
    /// Returns the lookup of an object. Its labels are decoded when the first of them is looked up.
    pub fn new(object: &'a Object) -> Self {
        Self { object, labels: OnceCell::new() }
    }

    /// The object.
    pub fn object(&self) -> &'a Object {
        self.object
    }

    /// The value of a label.
    pub fn get(&self, key: &str) -> Option<&'a str> {
        let labels = self.labels.get_or_init(|| self.object.labels().collect());
        labels.iter().find(|(known, _)| *known == key).map(|(_, value)| *value)
    }
}
