//! The bytes around objects in lists and watch events of the Kubernetes API, in each encoding:
//! JSON, protobuf and Table.
//!
//! These are pure functions over model types. The objects' own bytes come from the cache and are
//! shared, never rewritten; only their surroundings are written here. The hazard is a client that
//! compares bytes or relies on field order, so the order of fields is the apiserver's.

pub mod list;
pub mod watch;
