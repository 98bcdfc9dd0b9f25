//! Lists and single objects: the bytes around the items of a list and between them, in each
//! encoding.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};

use kubefan_model::{
    GroupVersionResource, Media, ResourceVersion,
    format::Format,
    object::{Object, ObjectParser},
    projection::{PARTIAL_API_VERSION, PARTIAL_KIND},
    protobuf,
    table::{self, Tables},
};

/// The metadata of a list.
pub struct ListMeta {
    /// The version of the snapshot that the list is read from.
    pub version: ResourceVersion,
    /// The continue token of the next page; empty for the last page.
    pub continues: String,
    /// The number of objects after this page; `None` if it is not counted.
    pub remaining: Option<usize>,
    /// The shard selector of the request, in the apiserver's form; empty if it had none.
    pub shard_selector: String,
}

/// The resource that a list is of.
pub struct ListedResource<'a> {
    /// Full name of the resource.
    pub gvr: &'a GroupVersionResource,
    /// The kind of its objects.
    pub kind: &'a str,
    /// The kind of its lists, which a CRD may choose.
    pub list_kind: &'a str,
    /// The parser of its objects. Its encoding is that of the cache.
    pub parser: &'a ObjectParser,
    /// Any object of the snapshot; it shows how the bytes of all of them start.
    pub sample: Option<&'a Object>,
}

/// Form of the items in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Style {
    /// JSON without `kind` and `apiVersion`, as in lists of built-in types: the prefix that is cut
    /// off each item.
    Typed(String),
    /// JSON, unchanged.
    Whole,
    /// Protobuf messages without the Kubernetes envelope.
    Messages,
    /// Rows of a Table.
    Rows,
}

/// Writes the items of a list in one format.
pub struct ListEncoder {
    format: Format,
    style: Style,
    tables: Option<Arc<Tables>>,
    list_kind: String,
    api_version: String,
}

impl ListEncoder {
    /// An encoder of lists of `resource`.
    pub fn new(resource: &ListedResource<'_>, format: Format) -> Self {
        let ListedResource { gvr, kind, list_kind, parser, sample } = *resource;
        let is_partial = format.projection().is_partial();
        let (kind, api_version) = if is_partial {
            (PARTIAL_KIND.to_owned(), PARTIAL_API_VERSION.to_owned())
        } else {
            (kind.to_owned(), gvr.api_version())
        };
        let style = match parser.media() {
            Media::Protobuf => Style::Messages,
            Media::Table => Style::Rows,
            Media::Json if !is_partial => {
                let head = format!("{{\"kind\":\"{kind}\",\"apiVersion\":\"{api_version}\",");
                let is_typed = match sample {
                    Some(object) => object.bytes().starts_with(head.as_bytes()),
                    // With no object to look at, guess: only custom resources have groups outside
                    // k8s.io.
                    None => !gvr.group.contains('.') || gvr.group.ends_with(".k8s.io"),
                };
                if is_typed { Style::Typed(head) } else { Style::Whole }
            }
            Media::Json => Style::Whole,
        };
        let list_kind = if is_partial { format!("{kind}List") } else { list_kind.to_owned() };
        let tables = parser.tables().cloned();
        Self { format, style, tables, list_kind, api_version }
    }

    /// Whether its items have the same form as those of another encoder of the same format.
    pub fn has_form_of(&self, other: &Self) -> bool {
        self.style == other.style && self.api_version == other.api_version
    }

