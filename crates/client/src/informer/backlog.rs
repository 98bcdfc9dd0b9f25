//! The calls that wait for a handler.
//!
//! A handler that is slower than the changes must not delay others, and must not fill the memory.
//! So it gets every call in order up to a limit. Above the limit, a change joins the last waiting
//! call for the same object, if there is one: the handler gets the first old state and the last new
//! one. Then at most two calls wait for each object, a deletion and the addition after it, because
//! a deletion and a new object of the same name stay apart.

use std::collections::{HashMap, VecDeque};

use super::handler::Notification;
use crate::object::ObjectKey;

/// Behaviour when a handler is behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backlog {
    /// Every call waits, without a limit: client-go's way. A handler that stops fills the memory.
    Unbounded,
    /// Above this many waiting calls, changes of one object are merged.
    Conflate(usize),
    /// With this many waiting calls, the next change ends the handler, and the informer reports it.
    /// The calls of one list, batch or resync come together, however many they are.
    StopWithReport(usize),
}

/// 10,000 calls, then merging. A call takes about 64 bytes, and keeps the states in it in memory.
impl Default for Backlog {
    fn default() -> Self {
        Self::Conflate(10_000)
    }
}

/// Waiting calls, oldest first.
pub(super) struct BacklogQueue<K> {
    policy: Backlog,
    /// `None` where a call was cancelled by a later one.
    calls: VecDeque<Option<Notification<K>>>,
    /// The number of the first element of `calls`, counted from the first call ever.
    first: u64,
    cancelled: usize,
    /// The last waiting call of each object, while calls are merged.
    last_by_key: Option<HashMap<ObjectKey, u64>>,
}

impl<K> Notification<K> {
    pub(super) fn key(&self) -> &ObjectKey {
        match self {
            Self::Add { object, .. } => object.key(),
            Self::Update { new, .. } => new.key(),
            Self::Delete(deleted) => deleted.key(),
        }
    }

    pub(super) fn is_initial(&self) -> bool {
        matches!(self, Self::Add { is_in_initial_list: true, .. })
    }
}

/// Result of joining a new call to the last waiting call of the same object.
enum Merged<K> {
    /// One call stands for both.
    Into(Notification<K>),
    /// The two cancel each other: the handler never hears of the object.
    Cancelled,
    /// Both calls are needed.
    Separate(Notification<K>),
}

fn merge<K>(waiting: &Notification<K>, new: Notification<K>) -> Merged<K> {
    use Notification::{Add, Delete, Update};
    match (waiting, new) {
        (Add { is_in_initial_list, .. }, Update { new, .. }) => {
            Merged::Into(Add { object: new, is_in_initial_list: *is_in_initial_list })
        }
        (Update { old, .. }, Update { new, .. }) => Merged::Into(Update { old: old.clone(), new }),
        (Update { .. }, Delete(deleted)) => Merged::Into(Delete(deleted)),
        (Add { .. }, Delete(_)) => Merged::Cancelled,
        (_, new) => Merged::Separate(new),
    }
}

impl<K> BacklogQueue<K> {
    pub(super) fn new(policy: Backlog) -> Self {
        Self { policy, calls: VecDeque::new(), first: 0, cancelled: 0, last_by_key: None }
    }

    /// The number of waiting calls.
    pub(super) fn len(&self) -> usize {
        self.calls.len() - self.cancelled
    }

    /// The limit, if the handler ends because it is that many calls behind.
    pub(super) fn overflow(&self) -> Option<usize> {
        match self.policy {
            Backlog::StopWithReport(limit) if self.len() >= limit => Some(limit),
            _ => None,
        }
    }

    /// Adds a call. Returns true if it cancelled a waiting addition of the initial list.
    pub(super) fn push(&mut self, call: Notification<K>) -> bool {
        if let Backlog::Conflate(limit) = self.policy {
            if self.len() >= limit {
                self.start_merging();
            } else if self.len() < limit / 2 {
                self.last_by_key = None;
            }
        }
        let call = match self.last(&call) {
            None => call,
            Some((number, index)) => match self.calls.get_mut(index) {
                Some(Some(waiting)) => match merge(waiting, call) {
                    Merged::Separate(call) => call,
                    Merged::Into(merged) => {
                        *waiting = merged;
                        return false;
                    }
                    Merged::Cancelled => return self.cancel(number, index),
                },
                _ => call,
            },
        };
        if let Some(last) = &mut self.last_by_key {
            last.insert(call.key().clone(), self.first + self.calls.len() as u64);
        }
        self.calls.push_back(Some(call));
        false
    }

    pub(super) fn pop(&mut self) -> Option<Notification<K>> {
        loop {
            let call = self.calls.pop_front()?;
            let number = self.first;
            self.first += 1;
            match call {
                None => self.cancelled -= 1,
                Some(call) => {
                    if let Some(last) = &mut self.last_by_key
                        && last.get(call.key()) == Some(&number)
                    {
                        last.remove(call.key());
                    }
                    return Some(call);
                }
            }
        }
    }

    fn start_merging(&mut self) {
        if self.last_by_key.is_some() {
            return;
        }
        let numbered = self.calls.iter().zip(self.first..);
        let last = numbered.filter_map(|(call, number)| Some((call.as_ref()?.key().clone(), number)));
        self.last_by_key = Some(last.collect());
    }

    /// The last waiting call for the same object: its number and index.
    fn last(&self, call: &Notification<K>) -> Option<(u64, usize)> {
        let number = *self.last_by_key.as_ref()?.get(call.key())?;
        Some((number, usize::try_from(number.checked_sub(self.first)?).ok()?))
    }

