//! A queue that takes turns: first between addresses, then between the connections of one address,
//! then in the order of arrival.
//!
//! The hazard is a client that queues thousands of requests, behind which those of all others would
//! wait.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
};

use super::fair_share::Holder;

/// The address of those that wait; `None` for kubefan's own work.
type AddressKey = Option<Option<IpAddr>>;

/// The queue. It has no limit of its own: what is queued holds a place among streams or reads.
#[derive(Debug)]
pub struct FairQueue<T> {
    /// The addresses that wait, in the order of their turns.
    turns: VecDeque<AddressKey>,
    addresses: HashMap<AddressKey, Connections<T>>,
    next: u64,
}

#[derive(Debug)]
struct Connections<T> {
    turns: VecDeque<Option<Holder>>,
    /// What waits, with its number. None is empty.
    waiting: HashMap<Option<Holder>, VecDeque<(u64, T)>>,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self { turns: VecDeque::new(), addresses: HashMap::new(), next: 0 }
    }
}

fn address_of(holder: Option<Holder>) -> AddressKey {
    holder.map(|holder| holder.address())
}

impl<T> FairQueue<T> {
    /// Appends an item. Returns its number.
    pub fn push(&mut self, holder: Option<Holder>, item: T) -> u64 {
        let (number, address) = (self.next, address_of(holder));
        self.next += 1;
        let connections = self.addresses.entry(address).or_insert_with(|| {
            self.turns.push_back(address);
            Connections { turns: VecDeque::new(), waiting: HashMap::new() }
        });
        let waiting = connections.waiting.entry(holder).or_insert_with(|| {
            connections.turns.push_back(holder);
            VecDeque::new()
        });
        waiting.push_back((number, item));
        number
    }

    /// Takes the next item of those whose address and holder may have a turn.
    pub fn pop(
        &mut self,
        address_may: impl Fn(Option<IpAddr>) -> bool,
        may: impl Fn(Option<Holder>) -> bool,
    ) -> Option<(Option<Holder>, T)> {
        for _ in 0..self.turns.len() {
            let key = self.turns.pop_front()?;
            let connections = self.addresses.get_mut(&key)?;
            let found = if key.is_none_or(&address_may) { connections.pop(&may) } else { None };
            if connections.waiting.is_empty() {
                self.addresses.remove(&key);
            } else {
                self.turns.push_back(key);
            }
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// Removes the item with this number, if it is still there.
    pub fn remove(&mut self, holder: Option<Holder>, number: u64) {
        let key = address_of(holder);
        let Some(connections) = self.addresses.get_mut(&key) else { return };
        let Some(waiting) = connections.waiting.get_mut(&holder) else { return };
        waiting.retain(|(other, _)| *other != number);
        if waiting.is_empty() {
            connections.waiting.remove(&holder);
            connections.turns.retain(|other| *other != holder);
        }
        if connections.waiting.is_empty() {
            self.addresses.remove(&key);
            self.turns.retain(|other| *other != key);
        }
    }
}

impl<T> Connections<T> {
    fn pop(&mut self, may: impl Fn(Option<Holder>) -> bool) -> Option<(Option<Holder>, T)> {
        let at = self.turns.iter().position(|holder| may(*holder))?;
        self.turns.rotate_left(at);
        let holder = self.turns.pop_front()?;
        let waiting = self.waiting.get_mut(&holder)?;
        let item = waiting.pop_front().map(|(_, item)| item);
        if waiting.is_empty() {
            self.waiting.remove(&holder);
        } else {
            self.turns.push_back(holder);
        }
        item.map(|item| (holder, item))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(connection: u64, last_byte: u8) -> Option<Holder> {
        Some(Holder::new(connection, Some(IpAddr::from([10, 0, 0, last_byte]))))
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
        let next = |queue: &mut FairQueue<&'static str>| queue.pop(|_| true, |_| true).map(|(_, name)| name);
        let order: Vec<_> = std::iter::from_fn(|| next(&mut queue)).collect();
        assert_eq!(order, ["a1", "c1", "b1", "c2", "a2", "a3"]);
        assert!(queue.turns.is_empty() && queue.addresses.is_empty());
    }

    #[test]
    fn those_that_may_have_no_turn_keep_their_place() {
        let mut queue = FairQueue::default();
        queue.push(holder(1, 1), "a");
        queue.push(holder(2, 2), "b");
        queue.push(None, "own");
        let not_the_first = |address: Option<IpAddr>| address != Some(IpAddr::from([10, 0, 0, 1]));
        assert_eq!(queue.pop(not_the_first, |_| true), Some((holder(2, 2), "b")));
        assert_eq!(queue.pop(|_| true, |holder| holder.is_some()), Some((holder(1, 1), "a")));
        assert_eq!(queue.pop(|_| false, |_| true), Some((None, "own")));
    }
}
