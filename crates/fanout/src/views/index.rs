//! Finds the views that an event may concern, without a look at the others.
//!
//! With one view per node, an event that tests every selector costs a thousand tests. But an
//! equality term matches only one known value, so a view is filed under one of its equality terms,
//! and found by the values of the event's objects: a thousand views of one node each cost an event
//! two look-ups. Views without an equality term (set-based and negative selectors, and those that
//! select everything) are candidates of every event. Candidates are still tested. The hazard is an
//! object that stops matching: it is found only by its values before the event.
//!
//! A term may have thousands of values. A view comes and goes inside the critical section, so it is
//! filed under a term with few values, and found by every event if it has none. The index has no
//! texts of values, only [`ValueId`]s: views and the numbers of their values.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

use kubefan_common::planted::{self, Bug};
use kubefan_model::{
    event::WatchEvent,
    fields::FieldRef,
    object::{Object, ObjectParser},
    selection::{Equality, Selection},
};

use super::value_table::{ValueId, ValueTable};

/// A view is not filed under a term with more values. To test such a term takes less than to file
/// and to remove it.
const VALUES_FILED_MAX: usize = 100;

/// The number of a view.
pub type ViewId = usize;

/// The views of a hub, by equality terms.
#[derive(Default)]
pub struct SelectorIndex {
    names: ValueTable,
    namespaces: ValueTable,
    labels: HashMap<Box<str>, ValueTable>,
    fields: HashMap<FieldRef, FieldValues>,
    rest: Vec<ViewId>,
    filed: Filed,
}

#[derive(Default)]
struct FieldValues {
    /// Parses the field; set with the first view.
    parser: Option<Arc<ObjectParser>>,
    values: ValueTable,
}

/// The views that are filed under a term, by number, with the term's place among the equality terms
/// of the selection. It is stored, because the choice depends on the views filed before.
#[derive(Default)]
struct Filed {
    views: Vec<Option<(Selection, usize)>>,
    hashes: RandomState,
}

impl Filed {
    fn term(&self, view: ViewId) -> Option<Equality<'_>> {
        let (selection, nth) = self.views.get(view)?.as_ref()?;
        selection.equalities().nth(*nth)
    }

    /// The value at a place. Every place that is filed has one.
    fn value(&self, place: ValueId) -> &str {
        match self.term(place.view()) {
            Some(Equality::Label(_, values)) => values.get(place.nth()).unwrap_or_default(),
            Some(Equality::Name(value) | Equality::Namespace(value) | Equality::Field(_, value)) => value,
            None => "",
        }
    }

    fn hash(&self, value: &str) -> u64 {
        self.hashes.hash_one(value)
    }

    fn find<'a>(&self, values: &'a ValueTable, value: &str) -> &'a [ValueId] {
        values.find(self.hash(value), |place| self.value(place) == value)
    }
}

impl SelectorIndex {
    /// Files a view under the equality term that shares its values with the fewest others. Returns
    /// the place of this term among the equality terms of the selection; `None` if it has none with
    /// few enough values.
    pub fn insert(&mut self, id: ViewId, selection: &Selection) -> Option<usize> {
        let terms = selection.equalities().enumerate().filter(|(_, term)| can_be_filed(term));
        let Some((nth, term)) = terms.min_by_key(|(_, term)| self.crowd(term)) else {
            self.rest.push(id);
            return None;
        };
        let Self { names, namespaces, labels, fields, filed, .. } = self;
        if filed.views.len() <= id {
            filed.views.resize_with(id + 1, || None);
        }
        filed.views[id] = Some((selection.clone(), nth));
        let table = match term {
            Equality::Name(_) => names,
            Equality::Namespace(_) => namespaces,
            Equality::Label(key, _) => labels.entry(key.into()).or_default(),
            Equality::Field(field, _) => {
                let of_field = fields.entry(field).or_default();
                of_field.parser.get_or_insert_with(|| selection.parser().clone());
                &mut of_field.values
            }
        };
        for (nth, value) in values_of(&term).enumerate() {
            let is_same = |place| filed.value(place) == value;
            table.insert(ValueId::new(id, nth), filed.hash(value), is_same, |place| filed.hash(filed.value(place)));
        }
        Some(nth)
    }

