//! The watch cache: the current objects, the recent events, and the one writer of both.
//!
//! Everything here is plain data without locks, clocks or I/O; [`crate::fanout::Hub`] publishes it to readers.

pub mod backfill;
pub mod comparison;
pub mod conflated;
pub mod history;

pub mod ring;
pub mod store;
pub mod writer;

pub use backfill::Backfill;
pub use conflated::{ConflatedHistory, PriorState};
pub use history::{History, HistoryCopy, HistorySource};
pub use ring::{EventRing, Expired, Gap, Record, RingLimits};
pub use store::Store;
pub use writer::{CacheWriter, Commit, Update, UpdateError};
