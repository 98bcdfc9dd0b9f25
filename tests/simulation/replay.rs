//! Plays one seed and prints its story: the faults, the messages of each subscriber around the
//! first violation, and the guarantee that this breaks.

use std::process::ExitCode;

use super::{
    history::Observation,
    informer::Observed,
    seed::{Options, Report, run_seed},
};

/// The entries that are shown before a violation. A fifth as many are shown after it.
const AROUND: usize = 25;

/// Plays a seed and prints its story.
pub(crate) fn replay(seed: u64) -> ExitCode {
    let report = run_seed(seed, &Options::default());
    println!("{}", story(&report));
    match report.failure() {
        None => ExitCode::SUCCESS,
        Some(_) => ExitCode::FAILURE,
    }
}

/// All faults and all observations except events and bookmarks, ordered by time.
pub(crate) fn story(report: &Report) -> String {
    let mut lines: Vec<_> =
        report.story.iter().map(|(at, what)| (*at, format!("{:>10.3} s  {what}", at.as_secs_f64()))).collect();
    for history in &report.histories {
        for entry in &history.entries {
            if !matches!(entry.what, Observation::Event(_) | Observation::Bookmark) {
                lines.push((entry.at, format!("{entry}  [subscriber {}]", history.spec.number)));
            }
        }
    }
    for history in &report.informers {
        for entry in &history.entries {
            if !matches!(entry.what, Observed::Call { .. } | Observed::Read { .. }) {
                lines.push((entry.at, format!("{entry}  [informer {}]", history.spec.number)));
            }
        }
    }
    lines.sort_by_key(|(at, _)| *at);
    let mut story: Vec<_> = lines.into_iter().map(|(_, line)| line).collect();
    story.push(format!(
        "seed {}: {} writes, {} faults, quiet after {:?}",
        report.seed, report.writes, report.faults, report.converged_in
    ));
    story.extend(report.counts.iter().map(|(name, count)| format!("  {count:>8}  {name}")));
    for (number, violation) in report.violations.iter().take(1) {
        let lines = |from: usize, to: usize| -> Vec<String> {
            match number.checked_sub(report.histories.len()) {
                None => report.histories[*number].entries[from..to].iter().map(ToString::to_string).collect(),
                Some(informer) => {
                    report.informers[informer].entries[from..to].iter().map(ToString::to_string).collect()
                }
            }
        };
        let entries = match number.checked_sub(report.histories.len()) {
            None => report.histories[*number].entries.len(),
            Some(informer) => report.informers[informer].entries.len(),
        };
        let from = violation.entry.saturating_sub(AROUND);
        let to = (violation.entry + AROUND / 5).min(entries);
        story.push(format!("\nwhat subscriber {number} received:"));
        for (i, entry) in lines(from, to).into_iter().enumerate() {
            let mark = if from + i == violation.entry { ">" } else { " " };
            story.push(format!("{mark} {entry}"));
        }
    }
    story.extend(report.panics.iter().map(|panic| format!("\na task panicked: {panic}")));
    let violations = report.violations.iter().map(|(_, violation)| violation).chain(&report.hasty);
    story.extend(violations.map(|violation| format!("\n{violation}")));
    story.join("\n")
}
