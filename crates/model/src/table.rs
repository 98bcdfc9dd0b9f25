//! Rows of the apiserver's Tables (`meta.k8s.io/v1`), which kubectl prints. They are cached without
//! a schema and without printers.
//!
//! The problem is time: the apiserver writes the age "5m" into a cell, and a moment later it is
//! wrong. So a cached row depends on its object alone: in place of an age it stores the timestamp,
//! and the age is computed whenever the row is sent. The obvious alternative, to print the cells
//! here, would need the apiserver's printer for every type. A Table with an age whose timestamp
//! cannot be found in the object is not cached.

mod restarts;

use std::{borrow::Cow, fmt, sync::OnceLock, time::SystemTime};

use bytes::Bytes;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{
    GroupVersionResource,
    human_duration::human_duration,
    include_object::IncludeObject,
    projection::{PARTIAL_API_VERSION, PARTIAL_KIND, Projection},
    protobuf::INITIAL_EVENTS_END,
};
use kubefan_common::{api_json::ListMeta, text::without_value};

/// Returns the current time, for ages.
pub type Clock = fn() -> SystemTime;

/// Descriptions of columns that show the age since `metadata.creationTimestamp`: the documentation
/// of the field (`ObjectMeta.SwaggerDoc` of apimachinery; older versions have a shorter text that
/// starts the same), or the default description of a custom resource's column
/// (`tableconvertor.go`).
const CREATED: &str = "CreationTimestamp is a timestamp representing the server time when this object was created.";
const CREATED_BY_PATH: &str = "Custom resource definition column (in JSONPath format): .metadata.creationTimestamp";

/// The parts of a row before its cells, its conditions and its object.
const CELLS: &str = r#"{"cells":"#;
const CONDITIONS: &str = r#","conditions":"#;
const OBJECT: &str = r#","object":"#;

/// Start of a Table, up to its resource version.
pub const HEAD: &str = r#"{"kind":"Table","apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":""#;
/// Between the metadata and the columns.
pub const COLUMNS: &str = r#"},"columnDefinitions":"#;
/// Between the columns and the rows.
pub const ROWS: &str = r#","rows":"#;
/// Replaces the columns in every event of a watch but the first.
pub const NO_COLUMNS: &str = "null";

/// Start of an object in a row that contains only the metadata.
const PARTIAL: &str = r#"{"kind":"PartialObjectMetadata""#;

/// Built-in resources with ages in their cells that are not the age of the object, and the names of
/// those columns. Their Tables are passed through from upstream.
const WITH_OTHER_AGES: &[(&str, &str, &str)] = &[
    ("", "events", "Last Seen and First Seen"),
    ("events.k8s.io", "events", "Last Seen and First Seen"),
    ("batch", "jobs", "Duration"),
    ("batch", "cronjobs", "Last Schedule"),
    ("resource.k8s.io", "devicetaintrules", "TimeAdded"),
];

/// The reason why a Table from upstream cannot be cached.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// The document is not a Table, or a row lacks its object.
    #[error("not a Table with an object in each row: {0}")]
    Malformed(String),
    /// The cached rows have other columns.
    #[error("the columns of the Table have changed")]
    ColumnsChanged,
    /// A column shows an age, but the timestamp it is computed from is unknown.
    #[error("column {0:?} shows an age whose timestamp is unknown")]
    UnknownAge(String),
}

/// A parsed Table.
pub struct Document<'a> {
    /// `metadata.resourceVersion`.
    pub version: String,
    /// `metadata.continue`.
    pub next: String,
    /// Each row as upstream wrote it.
    pub rows: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw<'a> {
    #[serde(borrow)]
    kind: Cow<'a, str>,
    #[serde(default)]
    metadata: Option<ListMeta>,
    #[serde(borrow, default)]
    column_definitions: Option<&'a RawValue>,
    #[serde(borrow, default)]
    rows: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
struct Column {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    description: String,
}

#[derive(Deserialize)]
struct Row<'a> {
    #[serde(borrow)]
    cells: Vec<&'a RawValue>,
    #[serde(borrow, default)]
    conditions: Option<&'a RawValue>,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct Created<'a> {
    #[serde(borrow)]
    metadata: CreatedMeta<'a>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CreatedMeta<'a> {
    #[serde(borrow, default)]
    creation_timestamp: Option<Cow<'a, str>>,
}

/// A cell with an age: the text before the age, the timestamp, and the text after the age.
#[derive(Deserialize)]
struct Since<'a>(#[serde(borrow)] Cow<'a, str>, #[serde(borrow)] Cow<'a, str>, #[serde(borrow)] Cow<'a, str>);

/// The stored form of such a cell: a map with an empty key, which no printer writes.
#[derive(Deserialize)]
struct StoredSince<'a> {
    #[serde(rename = "", borrow)]
    since: Since<'a>,
}

