//! Views by value, in a few bytes per value.
//!
//! Clients may choose a million values, so a table has neither their texts nor an allocation for
//! each. The texts are in the selections of the views: callers compare them.

use hashbrown::{HashTable, hash_table::Entry};
use slab::Slab;

/// A value of a view: the view's number, and the value's number among those of its term.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ValueId {
    /// In two halves, so that no bytes are lost to alignment.
    view: [u16; 2],
    nth: u16,
}

impl ValueId {
    /// The place of a value. A process has less than 2³² views, and a selector of at most
    /// [`SELECTOR_BYTES_MAX`](kubefan_model::selector::SELECTOR_BYTES_MAX) has less than 2¹⁶
    /// values.
    pub fn new(view: usize, nth: usize) -> Self {
        let view = u32::try_from(view).unwrap_or(u32::MAX);
        Self { view: [(view >> 16) as u16, view as u16], nth: nth.try_into().unwrap_or(u16::MAX) }
    }

    /// The number of the view.
    pub fn view(self) -> usize {
        let [high, low] = self.view.map(usize::from);
        high << 16 | low
    }

    /// The number of the value.
    pub fn nth(self) -> usize {
        self.nth.into()
    }
}

/// The views that have a value.
enum Having {
    /// One view has it.
    One(ValueId),
    /// Several have it: the number of their list. None of the lists is empty. They are sorted by
    /// view, so one of thousands of views of a value leaves after a binary search.
    Many(u32),
}

/// The memory of one value of one view, in bytes: the table is at least seven sixteenths full.
pub const PLACE_BYTES: usize = (size_of::<Having>() + 1) * 16 / 7;

/// The views by value.
#[derive(Default)]
pub struct ValueTable {
    values: HashTable<Having>,
    many: Slab<Vec<ValueId>>,
}

impl ValueTable {
    /// Whether no view is filed.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Memory of the table, in bytes.
    pub fn bytes(&self) -> usize {
        let lists = self.many.iter().map(|(_, places)| places.capacity() * size_of::<ValueId>()).sum::<usize>();
        self.values.allocation_size() + self.many.capacity() * size_of::<Vec<ValueId>>() + lists
    }

    /// The places of a value with this hash, which `is_value` knows by any of its places.
    pub fn find(&self, hash: u64, is_value: impl Fn(ValueId) -> bool) -> &[ValueId] {
        match self.values.find(hash, |having| is_value(any_place(&self.many, having))) {
            None => &[],
            Some(Having::One(place)) => std::slice::from_ref(place),
            Some(Having::Many(list)) => &self.many[*list as usize],
        }
    }

    /// Files a place of a value with this hash.
    pub fn insert(
        &mut self,
        place: ValueId,
        hash: u64,
        is_value: impl Fn(ValueId) -> bool,
        hash_of: impl Fn(ValueId) -> u64,
    ) {
        let Self { values, many } = self;
        let is_value = |having: &Having| is_value(any_place(many, having));
        match values.entry(hash, is_value, |having| hash_of(any_place(many, having))) {
            Entry::Vacant(vacant) => drop(vacant.insert(Having::One(place))),
            Entry::Occupied(mut occupied) => match occupied.get_mut() {
                Having::Many(list) => {
                    let places = &mut many[*list as usize];
                    places.insert(places.partition_point(|other| *other < place), place);
                }
                having @ Having::One(_) => {
                    let Having::One(first) = *having else { return };
                    *having = Having::Many(
                        many.insert(vec![first.min(place), first.max(place)]).try_into().unwrap_or(u32::MAX),
                    );
                }
            },
        }
    }

    /// Removes a view from a value with this hash.
    pub fn remove(&mut self, view: usize, hash: u64, is_value: impl Fn(ValueId) -> bool) {
        let Self { values, many } = self;
        let Ok(mut occupied) = values.find_entry(hash, |having| is_value(any_place(many, having))) else { return };
        match occupied.get_mut() {
            Having::One(_) => drop(occupied.remove()),
            Having::Many(list) => {
                let places = &mut many[*list as usize];
                if let Ok(at) = places.binary_search_by_key(&view, |place| place.view()) {
                    places.remove(at);
                }
                if let [last] = **places {
                    many.remove(*list as usize);
                    *occupied.get_mut() = Having::One(last);
                }
            }
        }
    }

    /// Gives back memory after many views have left.
    pub fn shrink(&mut self, hash_of: impl Fn(ValueId) -> u64) {
        let Self { values, many } = self;
        if values.capacity() > 4 * values.len().max(4) {
            values.shrink_to(2 * values.len(), |having| hash_of(any_place(many, having)));
        }
        if many.is_empty() {
            many.shrink_to_fit();
        }
    }
}

/// Any of the places that have this value.
fn any_place(many: &Slab<Vec<ValueId>>, having: &Having) -> ValueId {
    match having {
        Having::One(place) => *place,
        Having::Many(list) => many[*list as usize][0],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_of_a_view_takes_a_few_bytes() {
        let place = ValueId::new(0xab_cdef, 0x1234);
        assert_eq!((place.view(), place.nth()), (0xab_cdef, 0x1234));
        assert_eq!((size_of::<Having>(), PLACE_BYTES), (8, 20));
    }
}
