//! What the unit tests of several packages share. It depends on no package of kubefan, so that they
//! can use it without a circle.

#![allow(clippy::unwrap_used, reason = "only tests use it")]

pub mod certificates;
pub mod scripted_server;
