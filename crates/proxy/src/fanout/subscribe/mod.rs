//! Subscriptions: where one starts, what it is sent first, and how it continues.

mod backlog;
mod catch_up;
mod entry;
pub mod options;
mod start_point;
mod subscription;

pub use entry::{Need, NotSubscribed};
pub use options::{Provided, Start, SubscribeOptions};
pub use subscription::Subscription;
