//! Parses the objects of one resource from JSON, protobuf or the rows of a Table.

use std::borrow::Cow;

use bytes::Bytes;

use super::{
    cached_object::Object,
    json::{self, field_text},
    object_error::ObjectError,
    parser::{ObjectParser, Reads},
};
use crate::{fields::FieldRef, protobuf::enveloped};

impl ObjectParser {
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
