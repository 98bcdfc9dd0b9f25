//! The keys of the current objects by the values of labels and fields.
//!
//! A snapshot of 5,000 agents, each of its own node, would test every object 5,000 times. With the
//! keys ordered by value, a selection reads the keys of its value and no others, within the range
//! of its namespace. The sets are persistent, as the store is, so a snapshot of the store has the
//! keys of its own moment and costs no copy. The hazard is a set that no longer agrees with the
//! objects: it would hide one. So a set follows from the objects before and after each change, and
//! never from the content of an event.

use std::{
    collections::HashMap,
    iter::Peekable,
    ops::Bound::{self, Excluded, Unbounded},
    sync::Arc,
};

use imbl::OrdSet;
use kubefan_model::{ObjectKey, object::Object, object::ObjectParser, selection::Selection};
use smallvec::SmallVec;

use super::equality_term::{Column, Term, Values};

/// A selection with more values of one column scans the objects.
const VALUES_MAX: usize = 32;
/// If more than one in this many objects have a value, it is not indexed: a scan costs as much.
const COMMON_SHARE: usize = 8;
/// With fewer objects no value counts as common.
const COMMON_OBJECTS_LEAST: usize = 256;
/// The memory of one posting, in bytes: nodes of the set are about two thirds full.
const POSTING_BYTES: usize = size_of::<Posting>() * 3 / 2;

/// The keys of objects, by the columns that selections use. A clone is cheap and stays as it is.
#[derive(Clone, Default)]
pub struct Postings {
    columns: Arc<Vec<PostingColumn>>,
}

/// The keys of objects by their values in one column.
#[derive(Clone)]
pub struct PostingColumn {
    column: Column,
    /// Parses the fields.
    parser: Arc<ObjectParser>,
    /// Values without postings, sorted: many objects have them.
    common: Arc<[Arc<str>]>,
    postings: OrdSet<Posting>,
}

/// An object's value and key.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Posting {
    value: Arc<str>,
    key: ObjectKey,
}

/// Bounds of keys, in the order of the store.
pub type KeyBounds = (Bound<ObjectKey>, Bound<ObjectKey>);

impl Postings {
    /// Whether a column is indexed.
    pub fn has(&self, column: &Column) -> bool {
        self.columns.iter().any(|known| known.column == *column)
    }

    /// Whether no column is indexed.
    pub fn is_empty(&self) -> bool {
        self.columns.is_empty()
    }

    /// The columns with their memory, in bytes.
    pub fn sizes(&self) -> impl Iterator<Item = (&Column, usize)> {
        self.columns.iter().map(|column| (&column.column, column.postings.len() * POSTING_BYTES))
    }

    /// Adds a column.
    pub fn insert(&mut self, column: PostingColumn) {
        let columns = Arc::make_mut(&mut self.columns);
        columns.retain(|known| known.column != column.column);
        columns.push(column);
    }

    /// Removes a column.
    pub fn remove(&mut self, column: &Column) {
        if self.has(column) {
            Arc::make_mut(&mut self.columns).retain(|known| known.column != *column);
        }
    }

    /// Follows one object from one state to another.
    pub fn follow(&mut self, before: Option<&Arc<Object>>, after: Option<&Arc<Object>>) {
        let is_same = match (before, after) {
            (Some(before), Some(after)) => Arc::ptr_eq(before, after) || before.has_same_attributes(after),
            (before, after) => before.is_none() && after.is_none(),
        };
        if !is_same && !self.is_empty() {
            let columns = Arc::make_mut(&mut self.columns);
            for column in columns {
                column.follow(before, after);
            }
        }
    }

    /// The keys within `bounds` of the objects that a selection may match, in order; `None` if they
    /// are not indexed.
    pub fn candidates<'a>(
        &'a self,
        selection: &Selection,
        bounds: &KeyBounds,
    ) -> Option<impl Iterator<Item = &'a ObjectKey> + use<'a>> {
        if self.is_empty() {
            return None;
        }
        let terms = Term::all(selection);
        let runs = |(indexed, values)| Self::runs(indexed, values, bounds);
        let usable = terms.iter().filter_map(|term| Some((self.usable(term)?, term.values)));
        let usable: SmallVec<[_; 2]> = usable.collect();
        let is_short =
            |keys_max| usable.iter().find(move |term| runs(**term).into_iter().flatten().nth(keys_max).is_none());
        // The smallest set is found without counting the others.
        let short = if usable.len() > 1 { [16, 256, 4096].into_iter().find_map(is_short) } else { None };
        let mut runs = runs(*short.or(usable.first())?);
        // An object has one value, so no key is in two runs.
        Some(std::iter::from_fn(move || {
            let heads = runs.iter_mut().enumerate().filter_map(|(at, run)| Some((*run.peek()?, at)));
            let (_, at) = heads.min()?;
            runs[at].next()
        }))
    }

    /// The column of a term, if the keys of all its values are known.
    fn usable(&self, term: &Term<'_>) -> Option<&PostingColumn> {
        let indexed = self.columns.iter().find(|known| known.column == term.column)?;
        let is_common = || term.values.iter().any(|value| indexed.is_common(value));
        (term.values.iter().nth(VALUES_MAX).is_none() && !is_common()).then_some(indexed)
    }

    /// Whether a column is indexed and cannot be used for this term.
    pub fn is_useless(&self, term: &Term<'_>) -> bool {
        self.has(&term.column) && self.usable(term).is_none()
    }

    /// The keys of each value within bounds, in order.
    fn runs<'a>(
        indexed: &'a PostingColumn,
        values: Values<'_>,
        bounds: &KeyBounds,
    ) -> Vec<Peekable<impl Iterator<Item = &'a ObjectKey> + use<'a>>> {
        let (first, end) = bounds;
        let of_value = |value: &str| {
            let value = Arc::<str>::from(value);
            let at = |key: &ObjectKey| Posting { value: value.clone(), key: key.clone() };
            let from = match first {
                Unbounded => Bound::Included(at(&ObjectKey::new("", ""))),
                first => first.as_ref().map(at),
            };
            let to = match end {
                // The smallest text after the value.
                Unbounded => Excluded(Posting { value: format!("{value}\0").into(), key: ObjectKey::new("", "") }),
                end => end.as_ref().map(at),
            };
            let is_empty = match (&from, &to) {
                (Bound::Included(from), Bound::Included(to)) => from > to,
                (Bound::Included(from) | Excluded(from), Bound::Included(to) | Excluded(to)) => from >= to,
                _ => false,
            };
            let range = (!is_empty).then(|| indexed.postings.range::<_, Posting>((from, to)));
            range.into_iter().flatten().map(|posting| &posting.key).peekable()
        };
        values.iter().map(of_value).collect()
    }
}

