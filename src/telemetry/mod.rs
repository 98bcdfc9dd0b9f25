//! Metrics and logs.

pub mod metrics;
