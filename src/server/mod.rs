//! What subscribers and operators speak to. Everything below is served from the [`crate::fanout::Catalog`] trait.

pub mod admin;
pub mod codec;
pub mod grpc;
pub mod health;
pub mod listen;
pub mod request;
pub mod session;
pub mod status;
