//! Callers, and what kubefan lets them read.

pub(crate) mod crafted;
pub(crate) mod crafted_calls;
mod identities;
pub(crate) mod matrix;
pub(crate) mod refusals;
mod requests;
pub(crate) mod revocation;
mod rows;
pub(crate) mod setup;
mod tricks;
mod world;

pub(crate) use identities::Who;
pub(crate) use world::World;
