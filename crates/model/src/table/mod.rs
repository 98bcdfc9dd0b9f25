//! Rows of the apiserver's Tables (`meta.k8s.io/v1`): what kubectl prints, kept without a schema and without printers.
//!
//! The hazard is time: the apiserver writes "5m" into a cell when it answers, and a moment later that is wrong. So a row is kept in a form
//! that depends on its object alone: where a cell tells how long ago something was, the time itself stands in it, and the cell is written
//! anew whenever the row is sent. A table with times that cannot be traced back to the object is not kept at all.

mod restarts;

use std::{borrow::Cow, fmt, sync::OnceLock, time::SystemTime};

use bytes::Bytes;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{
    GroupVersionResource,
    format::Include,
    human_duration::human_duration,
    projection::{PARTIAL_API_VERSION, PARTIAL_KIND, Projection},
    protobuf::INITIAL_EVENTS_END,
};

/// Tells the time, for ages.
pub type Clock = fn() -> SystemTime;

/// How the columns say that they are of `metadata.creationTimestamp`: by its documentation (`ObjectMeta.SwaggerDoc` of apimachinery),
/// also in its older, shorter form, or as a custom resource's column without a description of its own (`tableconvertor.go`).
const CREATED: &str = "CreationTimestamp is a timestamp representing the server time when this object was created.";
const CREATED_BY_PATH: &str = "Custom resource definition column (in JSONPath format): .metadata.creationTimestamp";

/// What a row is before its cells, and between those and its object.
const CELLS: &str = r#"{"cells":"#;
const CONDITIONS: &str = r#","conditions":"#;
const OBJECT: &str = r#","object":"#;

/// What begins a Table, and what comes between its metadata, its columns and its rows.
pub const HEAD: &str = r#"{"kind":"Table","apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":""#;
/// Before the columns.
pub const COLUMNS: &str = r#"},"columnDefinitions":"#;
/// Before the rows.
pub const ROWS: &str = r#","rows":"#;
/// In place of the columns, in each event of a watch but the first.
pub const NO_COLUMNS: &str = "null";

/// How an object begins of which a row has only the metadata.
const PARTIAL: &str = r#"{"kind":"PartialObjectMetadata""#;

/// Built-in resources that have other times in their cells than their creation, and where: theirs come from upstream.
const WITH_OTHER_TIMES: &[(&str, &str, &str)] = &[
    ("", "events", "Last Seen and First Seen"),
    ("events.k8s.io", "events", "Last Seen and First Seen"),
    ("batch", "jobs", "Duration"),
    ("batch", "cronjobs", "Last Schedule"),
    ("resource.k8s.io", "devicetaintrules", "TimeAdded"),
];

/// Why what upstream gave is no table to be kept.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// Something else.
    #[error("it is no Table with an object in each row: {0}")]
    Malformed(String),
    /// The rows that are held are of other columns.
    #[error("the columns of its tables have changed")]
    Changed,
    /// Nobody could write the cell anew.
    #[error("its column {0:?} tells how long ago something was, and not of what")]
    Relative(String),
}

/// A Table that was read.
pub struct Document<'a> {
    /// `metadata.resourceVersion`.
    pub version: Cow<'a, str>,
    /// `metadata.continue`.
    pub next: String,
    /// Each a row as upstream wrote it.
    pub rows: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw<'a> {
    #[serde(borrow)]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    metadata: RawMeta<'a>,
    #[serde(borrow, default)]
    column_definitions: Option<&'a RawValue>,
    #[serde(borrow, default)]
    rows: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawMeta<'a> {
    #[serde(borrow, default)]
    resource_version: Cow<'a, str>,
    #[serde(default, rename = "continue")]
    next: String,
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

/// A cell that is written anew: what comes before the time that has passed, since when, and what comes after it.
#[derive(Deserialize)]
struct Since<'a>(#[serde(borrow)] Cow<'a, str>, #[serde(borrow)] Cow<'a, str>, #[serde(borrow)] Cow<'a, str>);

/// As it is kept: a map that no printer makes.
#[derive(Deserialize)]
struct KeptSince<'a> {
    #[serde(rename = "", borrow)]
    since: Since<'a>,
}

/// What begins it.
const KEPT_SINCE: &str = r#"{"":["#;

/// The columns, and which of them tell of which time.
struct Columns {
    definitions: Bytes,
    count: usize,
    ages: Vec<usize>,
    restarts: Option<usize>,
    /// They are those of a type that has no printer.
    are_default: bool,
}

/// What is known of the tables of one cache: their columns, which the first of them tells, and the time that ages are counted by.
pub struct Tables {
    gvr: GroupVersionResource,
    now: Clock,
    columns: OnceLock<Columns>,
    /// A row of an object without anything, as bookmarks have it.
    empty: OnceLock<Empty>,
}