/// The first bytes of the stored form.
const STORED_SINCE: &str = r#"{"":["#;

/// The columns, and which of them contain ages.
struct Columns {
    definitions: Bytes,
    count: usize,
    ages: Vec<usize>,
    restarts: Option<usize>,
    /// The default columns of types that have no printer.
    are_default: bool,
}

/// The columns of one cache's Tables, which the first Table determines, and the clock for ages.
pub struct Tables {
    gvr: GroupVersionResource,
    now: Clock,
    columns: OnceLock<Columns>,
    /// The row of an empty object, as upstream writes it in bookmarks.
    empty_row: OnceLock<EmptyRow>,
}

/// An empty object's row as upstream writes it: the cells, and the text of the object before and
/// after its metadata.
struct EmptyRow {
    cells: Box<str>,
    before: Box<str>,
    after: Box<str>,
}

impl fmt::Debug for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tables of {}", self.gvr)
    }
}

/// The columns because of which Tables of this resource are passed through from upstream; `None` if
/// the resource is not known to have such columns.
pub fn columns_with_other_ages(gvr: &GroupVersionResource) -> Option<&'static str> {
    let found = WITH_OTHER_AGES.iter().find(|(group, resource, _)| gvr.group == *group && gvr.resource == *resource);
    found.map(|(_, _, columns)| *columns)
}

impl Tables {
    /// The Tables of a resource, whose columns are not known yet.
    pub fn new(gvr: &GroupVersionResource, now: Clock) -> Self {
        Self { gvr: gvr.clone(), now, columns: OnceLock::new(), empty_row: OnceLock::new() }
    }

