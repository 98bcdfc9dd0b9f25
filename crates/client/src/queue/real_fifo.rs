//! The delta queue in strict arrival order, which informers use.

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
    object::ObjectKey,
    store::{Change, Deleted, DeletedFinalStateUnknown, Replacement, Store},
};

/// A delta queue in strict arrival order: client-go's `RealFIFO`, the default of its informers.
///
/// A reflector writes to it, and one consumer applies the deltas to the known objects. Every change
/// of an object is delivered, also those that a later one supersedes.
///
/// The consumer gets a batch per call: a single change, or the changes of one
/// [`apply_batch`](Store::apply_batch), or a complete state with the deletions that it implies, or
/// one resync. A consumer that applies a batch in one step never shows a state that the server
/// never had. client-go delivers each delta alone, or bundles of unrelated ones.
///
/// The queue has no limit, as client-go's has none: to drop or merge a delta would break its
/// contract. A consumer must only apply the deltas and pass them on to queues with limits.
/// [`len`](Self::len) tells how far it lags.
pub struct RealFifo<K> {
    queue: Consumable<K, Batches<K>>,
    known: Arc<dyn KnownObjects<K>>,
}

struct Batches<K> {
    batches: VecDeque<Vec<Delta<K>>>,
    /// The number of deltas in all batches.
    deltas: usize,
}

impl<K> Default for Batches<K> {
    fn default() -> Self {
        Self { batches: VecDeque::new(), deltas: 0 }
    }
}

impl<K> Batches<K> {
    fn push(&mut self, batch: Vec<Delta<K>>) {
        if !batch.is_empty() {
            self.deltas += batch.len();
            self.batches.push_back(batch);
        }
    }
}

impl<K> Waiting<K> for Batches<K> {
    fn pop(&mut self) -> Option<Vec<Delta<K>>> {
        let batch = self.batches.pop_front()?;
        self.deltas -= batch.len();
        Some(batch)
    }

    fn units(&self) -> usize {
        self.batches.len()
    }
}

/// The deltas that are not yet applied to the known objects, in order.
fn pending<K>(state: &ConsumerState<K, Batches<K>>) -> impl Iterator<Item = &Delta<K>> {
    state.in_process.iter().chain(&state.waiting.batches).flatten()
}

impl<K: 'static> RealFifo<K> {
    /// Returns an empty queue. `known` has the objects that the consumer has applied, as an
    /// [`Indexer`](crate::Indexer) of the consumer has. The queue calls it under its lock, so it
    /// must not call the queue.
    pub fn new(known: Arc<dyn KnownObjects<K>>) -> Self {
        Self { queue: Consumable::new(), known }
    }

    /// Processes the next batch, if there is one and no other consumer processes a batch now.
    /// Returns whether it did. `process` gets the deltas of the batch, oldest first, and whether
    /// they belong to the initial list.
    ///
    /// `process` may call the queue. Changes that arrive during the call are queued behind it.
    pub fn try_pop(&self, process: impl FnOnce(Vec<Delta<K>>, bool)) -> bool {
        self.queue.try_pop(process)
    }

    /// Processes the next batch like [`try_pop`](Self::try_pop), and waits for it as long as
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

    /// The number of deltas that wait for the consumer.
    pub fn len(&self) -> usize {
        self.queue.lock().waiting.deltas
    }

    /// Whether no deltas wait for the consumer.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The deletions that a complete state implies: of pending objects in order of arrival, then of
    /// known objects.
    fn deletions(&self, state: &ConsumerState<K, Batches<K>>, new: &Replacement<K>) -> Vec<Delta<K>> {
        let kept: HashSet<&ObjectKey> = new.objects.iter().map(|object| object.key()).chain(&new.undecodable).collect();
        let mut order = Vec::new();
        let mut newest: HashMap<&ObjectKey, &Delta<K>> = HashMap::new();
        for delta in pending(state) {
            if newest.insert(delta.key(), delta).is_none() {
                order.push(delta.key());
            }
        }
        let queued = order.into_iter().filter(|key| !kept.contains(*key)).filter_map(|key| {
            // A deletion that is already queued is the true one.
            let last_known = newest.get(key)?.live_object()?.clone();
            Some(DeletedFinalStateUnknown { key: key.clone(), last_known: Some(last_known) })
        });
        let known = self.known.keys().into_iter().filter(|key| !kept.contains(key) && !newest.contains_key(key));
        let known = known.map(|key| DeletedFinalStateUnknown { last_known: self.known.get(key.as_str()), key });
        queued.chain(known).map(|unknown| Delta::Deleted(Deleted::FinalStateUnknown(unknown))).collect()
    }
}

impl<K: Send + Sync + 'static> Store<K> for RealFifo<K> {
    fn apply(&self, change: Change<K>) {
        self.apply_batch(vec![change]);
    }

    fn apply_batch(&self, changes: Vec<Change<K>>) {
        if changes.is_empty() {
            return;
        }
        let batch = changes.into_iter().map(Delta::from).collect();
        self.queue.produce(|state| {
            state.set_populated();
            state.waiting.push(batch);
        });
    }

    fn replace(&self, new: Replacement<K>) {
        self.queue.produce(|state| {
            let mut batch = self.deletions(state, &new);
            batch.extend(new.objects.into_iter().map(Delta::Replaced));
            state.waiting.push(batch);
            state.set_replaced();
        });
    }

    fn resync(&self) {
        self.queue.produce(|state| {
            // A pending delta is newer than the known object, which must not be delivered after it.
            let pending: HashSet<&ObjectKey> = pending(state).map(Delta::key).collect();
            let keys = self.known.keys().into_iter().filter(|key| !pending.contains(key));
            let batch = keys.filter_map(|key| self.known.get(key.as_str())).map(Delta::Sync).collect();
            state.waiting.push(batch);
        });
    }
}

impl<K> fmt::Debug for RealFifo<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.queue.debug("RealFifo", formatter)
    }
}

#[cfg(test)]
mod tests;
