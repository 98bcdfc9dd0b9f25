//! How a list is written: what stands around its items and between them, in each encoding.

use std::sync::Arc;

use axum::body::Bytes;
use bytes::{BufMut, BytesMut};

use crate::{cache::Store, fanout::Served};
use kubefan_model::{
    Media, ResourceVersion,
    format::Format,
    object::{Object, ObjectParser},
    projection::{PARTIAL_API_VERSION, PARTIAL_KIND},
    protobuf,
    table::{self, Tables},
};

/// What a list says of itself.
pub struct ListMeta {
    /// The version of its state.
    pub version: ResourceVersion,
    /// The token of the next page; empty at the end.
    pub continues: String,
    /// How many objects come after this page, where that is counted.
    pub remaining: Option<usize>,
}

/// How items stand in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Style {
    /// JSON without the type, which the list's own says: what an item begins with that is left out.
    Typed(String),
    /// JSON as it is.
    Whole,
    /// Messages of protobuf without their envelopes.
    Messages,
    /// Rows of a table.
    Rows,
}

/// A list's items in one format.
pub struct Items {
    format: Format,
    style: Style,
    tables: Option<Arc<Tables>>,
    list_kind: String,
    api_version: String,
}

impl Items {
    /// Of a resource; the state tells how its objects begin.
    pub fn of(served: &Served, store: &Store, format: Format) -> Self {
        let is_identity = format.projection().is_identity();
        let (kind, api_version) = match is_identity {
            true => (served.hub.resource().kind.clone(), served.gvr.api_version()),
            false => (PARTIAL_KIND.to_owned(), PARTIAL_API_VERSION.to_owned()),
        };
        let style = match served.parser.media() {
            Media::Protobuf => Style::Messages,
            Media::Table => Style::Rows,
            Media::Json if is_identity => {
                let head = format!("{{\"kind\":\"{kind}\",\"apiVersion\":\"{api_version}\",");
                let is_typed = match store.iter().next() {
                    Some(object) => object.bytes().starts_with(head.as_bytes()),
                    // Nobody can tell from nothing; custom resources are in groups of somebody's domain.
                    None => !served.gvr.group.contains('.') || served.gvr.group.ends_with(".k8s.io"),
                };
                if is_typed { Style::Typed(head) } else { Style::Whole }
            }
            Media::Json => Style::Whole,
        };
        let list_kind = match is_identity {
            true => served.list_kind.to_string(),
            false => format!("{kind}List"),
        };
        let tables = served.parser.tables().cloned();
        Self { format, style, tables, list_kind, api_version }
    }

    /// Whether what comes before the items says how long they are.
    pub fn are_measured(&self) -> bool {
        self.style == Style::Messages
    }

    /// What an item takes where they are measured.
    pub fn len(&self, object: &Object) -> usize {
        protobuf::item_len(self.message(object).len())
    }

    /// What comes before the items, which take `items_len` bytes where they are measured and may be none, and after them; in the order of
    /// fields that the apiserver has: typed lists by their declaration, all others by name.
    pub fn around(&self, meta: &ListMeta, items_len: usize, is_empty: bool) -> (Bytes, Bytes) {
        let ListMeta { version, continues, remaining } = meta;
        let Self { list_kind, api_version, .. } = self;
        if self.style == Style::Messages {
            let meta = protobuf::ListMeta {
                resource_version: version.to_string(),
                next: continues.clone(),
                remaining_item_count: remaining.map(|remaining| remaining as u64),
            };
            let mut head = BytesMut::new();
            protobuf::put_list_head(api_version, list_kind, &meta, items_len, &mut head);
            return (head.freeze(), Bytes::from_static(protobuf::TAIL));
        }
        let remaining = remaining.map_or_else(String::new, |remaining| format!(",\"remainingItemCount\":{remaining}"));
        if self.style == Style::Whole && self.format.projection().is_identity() {
            let head = format!("{{\"apiVersion\":\"{api_version}\",\"items\":[");
            let tail = format!(
                "],\"kind\":\"{list_kind}\",\"metadata\":{{\"continue\":\"{continues}\"{remaining},\
                 \"resourceVersion\":\"{version}\"}}}}\n"
            );
            return (head.into(), tail.into());
        }
        let continues = match continues.as_str() {
            "" => String::new(),
            token => format!(",\"continue\":\"{token}\""),
        };
        if let Some(tables) = &self.tables {
            let meta = format!("{version}\"{continues}{remaining}");
            let (begin, end) = if is_empty { (tables.no_rows(), "}\n") } else { ("[", "]}\n") };
            return (table_head(tables, &meta, begin).into(), Bytes::from_static(end.as_bytes()));
        }
        let head = format!(
            "{{\"kind\":\"{list_kind}\",\"apiVersion\":\"{api_version}\",\"metadata\":{{\"resourceVersion\":\"{version}\"\
             {continues}{remaining}}},\"items\":["
        );
        (head.into(), Bytes::from_static(b"]}\n"))
    }

    /// Writes an item.
    pub fn put(&self, object: &Object, is_first: bool, out: &mut BytesMut) {
        if self.style == Style::Messages {
            let message = self.message(object);
            protobuf::put_item_head(message.len(), out);
            return out.put_slice(&message);
        }
        if !is_first {
            out.put_u8(b',');
        }
        let json = object.bytes();
        match &self.style {
            Style::Typed(head) if json.starts_with(head.as_bytes()) => {
                out.put_u8(b'{');
                out.put_slice(&json[head.len()..]);
            }
            Style::Typed(_) => out.put_slice(&json),
            _ => out.put_slice(&self.format.bytes_of(&json, self.tables.as_deref()).unwrap_or(json)),
        }
    }

    /// An item's message. The object was read before it was cached, so that there is one.
    fn message(&self, object: &Object) -> Bytes {
        let bytes = object.bytes();
        let message = match self.format.projection().is_identity() {
            true => protobuf::open(&bytes).map(|opened| bytes.slice_ref(opened.message)),
            false => protobuf::partial_metadata_item(&bytes),
        };
        message.unwrap_or_default()
    }
}

/// What begins a Table, with its columns: after the quote that begins its version, and before its rows.
fn table_head(tables: &Tables, meta: &str, rows: &str) -> String {
    let definitions = tables.definitions();
    let definitions = String::from_utf8_lossy(&definitions);
    [table::HEAD, meta, table::COLUMNS, &definitions, table::ROWS, rows].concat()
}

/// A Table of one row; nothing where the cache is of another form.
pub fn table_of(parser: &ObjectParser, version: ResourceVersion, row: &[u8]) -> Bytes {
    let Some(tables) = parser.tables() else { return Bytes::new() };
    let head = table_head(tables, &format!("{version}\""), "[");
    [head.as_bytes(), row, b"]}\n"].concat().into()
}
