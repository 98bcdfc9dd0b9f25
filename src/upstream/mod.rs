//! One list and watch per resource and scope.

pub mod client;
mod codec;
pub mod discovery;
pub mod error;
pub mod identity;
pub mod lines;
pub mod metadata;
pub mod reflector;
pub mod resource_index;
pub mod settings;
mod token_file;
mod transport;

pub use crate::backoff;
pub use client::Upstream;
pub use error::UpstreamError;
pub use reflector::Reflector;
