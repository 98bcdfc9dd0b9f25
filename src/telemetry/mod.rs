//! Metrics and logs.

pub mod metrics;
pub mod process;
#[cfg(feature = "cli")]
pub mod tracing;
