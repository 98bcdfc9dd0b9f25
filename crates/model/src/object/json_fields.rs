//! Places of the metadata and the selectable fields in an object's JSON: a tree of field names.

use crate::fields::FieldTable;

/// Places of the values that routing reads in the JSON.
#[derive(Debug)]
pub(super) struct JsonFields {
    pub(super) root: Node,
    /// For each selectable field, the slots that may contain it, in order of preference.
    pub(super) fields: Vec<Vec<usize>>,
    pub(super) slots: usize,
}

impl JsonFields {
    /// `at` is the path of the object within the JSON: empty, or `["object"]` in a row of a Table.
    pub(super) fn new(table: &FieldTable, at: &[&str]) -> Self {
        let mut root = Node::default();
        let mut slots = 0;
        let mut insert = |path: &[&str]| root.insert(&[at, path].concat(), &mut slots);
        for name in METADATA {
            insert(&["metadata", name]);
        }
        for name in ["kind", "apiVersion"] {
            insert(&[name]);
        }
        let mut path = |path: &Vec<String>| insert(&path.iter().map(String::as_str).collect::<Vec<_>>());
        let fields = table.fields().iter().map(|field| field.paths.iter().map(&mut path).collect()).collect();
        Self { root, fields, slots }
    }
}

/// A tree of field names. The JSON of a leaf's value is stored in its slot.
#[derive(Debug, Default)]
pub(super) struct Node {
    pub(super) children: Vec<(String, Node)>,
    pub(super) slot: Option<usize>,
}

pub(super) const NAME: usize = 0;
pub(super) const NAMESPACE: usize = 1;
pub(super) const UID: usize = 2;
pub(super) const VERSION: usize = 3;
pub(super) const LABELS: usize = 4;
const METADATA: [&str; 5] = ["name", "namespace", "uid", "resourceVersion", "labels"];
pub(super) const KIND: usize = 5;
pub(super) const API_VERSION: usize = 6;

impl Node {
    fn insert(&mut self, path: &[impl AsRef<str>], slot: &mut usize) -> usize {
        let Some((first, rest)) = path.split_first() else {
            return *self.slot.get_or_insert_with(|| {
                *slot += 1;
                *slot - 1
            });
        };
        let at = self.children.iter().position(|(name, _)| name == first.as_ref()).unwrap_or_else(|| {
            self.children.push((first.as_ref().to_owned(), Node::default()));
            self.children.len() - 1
        });
        self.children[at].1.insert(rest, slot)
    }
}
