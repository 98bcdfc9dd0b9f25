//! Finds the views that an event may concern, without a look at the others.
//!
//! With one view per node, an event that tests every selector costs a thousand tests. But an
//! equality term matches only one known value, so a view is filed under one of its equality terms,
//! and found by the values of the event's objects: a thousand views of one node each cost an event
//! two look-ups. Views without an equality term (set-based and negative selectors, and those that
//! select everything) are candidates of every event. Candidates are still tested. The hazard is an
//! object that stops matching: it is found only by its values before the event.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};

use kubefan_common::planted::{self, Bug};
use kubefan_model::{
    event::WatchEvent,
    fields::FieldRef,
    object::{Object, ObjectParser},
    selection::{Equality, Selection},
};

/// The number of a view.
pub type ViewId = usize;

type Values = HashMap<Box<str>, Vec<ViewId>>;

/// The views of a hub, by equality terms.
#[derive(Default)]
pub struct SelectorIndex {
    names: Values,
    namespaces: Values,
    labels: HashMap<Box<str>, Values>,
    fields: HashMap<FieldRef, FieldValues>,
    rest: Vec<ViewId>,
}

struct FieldValues {
    /// How the field is read.
    parser: Arc<ObjectParser>,
    values: Values,
}

/// The term that a view is filed under. It is stored with the view, because the choice depends on
/// the views filed before.
pub enum IndexTerm {
    /// None.
    Rest,
    /// Its object name.
    Name(Box<str>),
    /// Its namespace.
    Namespace(Box<str>),
    /// Each of these values of a label.
    Label(Box<str>, Box<[Box<str>]>),
    /// The value of a field.
    Field(FieldRef, Box<str>),
}

impl SelectorIndex {
    /// Files a view under the equality term that shares its values with the fewest others.
    pub fn insert(&mut self, id: ViewId, selection: &Selection) -> IndexTerm {
        let narrowest = selection.equalities().min_by_key(|term| self.crowd(term));
        match narrowest {
            None => {
                self.rest.push(id);
                IndexTerm::Rest
            }
            Some(Equality::Name(name)) => {
                file(&mut self.names, name, id);
                IndexTerm::Name(name.into())
            }
            Some(Equality::Namespace(namespace)) => {
                file(&mut self.namespaces, namespace, id);
                IndexTerm::Namespace(namespace.into())
            }
            Some(Equality::Label(key, values)) => {
                let label = self.labels.entry(key.into()).or_default();
                values.iter().for_each(|value| file(label, value, id));
                IndexTerm::Label(key.into(), values.into())
            }
            Some(Equality::Field(field, value)) => {
                let new = || FieldValues { parser: selection.parser().clone(), values: Values::new() };
                file(&mut self.fields.entry(field).or_insert_with(new).values, value, id);
                IndexTerm::Field(field, value.into())
            }
        }
    }

    /// Removes a view.
    pub fn remove(&mut self, id: ViewId, term: &IndexTerm) {
        match term {
            IndexTerm::Rest => self.rest.retain(|other| *other != id),
            IndexTerm::Name(name) => unfile(&mut self.names, name, id),
            IndexTerm::Namespace(namespace) => unfile(&mut self.namespaces, namespace, id),
            IndexTerm::Label(key, values) => {
                if let Entry::Occupied(mut label) = self.labels.entry(key.clone()) {
                    values.iter().for_each(|value| unfile(label.get_mut(), value, id));
                    if label.get().is_empty() {
                        label.remove();
                    }
                }
            }
            IndexTerm::Field(field, value) => {
                if let Entry::Occupied(mut of_field) = self.fields.entry(*field) {
                    unfile(&mut of_field.get_mut().values, value, id);
                    if of_field.get().values.is_empty() {
                        of_field.remove();
                    }
                }
            }
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
        let mut add = |found: Option<&Vec<ViewId>>| candidates.extend(found.into_iter().flatten());
        if !self.names.is_empty() {
            add(self.names.get(object.key().name()));
        }
        if !self.namespaces.is_empty() {
            add(self.namespaces.get(object.key().namespace()));
        }
        if !self.labels.is_empty() {
            for (key, value) in object.labels() {
                add(self.labels.get(key).and_then(|values| values.get(value)));
            }
        }
        for (field, FieldValues { parser, values }) in &self.fields {
            add(values.get(&*parser.field(object, *field)));
        }
    }

    /// How many views are filed under a term's values.
    fn crowd(&self, term: &Equality<'_>) -> usize {
        let under = |values: Option<&Values>, value: &str| values.and_then(|v| v.get(value)).map_or(0, Vec::len);
        match *term {
            Equality::Name(name) => under(Some(&self.names), name),
            Equality::Namespace(namespace) => under(Some(&self.namespaces), namespace),
            Equality::Label(key, values) => {
                let label = self.labels.get(key);
                values.iter().map(|value| under(label, value)).sum()
            }
            Equality::Field(field, value) => under(self.fields.get(&field).map(|of_field| &of_field.values), value),
        }
    }
}

fn file(values: &mut Values, value: &str, id: ViewId) {
    match values.get_mut(value) {
        Some(ids) => ids.push(id),
        None => {
            values.insert(value.into(), vec![id]);
        }
    }
}

fn unfile(values: &mut Values, value: &str, id: ViewId) {
    if let Some(ids) = values.get_mut(value) {
        ids.retain(|other| *other != id);
        if ids.is_empty() {
            values.remove(value);
        }
    }
}

#[cfg(test)]
mod tests;