    /// The bytes between two items.
    pub fn separator(&self) -> &'static [u8] {
        if self.style == Style::Messages { b"" } else { b"," }
    }

    /// Whether the head of the list needs the total length of the items.
    pub fn needs_items_len(&self) -> bool {
        self.style == Style::Messages
    }

    /// Whether an empty list has another head and tail.
    pub fn depends_on_emptiness(&self) -> bool {
        self.tables.is_some()
    }

    /// The bytes that an item takes, if [`Self::needs_items_len`].
    pub fn item_len(&self, object: &Object) -> usize {
        protobuf::item_len(self.message(object).len())
    }

    /// The head and the tail of the list. `items_len` is the total length of the items if
    /// [`Self::needs_items_len`]; `is_empty` means that there are no items, if
    /// [`Self::depends_on_emptiness`].
    ///
    /// Fields are in the apiserver's order: declaration order for typed lists, by name for all
    /// others.
    pub fn head_and_tail(&self, meta: &ListMeta, items_len: usize, is_empty: bool) -> (Bytes, Bytes) {
        let ListMeta { version, continues, remaining, shard_selector } = meta;
        let version = version.whole();
        let Self { list_kind, api_version, .. } = self;
        if self.style == Style::Messages {
            let meta = protobuf::ListMeta {
                resource_version: version.to_string(),
                next: continues.clone(),
                remaining_item_count: remaining.map(|remaining| remaining as u64),
                shard_selector: shard_selector.clone(),
            };
            let mut head = BytesMut::new();
            protobuf::put_list_head(api_version, list_kind, &meta, items_len, &mut head);
            return (head.freeze(), Bytes::from_static(protobuf::TAIL));
        }
        let remaining = remaining.map_or_else(String::new, |remaining| format!(",\"remainingItemCount\":{remaining}"));
        // It needs no escaping.
        let shard_info = match shard_selector.as_str() {
            "" => String::new(),
            selector => format!(",\"shardInfo\":{{\"selector\":\"{selector}\"}}"),
        };
        if self.style == Style::Whole && !self.format.projection().is_partial() {
            let head = format!("{{\"apiVersion\":\"{api_version}\",\"items\":[");
            let tail = format!(
                "],\"kind\":\"{list_kind}\",\"metadata\":{{\"continue\":\"{continues}\"{remaining},\
                 \"resourceVersion\":\"{version}\"{shard_info}}}}}\n"
            );
            return (head.into(), tail.into());
        }
        let continues = match continues.as_str() {
            "" => String::new(),
            token => format!(",\"continue\":\"{token}\""),
        };
        if let Some(tables) = &self.tables {
            let meta = format!("{version}\"{continues}{remaining}{shard_info}");
            let (start, end) = if is_empty { (tables.no_rows(), "}\n") } else { ("[", "]}\n") };
            return (table_head(tables, &meta, start).into(), Bytes::from_static(end.as_bytes()));
        }
        let head = format!(
            "{{\"kind\":\"{list_kind}\",\"apiVersion\":\"{api_version}\",\"metadata\":{{\"resourceVersion\":\"{version}\"\
             {continues}{remaining}{shard_info}}},\"items\":["
        );
        (head.into(), Bytes::from_static(b"]}\n"))
    }

    /// Writes an item, with a comma before it if it is not the first.
    pub fn put(&self, object: &Object, is_first: bool, out: &mut BytesMut) {
        if self.style == Style::Messages {
            let message = self.message(object);
            protobuf::put_item_head(message.len(), out);
            return out.put_slice(&message);
        }
        if !is_first {
            out.put_u8(b',');
        }
        let bytes = object.bytes();
        let json = self.format.bytes_of(&bytes, self.tables.as_deref()).unwrap_or(bytes);
        match &self.style {
            Style::Typed(head) if json.starts_with(head.as_bytes()) => {
                out.put_u8(b'{');
                out.put_slice(&json[head.len()..]);
            }
            _ => out.put_slice(&json),
        }
    }

    /// An item's protobuf message. It is always there, because the object was parsed before it was
    /// cached.
    fn message(&self, object: &Object) -> Bytes {
        let bytes = object.bytes();
        let message = if self.format.projection().is_identity() {
            protobuf::open(&bytes).map(|opened| bytes.slice_ref(opened.message))
        } else {
            protobuf::projected_item(&bytes, self.format.projection()).map(Bytes::from)
        };
        message.unwrap_or_default()
    }
}

/// The start of a Table with its columns. `meta` follows the quote that opens the resource version;
/// `rows` starts the rows.
fn table_head(tables: &Tables, meta: &str, rows: &str) -> String {
    let definitions = tables.definitions();
    let definitions = String::from_utf8_lossy(&definitions);
    [table::HEAD, meta, table::COLUMNS, &definitions, table::ROWS, rows].concat()
}

/// The body of a response with one object, in `format`.
pub fn single_object(object: &Object, parser: &ObjectParser, format: &Format) -> Bytes {
    let tables = parser.tables().map(|tables| &**tables);
    let bytes = object.bytes();
    let bytes = format.bytes_of(&bytes, tables).unwrap_or(bytes);
    match (parser.media(), tables) {
        (Media::Json, _) => [&bytes, b"\n".as_slice()].concat().into(),
        (Media::Protobuf, _) => bytes,
        (Media::Table, None) => Bytes::new(),
        (Media::Table, Some(tables)) => {
            let head = table_head(tables, &format!("{}\"", object.version()), "[");
            [head.as_bytes(), &bytes, b"]}\n"].concat().into()
        }
    }
}
