//! What programs notice of kubefan: how long informers take to start, to recover from an outage and
//! to move to another replica, and what they cost the apiserver. Each experiment does the same
//! through kubefan and straight at the apiserver, in one run, and prints both as a table.
//!
//! `KUBEFAN_TEST_SCALE=full` runs them at full size; `-- --nocapture --test-threads 1 quiet` shows
//! the tables. Times depend on the machine, so only states and counts are checked.

use std::{
    fmt::{self, Display, Formatter},
    future::Future,
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::Value;
use tokio::time::Instant;

use crate::{
    clients::{Both, Server},
    harness::{process::Process, tools, wait},
};

pub(crate) mod cluster;
pub(crate) mod dynamic_informers;
pub(crate) mod failover;
pub(crate) mod kubectl_outage;
pub(crate) mod outage;
pub(crate) mod restarted_fleet;
pub(crate) mod starts;
pub(crate) mod state_metrics;
pub(crate) mod upgrade;
pub(crate) mod upstream_requests;

/// Lines of a program's output that a failure shows.
const LINES_MAX: usize = 10;

/// The program with client-go's informers.
pub(crate) fn client_go() -> PathBuf {
    tools::go_program("clients", Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients")))
}

/// A directory for the files of a test.
pub(crate) fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory is created")
}

/// The lines of JSON that a program printed.
pub(crate) fn json_lines(process: &Process) -> Vec<Value> {
    process.log().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// The last lines that a program printed.
pub(crate) fn last_lines(process: &Process) -> String {
    let log = process.log();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(LINES_MAX)..].join("\n")
}

/// Waits until a program of `-marks` has printed that all informers have reached this mark. Returns
/// when; `None` if it was not in time.
pub(crate) async fn reached(process: &Process, mark: u64, at_most: Duration) -> Option<Instant> {
    let probe = || {
        let reached =
            json_lines(process).iter().any(|line| line["reached"].as_u64().is_some_and(|reached| reached >= mark));
        async move { reached.then(Instant::now) }
    };
    wait::try_until(at_most, probe).await
}

/// The time that a future takes.
pub(crate) async fn timed<T>(future: impl Future<Output = T>) -> (T, f64) {
    let start = Instant::now();
    let value = future.await;
    (value, start.elapsed().as_secs_f64())
}

/// A table, printed as Markdown.
pub(crate) struct Table {
    title: String,
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(title: impl Into<String>, columns: &[&str]) -> Table {
        let columns = columns.iter().map(|column| (*column).to_owned()).collect();
        Table { title: title.into(), columns, rows: Vec::new() }
    }

    /// Adds a row with a cell for each column, and prints it: the rest may take minutes.
    pub(crate) fn row(&mut self, cells: &[&dyn Display]) {
        assert_eq!(cells.len(), self.columns.len(), "{}", self.title);
        let cells: Vec<String> = cells.iter().map(|cell| cell.to_string()).collect();
        println!("{}: {}", self.title, cells.join(" | "));
        self.rows.push(cells);
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n{}\n", self.title)?;
        let mut line = |cells: &[String]| writeln!(f, "| {} |", cells.join(" | "));
        line(&self.columns)?;
        line(&self.columns.iter().map(|_| "---".to_owned()).collect::<Vec<_>>())?;
        self.rows.iter().try_for_each(|row| line(row))
    }
}

/// The lines of one of kubefan's metrics that are not 0.
pub(crate) async fn counted(both: &Both, name: &str) -> String {
    let (_, lines) = both.metric(name).await;
    lines.lines().filter(|line| !line.ends_with(" 0")).collect::<Vec<_>>().join("\n")
}

/// How a server is called in the tables.
pub(crate) fn through(server: &Server) -> &'static str {
    if server.name == "direct" { "straight" } else { server.name }
}

/// Seconds with two digits, or `never` with the time waited.
pub(crate) fn seconds(value: Option<f64>, waited: Duration) -> String {
    value.map_or_else(|| format!("not within {} s", waited.as_secs()), |value| format!("{value:.2}"))
}
