//! The caches: one per resource, scope and encoding, and the policies that fill, prove, check and
//! drop them.
//!
//! The files form layers. Each uses only those above it:
//!
//! ```text
//!   context                          clients and options that all caches share
//!   schema, discovered, allowance,   the facts and limits of one resource, and its configured media
//!     resource_media
//!   backfill, cluster_version,       requests to upstream on behalf of one cache
//!     consistency, warm_start
//!   informer, entry                  the task that fills a cache; a cache as it is stored
//!   registry                         the map of all caches
//!   configured, on_demand,           policies: which caches exist, are checked, limited, offered
//!     self_check, memory_pressure,     to peers, and reported as ready
//!     peer_source, readiness
//!   catalog, run                     the servers' view of the registry; its background tasks
//! ```

mod allowance;
mod backfiller;
mod cache_entry;
mod configured;
mod consistency;
mod context;
mod discovered;
mod informer;
mod lookup;
pub mod memory_pressure;
mod on_demand;
mod peer_source;
mod readiness;
mod registry;
mod resource_media;
mod run;
mod schema;
mod self_check;
mod version_lookup;
mod warm_start;

pub use allowance::{EncodingLimits, OnDemandLimits, SizeLimits};
pub use context::CacheContext;
pub use readiness::Readiness;
pub use registry::{Registry, RegistryOptions};
pub use resource_media::ConfiguredResource;
