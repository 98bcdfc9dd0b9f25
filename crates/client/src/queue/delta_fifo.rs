//! The delta queue by object: a consumer gets all that happened to one object at once.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    fmt,
    sync::Arc,
};

use super::{
    consume::{Consumable, ConsumerState, Waiting},
    delta::{Delta, KnownObjects},
};
use crate::{
    object::{Object, ObjectKey},
    store::{Change, Deleted, Replacement, Store},
};

/// A delta queue by object: client-go's `DeltaFIFO`, with `EmitDeltaTypeReplaced` as its informers
/// set it.
///
/// The consumer gets the deltas of one object per call, oldest first. Objects come in the order in
/// which each was first queued. Only two deletions in a row are merged. Different objects' changes
/// lose their order; [`RealFifo`](super::RealFifo) retains it.
///
/// The number of deltas of an object has no limit, as in client-go. A consumer must only apply the
/// deltas and pass them on to queues with limits.
pub struct DeltaFifo<K> {
    queue: Consumable<K, Keyed<K>>,
    known: Option<Arc<dyn KnownObjects<K>>>,
}

struct Keyed<K> {
    /// Deltas by key. Each key in `order` has at least one, and no other key is here.
    deltas: HashMap<ObjectKey, Vec<Delta<K>>>,
    order: VecDeque<ObjectKey>,
}

impl<K> Default for Keyed<K> {
    fn default() -> Self {
        Self { deltas: HashMap::new(), order: VecDeque::new() }
    }
}

impl<K> Keyed<K> {
    fn push(&mut self, delta: Delta<K>) {
        let deltas = self.deltas.entry(delta.key().clone()).or_default();
        match (deltas.last_mut(), delta) {
            (None, delta) => {
                self.order.push_back(delta.key().clone());
                deltas.push(delta);
            }
            (Some(Delta::Deleted(before)), Delta::Deleted(deleted)) => {
                // The state at the deletion says more than a final state that is unknown.
                if matches!(before, Deleted::FinalStateUnknown(_)) {
                    *before = deleted;
                }
            }
            (Some(_), delta) => deltas.push(delta),
        }
    }
}

impl<K> Waiting<K> for Keyed<K> {
    fn pop(&mut self) -> Option<Vec<Delta<K>>> {
        self.deltas.remove(&self.order.pop_front()?)
    }

    fn units(&self) -> usize {
        self.order.len()
    }
}

/// The newest delta in process. All of them have the same key.
fn in_process<K>(state: &ConsumerState<K, Keyed<K>>) -> Option<&Delta<K>> {
    state.in_process.as_ref()?.last()
}

fn unknown<K>(key: ObjectKey, last_known: Option<Arc<Object<K>>>) -> Delta<K> {
    Delta::Deleted(Deleted::unknown(key, last_known))
}

