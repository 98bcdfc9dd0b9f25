//! The current objects of one resource and scope.
//!
//! A persistent map: a clone is O(1) and stays as it is while the writer goes on, so a reader's snapshot is consistent without
//! blocking anyone. What a snapshot pins is only what has changed since.

use std::{
    ops::Bound::{Excluded, Included, Unbounded},
    sync::Arc,
};

use imbl::OrdMap;

use crate::model::{ObjectKey, object::Object, selection::Selection};

/// Objects by key, in the order of the apiserver's lists.
#[derive(Clone, Default)]
pub struct Store {
    objects: OrdMap<ObjectKey, Arc<Object>>,
    json_bytes: usize,
}

impl Store {
    /// The number of objects.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// The JSON bytes of all objects together.
    pub fn json_bytes(&self) -> usize {
        self.json_bytes
    }

    /// The object of a key.
    pub fn get(&self, key: &str) -> Option<&Arc<Object>> {
        self.objects.get(key)
    }

    /// Puts an object in; returns the one it replaces.
    pub fn insert(&mut self, object: Arc<Object>) -> Option<Arc<Object>> {
        self.json_bytes += object.bytes().len();
        let previous = self.objects.insert(object.key().clone(), object);
        self.json_bytes -= previous.as_ref().map_or(0, |previous| previous.bytes().len());
        previous
    }

    /// Takes an object out.
    pub fn remove(&mut self, key: &str) -> Option<Arc<Object>> {
        let previous = self.objects.remove(key);
        self.json_bytes -= previous.as_ref().map_or(0, |previous| previous.bytes().len());
        previous
    }

    /// All objects, in key order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Object>> {
        self.objects.values()
    }

    /// The selected objects after `last` (from the start if `None`), in key order. A selection of one namespace or one name looks
    /// only at its keys.
    pub fn select<'a>(
        &'a self,
        selection: &'a Selection,
        last: Option<&'a ObjectKey>,
    ) -> impl Iterator<Item = &'a Arc<Object>> + 'a {
        // In keys, `/` ends a namespace, and `0` is the byte after it.
        let spec = selection.spec();
        let (first, end) = (format!("{}/", spec.namespace), format!("{}0", spec.namespace));
        let from = match last {
            Some(key) => Excluded(key.as_str()),
            None if spec.namespace.is_empty() => Unbounded,
            None => Included(first.as_str()),
        };
        let to = if spec.namespace.is_empty() { Unbounded } else { Excluded(end.as_str()) };
        self.objects.range::<(_, _), str>((from, to)).map(|(_, object)| object).filter(|o| selection.matches(o))
    }
}
