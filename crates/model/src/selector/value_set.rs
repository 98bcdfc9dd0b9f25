//! The values of a requirement, as one piece of memory.
//!
//! A client may send thousands of short values, and each watch keeps its own. An allocation per
//! value would take several times the memory of the text.

use std::{cmp::Ordering, fmt};

/// A sorted set of texts.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct ValueSet {
    /// The texts, one after the other.
    text: Box<str>,
    /// The end of each of them in the text.
    ends: Box<[u32]>,
}

impl ValueSet {
    /// A set of sorted texts without duplicates. All together have at most `u32::MAX` bytes, as
    /// those of a selector have.
    pub(super) fn of_sorted<S: AsRef<str>>(values: impl IntoIterator<Item = S>) -> Self {
        let mut text = String::new();
        let mut ends = Vec::new();
        for value in values {
            text.push_str(value.as_ref());
            ends.push(u32::try_from(text.len()).unwrap_or(u32::MAX));
        }
        Self { text: text.into(), ends: ends.into() }
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The value at this place in the order of the values.
    pub fn get(&self, at: usize) -> Option<&str> {
        let start = at.checked_sub(1).map_or(0, |before| self.ends.get(before).copied().unwrap_or(u32::MAX));
        self.text.get(start as usize..*self.ends.get(at)? as usize)
    }

    /// The values, sorted.
    pub fn iter(&self) -> impl Iterator<Item = &str> + Clone {
        (0..self.ends.len()).filter_map(|at| self.get(at))
    }

    /// Whether the value is in the set.
    pub fn contains(&self, value: &str) -> bool {
        let mut from = 0;
        let mut to = self.ends.len();
        while from < to {
            let middle = from + (to - from) / 2;
            match self.get(middle).map(|at| at.cmp(value)) {
                Some(Ordering::Less) => from = middle + 1,
                Some(Ordering::Greater) => to = middle,
                Some(Ordering::Equal) => return true,
                None => return false,
            }
        }
        false
    }

    /// The memory behind the set, in bytes.
    pub(super) fn heap_bytes(&self) -> usize {
        self.text.len() + size_of_val(&*self.ends)
    }
}

impl Ord for ValueSet {
    fn cmp(&self, other: &Self) -> Ordering {
        self.iter().cmp(other.iter())
    }
}

impl PartialOrd for ValueSet {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for ValueSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// The values, separated by commas.
impl fmt::Display for ValueSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, value) in self.iter().enumerate() {
            write!(f, "{}{value}", if at == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_has_what_a_set_of_texts_has(
            values in prop::collection::btree_set("[a-cé]{0,3}", 0..9),
            other in prop::collection::btree_set("[a-cé]{0,3}", 0..9),
            asked in "[a-cé]{0,3}",
        ) {
            let set = |values: &BTreeSet<String>| ValueSet::of_sorted(values);
            prop_assert!(set(&values).iter().eq(values.iter()));
            prop_assert_eq!((set(&values).len(), set(&values).is_empty()), (values.len(), values.is_empty()));
            prop_assert_eq!(set(&values).contains(&asked), values.contains(&asked));
            prop_assert!(set(&values).get(values.len()).is_none());
            prop_assert_eq!(set(&values).cmp(&set(&other)), values.cmp(&other));
            prop_assert_eq!(set(&values) == set(&other), values == other);
        }
    }
}
