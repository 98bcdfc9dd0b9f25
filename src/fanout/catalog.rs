//! What servers see of everything above them: one small trait, so that they are tested without an upstream.

use std::{future::Future, sync::Arc};

use super::{hub::Hub, outcome::Refusal};
use crate::{
    model::{GroupVersionResource, Scope, fields::FieldTable, object::ObjectParser},
    proto::v1alpha1::ResourceStatus,
};

/// A resource that is served, in one scope.
#[derive(Clone)]
pub struct Served {
    /// Its full name.
    pub gvr: GroupVersionResource,
    /// Whether its objects have a namespace.
    pub namespaced: bool,
    /// What it is cached for.
    pub scope: Scope,
    /// The fields that selectors may name.
    pub fields: Arc<FieldTable>,
    /// How its objects are read.
    pub parser: Arc<ObjectParser>,
    /// State, history and views.
    pub hub: Arc<Hub>,
}

/// The resources that can be asked for.
pub trait Catalog: Send + Sync + 'static {
    /// Finds the cache for a resource, by any name that kubectl takes where `group` and `version` are empty; may start it.
    /// `namespace` is the one asked for, empty for all.
    fn find(
        &self,
        group: &str,
        version: &str,
        resource: &str,
        namespace: &str,
    ) -> impl Future<Output = Result<Served, Refusal>> + Send;

    /// Every cache, ordered by name.
    fn list(&self) -> Vec<ResourceStatus>;
}
