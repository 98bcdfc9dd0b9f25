//! Selections: which objects of a resource a subscriber asked for, by namespace, name, label
//! selector, field selector and shard selector.

use std::{
    any::Any,
    fmt,
    hash::{BuildHasher, Hash, Hasher, RandomState},
    sync::{Arc, LazyLock, OnceLock, Weak},
};

use kubefan_common::planted::{self, Bug};

use super::{
    GroupVersionResource, Scope,
    fields::{FieldRef, FieldTable, UnsupportedField},
    object::{LabelLookup, Object, ObjectParser},
    selector::{FieldOperator, FieldSelector, FieldTerm, LabelSelector, Operator, Shards, ValueSet},
};

/// A selection of objects. Equal selections compare equal, so that their subscribers share one
/// view. A clone shares the memory.
#[derive(Clone)]
pub struct Selection(Arc<Bound>);

/// A selection that exists only while another owner of it does.
#[derive(Clone)]
pub struct WeakSelection(Weak<Bound>);

struct Bound {
    spec: SelectionSpec,
    /// Hash of the spec. A selector may have thousands of values, and is compared under a lock.
    hash: u64,
    parser: Arc<ObjectParser>,
    kept: OnceLock<Box<dyn Any + Send + Sync>>,
}

/// Random, so that no client can choose selections with equal hashes.
static HASHES: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The criteria of a selection, which are its identity.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct SelectionSpec {
    /// Empty for every namespace.
    pub namespace: String,
    /// Empty for every name.
    pub name: String,
    /// By label.
    pub labels: LabelSelector,
    /// Field selector, with resolved field names.
    fields: Vec<(FieldRef, FieldOperator, Box<str>)>,
    /// `None` for every hash.
    shards: Option<Shards>,
}

impl SelectionSpec {
    /// The selected shards; `None` for all.
    pub fn shards(&self) -> Option<&Shards> {
        self.shards.as_ref()
    }
}

