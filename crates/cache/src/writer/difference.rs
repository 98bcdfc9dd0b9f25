//! Compares objects and states for the writer: which are the same, which only have a new encoding,
//! and which have changed.

use std::{collections::HashMap, sync::Arc};

use kubefan_common::planted::{self, Bug};
use kubefan_model::{
    ObjectKey,
    event::{EventType, WatchEvent},
    object::Object,
    packer::Packer,
};

use crate::store::Store;

/// Whether a list repeats an object. The same version has the same bytes, unless the schema has
/// changed.
pub(super) fn same(cached: &Object, object: &Object) -> bool {
    cached.version() == object.version() && cached.json_len() == object.json_len() && cached.bytes() == object.bytes()
}

/// Whether an object differs only in its bytes, because its schema has changed.
pub(super) fn is_reencoded(event: &WatchEvent) -> bool {
    event.kind() == EventType::Modified && event.previous().is_some_and(|old| old.version() == event.version())
}

/// The object, sharing the text of its key with the object that it replaces.
pub(super) fn new_object(mut object: Object, cached: Option<&Arc<Object>>) -> Arc<Object> {
    if let Some(cached) = cached {
        object.share_key(cached);
    }
    Arc::new(object)
}

/// The difference between two states: deletes first (a key whose uid changed is deleted, then
/// added), then adds and changes in the order of their versions. An object with other bytes at the
/// same version counts as changed, because its schema has. `packed` has replaced objects that are
/// packed already.
pub(super) fn difference(
    before: &Store,
    after: &Store,
    packed: &mut HashMap<ObjectKey, Arc<Object>>,
    packer: &Arc<Packer>,
) -> Vec<Arc<WatchEvent>> {
    let mut event = |kind, object: &Arc<Object>, previous: Option<&Arc<Object>>| {
        let event = WatchEvent::new(kind, object.version(), object.clone(), previous.cloned());
        let previous = previous.and_then(|previous| packed.remove(previous.key()));
        Arc::new(event.with_packed_previous(previous).packing(packer, None))
    };
    let mut deletes = Vec::new();
    for old in before.iter() {
        let new = after.get(old.key().as_str());
        if new.map_or(!planted::is(Bug::RelistForgetsDeletes), |new| new.uid() != old.uid()) {
            deletes.push(event(EventType::Deleted, old, Some(old)));
        }
    }
    let mut changes = Vec::new();
    for new in after.iter() {
        match before.get(new.key().as_str()) {
            Some(old) if Arc::ptr_eq(old, new) => {}
            Some(old) if old.uid() == new.uid() => changes.push(event(EventType::Modified, new, Some(old))),
            _ => changes.push(event(EventType::Added, new, None)),
        }
    }
    changes.sort_by_key(|event| event.version());
    deletes.append(&mut changes);
    deletes
}
