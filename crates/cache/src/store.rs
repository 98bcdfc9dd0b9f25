//! The current objects of one resource and scope.
//!
//! A persistent map: a clone is O(1) and does not change while the writer continues, so a reader's
//! snapshot is consistent and blocks nothing. A snapshot pins only the objects that were replaced
//! since.
//!
//! The published store also has the keys of its objects by the labels and fields that selections
//! use ([`Postings`]): a selection with an equality term reads its candidates and no others.

use std::{
    ops::Bound::{Excluded, Included, Unbounded},
    sync::Arc,
};

use imbl::OrdMap;
use kubefan_model::{
    ObjectKey, ResourceVersion,
    event::{EventType, WatchEvent},
    object::Object,
    selection::{Equality, Selection},
};

use super::{
    postings::{KeyBounds, Postings},
    sliced_scan::Scan,
};

/// With more changes at once, the postings are dropped, and made again outside of the hub's lock.
const FOLLOWED_EVENTS_MAX: usize = 1000;

/// Objects by key, in the order of the apiserver's lists.
#[derive(Clone, Default)]
pub struct Store {
    /// Not a set of objects ordered by their keys: inner nodes would retain a key, and so its
    /// object, for longer than the map does.
    objects: OrdMap<ObjectKey, Arc<Object>>,
    json_bytes: usize,
    cost_bytes: usize,
    /// Postings of a published store; a writer's store has none.
    postings: Postings,
}

impl Store {
    /// Whether both are the same state, by address. Equal objects may be in states that are not.
    pub fn is_same(&self, other: &Self) -> bool {
        self.objects.ptr_eq(&other.objects)
    }

    /// The number of objects.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Whether this state has the result of a change: an upstream watch that starts again may send
    /// changes of the version reached once more.
    pub fn has_applied(&self, kind: EventType, object: &Object) -> bool {
        let cached = self.get(object.key().as_str());
        match kind {
            EventType::Deleted => cached.is_none(),
            EventType::Added | EventType::Modified => cached.is_some_and(|cached| cached.version() == object.version()),
        }
    }

    /// The JSON bytes of all objects together.
    pub fn json_bytes(&self) -> usize {
        self.json_bytes
    }

    /// The memory of the objects, in bytes, packed or not; the map itself is not counted.
    pub fn cost_bytes(&self) -> usize {
        self.cost_bytes
    }

    /// The object of a key.
    pub fn get(&self, key: &str) -> Option<&Arc<Object>> {
        self.objects.get(key)
    }

    /// Inserts an object. Returns the object that it replaces.
    pub fn insert(&mut self, object: Arc<Object>) -> Option<Arc<Object>> {
        self.json_bytes += object.json_len();
        self.cost_bytes += object.cost_bytes();
        let previous = self.objects.insert(object.key().clone(), object);
        self.without(previous)
    }

    /// Removes an object, and returns it.
    pub fn remove(&mut self, key: &str) -> Option<Arc<Object>> {
        let previous = self.objects.remove(key);
        self.without(previous)
    }

    fn without(&mut self, previous: Option<Arc<Object>>) -> Option<Arc<Object>> {
        let previous = previous?;
        self.json_bytes -= previous.json_len();
        self.cost_bytes -= previous.cost_bytes();
        Some(previous)
    }

