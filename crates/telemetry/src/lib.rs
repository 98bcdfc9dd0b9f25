//! Metrics, logs, traces and process statistics.

pub mod alarms;
pub mod cgroup;
pub mod last_hour;
pub mod logging;
pub mod metrics;
pub mod process;
pub mod requests;
pub mod series;
pub mod traces;

pub use logging::LogFormat;
