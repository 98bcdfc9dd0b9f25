//! From an event to the views that could see it, without a look at the others.
//!
//! An object meets an equality term only with one known value, so a view is filed under one of its equality terms and found by what
//! an event's objects hold: a thousand watchers of one node each cost an event two look-ups. Views without such a term (set-based
//! and negative selectors, and those that select everything) are candidates of every event. Candidates are still tested.

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

/// Where views are filed.
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

/// Under which term a view is filed; kept with the view, because the choice depends on what was filed before.
pub enum IndexTerm {
    /// Under none.
    Rest,
    /// Under its name.
    Name(Box<str>),
    /// Under its namespace.
    Namespace(Box<str>),
    /// Under each of these values of a label.
    Label(Box<str>, Box<[Box<str>]>),
    /// Under the value of a field.
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

    /// Takes a view out.
    pub fn remove(&mut self, id: ViewId, place: &IndexTerm) {
        match place {
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

    /// Puts the views that could see `event` into `candidates`, each once, in the order of their numbers.
    pub fn candidates(&self, event: &WatchEvent, candidates: &mut Vec<ViewId>) {
        candidates.clear();
        candidates.extend_from_slice(&self.rest);
        self.collect(&event.object(), candidates);
        // What an object was decides who sees it leave.
        if let Some(previous) = event.previous()
            && !planted::is(Bug::IndexForgetsWhatWas)
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
mod tests {
    use proptest::prelude::*;

    use super::*;
    use kubefan_model::{
        GroupVersionResource, ResourceVersion,
        event::EventType,
        fields::FieldTable,
        selector::{FieldSelector, LabelSelector},
    };

    struct Pods {
        gvr: GroupVersionResource,
        table: FieldTable,
        parser: Arc<ObjectParser>,
    }

    impl Pods {
        fn new() -> Self {
            let gvr = GroupVersionResource::new("", "v1", "pods");
            let table = FieldTable::new(&gvr, true, &[]);
            let parser = Arc::new(ObjectParser::new(&table));
            Self { gvr, table, parser }
        }

        fn select(&self, namespace: &str, labels: &str, fields: &str) -> Selection {
            let (labels, fields) = (LabelSelector::parse(labels).unwrap(), FieldSelector::parse(fields).unwrap());
            Selection::bind(namespace, "", labels, &fields, &self.table, self.parser.clone(), &self.gvr).unwrap()
        }

        fn pod(&self, namespace: &str, labels: &str, node: &str) -> Arc<Object> {
            let json = format!(
                r#"{{"metadata":{{"namespace":"{namespace}","name":"p","resourceVersion":"1","labels":{{{labels}}}}},"spec":{{"nodeName":"{node}"}}}}"#
            );
            Arc::new(self.parser.parse(json.as_bytes()).unwrap())
        }
    }

    fn changed(before: Arc<Object>, after: Arc<Object>) -> WatchEvent {
        WatchEvent::new(EventType::Modified, ResourceVersion::new(2).unwrap(), after, Some(before))
    }

    #[test]
    fn only_views_that_could_see_an_event_are_looked_at() {
        let pods = Pods::new();
        let mut index = SelectorIndex::default();
        let selections: Vec<_> = (0..100).map(|node| pods.select("", "", &format!("spec.nodeName=n{node}"))).collect();
        let places: Vec<_> = selections.iter().enumerate().map(|(id, selection)| index.insert(id, selection)).collect();
        let negative = index.insert(100, &pods.select("", "app!=web", ""));
        let mut candidates = Vec::new();
        index.candidates(&changed(pods.pod("a", "", "n1"), pods.pod("a", "", "n7")), &mut candidates);
        assert_eq!(candidates, [1, 7, 100]);
        index.remove(7, &places[7]);
        index.remove(100, &negative);
        index.candidates(&changed(pods.pod("a", "", "n1"), pods.pod("a", "", "n7")), &mut candidates);
        assert_eq!(candidates, [1]);
    }

    #[test]
    fn a_view_is_filed_where_few_others_are() {
        let pods = Pods::new();
        let mut index = SelectorIndex::default();
        for id in 0..10 {
            index.insert(id, &pods.select("", "", "status.phase=Running"));
        }
        let place = index.insert(10, &pods.select("", "", "spec.nodeName=n1,status.phase=Running"));
        assert!(matches!(place, IndexTerm::Field(_, value) if &*value == "n1"));
    }

    proptest! {
        #[test]
        fn no_view_that_sees_an_event_is_missed(
            selectors in prop::collection::vec((0usize..3, 0usize..8, 0usize..5), 1..20),
            (from, to) in ((0usize..2, 0usize..4, 0usize..3), (0usize..2, 0usize..4, 0usize..3)),
            drop in prop::collection::vec(any::<bool>(), 20),
        ) {
            let pods = Pods::new();
            let namespaces = ["", "a", "b"];
            let labels = ["", "app=web", "app in (web,db)", "app!=web", "tier", "app=web,tier=x", "!app", "app notin (db)"];
            let fields = ["", "spec.nodeName=n1", "spec.nodeName!=n1", "spec.nodeName=", "metadata.name=p"];
            let sets = ["", r#""app":"web""#, r#""app":"db","tier":"x""#, r#""app":"web","tier":"x""#];
            let nodes = ["", "n1", "n2"];
            let pod = |(namespace, set, node): (usize, usize, usize)| pods.pod(["a", "b"][namespace], sets[set], nodes[node]);
            let mut index = SelectorIndex::default();
            let selections: Vec<_> =
                selectors.iter().map(|&(n, l, f)| pods.select(namespaces[n], labels[l], fields[f])).collect();
            let places: Vec<_> = selections.iter().enumerate().map(|(id, s)| index.insert(id, s)).collect();
            for (id, place) in places.iter().enumerate().filter(|(id, _)| drop[*id]) {
                index.remove(id, place);
            }
            let event = changed(pod(from), pod(to));
            let mut candidates = Vec::new();
            index.candidates(&event, &mut candidates);
            for (id, selection) in selections.iter().enumerate() {
                let sees = event.transition(selection).is_some();
                prop_assert!(!drop[id] || !candidates.contains(&id), "a removed view is found");
                prop_assert!(drop[id] || !sees || candidates.contains(&id), "view {id} is missed");
            }
        }
    }
}
