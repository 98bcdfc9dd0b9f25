//! The client of the apiserver, or of the next kubefan on the way to it: one list and watch per
//! resource and scope, discovery, and passthrough.

pub mod acting_as;
pub mod client;
pub mod direct_apiserver;
pub mod discovery;
pub mod error;
pub mod fallback;
mod grpc_reflector;
pub mod identity_headers;
pub mod kubefan_client;
pub mod metadata;
pub mod passthrough;
pub mod reflector;
pub mod source;
mod source_reflector;
mod tiered_reflector;
mod transport;

pub use client::{ReviewKind, Upstream, identity, lines};
pub use discovery::resource_index;
pub use error::UpstreamError;
pub use reflector::Reflector;
pub use source::Source;
pub use source_reflector::SourceReflector;
pub use tiered_reflector::TieredReflector;
pub use transport::settings;
