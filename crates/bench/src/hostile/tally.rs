//! Results of an attack: outcomes by name, and bytes.

use std::{
    collections::BTreeMap,
    fmt::Write,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// Kinds of outcomes that are told apart; more are counted together.
const OUTCOMES_MAX: usize = 12;
/// The name of all further outcomes.
const OTHER: &str = "other";

/// Counts the results of an attack. All its connections share one.
#[derive(Default)]
pub(super) struct Tally {
    outcomes: Mutex<BTreeMap<String, u64>>,
    bytes: AtomicU64,
}

impl Tally {
    /// Counts an outcome, such as an HTTP status.
    pub(super) fn count(&self, outcome: &str) {
        let mut outcomes = self.outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = outcomes.contains_key(outcome) || outcomes.len() < OUTCOMES_MAX;
        *outcomes.entry(if is_known { outcome } else { OTHER }.to_owned()).or_default() += 1;
    }

    /// Counts bytes that were read.
    pub(super) fn add_bytes(&self, count: usize) {
        self.bytes.fetch_add(count as u64, Relaxed);
    }

    /// The outcomes with their numbers, the most frequent first, and the bytes.
    pub(super) fn text(&self) -> String {
        let outcomes = self.outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sorted: Vec<(&String, &u64)> = outcomes.iter().collect();
        sorted.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let mut text = String::new();
        for (outcome, count) in sorted {
            let _ = write!(text, "{count} {outcome}, ");
        }
        let _ = write!(text, "{} kB read", self.bytes.load(Relaxed) / 1000);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_outcomes_come_first_and_their_kinds_are_bounded() {
        let tally = Tally::default();
        for outcome in ["200", "429", "429"] {
            tally.count(outcome);
        }
        tally.add_bytes(3_500);
        assert_eq!(tally.text(), "2 429, 1 200, 3 kB read");
        for number in 0..100 {
            tally.count(&format!("outcome {number}"));
        }
        assert!(tally.text().starts_with("90 other, "), "{}", tally.text());
    }
}
