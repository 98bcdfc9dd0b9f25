//! Compares the cached objects with upstream's: two sequences of (key, version), both in key order.
//!
//! A cache that has lost an event looks like any other; only a comparison with upstream finds it.
//! Keys arrive in pages and are compared as they arrive, so memory is needed only for the
//! differences. A limited number of them is retained.

use std::{cmp::Ordering, fmt, iter::Peekable};

use kubefan_model::{ObjectKey, ResourceVersion};

/// One key with different versions on the two sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The object.
    pub key: ObjectKey,
    /// Version of the object in the cache; `None` if it is not cached.
    pub cached: Option<ResourceVersion>,
    /// Version of the object upstream; `None` if it does not exist there.
    pub upstream: Option<ResourceVersion>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, cached, upstream } = self;
        match (cached, upstream) {
            (Some(cached), Some(upstream)) => write!(f, "{key} (cached at {cached}, upstream at {upstream})"),
            (None, Some(upstream)) => write!(f, "{key} (not cached, upstream at {upstream})"),
            (Some(cached), None) => write!(f, "{key} (cached at {cached}, not upstream)"),
            (None, None) => write!(f, "{key}"),
        }
    }
}

/// The differences found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Differences {
    /// Number of differences.
    pub count: usize,
    /// The first of them.
    pub first: Vec<Difference>,
}

impl Differences {
    /// Drops named differences that turned out to be none. If all named ones did, so did the
    /// others.
    pub fn retain(&mut self, is_one: impl FnMut(&Difference) -> bool) {
        let named = self.first.len();
        self.first.retain(is_one);
        self.count = if self.first.is_empty() { 0 } else { self.count - (named - self.first.len()) };
    }
}

impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, difference) in self.first.iter().enumerate() {
            let comma = if i > 0 { ", " } else { "" };
            write!(f, "{comma}{difference}")?;
        }
        match self.count - self.first.len() {
            0 => Ok(()),
            more => write!(f, ", and {more} more"),
        }
    }
}

/// Upstream's keys were out of order, so the comparison has no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("upstream lists {key} after {after}, which is not the order of keys")]
pub struct OutOfOrder {
    key: ObjectKey,
    after: ObjectKey,
}

/// A comparison in progress.
pub struct Comparison<I: Iterator<Item = (ObjectKey, ResourceVersion)>> {
    cached: Peekable<I>,
    last: Option<ObjectKey>,
    differences: Differences,
    retained_max: usize,
}

impl<I: Iterator<Item = (ObjectKey, ResourceVersion)>> Comparison<I> {
    /// A comparison with the cached versions, in key order. The first `retained_max` differences
    /// are named.
    pub fn new(cached: I, retained_max: usize) -> Self {
        Self { cached: cached.peekable(), last: None, differences: Differences::default(), retained_max }
    }

    /// Takes the key and version of upstream's next object.
    pub fn compare(&mut self, key: ObjectKey, upstream: ResourceVersion) -> Result<(), OutOfOrder> {
        if let Some(after) = self.last.take_if(|last| *last >= key) {
            return Err(OutOfOrder { key, after });
        }
        while let Some((cached_key, cached)) = self.cached.next_if(|(cached_key, _)| *cached_key <= key) {
            match cached_key.cmp(&key) {
                Ordering::Equal if cached == upstream => {
                    self.last = Some(key);
                    return Ok(());
                }
                Ordering::Equal => {
                    self.note(&key, Some(cached), Some(upstream));
                    self.last = Some(key);
                    return Ok(());
                }
                _ => self.note(&cached_key, Some(cached), None),
            }
        }
        self.note(&key, None, Some(upstream));
        self.last = Some(key);
        Ok(())
    }

    /// Upstream has no more objects.
    pub fn finish(mut self) -> Differences {
        while let Some((key, cached)) = self.cached.next() {
            self.note(&key, Some(cached), None);
        }
        self.differences
    }

    fn note(&mut self, key: &ObjectKey, cached: Option<ResourceVersion>, upstream: Option<ResourceVersion>) {
        self.differences.count += 1;
        if self.differences.first.len() < self.retained_max {
            self.differences.first.push(Difference { key: key.clone(), cached, upstream });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    type State = BTreeMap<ObjectKey, ResourceVersion>;

    fn states() -> impl Strategy<Value = State> {
        let object = ("[ab]-?[ab]?", "[xyz]", 1..4_u64);
        let state = prop::collection::vec(object, 0..12);
        state.prop_map(|objects| {
            let object = |(namespace, name, version): (String, String, u64)| {
                (ObjectKey::new(&namespace, &name), ResourceVersion::new(version).unwrap())
            };
            objects.into_iter().map(object).collect()
        })
    }

    proptest! {
        #[test]
        fn every_key_that_differs_is_found_and_no_other(cached in states(), upstream in states(), retained_max in 0..20_usize) {
            let keys: BTreeSet<_> = cached.keys().chain(upstream.keys()).cloned().collect();
            let differences = keys.into_iter().filter_map(|key| {
                let cached = cached.get(&key).copied();
                let upstream = upstream.get(&key).copied();
                (cached != upstream).then_some(Difference { key, cached, upstream })
            });
            let expected: Vec<_> = differences.collect();
            let mut comparison = Comparison::new(cached.clone().into_iter(), retained_max);
            for (key, version) in upstream.clone() {
                comparison.compare(key, version).unwrap();
            }
            let found = comparison.finish();
            prop_assert_eq!(found.count, expected.len());
            prop_assert_eq!(&found.first[..], &expected[..expected.len().min(retained_max)]);
        }
    }

    #[test]
    fn keys_out_of_order_are_an_error() {
        let mut comparison = Comparison::new(std::iter::empty(), 1);
        let version = ResourceVersion::new(1).unwrap();
        comparison.compare(ObjectKey::new("", "b"), version).unwrap();
        let error = comparison.compare(ObjectKey::new("", "a"), version).unwrap_err();
        assert_eq!(error.to_string(), "upstream lists a after b, which is not the order of keys");
    }

    #[test]
    fn the_first_differences_are_named_and_the_others_counted() {
        let version = |number| ResourceVersion::new(number);
        let difference =
            |name: &str, cached, upstream| Difference { key: ObjectKey::new("ns", name), cached, upstream };
        let first = vec![difference("a", version(1), version(2)), difference("b", None, version(2))];
        assert_eq!(
            Differences { count: 5, first }.to_string(),
            "ns/a (cached at 1, upstream at 2), ns/b (not cached, upstream at 2), and 3 more"
        );
    }
}
