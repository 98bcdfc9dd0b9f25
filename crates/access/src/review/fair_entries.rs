//! A limited number of entries, and the choice of the entry that makes room for another.
//!
//! The hazard is a tenant that brings many entries: if the oldest of all made room, it would push
//! out those of others, even if they have few. So the tenant with the most entries makes room, with
//! its oldest one. An entry that has ended makes room before that: tenants that are gone must not
//! take places from those that are there.
//!
//! The oldest entry is the one that came first, and not the one that was not read for the longest
//! time. Entries of one kind count for the same time, so it ends first; and a read changes nothing.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::Hash,
};

/// The entries by key. `T` is a tenant.
pub(super) struct FairEntries<K, T, E> {
    entries_max: usize,
    entries: HashMap<K, Held<T, E>>,
    /// The keys by number: the oldest entry comes first.
    by_age: BTreeMap<u64, K>,
    /// The numbers of each tenant's entries. None is empty.
    by_tenant: HashMap<T, BTreeSet<u64>>,
    /// The size of each tenant. The largest comes last.
    sizes: BTreeSet<Size>,
    last: u64,
}

struct Held<T, E> {
    number: u64,
    tenant: T,
    entry: E,
}

/// Number of a tenant's entries, and the number of its oldest one. If several tenants have as many,
/// the one with the oldest entry is the largest.
type Size = (usize, Reverse<u64>);

impl<K, T, E> FairEntries<K, T, E>
where
    K: Hash + Eq + Copy,
    T: Hash + Eq + Copy,
{
    /// Returns a store with room for this many entries.
    pub(super) fn new(entries_max: usize) -> Self {
        Self {
            entries_max,
            entries: HashMap::new(),
            by_age: BTreeMap::new(),
            by_tenant: HashMap::new(),
            sizes: BTreeSet::new(),
            last: 0,
        }
    }

    /// The entry with this key.
    pub(super) fn get(&self, key: &K) -> Option<&E> {
        self.entries.get(key).map(|held| &held.entry)
    }

    /// Adds an entry, which counts to a tenant. It replaces the one with this key. If there are too
    /// many, one is removed. `has_ended` tells whether one means nothing any more.
    pub(super) fn insert(&mut self, key: K, tenant: T, entry: E, has_ended: impl Fn(&E) -> bool) {
        self.remove(&key);
        self.last += 1;
        let number = self.last;
        self.entries.insert(key, Held { number, tenant, entry });
        self.by_age.insert(number, key);
        self.change(tenant, |numbers| numbers.insert(number));
        if self.entries.len() > self.entries_max
            && let Some(key) = self.to_remove(has_ended)
        {
            self.remove(&key);
        }
    }

    /// Removes the entry with this key, if there is one.
    pub(super) fn remove(&mut self, key: &K) {
        let Some(Held { number, tenant, .. }) = self.entries.remove(key) else { return };
        self.by_age.remove(&number);
        self.change(tenant, |numbers| numbers.remove(&number));
    }

    /// The key of the entry that makes room.
    fn to_remove(&self, has_ended: impl Fn(&E) -> bool) -> Option<K> {
        let (_, oldest) = self.by_age.first_key_value()?;
        if self.get(oldest).is_some_and(has_ended) {
            return Some(*oldest);
        }
        let (_, Reverse(number)) = self.sizes.last()?;
        self.by_age.get(number).copied()
    }

    /// Changes the numbers of a tenant's entries, and its size with them.
    fn change(&mut self, tenant: T, change: impl FnOnce(&mut BTreeSet<u64>) -> bool) {
        let numbers = self.by_tenant.entry(tenant).or_default();
        if let Some(before) = size(numbers) {
            self.sizes.remove(&before);
        }
        change(numbers);
        match size(numbers) {
            Some(after) => _ = self.sizes.insert(after),
            None => _ = self.by_tenant.remove(&tenant),
        }
    }
}

/// `None` without entries.
fn size(numbers: &BTreeSet<u64>) -> Option<Size> {
    Some((numbers.len(), Reverse(*numbers.first()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entries that have ended if they are `true`.
    type Entries = FairEntries<u8, &'static str, bool>;

    fn add(entries: &mut Entries, keys: std::ops::Range<u8>, tenant: &'static str) {
        for key in keys {
            entries.insert(key, tenant, false, |ended| *ended);
        }
    }

    fn kept(entries: &Entries) -> Vec<u8> {
        (0..100).filter(|key| entries.get(key).is_some()).collect()
    }

    #[test]
    fn the_tenant_with_the_most_entries_makes_room_with_its_oldest() {
        let mut entries = Entries::new(6);
        add(&mut entries, 0..2, "honest");
        add(&mut entries, 10..20, "greedy");
        assert_eq!(kept(&entries), [0, 1, 16, 17, 18, 19]);
        add(&mut entries, 2..4, "honest");
        assert_eq!(kept(&entries), [1, 2, 3, 17, 18, 19], "no more than an equal part");
    }

    #[test]
    fn among_equal_tenants_the_one_with_the_oldest_entry_makes_room() {
        let mut entries = Entries::new(3);
        for (key, tenant) in [(0, "d"), (1, "c"), (2, "b"), (3, "a"), (4, "d")] {
            add(&mut entries, key..key + 1, tenant);
        }
        assert_eq!(kept(&entries), [2, 3, 4]);
    }

    #[test]
    fn ended_entries_make_room_first() {
        let mut entries = Entries::new(4);
        for key in 0..2 {
            entries.insert(key, "gone", true, |ended| *ended);
        }
        add(&mut entries, 10..14, "here");
        assert_eq!(kept(&entries), [10, 11, 12, 13]);
    }

    #[test]
    fn an_entry_may_come_again_for_another_tenant() {
        let mut entries = Entries::new(3);
        add(&mut entries, 0..3, "one");
        add(&mut entries, 0..2, "other");
        assert_eq!(kept(&entries), [0, 1, 2]);
        add(&mut entries, 3..4, "one");
        assert_eq!(kept(&entries), [0, 1, 3], "each had two, and its own was older");
    }

    #[test]
    fn removed_entries_leave_nothing_behind() {
        let mut entries = Entries::new(10);
        add(&mut entries, 0..5, "one");
        add(&mut entries, 3..8, "other");
        for key in 0..20 {
            entries.remove(&key);
        }
        let FairEntries { entries, by_age, by_tenant, sizes, .. } = entries;
        assert!(entries.is_empty() && by_age.is_empty() && by_tenant.is_empty() && sizes.is_empty());
    }
}
