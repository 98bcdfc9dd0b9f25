//! Subscriptions: their starts, their backlogs, and their ways to continue.

mod backlog;
mod catch_up;
pub mod options;
mod progress;
mod start_point;
mod subscription;
mod try_subscribe;

pub use options::{Provided, Start, SubscribeOptions};
pub use progress::{Observed, Observer};
pub use subscription::{BATCH_BYTES_MAX, Subscription};
pub use try_subscribe::{NotSubscribed, SubscribeNeed};
