//! Effects on programs when the control plane in front of them is replaced, and the tools that
//! measurements beside a real apiserver share: its objects, its requests by purpose, and their
//! tables.

use std::{
    fmt::{self, Display, Formatter},
    future::Future,
};

use tokio::time::Instant;

pub(crate) mod cluster;
pub(crate) mod upgrade;
pub(crate) mod upstream_requests;

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
        for row in &self.rows {
            line(row)?;
        }
        Ok(())
    }
}