    /// Parses the Table of a list or of an event. The first Table determines the columns; later
    /// ones are compared with them.
    ///
    /// # Errors
    /// If this is not a Table, its columns differ from the earlier ones, or they cannot be cached.
    pub fn read<'a>(&self, json: &'a [u8]) -> Result<Document<'a>, TableError> {
        let Raw { kind, metadata, column_definitions, rows } = serde_json::from_slice(json).map_err(malformed)?;
        if kind != "Table" {
            return Err(TableError::Malformed(format!("its kind is {kind:.64}")));
        }
        if let Some(definitions) = column_definitions {
            self.take_columns(definitions.get())?;
        }
        let ListMeta { resource_version: version, continue_token: next, .. } = metadata.unwrap_or_default();
        Ok(Document { version, next, rows: rows.unwrap_or_default() })
    }

    fn take_columns(&self, definitions: &str) -> Result<(), TableError> {
        let is_same = |columns: &Columns| columns.definitions == definitions.as_bytes();
        if self.columns.get().is_some_and(is_same) {
            return Ok(());
        }
        let columns: Vec<Column> = serde_json::from_str(definitions).map_err(malformed)?;
        let is_age_column =
            |column: &Column| column.description.starts_with(CREATED) || column.description == CREATED_BY_PATH;
        if let Some(column) = columns.iter().find(|column| column.kind == "date" && !is_age_column(column)) {
            return Err(TableError::UnknownAge(column.name.clone()));
        }
        let ages = (0..columns.len()).filter(|at| is_age_column(&columns[*at])).collect();
        let is_pod = self.gvr.group.is_empty() && self.gvr.resource == "pods";
        let restarts = columns.iter().position(|column| is_pod && column.name == "Restarts");
        let are_default = columns.iter().any(|column| column.name == "Created At" && column.kind == "date");
        let definitions = Bytes::copy_from_slice(definitions.as_bytes());
        // Another thread may have set the columns in the meantime.
        let known = self.columns.get_or_init(|| Columns {
            count: columns.len(),
            ages,
            restarts,
            are_default,
            definitions: definitions.clone(),
        });
        if known.definitions == definitions { Ok(()) } else { Err(TableError::ColumnsChanged) }
    }

    /// The columns as JSON; an empty list if they are not known yet.
    pub fn definitions(&self) -> Bytes {
        self.columns.get().map_or(Bytes::from_static(b"[]"), |columns| columns.definitions.clone())
    }

    /// Returns the stored form of a row. It is the same at whatever time upstream wrote the row,
    /// and the stored form of a stored row is that row.
    ///
    /// # Errors
    /// If the row has no whole object, or the number of cells differs from the number of columns.
    pub fn stored_row(&self, row: &[u8]) -> Result<Vec<u8>, TableError> {
        let Row { cells, conditions, object } = serde_json::from_slice(row).map_err(malformed)?;
        let object = object.get();
        // Selectors need the whole object, and clients may ask for it.
        if object.starts_with(PARTIAL) {
            return Err(TableError::Malformed("a row has only the metadata of its object".to_owned()));
        }
        let columns =
            self.columns.get().ok_or_else(|| TableError::Malformed("a row precedes the columns".to_owned()))?;
        if cells.len() != columns.count {
            return Err(TableError::ColumnsChanged);
        }
        let mut stored: Vec<Cow<'_, str>> = cells.into_iter().map(|cell| Cow::Borrowed(cell.get())).collect();
        let ages = columns.ages.iter().copied().filter(|at| is_age(&stored[*at])).collect::<Vec<_>>();
        if !ages.is_empty() {
            let Created { metadata } = serde_json::from_str(object).map_err(malformed)?;
            // Without a timestamp the cell says `<unknown>`, which is not an age.
            if let Some(created) = metadata.creation_timestamp {
                for at in ages {
                    stored[at] = since("", &created, "").into();
                }
            }
        }
        if let Some(cell) = columns.restarts.map(|at| &mut stored[at])
            && let Some((count, _)) =
                cell.trim_matches('"').strip_suffix(" ago)").and_then(|text| text.split_once(" ("))
            && let Some(last) = restarts::last(object)
        {
            *cell = since(&format!("{count} ("), &last, " ago)").into();
        }
        let mut out = Vec::with_capacity(row.len() + 64);
        put_row(&stored, conditions.map(RawValue::get), object, &mut out);
        Ok(out)
    }

    /// Returns the row of an object of selectable attributes. Its cells are those of an empty
    /// object.
    pub fn attributes_row(&self, object: &[u8]) -> Vec<u8> {
        let empty = self.empty_cells();
        [CELLS.as_bytes(), empty.as_bytes(), OBJECT.as_bytes(), object, b"}"].concat()
    }

    /// A stored row as it is sent now, with current ages.
    pub fn row(&self, stored: &[u8], include: IncludeObject) -> Bytes {
        let Some((cells, conditions, object)) = split(stored) else { return Bytes::new() };
        let now = (self.now)();
        let cells: Vec<_> = cells.into_iter().map(|cell| rendered(cell.get(), now)).collect();
        let object = match include {
            IncludeObject::None => Cow::Borrowed("null"),
            IncludeObject::Object => Cow::Borrowed(object),
            IncludeObject::Metadata => {
                let partial = Projection::partial_object_metadata().apply(object.as_bytes());
                Cow::Owned(String::from_utf8(partial.into()).unwrap_or_default())
            }
        };
        let mut out = Vec::with_capacity(object.len() + 256);
        put_row(&cells, conditions.map(RawValue::get), &object, &mut out);
        out.into()
    }

    /// Remembers from an upstream bookmark how upstream writes the row of an empty object.
    pub fn note_bookmark(&self, row: &RawValue) {
        #[derive(Deserialize)]
        struct Object<'a> {
            #[serde(borrow)]
            metadata: &'a RawValue,
        }
        let Ok(Row { cells, object, .. }) = serde_json::from_str(row.get()) else { return };
        let Ok(Object { metadata }) = serde_json::from_str(object.get()) else { return };
        let Some((before, after)) = object.get().split_once(metadata.get()) else { return };
        if self.columns.get().is_none_or(|columns| columns.count != cells.len()) {
            return;
        }
        let cells: Vec<_> = cells.into_iter().map(RawValue::get).collect();
        self.empty_row.get_or_init(|| EmptyRow {
            cells: format!("[{}]", cells.join(",")).into(),
            before: before.into(),
            after: after.into(),
        });
    }

    /// The row of a bookmark at a version. If `ends` is set, the metadata of its object has the
    /// annotation that ends the initial events, even with [`IncludeObject::None`]. The objects have
    /// this kind and API version.
    pub fn bookmark_row(
        &self,
        kind: &str,
        api_version: &str,
        include: IncludeObject,
        version: &str,
        ends: bool,
    ) -> String {
        let typed =
            |kind: &str, api_version: &str| format!(r#"{{"kind":"{kind}","apiVersion":"{api_version}","metadata":"#);
        let (before, after) = match (include, self.empty_row.get()) {
            (IncludeObject::Object, Some(EmptyRow { before, after, .. })) => (before.to_string(), &**after),
            (IncludeObject::Object, None) => (typed(kind, api_version), "}"),
            (IncludeObject::None, _) if !ends => return format!(r#"{{"cells":{},"object":null}}"#, self.empty_cells()),
            (IncludeObject::None | IncludeObject::Metadata, _) => (typed(PARTIAL_KIND, PARTIAL_API_VERSION), "}"),
        };
        let annotations =
            if ends { format!(r#","annotations":{{"{INITIAL_EVENTS_END}":"true"}}"#) } else { String::new() };
        let cells = self.empty_cells();
        format!(r#"{{"cells":{cells},"object":{before}{{"resourceVersion":"{version}"{annotations}}}{after}}}"#)
    }

    /// The cells of an empty object; each is `null` if they are not known.
    fn empty_cells(&self) -> Cow<'_, str> {
        let unknown = || vec!["null"; self.columns.get().map_or(0, |columns| columns.count)].join(",");
        self.empty_row.get().map_or_else(|| format!("[{}]", unknown()).into(), |empty| Cow::Borrowed(&*empty.cells))
    }

    /// The `rows` of an empty Table. For types without a printer, `rest.NewDefaultTableConvertor`
    /// leaves them `null`.
    pub fn no_rows(&self) -> &'static str {
        if self.columns.get().is_some_and(|columns| columns.are_default) { "null" } else { "[]" }
    }
}

fn malformed(error: serde_json::Error) -> TableError {
    TableError::Malformed(without_value(&error))
}

/// Whether a cell is an age. Some resources show a date instead, which never changes.
fn is_age(cell: &str) -> bool {
    let text = cell.trim_matches('"');
    let is_duration = text.ends_with(['s', 'm', 'h', 'd', 'y'])
        && text.starts_with(|first: char| first.is_ascii_digit())
        && text.chars().all(|c| c.is_ascii_digit() || "smhdy".contains(c));
    text.len() < cell.len() && (is_duration || text == INVALID)
}

/// `<invalid>` as Go's JSON encoder writes it.
const INVALID: &str = r"\u003cinvalid\u003e";

fn since(before: &str, time: &str, after: &str) -> String {
    let parts = [before, time, after].map(|part| serde_json::Value::from(part).to_string());
    format!("{STORED_SINCE}{}]}}", parts.join(","))
}

/// The cell as it is sent at `now`.
fn rendered(cell: &str, now: SystemTime) -> Cow<'_, str> {
    if !cell.starts_with(STORED_SINCE) {
        return Cow::Borrowed(cell);
    }
    let Ok(StoredSince { since: Since(before, time, after) }) = serde_json::from_str(cell) else {
        return Cow::Borrowed(cell);
    };
    let age = match (time.parse::<Timestamp>(), Timestamp::try_from(now)) {
        (Ok(time), Ok(now)) => human_duration(now.duration_since(time).as_secs()),
        _ => INVALID.to_owned(),
    };
    let age = if age == "<invalid>" { INVALID } else { &age };
    Cow::Owned(format!("\"{before}{age}{after}\""))
}

fn put_row(cells: &[Cow<'_, str>], conditions: Option<&str>, object: &str, out: &mut Vec<u8>) {
    let mut put = |text: &str| out.extend_from_slice(text.as_bytes());
    put(CELLS);
    for (at, cell) in cells.iter().enumerate() {
        put(if at == 0 { "[" } else { "," });
        put(cell);
    }
    put(if cells.is_empty() { "[]" } else { "]" });
    if let Some(conditions) = conditions {
        put(CONDITIONS);
        put(conditions);
    }
    put(OBJECT);
    put(object);
    put("}");
}

/// The parts of a row that [`put_row`] wrote. The object is not parsed.
fn split(stored: &[u8]) -> Option<(Vec<&RawValue>, Option<&RawValue>, &str)> {
    let rest = std::str::from_utf8(stored).ok()?.strip_prefix(CELLS)?;
    let (cells, rest) = first_value(rest)?;
    let (conditions, rest) = match rest.strip_prefix(CONDITIONS) {
        Some(rest) => first_value(rest).map(|(conditions, rest)| (Some(conditions), rest))?,
        None => (None, rest),
    };
    Some((cells, conditions, rest.strip_prefix(OBJECT)?.strip_suffix('}')?))
}

fn first_value<'a, T: Deserialize<'a>>(json: &'a str) -> Option<(T, &'a str)> {
    let mut values = serde_json::Deserializer::from_str(json).into_iter();
    let value = values.next()?.ok()?;
    Some((value, &json[values.byte_offset()..]))
}

#[cfg(test)]
mod tests;
