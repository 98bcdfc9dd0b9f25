//! Metrics and logs.

#[cfg(feature = "cli")]
pub mod tracing;
