//! The common part of reviews of tokens and of reads.
//!
//! The hazard is a crowd: thousands of clients that return at once, or one that sends random
//! tokens, must neither flood the apiserver nor keep others waiting. So a verdict is kept for a
//! while (`verdict_cache`) in a place that tenants share (`fair_entries`), all who ask the same
//! wait for one review (`in_flight`), and reviews are sent at a limited rate, for which callers
//! take turns (`review_queue`).
//!
//! [`reviews`] puts these together, and keeps known callers known while the apiserver is away.

mod fair_entries;
#[cfg(test)]
pub(crate) mod fake;
mod in_flight;
mod review_queue;
pub mod reviews;
mod verdict_cache;

pub use review_queue::QueueLimits;
pub use reviews::{Review, ReviewError, Reviews, ReviewsOptions};
pub use verdict_cache::Outcome;
