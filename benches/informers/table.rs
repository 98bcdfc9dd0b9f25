//! The figures of a client, and the table of all.

use std::fmt::Write;

use crate::kinds::Kind;

/// Cost of one client.
#[derive(Debug, Clone, Default)]
pub(crate) struct Figures {
    pub(crate) micros_per_object: f64,
    pub(crate) micros_per_event: f64,
    /// The calls that it made of the changes.
    pub(crate) events: f64,
    /// Resident before the start. The other bytes are in addition to these.
    pub(crate) base_bytes: f64,
    pub(crate) synced_bytes: f64,
    /// The highest value until it was synced.
    pub(crate) peak_bytes: f64,
    pub(crate) after_bytes: f64,
    /// Go: after a collection that returns free memory to the system.
    pub(crate) collected_bytes: Option<f64>,
}

impl Figures {
    /// The median of each figure.
    pub(crate) fn median(runs: &[Self]) -> Self {
        let of = |figure: fn(&Self) -> f64| {
            let mut values: Vec<_> = runs.iter().map(figure).collect();
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or_default()
        };
        let is_collected = runs.iter().any(|run| run.collected_bytes.is_some());
        Self {
            micros_per_object: of(|run| run.micros_per_object),
            micros_per_event: of(|run| run.micros_per_event),
            events: of(|run| run.events),
            base_bytes: of(|run| run.base_bytes),
            synced_bytes: of(|run| run.synced_bytes),
            peak_bytes: of(|run| run.peak_bytes),
            after_bytes: of(|run| run.after_bytes),
            collected_bytes: is_collected.then(|| of(|run| run.collected_bytes.unwrap_or_default())),
        }
    }
}

/// A Markdown table. The ratios in brackets are to kube-rs with the same type.
pub(crate) fn render(rows: &[(Kind, Figures)]) -> String {
    let mut text = String::from(
        "| | µs per initial object | µs per change | MB when synced | MB at the peak of it | MB after the changes |\n\
         |---|---|---|---|---|---|\n",
    );
    for (kind, figures) in rows {
        let baseline = rows.iter().find(|(other, _)| *other == kind.baseline()).map(|(_, figures)| figures);
        let cell = |figure: fn(&Figures) -> f64, unit: f64| {
            let value = figure(figures);
            match baseline.map(figure) {
                Some(other) if other > 0.0 => format!("{:.1} ({:.2})", value / unit, value / other),
                _ => format!("{:.1}", value / unit),
            }
        };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} |",
            kind.title(),
            cell(|figures| figures.micros_per_object, 1.0),
            cell(|figures| figures.micros_per_event, 1.0),
            cell(|figures| figures.synced_bytes, 1e6),
            cell(|figures| figures.peak_bytes, 1e6),
            cell(|figures| figures.after_bytes, 1e6),
        );
    }
    for (kind, figures) in rows {
        let _ = write!(text, "\n{}: {:.1} MB before the start", kind.title(), figures.base_bytes / 1e6);
        if let Some(bytes) = figures.collected_bytes {
            let _ = write!(text, ", {:.1} MB after a collection", bytes / 1e6);
        }
        let _ = write!(text, "; {} calls of the changes", figures.events);
    }
    text
}
