//! One list and watch per resource and scope.

pub mod client;
mod cluster_version;
mod codec;
mod connector;
pub mod discovery;
pub mod error;
pub mod identity;
pub mod lines;
pub mod metadata;
pub mod passthrough;
mod pool;
pub mod reflector;
mod renewal;
pub mod resource_index;
pub mod settings;
mod token_file;
mod transport;
pub use crate::cache::warnings;

pub use client::Upstream;
pub use error::UpstreamError;
pub use kubefan_common::backoff;
pub use reflector::Reflector;
