//! Metrics and logs.

pub mod metrics;
#[cfg(feature = "cli")]
pub mod tracing;
