//! Subscriptions: where one starts, what it is sent first, and how it continues.

pub(in crate::fanout) mod backlog;
mod catch_up;
pub mod options;
mod start;
mod subscription;

pub use options::{OnExpired, OnLag, Start, SubscribeOptions};
pub use subscription::Subscription;