/// What upstream writes for nothing: the cells, and of the object what stands around its metadata.
struct Empty {
    cells: Box<str>,
    before: Box<str>,
    after: Box<str>,
}

impl fmt::Debug for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tables of {}", self.gvr)
    }
}

/// Why the tables of a resource come from upstream, where that is known by its name.
pub fn other_times(gvr: &GroupVersionResource) -> Option<&'static str> {
    let found = WITH_OTHER_TIMES.iter().find(|(group, resource, _)| gvr.group == *group && gvr.resource == *resource);
    found.map(|(_, _, columns)| *columns)
}

impl Tables {
    /// Those of a resource, of which nothing is known yet.
    pub fn new(gvr: &GroupVersionResource, now: Clock) -> Self {
        Self { gvr: gvr.clone(), now, columns: OnceLock::new(), empty: OnceLock::new() }
    }

    /// Reads a Table, of a list or of an event, and takes its columns or compares them.
    ///
    /// # Errors
    /// Where it is none, where its columns are not those of the tables before it, or cannot be kept.
    pub fn read<'a>(&self, json: &'a [u8]) -> Result<Document<'a>, TableError> {
        let Raw { kind, metadata, column_definitions, rows } = serde_json::from_slice(json).map_err(malformed)?;
        if kind != "Table" {
            return Err(TableError::Malformed(format!("it is a {kind:.64}")));
        }
        if let Some(definitions) = column_definitions {
            self.take_columns(definitions.get())?;
        }
        let RawMeta { resource_version: version, next } = metadata;
        Ok(Document { version, next, rows: rows.unwrap_or_default() })
    }

    fn take_columns(&self, definitions: &str) -> Result<(), TableError> {
        let is_same = |columns: &Columns| columns.definitions == definitions.as_bytes();
        if self.columns.get().is_some_and(is_same) {
            return Ok(());
        }
        let columns: Vec<Column> = serde_json::from_str(definitions).map_err(malformed)?;
        let tells_age =
            |column: &Column| column.description.starts_with(CREATED) || column.description == CREATED_BY_PATH;
        if let Some(column) = columns.iter().find(|column| column.kind == "date" && !tells_age(column)) {
            return Err(TableError::Relative(column.name.clone()));
        }
        let ages = (0..columns.len()).filter(|at| tells_age(&columns[*at])).collect();
        let is_pod = self.gvr.group.is_empty() && self.gvr.resource == "pods";
        let restarts = columns.iter().position(|column| is_pod && column.name == "Restarts");
        let are_default = columns.iter().any(|column| column.name == "Created At" && column.kind == "date");
        let definitions = Bytes::copy_from_slice(definitions.as_bytes());
        // Another reader of the same may have been first.
        let known = self.columns.get_or_init(|| Columns {
            count: columns.len(),
            ages,
            restarts,
            are_default,
            definitions: definitions.clone(),
        });
        if known.definitions == definitions { Ok(()) } else { Err(TableError::Changed) }
    }

    /// The columns, as JSON; an empty list before they are known.
    pub fn definitions(&self) -> Bytes {
        self.columns.get().map_or(Bytes::from_static(b"[]"), |columns| columns.definitions.clone())
    }

    /// A row in the form that is kept, which is the same whenever upstream writes it. One that has this form stays as it is.
    ///
    /// # Errors
    /// Where it has no object, or not a cell for each column.
    pub fn keep(&self, row: &[u8]) -> Result<Vec<u8>, TableError> {
        let Row { cells, conditions, object } = serde_json::from_slice(row).map_err(malformed)?;
        let object = object.get();
        // Selectors see the whole object, and so does who asks for it.
        if object.starts_with(PARTIAL) {
            return Err(TableError::Malformed("a row has only the metadata of its object".to_owned()));
        }
        let columns =
            self.columns.get().ok_or_else(|| TableError::Malformed("a row came before the columns".to_owned()))?;
        if cells.len() != columns.count {
            return Err(TableError::Changed);
        }
        let mut kept: Vec<Cow<'_, str>> = cells.into_iter().map(|cell| Cow::Borrowed(cell.get())).collect();
        let ages = columns.ages.iter().copied().filter(|at| is_age(&kept[*at])).collect::<Vec<_>>();
        if !ages.is_empty() {
            let Created { metadata } = serde_json::from_str(object).map_err(malformed)?;
            // Without one the cell says so.
            if let Some(created) = metadata.creation_timestamp {
                ages.into_iter().for_each(|at| kept[at] = since("", &created, "").into());
            }
        }
        if let Some(cell) = columns.restarts.map(|at| &mut kept[at])
            && let Some((count, _)) =
                cell.trim_matches('"').strip_suffix(" ago)").and_then(|text| text.split_once(" ("))
            && let Some(last) = restarts::last(object)
        {
            *cell = since(&format!("{count} ("), &last, " ago)").into();
        }
        let mut out = Vec::with_capacity(row.len() + 64);
        put_row(&kept, conditions.map(RawValue::get), object, &mut out);
        Ok(out)
    }

    /// The row of an object of which too little is known for its cells.
    pub fn remnant(&self, object: &[u8]) -> Vec<u8> {
        let empty = self.empty_cells();
        [CELLS.as_bytes(), empty.as_bytes(), OBJECT.as_bytes(), object, b"}"].concat()
    }

    /// A row as it is sent now.
    pub fn row(&self, kept: &[u8], include: Include) -> Bytes {
        let Some((cells, conditions, object)) = split(kept) else { return Bytes::new() };
        let now = (self.now)();
        let cells: Vec<_> = cells.into_iter().map(|cell| told(cell.get(), now)).collect();
        let object = match include {
            Include::None => Cow::Borrowed("null"),
            Include::Object => Cow::Borrowed(object),
            Include::Metadata => {
                let partial = Projection::partial_object_metadata().apply(object.as_bytes());
                Cow::Owned(String::from_utf8(partial.into()).unwrap_or_default())
            }
        };
        let mut out = Vec::with_capacity(object.len() + 256);
        put_row(&cells, conditions.map(RawValue::get), &object, &mut out);
        out.into()
    }

    /// Remembers how upstream writes a row of nothing.
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
        self.empty.get_or_init(|| Empty {
            cells: format!("[{}]", cells.join(",")).into(),
            before: before.into(),
            after: after.into(),
        });
    }

    /// The row of a bookmark at a version; the one that ends the initial state says so in its object's metadata, whatever was asked for.
    /// `of` is the kind and the group version of the objects.
    pub fn bookmark_row(&self, of: (&str, &str), include: Include, version: &str, ends: bool) -> String {
        let typed = |(kind, api_version)| format!(r#"{{"kind":"{kind}","apiVersion":"{api_version}","metadata":"#);
        let (before, after) = match (include, self.empty.get()) {
            (Include::Object, Some(Empty { before, after, .. })) => (before.to_string(), &**after),
            (Include::Object, None) => (typed(of), "}"),
            (Include::None, _) if !ends => return format!(r#"{{"cells":{},"object":null}}"#, self.empty_cells()),
            (Include::None | Include::Metadata, _) => (typed((PARTIAL_KIND, PARTIAL_API_VERSION)), "}"),
        };
        let annotations = match ends {
            true => format!(r#","annotations":{{"{INITIAL_EVENTS_END}":"true"}}"#),
            false => String::new(),
        };
        let cells = self.empty_cells();
        format!(r#"{{"cells":{cells},"object":{before}{{"resourceVersion":"{version}"{annotations}}}{after}}}"#)
    }

    /// The cells of an object without anything, as far as they are known.
    fn empty_cells(&self) -> Cow<'_, str> {
        let unknown = || vec!["null"; self.columns.get().map_or(0, |columns| columns.count)].join(",");
        self.empty.get().map_or_else(|| format!("[{}]", unknown()).into(), |empty| Cow::Borrowed(&*empty.cells))
    }

    /// The rows of a table that has none. Where there is no printer, `rest.NewDefaultTableConvertor` makes no list for them.
    pub fn no_rows(&self) -> &'static str {
        if self.columns.get().is_some_and(|columns| columns.are_default) { "null" } else { "[]" }
    }
}

fn malformed(error: serde_json::Error) -> TableError {
    TableError::Malformed(error.to_string())
}

/// Whether a cell is a time that has passed. The age of some resources is a date, which stays.
fn is_age(cell: &str) -> bool {
    let text = cell.trim_matches('"');
    let is_duration = text.ends_with(['s', 'm', 'h', 'd', 'y'])
        && text.starts_with(|first: char| first.is_ascii_digit())
        && text.chars().all(|c| c.is_ascii_digit() || "smhdy".contains(c));
    text.len() < cell.len() && (is_duration || text == INVALID)
}

/// How Go writes `<invalid>`.
const INVALID: &str = r"\u003cinvalid\u003e";

fn since(before: &str, time: &str, after: &str) -> String {
    let parts = [before, time, after].map(|part| serde_json::Value::from(part).to_string());
    format!("{KEPT_SINCE}{}]}}", parts.join(","))
}

/// A cell as it is now.
fn told(cell: &str, now: SystemTime) -> Cow<'_, str> {
    if !cell.starts_with(KEPT_SINCE) {
        return Cow::Borrowed(cell);
    }
    let Ok(KeptSince { since: Since(before, time, after) }) = serde_json::from_str(cell) else {
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

/// The parts of a row that [`put_row`] wrote, without a look at its object.
fn split(kept: &[u8]) -> Option<(Vec<&RawValue>, Option<&RawValue>, &str)> {
    let rest = std::str::from_utf8(kept).ok()?.strip_prefix(CELLS)?;
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
