//! Parses the objects of one resource from JSON, protobuf or the rows of a Table.

use std::{borrow::Cow, sync::Arc};

use bytes::Bytes;

use super::{
    Object, ObjectError,
    json::{self, JsonFields, field_text},
    protobuf::ProtobufFields,
};
use crate::{
    GroupVersionResource, Media,
    fields::{FieldRef, FieldTable},
    protobuf::enveloped,
    table::Tables,
};

/// Knows which parts of a resource's objects to read: the metadata and the selectable fields. There
/// is one parser per cache.
#[derive(Debug)]
pub struct ObjectParser {
    pub(super) reads: Reads,
    defaults: Vec<&'static str>,
    /// The preferred path of each selectable field. With `kind` and `api_version` it is all that is
    /// needed to write the JSON of an object of selectable attributes.
    pub(super) paths: Vec<Option<Vec<String>>>,
    pub(super) kind: String,
    pub(super) api_version: String,
}

/// How fields are found: by name in JSON, by number in protobuf.
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
        let (object, tables) = (JsonFields::new(table, &["object"]), Arc::new(tables));
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

    /// This parser for objects with this `kind` and `apiVersion`.
    pub fn of(self, kind: &str, api_version: &str) -> Self {
        Self { kind: kind.to_owned(), api_version: api_version.to_owned(), ..self }
    }

    /// Parses the bytes of a watch event or a GET. They are copied, so the object does not keep the
    /// network buffer alive.
    pub fn parse(&self, bytes: &[u8]) -> Result<Object, ObjectError> {
        match &self.reads {
            Reads::Json(fields) => Ok(json::parse(fields, Bytes::copy_from_slice(bytes))?.0),
            Reads::Protobuf(fields) => fields.parse(Bytes::copy_from_slice(bytes)),
            Reads::Table { object, tables } => {
                let row = tables.stored_row(bytes)?.into_boxed_slice();
                Ok(json::parse(object, Bytes::from(row))?.0)
            }
        }
    }

    /// Parses an item of a list. In JSON, `kind` and `api_version` are added in front if the item
    /// has neither; in protobuf the item gets its envelope. A row needs no change.
    pub fn from_list_item(&self, item: &[u8], kind: &str, api_version: &str) -> Result<Object, ObjectError> {
        let fields = match &self.reads {
            Reads::Json(fields) => fields,
            Reads::Protobuf(fields) => return fields.parse(enveloped(api_version, kind, item)),
            Reads::Table { .. } => return self.parse(item),
        };
        let (object, has_type) = json::parse(fields, Bytes::copy_from_slice(item))?;
        // Their position does not matter: keys of a custom resource are sorted, and some sort
        // before these two.
        if has_type {
            return Ok(object);
        }
        let body = item.trim_ascii_start();
        let body = body.strip_prefix(b"{").unwrap_or(body).trim_ascii_start();
        let comma = if body.starts_with(b"}") { "" } else { "," };
        let head = format!("{{\"kind\":\"{kind}\",\"apiVersion\":\"{api_version}\"{comma}");
        let canonical = [head.as_bytes(), body].concat().into_boxed_slice();
        Ok(json::parse(fields, Bytes::from(canonical))?.0)
    }

    /// The value that a field selector compares with.
    pub fn field<'a>(&self, object: &'a Object, field: FieldRef) -> Cow<'a, str> {
        match field {
            FieldRef::Name => Cow::Borrowed(object.key.name()),
            FieldRef::Namespace => Cow::Borrowed(object.key.namespace()),
            FieldRef::Index(index) => {
                let raw = object.texts().at(1 + 2 * object.label_count as usize + index).unwrap_or_default();
                match &self.reads {
                    _ if raw.is_empty() => Cow::Borrowed(self.defaults.get(index).copied().unwrap_or_default()),
                    Reads::Json(_) | Reads::Table { .. } => field_text(std::str::from_utf8(raw).unwrap_or_default()),
                    Reads::Protobuf(fields) => fields.text(index, raw),
                }
            }
        }
    }
}
