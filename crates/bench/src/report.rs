//! Reports: the figures per scenario, variant and server, as a JSON object and as a row of a table.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::{
    BenchOptions, Scenario,
    figures::{Figure, Figures, Spread, spread},
    scenario::Variant,
};

/// Spaces between two columns, as in kubectl's tables.
const PADDING: usize = 3;

/// All runs of one variant with one server.
#[derive(Debug, Clone)]
pub struct Report {
    scenario: Scenario,
    server: String,
    variant: Variant,
    /// Number of pods at the start.
    objects: usize,
    /// One entry per run.
    runs: Vec<Figures>,
}

impl Report {
    pub(super) fn new(scenario: Scenario, server: &str, variant: Variant, objects: usize) -> Self {
        Self { scenario, server: server.to_owned(), variant, objects, runs: Vec::new() }
    }

    pub(super) fn is_of(&self, server: &str, variant: &Variant, objects: usize) -> bool {
        self.server == server && self.variant == *variant && self.objects == objects
    }

    pub(super) fn add(&mut self, figures: Figures) {
        self.runs.push(figures);
    }

    /// The scenario.
    pub fn scenario(&self) -> Scenario {
        self.scenario
    }

    /// The median and the range of a figure over the runs; `None` if the scenario does not measure
    /// it.
    pub fn figure(&self, figure: Figure) -> Option<Spread> {
        spread(self.runs.iter().filter_map(|run| run.get(figure)))
    }

    /// A result of the last run that no figure can express; empty in most scenarios.
    pub fn note(&self) -> &str {
        self.runs.last().map_or("", Figures::note)
    }

    /// An object with every figure's median under its key (null if the scenario does not measure
    /// it); `spread` contains the lowest and highest values.
    pub fn to_json(&self, options: &BenchOptions) -> Value {
        let Variant { name, subscribers, batch } = &self.variant;
        let mut object = json!({
            "scenario": self.scenario.as_str(),
            "variant": (!name.is_empty()).then_some(name),
            "server": self.server,
            "subscribers": subscribers,
            "streams_per_connection": options.streams_per_connection.min(*subscribers),
            "batch": batch,
            "objects": self.objects,
            "object_bytes": options.object_bytes,
            "tls": options.tls,
            "protocol": options.protocol.as_str(),
            "encoding": options.encoding.as_str(),
            "projection": options.projection.as_str(),
            "duration_seconds": options.duration.as_secs_f64(),
            "runs": self.runs.len(),
            "note": (!self.note().is_empty()).then(|| self.note()),
        });
        let mut latency = Map::new();
        let mut spreads = Map::new();
        for figure in Figure::ALL {
            let spread = self.figure(figure);
            let median = spread.map_or(Value::Null, |spread| rounded(spread.median).into());
            match figure.key().strip_prefix("latency_ms_") {
                Some(part) => drop(latency.insert(part.to_owned(), median)),
                None => object[figure.key()] = median,
            }
            if let Some(Spread { min, max, .. }) = spread {
                spreads.insert(figure.key().to_owned(), json!({"min": rounded(min), "max": rounded(max)}));
            }
        }
        object["latency_ms"] = latency.into();
        object["spread"] = spreads.into();
        object
    }
}

