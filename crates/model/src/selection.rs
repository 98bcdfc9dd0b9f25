//! Selections: which objects of a resource a subscriber asked for, by namespace, name, label
//! selector and field selector.

use std::sync::Arc;

use super::{
    GroupVersionResource,
    fields::{FieldRef, FieldTable, UnsupportedField},
    object::{Object, ObjectParser},
    selector::{FieldOperator, FieldSelector, LabelSelector, Operator},
};

/// A selection of objects. Equal selections compare equal, so that their subscribers share one
/// view.
#[derive(Clone)]
pub struct Selection {
    spec: SelectionSpec,
    parser: Arc<ObjectParser>,
}

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
}

/// A condition that only objects with certain known values meet. Selections are indexed by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Equality<'a> {
    /// The name.
    Name(&'a str),
    /// The namespace.
    Namespace(&'a str),
    /// The label with this key has one of these values.
    Label(&'a str, &'a [Box<str>]),
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
        Ok(Self { spec: SelectionSpec { namespace: namespace.into(), name: name.into(), labels, fields }, parser })
    }

    /// The criteria. Two selections of one resource with equal specs select the same objects.
    pub fn spec(&self) -> &SelectionSpec {
        &self.spec
    }

    /// Whether an object can become or cease to be a member while it exists. Name and namespace
    /// alone cannot cause that, because they never change.
    pub fn membership_can_change(&self) -> bool {
        !self.spec.labels.is_everything()
            || self.spec.fields.iter().any(|(field, ..)| matches!(field, FieldRef::Index(_)))
    }

    /// The parser that reads the fields.
    pub fn parser(&self) -> &Arc<ObjectParser> {
        &self.parser
    }

    /// The criteria that are equalities. All of them must hold.
    pub fn equalities(&self) -> impl Iterator<Item = Equality<'_>> {
        let SelectionSpec { namespace, name, labels, fields } = &self.spec;
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
        let SelectionSpec { namespace, name, labels, fields } = &self.spec;
        (namespace.is_empty() || namespace == object.key().namespace())
            && (name.is_empty() || name == object.key().name())
            && fields.iter().all(|(field, operator, value)| {
                (*self.parser.field(object, *field) == **value) == (*operator == FieldOperator::Equals)
            })
            && (labels.is_everything() || labels.matches(|key| object.label(key)))
    }
}