/// A condition that only objects with certain known values meet. Selections are indexed by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Equality<'a> {
    /// The name.
    Name(&'a str),
    /// The namespace.
    Namespace(&'a str),
    /// The label with this key has one of these values.
    Label(&'a str, &'a ValueSet),
    /// The field has this value.
    Field(FieldRef, &'a str),
}

impl Selection {
    /// A selection of the objects that meet all criteria.
    ///
    /// # Errors
    /// If `fields` names a field that the resource cannot be selected by.
    pub fn bind(
        namespace: &str,
        name: &str,
        labels: LabelSelector,
        fields: &FieldSelector,
        table: &FieldTable,
        parser: Arc<ObjectParser>,
        resource: &GroupVersionResource,
    ) -> Result<Self, UnsupportedField> {
        let terms =
            fields.terms().iter().map(|term| Ok((table.resolve(&term.path, resource)?, term.op, term.value.clone())));
        let fields = terms.collect::<Result<Vec<_>, _>>()?;
        let spec = SelectionSpec { namespace: namespace.into(), name: name.into(), labels, fields, shards: None };
        Ok(Self::of(spec, parser))
    }

    fn of(spec: SelectionSpec, parser: Arc<ObjectParser>) -> Self {
        let hash = HASHES.hash_one(&spec);
        let kept = OnceLock::new();
        Self(Arc::new(Bound { spec, hash, parser, kept }))
    }

    /// Limits this selection to the objects in these shards.
    #[must_use]
    pub fn within(self, shards: Shards) -> Self {
        let spec = SelectionSpec { shards: Some(shards), ..self.spec().clone() };
        Self::of(spec, self.parser().clone())
    }

    /// The selection in all shards.
    #[must_use]
    pub fn in_all_shards(&self) -> Self {
        match self.spec().shards {
            None => self.clone(),
            Some(_) => Self::of(SelectionSpec { shards: None, ..self.spec().clone() }, self.parser().clone()),
        }
    }

    /// A weak reference to the selection, which its owner can drop.
    pub fn downgrade(&self) -> WeakSelection {
        WeakSelection(Arc::downgrade(&self.0))
    }

    /// Keeps a value until the last clone is dropped, such as a count of the memory. Only the first
    /// value is kept.
    pub fn keep(&self, value: impl Any + Send + Sync) {
        let _ = self.0.kept.set(Box::new(value));
    }

    /// A hash of the criteria, for this process.
    pub fn spec_hash(&self) -> u64 {
        self.0.hash
    }

    /// The price of testing one object: the number of its terms and one.
    pub fn tests(&self) -> usize {
        let SelectionSpec { labels, fields, shards, .. } = &self.0.spec;
        1 + labels.requirements().len() + fields.len() + usize::from(shards.is_some())
    }

    /// The memory of the selection, in bytes, without the parser.
    pub fn bytes(&self) -> usize {
        let SelectionSpec { namespace, name, labels, fields, shards } = &self.0.spec;
        let behind = fields.iter().map(|(.., value)| value.len()).sum::<usize>() + size_of_val(&**fields);
        let shards = shards.as_ref().map_or(0, Shards::heap_bytes);
        size_of::<Bound>() + namespace.len() + name.len() + labels.heap_bytes() + behind + shards
    }

    /// The criteria. Two selections of one resource with equal specs select the same objects.
    pub fn spec(&self) -> &SelectionSpec {
        &self.0.spec
    }

    /// Whether it selects every object in a scope.
    pub fn is_everything_in(&self, scope: &Scope) -> bool {
        let SelectionSpec { namespace, name, labels, fields, shards } = &self.0.spec;
        let has_namespace = !namespace.is_empty() && namespace != scope.namespace();
        !has_namespace && name.is_empty() && labels.is_everything() && fields.is_empty() && shards.is_none()
    }

    /// Returns the name and the fields as a field selector. `table` is the one that they were bound
    /// with.
    pub fn field_selector(&self, table: &FieldTable) -> FieldSelector {
        let SelectionSpec { name, fields, .. } = &self.0.spec;
        let named = (!name.is_empty()).then_some((FieldRef::Name, FieldOperator::Equals, &**name));
        let fields = fields.iter().map(|(field, operator, value)| (*field, *operator, &**value));
        FieldSelector::new(named.into_iter().chain(fields).map(|(field, op, value)| FieldTerm {
            path: table.name(field).into(),
            op,
            value: value.into(),
        }))
    }

    /// Whether the object with this namespace and uid is in the selected shards.
    pub fn shards_contain(&self, namespace: &str, uid: &str) -> bool {
        let shards = self.0.spec.shards.as_ref().filter(|_| !planted::is(Bug::ShardIsIgnored));
        shards.is_none_or(|shards| shards.contains(namespace, uid))
    }

    /// Whether an object can become or cease to be a member while it exists. Name, namespace and
    /// uid alone cannot cause that, because they never change.
    pub fn membership_can_change(&self) -> bool {
        !self.0.spec.labels.is_everything()
            || self.0.spec.fields.iter().any(|(field, ..)| matches!(field, FieldRef::Index(_)))
    }

    /// The parser that reads the fields.
    pub fn parser(&self) -> &Arc<ObjectParser> {
        &self.0.parser
    }

    /// The criteria that are equalities. All of them must hold.
    pub fn equalities(&self) -> impl Iterator<Item = Equality<'_>> {
        let SelectionSpec { namespace, name, labels, fields, .. } = &self.0.spec;
        let path = [Equality::Name(name), Equality::Namespace(namespace)];
        let path = path.into_iter().filter(|term| !matches!(term, Equality::Name("") | Equality::Namespace("")));
        let fields = fields.iter().filter(|(_, operator, _)| *operator == FieldOperator::Equals);
        let fields = fields.map(|(field, _, value)| match field {
            FieldRef::Name => Equality::Name(value),
            FieldRef::Namespace => Equality::Namespace(value),
            FieldRef::Index(_) => Equality::Field(*field, value),
        });
        let labels = labels.requirements().iter().filter(|requirement| requirement.operator() == Operator::In);
        path.chain(fields).chain(labels.map(|requirement| Equality::Label(requirement.key(), requirement.values())))
    }

    /// Whether `object` is selected.
    pub fn matches(&self, object: &Object) -> bool {
        // One requirement needs no look-up of others.
        match self.0.spec.labels.requirements() {
            [] | [_] => self.matches_by(object, |key| object.label(key)),
            _ => self.matches_decoded(&LabelLookup::new(object)),
        }
    }

    /// Whether the object is selected, as [`Self::matches`], for an object that several selections
    /// test.
    pub fn matches_decoded(&self, labels: &LabelLookup<'_>) -> bool {
        self.matches_by(labels.object(), |key| labels.get(key))
    }

    fn matches_by<'a>(&self, object: &'a Object, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        let SelectionSpec { namespace, name, labels, fields, .. } = &self.0.spec;
        (namespace.is_empty() || namespace == object.key().namespace())
            && (name.is_empty() || name == object.key().name())
            && fields.iter().all(|(field, operator, value)| {
                (*self.0.parser.field(object, *field) == **value) == (*operator == FieldOperator::Equals)
            })
            && (labels.is_everything() || labels.matches(label))
            && self.shards_contain(object.key().namespace(), object.uid())
    }
}

