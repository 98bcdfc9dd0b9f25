//! Metrics, logs, traces and process statistics.

pub mod cgroup;
pub mod last_hour;
mod log_format;
pub mod metrics;
pub mod process;
pub mod requests;
pub mod series;
pub mod traces;
pub mod tracing;

pub use log_format::LogFormat;
