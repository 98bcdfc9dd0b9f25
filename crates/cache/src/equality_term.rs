//! The equality term of a selection that is used to look up state and history.
//!
//! Only the objects with a known value of a label or field can meet an equality term. An index by
//! these values finds the candidates of a selection without testing other objects. Candidates are
//! still tested against the whole selection.

use std::{borrow::Cow, sync::Arc};

use smallvec::SmallVec;

use kubefan_model::{
    fields::FieldRef,
    object::{Object, ObjectParser},
    selection::{Equality, Selection},
    selector::ValueSet,
};

/// Property that objects are indexed by.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Column {
    /// The name.
    Name,
    /// The namespace.
    Namespace,
    /// The label with this key. An object without it has no value.
    Label(Arc<str>),
    /// A selectable field. Every object has a value, which may be empty.
    Field(FieldRef),
}

/// The values of a column that a selection allows.
#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    /// Only this one.
    One(&'a str),
    /// Any of these values, each once.
    Any(&'a ValueSet),
}

/// An equality term of a selection.
#[derive(Debug, Clone)]
pub struct Term<'a> {
    /// The label or field.
    pub column: Column,
    /// Values that the selection allows.
    pub values: Values<'a>,
}

impl<'a> Term<'a> {
    /// Returns the equality terms of a selection. The term that is likely to have the most
    /// different values comes first.
    pub fn all(selection: &'a Selection) -> SmallVec<[Self; 2]> {
        let mut terms: SmallVec<[_; 2]> = selection.equalities().collect();
        terms.sort_by_key(|term| match term {
            Equality::Name(_) => 0,
            Equality::Field(..) => 1,
            Equality::Label(..) => 2,
            Equality::Namespace(_) => 3,
        });
        let term = |equality| {
            let (column, values) = match equality {
                Equality::Name(name) => (Column::Name, Values::One(name)),
                Equality::Namespace(namespace) => (Column::Namespace, Values::One(namespace)),
                Equality::Label(key, values) => (Column::Label(key.into()), Values::Any(values)),
                Equality::Field(field, value) => (Column::Field(field), Values::One(value)),
            };
            Self { column, values }
        };
        terms.into_iter().map(term).collect()
    }
}

impl Column {
    /// The value of an object.
    pub fn value<'a>(&self, object: &'a Object, parser: &ObjectParser) -> Option<Cow<'a, str>> {
        match self {
            Self::Name => Some(object.key().name().into()),
            Self::Namespace => Some(object.key().namespace().into()),
            Self::Label(key) => object.label(key).map(Cow::from),
            Self::Field(field) => Some(parser.field(object, *field)),
        }
    }
}

impl<'a> Values<'a> {
    /// The values, each once.
    pub fn iter(self) -> impl Iterator<Item = &'a str> {
        let (one, any) = match self {
            Self::One(value) => (Some(value), None),
            Self::Any(values) => (None, Some(values)),
        };
        one.into_iter().chain(any.into_iter().flat_map(ValueSet::iter))
    }
}