    /// Removes a view.
    pub fn remove(&mut self, id: ViewId) {
        let Self { names, namespaces, labels, fields, rest, filed } = self;
        let Some(term) = filed.term(id) else {
            rest.retain(|other| *other != id);
            return;
        };
        let remove_from = |table: &mut ValueTable| {
            for value in values_of(&term) {
                table.remove(id, filed.hash(value), |place| filed.value(place) == value);
            }
            table.shrink(|place| filed.hash(filed.value(place)));
            table.is_empty()
        };
        match term {
            Equality::Name(_) => drop(remove_from(names)),
            Equality::Namespace(_) => drop(remove_from(namespaces)),
            Equality::Label(key, _) => {
                if labels.get_mut(key).is_some_and(remove_from) {
                    labels.remove(key);
                }
            }
            Equality::Field(field, _) => {
                if fields.get_mut(&field).map(|of_field| &mut of_field.values).is_some_and(remove_from) {
                    fields.remove(&field);
                }
            }
        }
        filed.views[id] = None;
        let used = filed.views.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        filed.views.truncate(used);
        if filed.views.capacity() > 4 * used.max(4) {
            filed.views.shrink_to(2 * used);
        }
    }

    /// Sets `candidates` to the views that `event` may concern, each once, in the order of their
    /// numbers.
    pub fn candidates(&self, event: &WatchEvent, candidates: &mut Vec<ViewId>) {
        candidates.clear();
        candidates.extend_from_slice(&self.rest);
        self.collect(&event.object(), candidates);
        // A view that the object leaves is found by the object before the event.
        if let Some(previous) = event.previous()
            && !planted::is(Bug::IndexIgnoresPrevious)
        {
            self.collect(&previous, candidates);
        }
        candidates.sort_unstable();
        candidates.dedup();
    }

    fn collect(&self, object: &Object, candidates: &mut Vec<ViewId>) {
        let mut add = |values: &ValueTable, value: &str| {
            candidates.extend(self.filed.find(values, value).iter().map(|place| place.view()));
        };
        if !self.names.is_empty() {
            add(&self.names, object.key().name());
        }
        if !self.namespaces.is_empty() {
            add(&self.namespaces, object.key().namespace());
        }
        if !self.labels.is_empty() {
            for (key, value) in object.labels() {
                if let Some(values) = self.labels.get(key) {
                    add(values, value);
                }
            }
        }
        for (field, FieldValues { parser, values }) in &self.fields {
            if let Some(parser) = parser {
                add(values, &parser.field(object, *field));
            }
        }
    }

    /// Memory of the index, in bytes, beyond the memory of the views themselves.
    pub fn bytes(&self) -> usize {
        let labels = self.labels.values().map(ValueTable::bytes).sum::<usize>();
        let fields = self.fields.values().map(|of_field| of_field.values.bytes()).sum::<usize>();
        let views = self.filed.views.capacity() * size_of::<Option<(Selection, usize)>>();
        views + self.names.bytes() + self.namespaces.bytes() + labels + fields
    }

    /// Returns the number of views that are filed under a term's values.
    fn crowd(&self, term: &Equality<'_>) -> usize {
        let table = match term {
            Equality::Name(_) => Some(&self.names),
            Equality::Namespace(_) => Some(&self.namespaces),
            Equality::Label(key, _) => self.labels.get(*key),
            Equality::Field(field, _) => self.fields.get(field).map(|of_field| &of_field.values),
        };
        table.map_or(0, |table| values_of(term).map(|value| self.filed.find(table, value).len()).sum())
    }
}

/// The number of values under which a view of this selection is filed, at most.
pub fn filed_values_max(selection: &Selection) -> usize {
    selection.equalities().filter(can_be_filed).map(|term| values_of(&term).count()).max().unwrap_or(0)
}

fn can_be_filed(term: &Equality<'_>) -> bool {
    !matches!(term, Equality::Label(_, values) if values.len() > VALUES_FILED_MAX)
}

/// The values of a term, each once.
fn values_of<'a>(term: &Equality<'a>) -> impl Iterator<Item = &'a str> + use<'a> {
    let (one, any) = match *term {
        Equality::Name(value) | Equality::Namespace(value) | Equality::Field(_, value) => (Some(value), None),
        Equality::Label(_, values) => (None, Some(values)),
    };
    one.into_iter().chain(any.into_iter().flat_map(|values| values.iter()))
}

#[cfg(test)]
mod tests;