/// Rounds to four decimals, which is more than a machine can reproduce.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// The reports of one scenario as a table: one line of medians per report, and below it the range
/// if there were several runs. Columns without a value are omitted.
pub fn table(scenario: Scenario, reports: &[Report]) -> String {
    let reports: Vec<&Report> = reports.iter().filter(|report| report.scenario == scenario).collect();
    let figures: Vec<Figure> = Figure::ALL
        .into_iter()
        .filter(|figure| reports.iter().any(|report| report.figure(*figure).is_some()))
        .collect();
    let mut header = vec!["SERVER".to_owned(), "SUBSCRIBERS".to_owned(), "BATCH".to_owned()];
    header.extend(figures.iter().map(|figure| figure.column().0.to_owned()));
    let mut rows = vec![header];
    for report in &reports {
        let Variant { name, subscribers, batch } = &report.variant;
        let server = if name.is_empty() { report.server.clone() } else { format!("{} ({name})", report.server) };
        // Rows for several numbers of pods say which.
        let has_sizes = reports.iter().any(|other| other.objects != report.objects);
        let server = if has_sizes { format!("{server}, {} pods", report.objects) } else { server };
        let batch = batch.map_or_else(|| "-".to_owned(), |batch| batch.to_string());
        let mut medians = vec![server, subscribers.to_string(), batch];
        let mut ranges = vec![String::new(); 3];
        for figure in &figures {
            let digits = figure.column().1;
            let spread = report.figure(*figure);
            medians.push(spread.map_or_else(|| "-".to_owned(), |spread| format!("{:.digits$}", spread.median)));
            let range = spread.map(|spread| format!("{:.digits$}..{:.digits$}", spread.min, spread.max));
            ranges.push(range.unwrap_or_default());
        }
        rows.push(medians);
        if report.runs.len() > 1 {
            rows.push(ranges);
        }
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let mut text = format!("{}: {}\n", scenario.as_str(), scenario.description());
    for row in &rows {
        let mut line = String::new();
        for (at, (cell, width)) in row.iter().zip(&widths).enumerate() {
            // Align the server's name left and the numbers right.
            let _ = match at {
                0 => write!(line, "{cell:<width$}"),
                _ => write!(line, "{:PADDING$}{cell:>width$}", ""),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    let met: Vec<(&str, bool)> = reports
        .iter()
        .filter_map(|report| Some((report.variant.name, report.figure(Figure::GoalsMet)?.median >= 1.0)))
        .collect();
    if !met.is_empty() {
        let missed: Vec<&str> = met.iter().filter(|(_, is_met)| !is_met).map(|(name, _)| *name).collect();
        let list = if missed.is_empty() { "none".to_owned() } else { missed.join(", ") };
        let _ = writeln!(text, "goals met in {} of {} cases; missed: {list}", met.len() - missed.len(), met.len());
    }
    for report in reports.iter().filter(|report| !report.note().is_empty()) {
        let _ = writeln!(text, "{}: {}", report.variant.name, report.note());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(values: &[f64]) -> Report {
        let variant = Variant { name: "", subscribers: 1000, batch: Some(32) };
        let mut report = Report::new(Scenario::Fanout, "kubefan", variant, 1000);
        for value in values {
            let mut figures = Figures::default();
            figures.set(Figure::CpuPerDelivery, *value);
            figures.set(Figure::LatencyP99, value * 2.0);
            report.add(figures);
        }
        report
    }

    #[test]
    fn a_report_has_every_field_and_null_for_figures_that_were_not_measured() {
        let json = report(&[2.0, 1.0, 4.0]).to_json(&BenchOptions::default());
        assert_eq!((&json["scenario"], &json["batch"], &json["runs"]), (&json!("fanout"), &json!(32), &json!(3)));
        assert_eq!(json["cpu_us_per_delivery"], 2.0);
        assert_eq!(json["latency_ms"]["p99"], 4.0);
        assert_eq!(json["spread"]["cpu_us_per_delivery"], json!({"min": 1.0, "max": 4.0}));
        let fields = json.as_object().unwrap();
        assert!(fields.contains_key("floor_share") && json["floor_share"].is_null());
        assert!(json["latency_ms"].as_object().unwrap().contains_key("max"));
    }

    #[test]
    fn a_table_has_only_the_columns_that_were_measured() {
        let expected = "\
fanout: every subscriber receives every change, at full speed
SERVER    SUBSCRIBERS   BATCH   µs/delivery       p99 ms
kubefan          1000      32          2.00         4.00
                                 1.00..4.00   2.00..8.00
";
        assert_eq!(table(Scenario::Fanout, &[report(&[2.0, 1.0, 4.0])]), expected);
        assert_eq!(table(Scenario::Fanout, &[report(&[2.0])]).lines().count(), 3);
    }

    #[test]
    fn a_table_with_goals_names_the_cases_that_missed_them() {
        let case = |name, goals_met: &[f64]| {
            let variant = Variant { name, subscribers: 200, batch: None };
            let mut report = Report::new(Scenario::Hostile, "kubefan", variant, 1000);
            for met in goals_met {
                let mut figures = Figures::default();
                figures.set(Figure::GoalsMet, *met);
                report.add(figures);
            }
            report
        };
        let table = table(Scenario::Hostile, &[case("a", &[1.0, 0.0, 1.0]), case("b", &[0.0]), case("c", &[1.0])]);
        assert!(table.ends_with("goals met in 2 of 3 cases; missed: b\n"), "{table}");
    }
}
