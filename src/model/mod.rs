//! The data model every layer shares: names, versions, objects, events and selectors. Pure: no I/O, no clock.

#[cfg(feature = "server")]
pub mod event;
pub mod fields;
pub mod format;
#[cfg(any(feature = "server", feature = "cli"))]
pub(crate) mod human_duration;
mod media;
#[cfg(feature = "server")]
pub mod object;
#[cfg(feature = "server")]
pub mod packer;
pub mod projection;
#[cfg(feature = "server")]
pub mod protobuf;
pub mod resource;
#[cfg(feature = "server")]
pub mod selection;
pub mod selector;
#[cfg(feature = "server")]
pub mod table;
pub mod version;

pub use media::Media;
pub use resource::{GroupVersionResource, ObjectKey, Scope};
pub use version::ResourceVersion;