    /// The objects after `last`, from the start if `None`, in key order.
    pub fn after<'a>(&'a self, last: Option<&'a ObjectKey>) -> impl Iterator<Item = &'a Arc<Object>> + 'a {
        let from = last.map_or(Unbounded, |key| Excluded(key.as_str()));
        self.objects.range::<(_, _), str>((from, Unbounded)).map(|(_, object)| object)
    }

    /// All objects, in key order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Object>> {
        self.objects.values()
    }

    /// Key and version of every object, in key order.
    pub fn into_versions(self) -> impl Iterator<Item = (ObjectKey, ResourceVersion)> + Send + use<> {
        self.objects.into_iter().map(|(key, object)| (key, object.version()))
    }

    /// The selected objects after `last` (from the start if `None`), in key order. For a selection
    /// of one namespace or one object only the keys of that range are read, and only the keys with
    /// the value of an equality term if the store has postings of it.
    pub fn select<'a>(
        &'a self,
        selection: &'a Selection,
        last: Option<&'a ObjectKey>,
    ) -> impl Iterator<Item = &'a Arc<Object>> + 'a {
        self.candidates(selection, bounds(selection, last)).filter(|object| selection.matches(object))
    }

    /// As [`Self::select`], but ends after at most `tests_max` tests, and at least one object.
    pub fn scan<'a>(
        &'a self,
        selection: &'a Selection,
        last: Option<&ObjectKey>,
        tests_max: usize,
    ) -> Scan<'a, impl Iterator<Item = &'a Arc<Object>> + use<'a>> {
        Scan::new(self.candidates(selection, bounds(selection, last)), selection, tests_max)
    }

    fn candidates<'a>(
        &'a self,
        selection: &Selection,
        bounds: KeyBounds,
    ) -> impl Iterator<Item = &'a Arc<Object>> + use<'a> {
        let keys = self.postings.candidates(selection, &bounds);
        let scanned = keys.is_none().then(|| self.objects.range::<(_, _), ObjectKey>(bounds));
        let found = keys.into_iter().flatten().filter_map(|key| self.objects.get(key.as_str()));
        let scanned = scanned.into_iter().flatten().map(|(_, object)| object);
        found.chain(scanned)
    }

    /// The keys by label and field.
    pub fn postings(&self) -> &Postings {
        &self.postings
    }

    /// The keys by label and field, to add or remove columns of this very state.
    pub fn postings_mut(&mut self) -> &mut Postings {
        &mut self.postings
    }

    /// Takes over the postings of the state before, which differs by these events. Returns whether
    /// it could: too many changes are not followed.
    pub fn follow(&mut self, before: Self, events: &[Arc<WatchEvent>]) -> bool {
        self.postings = before.postings;
        if self.postings.is_empty() {
            return true;
        }
        if events.len() > FOLLOWED_EVENTS_MAX {
            self.postings = Postings::default();
            return false;
        }
        for event in events {
            let object = event.object();
            let key = object.key().as_str();
            self.postings.follow(before.objects.get(key), self.objects.get(key));
        }
        true
    }
}

/// The bounds of the keys that a selection can match after `last`.
fn bounds(selection: &Selection, last: Option<&ObjectKey>) -> KeyBounds {
    let mut namespace = None;
    let mut name = None;
    for term in selection.equalities() {
        match term {
            Equality::Namespace(of) => namespace = namespace.or(Some(of)),
            Equality::Name(of) => name = name.or(Some(of)),
            Equality::Label(..) | Equality::Field(..) => {}
        }
    }
    // In keys, `/` ends a namespace, and `0` is the byte after it.
    let text = |text: String| ObjectKey::new("", &text);
    let (first, end) = match (namespace.filter(|namespace| !namespace.is_empty()), name) {
        (None, _) => (None, None),
        (Some(namespace), None) => (Some(text(format!("{namespace}/"))), Some(text(format!("{namespace}0")))),
        (Some(namespace), Some(name)) => {
            (Some(text(format!("{namespace}/{name}"))), Some(text(format!("{namespace}/{name}\0"))))
        }
    };
    let end = end.map_or(Unbounded, |end| match last {
        // Nothing is left.
        Some(last) if *last >= end => Included(last.clone()),
        _ => Excluded(end),
    });
    let from = match (last, first) {
        (Some(last), Some(first)) if *last < first => Included(first),
        (Some(last), _) => Excluded(last.clone()),
        (None, first) => first.map_or(Unbounded, Included),
    };
    (from, end)
}

#[cfg(test)]
mod tests {
    use kubefan_model::{
        GroupVersionResource,
        fields::FieldTable,
        object::ObjectParser,
        selector::{FieldSelector, LabelSelector},
    };

    use super::*;

    #[test]
    fn a_selection_of_one_namespace_or_object_reads_only_its_keys() {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let table = FieldTable::new(&gvr, true, &[]);
        let parser = Arc::new(ObjectParser::new(&table));
        let mut store = Store::default();
        for (namespace, name) in [("a", "x"), ("a", "y"), ("a-b", "x"), ("b", "x"), ("aa", "x")] {
            let json = format!(r#"{{"metadata":{{"namespace":"{namespace}","name":"{name}","resourceVersion":"1"}}}}"#);
            store.insert(Arc::new(parser.parse(json.as_bytes()).unwrap()));
        }
        let select = |namespace, name, last: Option<ObjectKey>| {
            let labels = LabelSelector::default();
            let fields = FieldSelector::default();
            let selection = Selection::bind(namespace, name, labels, &fields, &table, parser.clone(), &gvr).unwrap();
            store.select(&selection, last.as_ref()).map(|object| object.key().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(select("", "", None), ["a-b/x", "a/x", "a/y", "aa/x", "b/x"]);
        assert_eq!(select("a", "", None), ["a/x", "a/y"]);
        assert_eq!(select("a", "y", None), ["a/y"]);
        assert_eq!(select("", "x", None).len(), 4);
        assert_eq!(select("a", "", Some(ObjectKey::new("a", "x"))), ["a/y"]);
        assert!(select("a", "", Some(ObjectKey::new("a", "y"))).is_empty());
    }
}