impl PostingColumn {
    /// The label or field.
    pub fn column(&self) -> &Column {
        &self.column
    }

    fn is_common(&self, value: &str) -> bool {
        self.common.binary_search_by(|common| (**common).cmp(value)).is_ok()
    }

    /// Follows one object from one state to another.
    pub fn follow(&mut self, before: Option<&Arc<Object>>, after: Option<&Arc<Object>>) {
        let value = |object: Option<&'_ Arc<Object>>| {
            let object = object?;
            let value = self.column.value(object, &self.parser)?;
            (!self.is_common(&value)).then(|| Posting { value: self.shared(&value), key: object.key().clone() })
        };
        let was = value(before);
        let is = value(after);
        if was != is {
            was.map(|was| self.postings.remove(&was));
            is.map(|is| self.postings.insert(is));
        }
    }

    /// The text of a value, shared with the other objects that have it.
    fn shared(&self, value: &str) -> Arc<str> {
        let first = Posting { value: value.into(), key: ObjectKey::new("", "") };
        match self.postings.get_next(&first).filter(|next| *next.value == *value) {
            Some(next) => next.value.clone(),
            None => first.value,
        }
    }
}

/// Makes the postings of a column from a snapshot, in parts, so that no other task waits for it.
pub struct PostingBuilder {
    column: PostingColumn,
    objects: usize,
    keys: HashMap<Arc<str>, Vec<ObjectKey>>,
    /// Values with their keys, the last one first, once all objects were read.
    sorted: Vec<(Arc<str>, Vec<ObjectKey>)>,
}

impl PostingBuilder {
    /// Returns a builder without objects.
    pub fn new(column: Column, parser: Arc<ObjectParser>) -> Self {
        let column = PostingColumn { column, parser, common: Arc::default(), postings: OrdSet::new() };
        Self { column, objects: 0, keys: HashMap::new(), sorted: Vec::new() }
    }

    /// Reads an object. Each object is read once, in the order of the keys.
    pub fn read(&mut self, object: &Object) {
        self.objects += 1;
        let Some(value) = self.column.column.value(object, &self.column.parser) else { return };
        match self.keys.get_mut(&*value) {
            Some(keys) => keys.push(object.key().clone()),
            None => drop(self.keys.insert(value.as_ref().into(), vec![object.key().clone()])),
        }
    }

    /// Ends the build after all objects were read. Returns whether the postings are within
    /// `bytes_max`.
    pub fn end(&mut self, bytes_max: usize) -> bool {
        let is_common =
            |keys: &Vec<ObjectKey>| self.objects >= COMMON_OBJECTS_LEAST && keys.len() > self.objects / COMMON_SHARE;
        let (common, mut rare): (Vec<_>, Vec<_>) = self.keys.drain().partition(|(_, keys)| is_common(keys));
        let mut common: Vec<_> = common.into_iter().map(|(value, _)| value).collect();
        common.sort_unstable();
        self.column.common = common.into();
        rare.sort_unstable_by(|(one, _), (other, _)| other.cmp(one));
        self.sorted = rare;
        self.sorted.iter().map(|(_, keys)| keys.len() * POSTING_BYTES).sum::<usize>() <= bytes_max
    }

    /// Files about this many postings. Returns whether there are more.
    pub fn file(&mut self, postings_max: usize) -> bool {
        let mut filed = 0;
        while filed < postings_max
            && let Some((value, keys)) = self.sorted.pop()
        {
            filed += keys.len();
            for key in keys {
                self.column.postings.insert(Posting { value: value.clone(), key });
            }
        }
        !self.sorted.is_empty()
    }

    /// The column.
    pub fn finish(self) -> PostingColumn {
        self.column
    }
}
