//! The client of the apiserver: one list and watch per resource and scope, discovery, and
//! passthrough.

pub mod client;
mod cluster_version;
mod codec;
mod connection;
mod connector;
pub mod discovery;
pub mod error;
pub mod identity;
mod identity_check;
pub mod lines;
pub mod metadata;
pub mod passthrough;
mod pool;
pub mod reflector;
mod reflector_error;
mod renewal;
pub mod resource_index;
pub mod settings;
mod target;
mod token_file;
mod transport;
pub mod warnings;

pub use client::Upstream;
pub use error::UpstreamError;
pub use kubefan_common::backoff;
pub use reflector::Reflector;
