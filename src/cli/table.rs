//! Tables in kubectl's format, with three spaces between columns. Columns never get narrower, so
//! that the rows of a watch stay aligned with their headers.

use std::io::{self, Write};

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use super::{pod_status::pod_status, projection::ProjectionArgs, visible::visible};
use kubefan_client::{ResolvedResource, grpc::Object};
use kubefan_model::human_duration::human_duration;

/// The minimum width of a column, and the space between two columns. Both are kubectl's.
const WIDTH_MIN: usize = 6;
const PADDING: usize = 3;

/// A table of the objects of one resource.
pub(super) struct Table {
    with_namespace: bool,
    with_type: bool,
    /// `Some` to print the columns of pods.
    pods: Option<PodColumns>,
    type_name: String,
    columns: Columns,
    has_header: bool,
}

/// Column widths, which only grow.
#[derive(Default)]
pub(super) struct Columns {
    widths: Vec<usize>,
}

impl Columns {
    /// The first column is at least this wide, including the space after it.
    pub(super) fn starting_with(width: usize) -> Self {
        Self { widths: vec![width] }
    }

    /// Prints rows, whose cells may contain anything.
    pub(super) fn print(&mut self, out: &mut impl Write, rows: &[Vec<String>]) -> io::Result<()> {
        let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|cell| visible(cell)).collect()).collect();
        for row in &rows {
            self.widths.resize(self.widths.len().max(row.len()), WIDTH_MIN);
            for (width, cell) in self.widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count() + PADDING);
            }
        }
        for row in &rows {
            let cells = self.widths.iter().zip(row).map(|(width, cell)| format!("{cell:<width$}"));
            writeln!(out, "{}", cells.collect::<String>().trim_end())?;
        }
        Ok(())
    }
}

impl Table {
    /// A new table. `with_namespace` adds the column NAMESPACE for namespaced resources, and
    /// `with_type` prints names as `pod/web-1`.
    pub(super) fn new(resource: &ResolvedResource, pods: PodColumns, with_namespace: bool, with_type: bool) -> Self {
        Self {
            with_namespace: with_namespace && resource.namespaced,
            with_type,
            pods: (resource.group.is_empty() && resource.resource == "pods").then_some(pods),
            type_name: type_name(resource),
            columns: Columns::default(),
            has_header: false,
        }
    }

    /// Prints objects, and first the header if it is not yet printed.
    pub(super) fn print(&mut self, out: &mut impl Write, objects: &[Object], now: Timestamp) -> io::Result<()> {
        let mut rows = Vec::with_capacity(objects.len() + 1);
        if !std::mem::replace(&mut self.has_header, true) {
            rows.push(self.header());
        }
        rows.extend(objects.iter().map(|object| self.row(object, now)));
        self.columns.print(out, &rows)
    }

    fn header(&self) -> Vec<String> {
        let namespace = self.with_namespace.then_some("NAMESPACE");
        let pod: &[&str] = if self.pods.is_some() { &["STATUS", "NODE"] } else { &[] };
        let columns = namespace.into_iter().chain(["NAME"]).chain(pod.iter().copied()).chain(["AGE"]);
        columns.map(str::to_owned).collect()
    }

    fn row(&self, object: &Object, now: Timestamp) -> Vec<String> {
        let mut cells = Vec::with_capacity(5);
        if self.with_namespace {
            cells.push(object.namespace.clone());
        }
        cells.push(if self.with_type { format!("{}/{}", self.type_name, object.name) } else { object.name.clone() });
        if let Some(pods) = self.pods {
            cells.extend(pods.cells(&pod_value(&object.object)));
        }
        cells.push(age(&object.object, now));
        cells
    }
}

const UNKNOWN: &str = "<unknown>";

/// The pod columns whose values the projection includes.
#[derive(Debug, Clone, Copy)]
pub(super) struct PodColumns {
    status: bool,
    node: bool,
}

impl PodColumns {
    pub(super) fn of(projection: &ProjectionArgs) -> Self {
        Self { status: projection.includes("status.phase"), node: projection.includes("spec.nodeName") }
    }

