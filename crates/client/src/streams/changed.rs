//! Leaves out events that change nothing of interest.

use std::collections::HashMap;

use futures::{Stream, StreamExt};

use super::{InformerEvent, Item};
use crate::{
    object::{Object, ObjectKey},
    store::Change,
};

/// Passes an object on only if `value` returns something else than for the object's previous state,
/// such as its generation or its labels: kube-rs' `predicate_filter`.
///
/// The first state of each object passes, and so do deletions, errors and versions. From a complete
/// state only the changed objects pass, so write to a store ([`reflect`](super::reflect)) before
/// this, not after it. The last value of each object stays in memory until the object is deleted.
///
/// ```
/// use kubefan_client::{FakeListWatch, changed_only, objects, watcher};
/// # let deployments = FakeListWatch::new();
/// let events = watcher::<serde_json::Value>(deployments);
/// let scaled = objects(changed_only(events, |object| object["metadata"]["generation"].as_i64()));
/// # drop(scaled);
/// ```
pub fn changed_only<K, V, S>(events: S, value: impl Fn(&Object<K>) -> V + Send) -> impl Stream<Item = Item<K>>
where
    V: PartialEq,
    S: Stream<Item = Item<K>>,
{
    let mut seen = Seen { values: HashMap::new(), replacing: HashMap::new(), value };
    events.filter_map(move |event| std::future::ready(seen.filter(event)))
}

/// The uid and the value of each object.
type Values<V> = HashMap<ObjectKey, (Box<str>, V)>;

struct Seen<V, F> {
    values: Values<V>,
    /// The values of a complete state that has not ended.
    replacing: Values<V>,
    value: F,
}

impl<V: PartialEq, F> Seen<V, F> {
    fn filter<K>(&mut self, event: Item<K>) -> Option<Item<K>>
    where
        F: Fn(&Object<K>) -> V,
    {
        let passes = match &event {
            Ok(InformerEvent::ReplaceBegin) => {
                self.replacing.clear();
                true
            }
            Ok(InformerEvent::Replaced(object)) => {
                let entry = self.entry(object);
                let changed = self.values.get(object.key()) != Some(&entry);
                self.replacing.insert(object.key().clone(), entry);
                changed
            }
            Ok(InformerEvent::ReplaceEnd { undecodable, .. }) => {
                let mut values = std::mem::take(&mut self.replacing);
                values.extend(undecodable.iter().filter_map(|key| self.values.remove_entry(key)));
                self.values = values;
                true
            }
            Ok(InformerEvent::Changed(change)) => self.is_changed(change),
            Ok(InformerEvent::Batch(_) | InformerEvent::Advanced { .. }) | Err(_) => true,
        };
        match event {
            Ok(InformerEvent::Batch(mut changes)) => {
                changes.retain(|change| self.is_changed(change));
                (!changes.is_empty()).then_some(Ok(InformerEvent::Batch(changes)))
            }
            event => passes.then_some(event),
        }
    }

    fn entry<K>(&self, object: &Object<K>) -> (Box<str>, V)
    where
        F: Fn(&Object<K>) -> V,
    {
        (object.uid().into(), (self.value)(object))
    }

    fn is_changed<K>(&mut self, change: &Change<K>) -> bool
    where
        F: Fn(&Object<K>) -> V,
    {
        match change {
            Change::Added(object) | Change::Updated(object) => {
                let entry = self.entry(object);
                let changed = self.values.get(object.key()) != Some(&entry);
                if changed {
                    self.values.insert(object.key().clone(), entry);
                }
                changed
            }
            Change::Deleted(deleted) => {
                self.values.remove(deleted.key());
                true
            }
        }
    }
}