    fn cancel(&mut self, number: u64, index: usize) -> bool {
        let Some(call) = self.calls.get_mut(index).and_then(Option::take) else { return false };
        self.cancelled += 1;
        if let Some(last) = &mut self.last_by_key {
            debug_assert_eq!(last.get(call.key()), Some(&number));
            last.remove(call.key());
        }
        // Without this, objects that come and go would leave gaps without end.
        if self.cancelled > self.len().max(64) {
            self.calls.retain(Option::is_some);
            self.cancelled = 0;
            if self.last_by_key.take().is_some() {
                self.start_merging();
            }
        }
        call.is_initial()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{object::Object, store::Deleted};

    fn object(key: &str, version: u32) -> Arc<Object<u32>> {
        Arc::new(Object::new(key.into(), "", version.to_string(), version))
    }

    fn add(key: &str, version: u32) -> Notification<u32> {
        Notification::Add { object: object(key, version), is_in_initial_list: false }
    }

    fn update(key: &str, old: u32, new: u32) -> Notification<u32> {
        Notification::Update { old: object(key, old), new: object(key, new) }
    }

    fn delete(key: &str, version: u32) -> Notification<u32> {
        Notification::Delete(Deleted::Known(object(key, version)))
    }

    fn text(call: &Notification<u32>) -> String {
        match call {
            Notification::Add { object, .. } => format!("+{}{}", object.key(), object.value()),
            Notification::Update { old, new } => format!("{}{}→{}", new.key(), old.value(), new.value()),
            Notification::Delete(deleted) => {
                format!("-{}{}", deleted.key(), deleted.last_known().map_or(0, |object| *object.value()))
            }
        }
    }

    /// The calls that remain, if all of `pushed` wait at once.
    fn remaining(policy: Backlog, pushed: Vec<Notification<u32>>) -> String {
        let mut queue = BacklogQueue::new(policy);
        for call in pushed {
            queue.push(call);
        }
        std::iter::from_fn(|| queue.pop()).map(|call| text(&call)).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn up_to_the_limit_every_call_is_delivered_in_order() {
        let calls = || vec![add("a", 1), update("a", 1, 2), add("b", 3), update("a", 2, 4)];
        assert_eq!(remaining(Backlog::Conflate(4), calls()), "+a1 a1→2 +b3 a2→4");
        assert_eq!(remaining(Backlog::Unbounded, calls()), "+a1 a1→2 +b3 a2→4");
    }

    #[test]
    fn above_the_limit_an_object_keeps_its_first_old_and_its_last_new_state() {
        let calls = vec![update("a", 1, 2), update("b", 1, 2), update("a", 2, 3), update("a", 3, 4), update("b", 2, 5)];
        assert_eq!(remaining(Backlog::Conflate(1), calls), "a1→4 b1→5");
        assert_eq!(remaining(Backlog::Conflate(1), vec![add("a", 1), update("a", 1, 2)]), "+a2");
    }

    #[test]
    fn above_the_limit_a_deletion_and_a_new_object_of_the_same_name_stay_apart() {
        let calls = vec![update("a", 1, 2), delete("a", 3), add("a", 4), update("a", 4, 5)];
        assert_eq!(remaining(Backlog::Conflate(1), calls), "-a3 +a5");
    }

    #[test]
    fn above_the_limit_an_object_that_came_and_went_is_not_reported() {
        assert_eq!(remaining(Backlog::Conflate(1), vec![add("b", 1), add("a", 1), delete("a", 2)]), "+b1");
        let again = vec![delete("a", 1), add("a", 2), delete("a", 3), add("a", 4)];
        assert_eq!(remaining(Backlog::Conflate(1), again), "-a1 +a4");
    }

    #[test]
    fn a_stuck_handler_has_at_most_two_calls_for_each_object() {
        let mut queue = BacklogQueue::new(Backlog::Conflate(10));
        for round in 0..2_000 {
            for name in 0..50 {
                let key = format!("n{name}");
                let call = match round % 3 {
                    0 => add(&key, round),
                    1 => update(&key, round - 1, round),
                    _ => delete(&key, round),
                };
                queue.push(call);
            }
        }
        assert!(queue.len() <= 110, "{}", queue.len());
        assert!(queue.calls.len() <= 300, "{} with cancelled ones", queue.calls.len());
    }

    #[test]
    fn a_handler_with_a_hard_limit_overflows_at_it() {
        let mut queue = BacklogQueue::new(Backlog::StopWithReport(2));
        queue.push(add("a", 1));
        assert_eq!(queue.overflow(), None);
        queue.push(add("b", 1));
        assert_eq!(queue.overflow(), Some(2));
    }

    #[test]
    fn a_handler_that_catches_up_gets_single_calls_again() {
        let mut queue = BacklogQueue::new(Backlog::Conflate(4));
        for version in 0..10 {
            queue.push(update("a", version, version + 1));
        }
        while queue.pop().is_some() {}
        queue.push(update("a", 10, 11));
        queue.push(update("a", 11, 12));
        assert_eq!(queue.len(), 2);
    }

    #[test]
    fn a_cancelled_initial_addition_is_reported_so_that_the_handler_counts_as_synced() {
        let mut queue = BacklogQueue::new(Backlog::Conflate(1));
        queue.push(Notification::Add { object: object("a", 1), is_in_initial_list: true });
        assert!(queue.push(delete("a", 2)));
        assert_eq!(queue.len(), 0);
    }
}
