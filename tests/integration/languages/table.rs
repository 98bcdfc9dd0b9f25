//! The table of results, as Markdown.

use std::time::Duration;

use super::{script::Step, step_run::Outcome};

/// One row for each step, one column for each language, and the reasons of missing features.
pub(super) fn render(languages: &[&str], rows: &[(&Step, Vec<Outcome>)]) -> String {
    let mut text = format!("\n| step | {} |\n|---|{}", languages.join(" | "), "---|".repeat(languages.len()));
    let mut reasons: Vec<String> = Vec::new();
    for (step, outcomes) in rows {
        text += &format!("\n| {} |", step.name.replace('_', " "));
        for (language, outcome) in languages.iter().zip(outcomes) {
            let cell = match outcome {
                Outcome::Ok => "ok",
                Outcome::Failed(_) => "FAILED",
                Outcome::NotOffered(reason) => {
                    let reason = format!("{language}: {reason}");
                    if !reasons.contains(&reason) {
                        reasons.push(reason);
                    }
                    "not offered"
                }
            };
            text += &format!(" {cell} |");
        }
    }
    let count = |wanted: &str| {
        let is = |outcome: &&Outcome| match outcome {
            Outcome::Ok => wanted == "ok",
            Outcome::Failed(_) => wanted == "failed",
            Outcome::NotOffered(_) => wanted == "not offered",
        };
        rows.iter().flat_map(|(_, outcomes)| outcomes).filter(is).count()
    };
    let [ok, failed, not_offered] = ["ok", "failed", "not offered"].map(count);
    text += &format!("\n\n{} steps: {ok} ok, {failed} failed, {not_offered} not offered", rows.len());
    for reason in reasons {
        text += &format!("\nnot offered: {reason}");
    }
    text
}

/// The outcome of one step, while the others still run.
pub(super) fn line(languages: &[&str], step: &Step, outcomes: &[Outcome], took: Duration) -> String {
    let failed: Vec<String> = languages
        .iter()
        .zip(outcomes)
        .filter_map(|(language, outcome)| match outcome {
            Outcome::Failed(why) => Some(format!("\n    {language}: {why}")),
            Outcome::Ok | Outcome::NotOffered(_) => None,
        })
        .collect();
    let verdict = if failed.is_empty() { "ok" } else { "FAILED" };
    format!("{verdict} {} ({:.1} s){}", step.name, took.as_secs_f64(), failed.concat())
}
