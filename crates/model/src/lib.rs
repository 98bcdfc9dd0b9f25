//! The data model every layer shares: names, versions, objects, events and selectors. Pure: no I/O, no clock.

pub mod event;
pub mod fields;
pub mod format;
pub mod human_duration;
mod media;
pub mod object;
pub mod packer;
pub mod projection;
pub mod protobuf;
pub mod resource;
pub mod selection;
pub mod selector;
pub mod table;
pub mod version;

pub use media::Media;
pub use resource::{GroupVersionResource, ObjectKey, Scope};
pub use version::ResourceVersion;