impl<K: 'static> DeltaFifo<K> {
    /// Returns an empty queue. `known` has the objects that the consumer has applied. The queue
    /// calls it under its lock, so it must not call the queue. Without it, the queue ignores
    /// deletions of objects that are not queued, and has no resync.
    pub fn new(known: Option<Arc<dyn KnownObjects<K>>>) -> Self {
        Self { queue: Consumable::new(), known }
    }

    /// Processes the deltas of the next object, if there is one and no other consumer processes an
    /// object now. Returns whether it did. `process` gets the deltas, oldest first, and whether
    /// they belong to the initial list.
    ///
    /// `process` may call the queue. Changes that arrive during the call are queued behind it.
    pub fn try_pop(&self, process: impl FnOnce(Vec<Delta<K>>, bool)) -> bool {
        self.queue.try_pop(process)
    }

    /// Processes the next object like [`try_pop`](Self::try_pop), and waits for it as long as
    /// needed. Returns false if the queue is closed and empty.
    ///
    /// Cancelling the wait loses nothing.
    pub async fn pop(&self, process: impl FnOnce(Vec<Delta<K>>, bool)) -> bool {
        self.queue.pop(process).await
    }

    /// Whether the first complete state was processed. Also true if it was empty, and once a single
    /// change arrives before any complete state.
    pub fn has_synced(&self) -> bool {
        self.queue.has_synced()
    }

    /// Waits until [`has_synced`](Self::has_synced) is true. Returns false if the queue was closed
    /// and emptied before.
    pub async fn synced(&self) -> bool {
        self.queue.synced().await
    }

    /// Closes the queue. Consumers still get the queued deltas, and then no longer wait.
    pub fn close(&self) {
        self.queue.close();
    }

    /// Whether the queue was closed.
    pub fn is_closed(&self) -> bool {
        self.queue.is_closed()
    }

    /// The number of objects that wait for the consumer.
    pub fn len(&self) -> usize {
        self.queue.lock().waiting.units()
    }

    /// Whether no objects wait for the consumer.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the queue or the consumer has this object.
    fn exists(&self, state: &ConsumerState<K, Keyed<K>>, key: &ObjectKey) -> bool {
        if state.waiting.deltas.contains_key(key) {
            return true;
        }
        let Some(known) = &self.known else { return false };
        match in_process(state).filter(|delta| delta.key() == key) {
            Some(delta) => delta.live_object().is_some(),
            None => known.get(key.as_str()).is_some(),
        }
    }

    fn push(&self, state: &mut ConsumerState<K, Keyed<K>>, change: Change<K>) {
        state.set_populated();
        // A complete state has reported the deletion of an object that is gone already.
        if !matches!(change, Change::Deleted(_)) || self.exists(state, change.key()) {
            state.waiting.push(change.into());
        }
    }

    /// The deletions that a complete state implies: of queued objects in order of the queue, of the
    /// object in process, then of known objects.
    fn deletions(&self, state: &ConsumerState<K, Keyed<K>>, kept: &HashSet<ObjectKey>) -> Vec<Delta<K>> {
        let Keyed { deltas, order } = &state.waiting;
        let last_known = |delta: &Delta<K>| match delta {
            Delta::Deleted(deleted) => deleted.last_known().cloned(),
            delta => delta.live_object().cloned(),
        };
        let newest = |key: &ObjectKey| deltas.get(key).and_then(|deltas| deltas.last()).and_then(last_known);
        let queued = order.iter().filter(|key| !kept.contains(*key)).map(|key| unknown(key.clone(), newest(key)));
        let mut deletions: Vec<_> = queued.collect();
        let Some(known) = &self.known else { return deletions };
        let gone = |key: &ObjectKey| !kept.contains(key) && !deltas.contains_key(key);
        let in_process = in_process(state);
        let processed = in_process.filter(|delta| gone(delta.key()) && delta.live_object().is_some());
        deletions.extend(processed.map(|delta| unknown(delta.key().clone(), last_known(delta))));
        let applied = |key: &ObjectKey| in_process.is_none_or(|delta| delta.key() != key);
        for key in known.keys().into_iter().filter(|key| gone(key) && applied(key)) {
            let last_known = known.get(key.as_str());
            deletions.push(unknown(key, last_known));
        }
        deletions
    }
}

impl<K: Send + Sync + 'static> Store<K> for DeltaFifo<K> {
    fn apply(&self, change: Change<K>) {
        self.queue.produce(|state| self.push(state, change));
    }

    fn apply_batch(&self, changes: Vec<Change<K>>) {
        self.queue.produce(|state| {
            for change in changes {
                self.push(state, change);
            }
        });
    }

    fn replace(&self, new: Replacement<K>) {
        let undecodable = new.undecodable.into_iter();
        let kept = new.objects.iter().map(|object| object.key().clone()).chain(undecodable).collect();
        self.queue.produce(|state| {
            for object in new.objects {
                state.waiting.push(Delta::Replaced(object));
            }
            for deletion in self.deletions(state, &kept) {
                state.waiting.push(deletion);
            }
            state.set_replaced();
        });
    }

    fn resync(&self) {
        let Some(known) = &self.known else { return };
        self.queue.produce(|state| {
            for key in known.keys() {
                // A pending delta is newer than the known object, which must not be delivered after
                // it.
                let in_process = in_process(state).is_some_and(|delta| *delta.key() == key);
                if in_process || state.waiting.deltas.contains_key(&key) {
                    continue;
                }
                if let Some(object) = known.get(key.as_str()) {
                    state.waiting.push(Delta::Sync(object));
                }
            }
        });
    }
}

impl<K> fmt::Debug for DeltaFifo<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.queue.debug("DeltaFifo", formatter)
    }
}

#[cfg(test)]
mod tests;
