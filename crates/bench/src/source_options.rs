//! The objects that a source has.

use kubefan_sim::workload::WorkloadOptions;

/// The objects of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SourceOptions {
    pub(super) workload: WorkloadOptions,
    /// Approximate JSON size of each pod in bytes; `None` for the workload's own.
    pub(super) object_bytes: Option<usize>,
    pub(super) seed: u64,
}
