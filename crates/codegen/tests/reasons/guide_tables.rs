//! The tables of reasons in the gRPC guide, between two comments each.

use std::fmt::Write as _;

use crate::table::{Ends, ErrorRow, Table};

pub(crate) const PATH: &str = "docs/grpc.md";

/// The page with its tables made again.
pub(crate) fn replace(page: &str, table: &Table) -> Result<String, String> {
    let page = between(page, "reasons of errors", &errors(table))?;
    between(&page, "reasons of gaps", &gaps(table))
}

fn between(page: &str, what: &str, rows: &str) -> Result<String, String> {
    let start = format!("<!-- {what} -->\n");
    let end = format!("<!-- end of {what} -->\n");
    let (before, rest) = page.split_once(&start).ok_or_else(|| format!("there is no {start}"))?;
    let (_, after) = rest.split_once(&end).ok_or_else(|| format!("there is no {end}"))?;
    Ok(format!("{before}{start}{rows}{end}{after}"))
}

fn errors(table: &Table) -> String {
    let mut out = "| code | reason | delay | ends | meaning | client |\n|---|---|---|---|---|---|\n".to_owned();
    for row in &table.errors {
        let ErrorRow { value, code, delay, meaning, client, see, .. } = row;
        let delay = delay.map(|seconds| format!("{seconds} s")).unwrap_or_default();
        let see = see.as_ref().map(|page| format!(" [More]({page})")).unwrap_or_default();
        let ends = row.ends.iter().map(|ends| match ends {
            Ends::Calls => "calls",
            Ends::Streams => "streams",
        });
        let ends = ends.collect::<Vec<_>>().join(", ");
        let _ = writeln!(out, "| `{code}` | `{value}` | {delay} | {ends} | {meaning}{see} | {client} |");
    }
    out
}

fn gaps(table: &Table) -> String {
    let mut out = "| reason | meaning |\n|---|---|\n".to_owned();
    for row in &table.gaps {
        let _ = writeln!(out, "| `{}` | {} |", row.value, row.meaning);
    }
    out
}
