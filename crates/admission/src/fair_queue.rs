//! A queue that takes turns: first between users, then between the workloads or addresses of one
//! user, then between the connections of one of those, then in the order of arrival.
//!
//! The hazard is a client that queues thousands of requests, so that those of all others would wait
//! behind them.

use std::collections::{HashMap, VecDeque};

use super::fair_share::{Holder, LevelKey, level_keys};

/// The queue. It has no limit of its own: each queued request holds a place among streams or reads.
#[derive(Debug)]
pub struct FairQueue<T> {
    turns: Turns<T>,
    next: u64,
}

/// Entries that wait at one level, in the order of their turns. None is empty.
#[derive(Debug)]
struct Turns<T> {
    order: VecDeque<LevelKey>,
    waiting: HashMap<LevelKey, Waiting<T>>,
}

#[derive(Debug)]
enum Waiting<T> {
    /// The turns of the next level.
    Turns(Turns<T>),
    /// The items that a connection waits for.
    Items(VecDeque<Item<T>>),
}

#[derive(Debug)]
struct Item<T> {
    number: u64,
    holder: Option<Holder>,
    item: T,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self { turns: Turns::default(), next: 0 }
    }
}

impl<T> FairQueue<T> {
    /// Appends an item. Returns its number.
    pub fn push(&mut self, holder: Option<Holder>, item: T) -> u64 {
        let number = self.next;
        self.next += 1;
        self.turns.push(&level_keys(holder), Item { number, holder, item });
        number
    }

    /// Takes the next item of those that may have a turn, at each level.
    pub fn pop(&mut self, may: impl Fn(usize, LevelKey) -> bool) -> Option<(Option<Holder>, T)> {
        self.turns.pop(0, &may).map(|Item { holder, item, .. }| (holder, item))
    }

    /// Removes the item with this number, if it is still there.
    pub fn remove(&mut self, holder: Option<Holder>, number: u64) {
        self.turns.remove(&level_keys(holder), number);
    }
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { order: VecDeque::new(), waiting: HashMap::new() }
    }
}

impl<T> Turns<T> {
    fn push(&mut self, keys: &[LevelKey], item: Item<T>) {
        let [key, below @ ..] = keys else { return };
        let waiting = self.waiting.entry(*key).or_insert_with(|| {
            self.order.push_back(*key);
            if below.is_empty() { Waiting::Items(VecDeque::new()) } else { Waiting::Turns(Turns::default()) }
        });
        match waiting {
            Waiting::Turns(turns) => turns.push(below, item),
            Waiting::Items(items) => items.push_back(item),
        }
    }

    fn pop(&mut self, level: usize, may: &impl Fn(usize, LevelKey) -> bool) -> Option<Item<T>> {
        for at in 0..self.order.len() {
            let key = *self.order.get(at)?;
            if !may(level, key) {
                continue;
            }
            let Some(item) = self.waiting.get_mut(&key)?.pop(level + 1, may) else { continue };
            // Those before it keep their turns.
            self.order.remove(at);
            if !self.forget_empty(key) {
                self.order.push_back(key);
            }
            return Some(item);
        }
        None
    }

    fn remove(&mut self, keys: &[LevelKey], number: u64) {
        let [key, below @ ..] = keys else { return };
        match self.waiting.get_mut(key) {
            Some(Waiting::Turns(turns)) => turns.remove(below, number),
            Some(Waiting::Items(items)) => items.retain(|item| item.number != number),
            None => return,
        }
        if self.forget_empty(*key) {
            self.order.retain(|other| other != key);
        }
    }

    /// Forgets a key if nothing waits under it.
    fn forget_empty(&mut self, key: LevelKey) -> bool {
        let is_empty = self.waiting.get(&key).is_none_or(Waiting::is_empty);
        if is_empty {
            self.waiting.remove(&key);
        }
        is_empty
    }
}

impl<T> Waiting<T> {
    fn pop(&mut self, level: usize, may: &impl Fn(usize, LevelKey) -> bool) -> Option<Item<T>> {
        match self {
            Self::Turns(turns) => turns.pop(level, may),
            Self::Items(items) => items.pop_front(),
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Turns(turns) => turns.waiting.is_empty(),
            Self::Items(items) => items.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn holder(connection: u64, last_byte: u8) -> Option<Holder> {
        Some(Holder::new(connection, Some(IpAddr::from([10, 0, 0, last_byte]))))
    }

    /// Every item, in the order of the turns.
    fn order(mut queue: FairQueue<&'static str>) -> Vec<&'static str> {
        let order = std::iter::from_fn(|| queue.pop(|_, _| true).map(|(_, name)| name)).collect();
        assert!(queue.turns.order.is_empty() && queue.turns.waiting.is_empty(), "{queue:?}");
        order
    }

    #[test]
    fn addresses_and_their_connections_take_turns() {
        let mut queue = FairQueue::default();
        for (connection, address, name) in
            [(1, 1, "a1"), (1, 1, "a2"), (1, 1, "a3"), (2, 1, "b1"), (3, 2, "c1"), (3, 2, "c2")]
        {
            queue.push(holder(connection, address), name);
        }
        let gone = queue.push(holder(4, 3), "gone");
        queue.remove(holder(4, 3), gone);
        assert_eq!(order(queue), ["a1", "c1", "b1", "c2", "a2", "a3"]);
    }

    #[test]
    fn a_user_with_many_workloads_has_one_turn() {
        let mut queue = FairQueue::default();
        for (connection, user, workload, name) in [
            (1, "agents", Some("p1"), "p1"),
            (2, "agents", Some("p2"), "p2"),
            (3, "agents", Some("p2"), "p2 again"),
            (4, "agents", Some("p3"), "p3"),
            (5, "controller", None, "c1"),
            (5, "controller", None, "c2"),
        ] {
            queue.push(holder(connection, 1).map(|holder| holder.identified(user, workload)), name);
        }
        assert_eq!(order(queue), ["p1", "c1", "p2", "c2", "p3", "p2 again"]);
    }

    #[test]
    fn waiters_that_are_passed_over_keep_their_place() {
        let mut queue = FairQueue::default();
        queue.push(holder(1, 1), "a");
        queue.push(holder(2, 2), "b");
        queue.push(None, "own");
        let [_, first, _] = level_keys(holder(1, 1));
        assert_eq!(queue.pop(|_, key| key != first), Some((holder(2, 2), "b")));
        assert_eq!(queue.pop(|_, key| key != LevelKey::Own), Some((holder(1, 1), "a")));
        assert_eq!(queue.pop(|_, key| key == LevelKey::Own), Some((None, "own")));
    }
}
