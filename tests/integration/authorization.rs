//! Callers, and what kubefan lets them read.

mod admin;
mod commands;
mod crafted;
mod crafted_calls;
mod fleet;
mod identities;
mod matrix;
mod refusals;
mod requests;
mod revocation;
mod rights;
mod rows;
mod service_accounts;
mod tricks;
mod world;

pub(crate) use identities::Who;
pub(crate) use world::World;
