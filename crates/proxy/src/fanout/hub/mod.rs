//! The meeting point of one writer and many subscribers, for one resource and scope.

pub mod core;
mod status;

pub use self::core::{COALESCE_MAX, CachePosition, ClusterName, Hub, HubOptions};
pub use status::{HubStatus, Phase};
