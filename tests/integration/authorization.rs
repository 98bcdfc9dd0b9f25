//! Callers, and the reads that kubefan allows them.

pub(crate) mod admin;
pub(crate) mod crafted;
pub(crate) mod crafted_calls;
pub(crate) mod fleet;
mod identities;
pub(crate) mod matrix;
pub(crate) mod refusals;
mod requests;
pub(crate) mod revocation;
pub(crate) mod rights;
mod rows;
pub(crate) mod service_accounts;
pub(crate) mod setup;
mod tricks;
mod world;

pub(crate) use identities::Who;
pub(crate) use world::World;
