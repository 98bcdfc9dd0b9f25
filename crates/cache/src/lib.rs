//! The watch cache: the current objects, the recent events, and the one writer of both.
//!
//! Everything here is plain data without clocks or I/O, and without locks but for the index that a
//! gap makes of its events, and the list of a budget's tenants. `kubefan_fanout::Hub` owns the
//! lock and publishes it to readers. Caches share only the counts of their budgets.

use std::time::Duration;

pub mod backfill;
pub mod budget;
pub mod column_build;
pub mod columns;
pub mod comparison;
mod compression_budget;
pub mod conflated;
pub mod equality_term;
pub mod gap;
pub mod history;
pub mod history_index;
pub mod kube_encoding;
pub mod postings;
pub mod published;
pub mod refusal;
pub mod relist_reason;
pub mod resume;
pub mod ring;
pub mod sliced_scan;
pub mod store;
pub mod stream_end;
pub mod tenant_bytes;
pub mod warnings;
pub mod writer;

pub use backfill::Backfill;
pub use budget::{Budgets, ProcessBudgets, RetainedLimits};
pub use compression_budget::CompressionBudget;
pub use conflated::{ConflatedHistory, PriorState};
pub use gap::Gap;
pub use history::{History, HistoryCopy, PriorStep};
pub use published::{CachedState, Phase, PublishedCache};
pub use refusal::Refusal;
pub use relist_reason::RelistReason;
pub use resume::{HistorySource, OnExpired, OnLag};
pub use ring::{EventRing, Expired, HistoryRecord, RingLimits};
pub use store::Store;
pub use stream_end::StreamEnd;
pub use writer::{CacheWriter, Commit, ConflatedChange, Update, UpdateError};

/// Time to wait for more events of a version. A watch brings the events of one version together,
/// and nothing need follow them in a quiet cluster. A cached resource has a bookmark in this time
/// (`bookmarkFrequency` of the apiserver's cacher: 2 seconds before a watch ends).
pub const SAME_VERSION_WAIT: Duration = Duration::from_millis(1_500);
