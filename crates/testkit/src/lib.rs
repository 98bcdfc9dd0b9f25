//! Helpers that unit tests of several packages share. They depend on no package of kubefan, so that
//! each package can use them without a circle.

#![allow(clippy::unwrap_used, reason = "only tests use it")]

pub mod certificates;
pub mod scripted_server;
