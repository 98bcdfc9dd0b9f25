//! The metrics of states on disk.

use prometheus::{Error, IntCounter, IntCounterVec};

use super::{labels::SavedStart, register::Registrar};

/// The metrics of all caches.
pub(super) struct SavedStateFamilies {
    starts: IntCounterVec,
    bytes: IntCounterVec,
    failures: IntCounterVec,
}

impl SavedStateFamilies {
    /// Registers the metrics. `labels` name a cache.
    pub(super) fn new(register: &Registrar<'_>, labels: [&'static str; 4]) -> Result<Self, Error> {
        let [group, resource, namespace, media] = labels;
        Ok(Self {
            starts: register.counters(
                "kubefan_saved_starts_total",
                "Attempts to start a cache from its saved state, by result.",
                &[group, resource, namespace, media, "result"],
            )?,
            bytes: register.counters("kubefan_saved_bytes_total", "Bytes of state written to disk.", &labels)?,
            failures: register.counters(
                "kubefan_save_failures_total",
                "States that could not be written to disk.",
                &labels,
            )?,
        })
    }

    /// Creates the counters of one cache, at zero.
    pub(super) fn of(&self, [group, resource, namespace, media]: [&str; 4]) -> SavedStateMetrics {
        let of_start = |result| self.starts.with_label_values(&[group, resource, namespace, media, result]);
        SavedStateMetrics {
            starts: SavedStart::ALL.map(of_start),
            bytes: self.bytes.with_label_values(&[group, resource, namespace, media]),
            failures: self.failures.with_label_values(&[group, resource, namespace, media]),
        }
    }
}

/// The metrics of the saved state of one cache.
pub struct SavedStateMetrics {
    /// In the order of [`SavedStart::ALL`].
    starts: [IntCounter; 4],
    bytes: IntCounter,
    failures: IntCounter,
}

impl SavedStateMetrics {
    /// Counts an attempt to start from the saved state.
    pub fn started(&self, result: SavedStart) {
        self.starts[result as usize].inc();
    }

    /// Counts the bytes of a state that was written to disk.
    pub fn saved(&self, bytes: u64) {
        self.bytes.inc_by(bytes);
    }

    /// Counts a state that could not be written to disk.
    pub fn failed(&self) {
        self.failures.inc();
    }
}
