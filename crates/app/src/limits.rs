//! The limits that follow from the configuration and from the process's own limits, decided once,
//! at the start.

use super::{memory::Memory, open_files};
use crate::config::ServeConfig;

/// Limits of this process.
pub(super) struct Limits {
    /// Connections of the data port.
    pub(super) connections_max: usize,
    /// The memory budget.
    pub(super) memory: Memory,
}

impl Limits {
    /// Decides the limits. `open_files` is the limit of open files; `None` if there is none.
    pub(super) fn new(config: &ServeConfig, open_files: Option<usize>) -> Self {
        let memory = Memory::new(config);
        let connections_max = open_files::connections_max(config, open_files, memory.bytes_max());
        Self { connections_max, memory }
    }
}
