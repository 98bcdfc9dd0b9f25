//! Compares the histories of the subscribers with the apiserver's own watch.

use std::collections::{BTreeMap, HashSet};

use super::subscribers::{Change, History};

/// A part of the experiment, by its times in microseconds.
#[derive(Clone, Debug)]
pub(super) struct Phase {
    pub(super) name: &'static str,
    pub(super) from: u64,
    pub(super) until: u64,
}

/// Differences between the histories and the truth, over all subscribers.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Differences {
    pub(super) lost: usize,
    pub(super) repeated: usize,
    pub(super) out_of_order: usize,
    /// Events that the apiserver has not sent.
    pub(super) unknown: usize,
}

/// The times from a write to its readers in one phase, in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Latency {
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) longest: f64,
}

/// Compares the events after each subscriber's initial state, up to the version `end`.
pub(super) fn differences(truth: &[Change], histories: &[History], end: u64) -> Differences {
    let mut all = Differences::default();
    for history in histories {
        let expected: Vec<Change> =
            truth.iter().copied().filter(|(_, version)| (history.from + 1..=end).contains(version)).collect();
        let got: Vec<Change> = history.events.iter().map(|(change, _)| *change).filter(|(_, at)| *at <= end).collect();
        if got == expected {
            continue;
        }
        let distinct: HashSet<Change> = got.iter().copied().collect();
        let known: HashSet<Change> = expected.iter().copied().collect();
        all.lost += known.difference(&distinct).count();
        all.unknown += distinct.difference(&known).count();
        all.repeated += got.len() - distinct.len();
        all.out_of_order += got.windows(2).filter(|pair| pair[1].1 < pair[0].1).count();
    }
    all
}

/// The latencies of the events that were written in a phase. `written` has the time of each
/// version.
pub(super) fn latency<'a>(
    phase: &Phase,
    written: &BTreeMap<u64, u64>,
    histories: impl Iterator<Item = &'a History>,
) -> Latency {
    let mut micros: Vec<u64> = Vec::new();
    for ((_, version), at) in histories.flat_map(|history| &history.events) {
        if let Some(sent) = written.get(version).filter(|sent| (phase.from..phase.until).contains(sent)) {
            micros.push(at.saturating_sub(*sent));
        }
    }
    micros.sort_unstable();
    let at = |part: f64| micros.get((micros.len() as f64 * part) as usize).or(micros.last()).copied().unwrap_or(0);
    let ms = |part: f64| at(part) as f64 / 1000.0;
    Latency { p50: ms(0.5), p99: ms(0.99), longest: ms(1.0) }
}
