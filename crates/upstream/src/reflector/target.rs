//! The resource and scope that a reflector lists and watches.

use kubefan_model::{GroupVersionResource, Scope};

/// The objects to list and watch.
#[derive(Debug, Clone)]
pub struct Target {
    /// The resource.
    pub gvr: GroupVersionResource,
    /// Kind of the objects, which the items of a list do not contain.
    pub kind: String,
    /// Whether its objects have a namespace.
    pub namespaced: bool,
    /// The whole cluster, or one namespace.
    pub scope: Scope,
    /// A field selector that limits what is cached; empty for everything.
    pub field_selector: String,
}
