//! Limits that are shared fairly: places for streams, reads and requests, and the gate for requests
//! that pin state while it is sent.
//!
//! - [`fair_share`]: a limited number of places, in equal parts among those that hold them.
//! - [`fair_queue`]: a queue in which users, workloads and connections take turns.
//! - [`gate`]: permits for snapshots, lists, catch-ups, backfills and transfers to peers.
//! - [`permit_kind`]: the texts with which permits are refused.

pub mod fair_queue;
pub mod fair_share;
pub mod gate;
pub mod permit_kind;

pub use fair_share::{FairPermit, FairPool, Holder, PermitLimits};
pub use gate::{Gate, GateLimits, GatePermit};
pub use permit_kind::PermitKind;
