//! The caches: one per resource, scope and encoding, and the policies that fill, prove, check and
//! drop them.
//!
//! The files form layers. Each uses only those above it:
//!
//! ```text
//!   list_scheduler                   the order of lists upstream
//!   saved_states                     the states on disk, and the hubs that serve them
//!   upstream_context                 clients and options that all caches share
//!   retry, planned_relist,           retries, relists, limits and failure logs of one cache
//!     read_limit, failure_log
//!   batched_requests, bookmark_pause shared requests and waits of readers
//!   shared_bytes, on_demand_eviction shared limits of caches on demand
//!   discovered, cache_quota,         the facts and limits of one resource, its configured media, a
//!     resource_media, missing_right    missing right
//!   cached_schema, shape, schema     the schema and shape of a cache, and checks for changes
//!   saved_resource                   the start of a cache from a state on disk
//!   backfiller, version_lookup,      requests to upstream on behalf of one cache
//!     state_comparison, consistency,
//!     warm_start
//!   stop_reason, informer,           the task that fills a cache; a cache as it is stored
//!     cache_entry
//!   cache_map                        all caches, by identity and by resource
//!   registry                         the map of all caches, and the task of each
//!   configured, on_demand,           policies: create, check, limit and offer caches (to peers),
//!     self_check, memory_pressure,     and report readiness; save them
//!     offered_caches, readiness,
//!     state_saver
//!   lookup, background_tasks         the servers' view of the registry; its background tasks
//! ```

mod backfiller;
mod background_tasks;
mod batched_requests;
mod bookmark_pause;
mod cache_entry;
mod cache_map;
mod cache_quota;
mod cached_schema;
mod configured;
mod consistency;
mod discovered;
mod failure_log;
mod informer;
mod list_scheduler;
mod lookup;
pub mod memory_pressure;
mod missing_right;
mod offered_caches;
mod on_demand;
mod on_demand_eviction;
mod planned_relist;
mod read_limit;
mod readiness;
mod registry;
mod resource_media;
mod retry;
mod saved_resource;
mod saved_states;
mod schema;
mod self_check;
mod shape;
mod shared_bytes;
mod state_comparison;
mod state_saver;
mod stop_reason;
mod upstream_context;
mod version_lookup;
mod warm_start;

pub use cache_quota::{EncodingLimits, OnDemandLimits, SizeLimits};
pub use list_scheduler::ListScheduler;
pub use lookup::CacheCatalog;
pub use readiness::Readiness;
pub use registry::{Registry, RegistryOptions};
pub use resource_media::ConfiguredResource;
pub use saved_states::SavedStates;
pub use state_saver::{SaveLimits, StateSaver};
pub use upstream_context::CacheContext;
