//! Metrics and logs.

pub mod metrics;
pub mod process;
pub mod requests;
pub mod tracing;
