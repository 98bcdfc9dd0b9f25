//! Queues: of deltas between a reflector and an informer, and of keys between handlers and workers.

mod consume;
mod delayed;
mod delta;
mod delta_fifo;
mod rate_limiter;
mod real_fifo;
#[cfg(test)]
mod testing;
mod work_queue;
mod work_state;

pub use delta::{Delta, KnownObjects};
pub use delta_fifo::DeltaFifo;
pub use rate_limiter::{BucketRateLimiter, ItemExponentialFailureRateLimiter, MaxOfRateLimiter, RateLimiter};
pub use real_fifo::RealFifo;
pub use work_queue::{WorkItem, WorkQueue};
