//! The caches: which there are, what fills each of them, and when they go.

mod backfill;
mod catalog;
mod cluster_version;
mod consistency;
pub mod informer;
pub mod memory_pressure;
pub mod on_demand;
pub mod registry;
mod self_check;
mod warm_start;
