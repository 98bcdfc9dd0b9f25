//! The parser of a resource: the encoding of its objects, and where the values lie that routing
//! reads.

use std::sync::Arc;

use super::{json_fields::JsonFields, protobuf_fields::ProtobufFields};
use crate::{GroupVersionResource, Media, fields::FieldTable, table::Tables};

/// Knows which parts of a resource's objects to read: the metadata and the selectable fields. There
/// is one parser per cache.
#[derive(Debug)]
pub struct ObjectParser {
    pub(super) reads: Reads,
    pub(super) defaults: Vec<&'static str>,
    /// The preferred path of each selectable field. With `kind` and `api_version` it is all that is
    /// needed to write the JSON of an object of selectable attributes.
    pub(super) paths: Vec<Option<Vec<String>>>,
    pub(super) kind: String,
    pub(super) api_version: String,
}

/// The way to find fields: by name in JSON, by number in protobuf.
#[derive(Debug)]
pub(super) enum Reads {
    Json(JsonFields),
    Protobuf(ProtobufFields),
    /// By name, in the object within each row of a Table.
    Table {
        object: JsonFields,
        tables: Arc<Tables>,
    },
}

impl ObjectParser {
    /// A parser for objects in JSON, with the selectable fields of `table`.
    pub fn new(table: &FieldTable) -> Self {
        Self::reading(Reads::Json(JsonFields::new(table, &[])), table)
    }

    /// A parser for objects in protobuf. `None` if the field numbers of this resource are not
    /// known.
    pub fn protobuf(gvr: &GroupVersionResource, table: &FieldTable) -> Option<Self> {
        Some(Self::reading(Reads::Protobuf(ProtobufFields::new(gvr, table)?), table))
    }

    /// A parser for objects in the rows of Tables.
    pub fn table(tables: Tables, table: &FieldTable) -> Self {
        let object = JsonFields::new(table, &["object"]);
        let tables = Arc::new(tables);
        Self::reading(Reads::Table { object, tables }, table)
    }

    fn reading(reads: Reads, table: &FieldTable) -> Self {
        let defaults = table.fields().iter().map(|field| field.default).collect();
        let paths = table.fields().iter().map(|field| field.paths.first().cloned()).collect();
        Self { reads, defaults, paths, kind: String::new(), api_version: String::new() }
    }

    /// The encoding of the objects.
    pub fn media(&self) -> Media {
        match self.reads {
            Reads::Json(_) => Media::Json,
            Reads::Protobuf(_) => Media::Protobuf,
            Reads::Table { .. } => Media::Table,
        }
    }

    /// The columns of the Tables that the rows come from; `None` for other encodings.
    pub fn tables(&self) -> Option<&Arc<Tables>> {
        match &self.reads {
            Reads::Table { tables, .. } => Some(tables),
            Reads::Json(_) | Reads::Protobuf(_) => None,
        }
    }

    /// The `kind` and `apiVersion` of the objects.
    pub fn type_meta(&self) -> (&str, &str) {
        (&self.kind, &self.api_version)
    }

    /// Sets the `kind` and `apiVersion` of the objects.
    pub fn of(self, kind: &str, api_version: &str) -> Self {
        Self { kind: kind.to_owned(), api_version: api_version.to_owned(), ..self }
    }
}