impl WeakSelection {
    /// The selection; `None` if all its owners have dropped it.
    pub fn upgrade(&self) -> Option<Selection> {
        self.0.upgrade().map(Selection)
    }

    /// Whether all its owners have dropped it.
    pub fn is_dropped(&self) -> bool {
        self.0.strong_count() == 0
    }
}

impl PartialEq for Selection {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || (self.0.hash == other.0.hash && self.0.spec == other.0.spec)
    }
}

impl Eq for Selection {}

impl Hash for Selection {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}

impl fmt::Debug for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.spec.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selector::ShardSelector;

    #[test]
    fn the_selectors_of_a_selection_select_the_same() {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let table = FieldTable::new(&gvr, true, &[]);
        let parser = Arc::new(ObjectParser::new(&table));
        let bind = |name: &str, labels: LabelSelector, fields: &FieldSelector| {
            Selection::bind("", name, labels, fields, &table, parser.clone(), &gvr).unwrap()
        };
        for labels in ["", "app", "!app", "app in (db,web),n>5", "app notin (x),tier!=y"] {
            for fields in
                ["", "spec.nodeName=n1", r"metadata.name!=a\,b,spec.host=x\=y,status.phase!=", "metadata.namespace=x"]
            {
                let labels = LabelSelector::parse(labels).unwrap();
                let selection = bind("", labels, &FieldSelector::parse(fields).unwrap());
                let labels = LabelSelector::parse(&selection.spec().labels.to_string()).unwrap();
                let fields = FieldSelector::parse(&selection.field_selector(&table).to_string()).unwrap();
                assert_eq!(bind("", labels, &fields), selection);
            }
        }
        let named = bind("p", LabelSelector::default(), &FieldSelector::default());
        assert_eq!(named.field_selector(&table).to_string(), "metadata.name=p");
        assert!(!named.is_everything_in(&Scope::Cluster));
    }

    #[test]
    fn a_selection_within_shards_selects_by_the_hash_of_the_uid() {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let table = FieldTable::new(&gvr, true, &[]);
        let parser = Arc::new(ObjectParser::new(&table));
        let all = FieldSelector::default();
        let whole = Selection::bind("", "", LabelSelector::default(), &all, &table, parser.clone(), &gvr).unwrap();
        // The hash of "a" is 0xaf63dc4c8601ec8c.
        let [low, high] = [("0x0000000000000000", "0xaf63dc4c8601ec8c"), ("0xaf63dc4c8601ec8c", "0xaf63dc4c8601ec8d")]
            .map(|(start, end)| {
                let text = format!("shardRange(object.metadata.uid, '{start}', '{end}')");
                whole.clone().within(ShardSelector::parse(&text).unwrap().shards().unwrap())
            });
        let object = parser.parse(br#"{"metadata":{"name":"p","uid":"a","resourceVersion":"1"}}"#).unwrap();
        assert!(high.matches(&object) && !low.matches(&object) && whole.matches(&object));
        assert!(high != whole && high != low && !high.is_everything_in(&Scope::Cluster));
        assert!(!high.membership_can_change(), "an object with another uid is another object");
        let reduced = Arc::new(object).selectable_attributes(&parser);
        assert!(high.matches(&reduced) && !low.matches(&reduced));
    }

    #[test]
    fn labels_that_were_decoded_once_match_as_those_of_the_object() {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let table = FieldTable::new(&gvr, true, &[]);
        let parser = Arc::new(ObjectParser::new(&table));
        for labels in ["", r#""app":"web""#, r#""app":"web","tier":"x""#, r#""tier":"y","app":"db","n":"7""#] {
            let json = format!(r#"{{"metadata":{{"name":"p","resourceVersion":"1","labels":{{{labels}}}}}}}"#);
            let object = parser.parse(json.as_bytes()).unwrap();
            let lookup = LabelLookup::new(&object);
            for selector in
                ["", "app", "!tier", "app=web,tier=x", "app in (web,db),tier!=x", "n>5,app", "tier notin (x,z)"]
            {
                let selector = LabelSelector::parse(selector).unwrap();
                let expected = selector.matches(|key| object.label(key));
                let none = FieldSelector::default();
                let selection = Selection::bind("", "", selector, &none, &table, parser.clone(), &gvr).unwrap();
                assert_eq!(selection.matches(&object), expected, "{labels} {:?}", selection.spec());
                assert_eq!(selection.matches_decoded(&lookup), expected, "{labels} {:?}", selection.spec());
            }
        }
    }
}
