//! The memory budget, by the configuration.

use std::sync::Arc;

use kubefan_informers::{
    Registry,
    memory_pressure::{MemoryBudget, keep_within},
};
use kubefan_server::transport::unread::Readers;

use super::component::Shared;
use crate::config::ServeConfig;

/// Keeps the process within its budget, if it has one.
pub(super) struct Memory {
    budget: Option<MemoryBudget>,
}

impl Memory {
    /// Takes the budget from the configuration, or else from the control group.
    pub(super) fn new(config: &ServeConfig) -> Self {
        Self { budget: MemoryBudget::new(config.serving.memory_bytes_max) }
    }

    /// Returns the budget, in bytes.
    pub(super) fn bytes_max(&self) -> Option<usize> {
        self.budget.as_ref().map(|budget| budget.bytes_max)
    }

    /// Limits caches and readers until kubefan stops.
    pub(super) fn build(self, shared: Shared<'_>, registry: &Arc<Registry>, readers: Arc<Readers>) {
        let Some(budget) = self.budget else { return };
        let end_unread = move || readers.end_some();
        shared.spawn(keep_within(registry.clone(), shared.metrics.clone(), budget, end_unread));
    }
}