    /// The values of STATUS and NODE.
    pub(super) fn cells(self, pod: &Value) -> [String; 2] {
        let status = if self.status { pod_status(pod) } else { UNKNOWN.to_owned() };
        let node = if self.node { pod["spec"]["nodeName"].as_str().unwrap_or("<none>") } else { UNKNOWN };
        [status, node.to_owned()]
    }
}

/// A type as kubectl writes it before a name: `pod`, `deployment.apps`.
pub(super) fn type_name(resource: &ResolvedResource) -> String {
    let kind = if resource.kind.is_empty() { resource.resource.clone() } else { resource.kind.to_lowercase() };
    if resource.group.is_empty() { kind } else { format!("{kind}.{}", resource.group) }
}

/// A pod as a value. Its schema limits how deep it is. If it is not JSON, its columns have no data.
pub(super) fn pod_value(pod: &[u8]) -> Value {
    serde_json::from_slice(pod).unwrap_or(Value::Null)
}

/// Metadata that every object has, however deep the rest of it is.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Metadata {
    creation_timestamp: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct WithMetadata {
    metadata: Metadata,
}

fn age(object: &[u8], now: Timestamp) -> String {
    let object = serde_json::from_slice::<WithMetadata>(object).ok();
    let created = object.and_then(|object| object.metadata.creation_timestamp.parse::<Timestamp>().ok());
    created.map_or_else(|| UNKNOWN.to_owned(), |created| human_duration(now.as_second() - created.as_second()))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn object(namespace: &str, name: &str, node: &str) -> Object {
        let body = serde_json::json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"nodeName": node},
            "status": {"phase": "Running"}});
        Object { namespace: namespace.into(), name: name.into(), object: body.to_string().into(), ..Object::default() }
    }

    fn resource(resource: &str, kind: &str, group: &str) -> ResolvedResource {
        ResolvedResource {
            group: group.into(),
            resource: resource.into(),
            kind: kind.into(),
            namespaced: true,
            version: "v1".into(),
        }
    }

    pub(in crate::cli) const ALL: PodColumns = PodColumns { status: true, node: true };

    #[test]
    fn a_column_without_data_is_unknown_and_not_none() {
        let phase = serde_json::json!({"status": {"phase": "Running"}});
        assert_eq!(PodColumns { node: false, ..ALL }.cells(&phase), ["Running", "<unknown>"]);
        assert_eq!(PodColumns { status: false, ..ALL }.cells(&Value::Null), ["<unknown>", "<none>"]);
    }

    fn now() -> Timestamp {
        "2026-01-01T00:05:00Z".parse().unwrap()
    }

    #[test]
    fn pods_have_status_and_node_and_later_rows_stay_aligned() {
        let mut table = Table::new(&resource("pods", "Pod", ""), ALL, true, false);
        let mut out = Vec::new();
        table.print(&mut out, &[object("default", "web-1", "node-1"), object("default", "a", "n")], now()).unwrap();
        table.print(&mut out, &[object("x", "b", "n")], now()).unwrap();
        let expected = "\
NAMESPACE   NAME    STATUS    NODE     AGE
default     web-1   Running   node-1   5m
default     a       Running   n        5m
x           b       Running   n        5m
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn no_cell_controls_the_terminal_or_forges_a_row() {
        let mut table = Table::new(&resource("pods", "Pod", ""), ALL, false, false);
        let hostile = object("default", "a", "n\u{1b}[31m\nforged   Running   n   5m");
        let mut out = Vec::new();
        table.print(&mut out, &[hostile], now()).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.lines().count() == 2 && !text.contains('\u{1b}'), "{text:?}");
    }

    #[test]
    fn other_resources_have_name_and_age() {
        let mut table = Table::new(&resource("deployments", "Deployment", "apps"), ALL, false, true);
        let mut out = Vec::new();
        let broken = Object { name: "odd".into(), object: "{".into(), ..Object::default() };
        table.print(&mut out, &[object("default", "web", ""), broken], now()).unwrap();
        let expected = "NAME                  AGE\ndeployment.apps/web   5m\ndeployment.apps/odd   <unknown>\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
}
