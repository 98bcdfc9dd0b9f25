//! From one event to many subscribers: views shared by equal subscriptions, and cursors into their logs.
//!
//! The hub is the only place where state, history and views change, all in one critical section per commit. Nobody waits for a
//! subscriber: a subscription pulls, and a wake-up carries no data.

pub mod bell;
pub mod block;
pub mod budget;
pub mod catalog;
mod catch_up;
pub mod encoder;
pub mod frame;
pub mod gate;
pub mod generation;
pub mod hub;
pub mod index;
pub mod log;
pub mod outcome;
pub mod pacer;
pub mod pieces;
mod prelude;
pub mod subscription;
mod sync;
pub mod terms;
pub mod view;
mod views;

#[cfg(test)]
mod tests;

pub use bell::{Bell, Line, Rung};
pub use catalog::{Catalog, Patience, Served};
pub use gate::{Gate, GateLimits, Pass};
pub use hub::{Ahead, Hub, HubOptions, HubStatus, Phase};
pub use outcome::{Refusal, StreamEnd};
pub use pieces::Pieces;
pub use subscription::Subscription;
pub use terms::{OnExpired, OnLag, Start, Terms};
