//! The data model that every layer shares: names, versions, objects, events and selectors. Pure: no
//! I/O and no clock of its own.

pub mod api_path;
pub mod event;
pub mod fields;
pub mod format;
pub mod human_duration;
mod include_object;
mod media;
pub mod object;
pub mod packer;
pub mod projection;
pub mod protobuf;
mod read_spec;
pub mod resource;
pub mod sampler;
pub mod selection;
pub mod selector;
pub mod table;
pub mod version;

pub use api_path::ApiPath;
pub use media::Media;
pub use read_spec::{ReadSpec, SelectorTexts};
pub use resource::{GroupVersionResource, ObjectKey, Scope};
pub use version::ResourceVersion;
