//! Metrics and logs.

pub mod metrics;
pub mod process;
pub mod requests;
#[cfg(feature = "cli")]
pub mod tracing;
