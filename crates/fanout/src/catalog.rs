//! The servers' view of the caches: one small trait, so that servers are tested without an
//! upstream.

use std::{any::Any, sync::Arc};

use async_trait::async_trait;
use kubefan_cache::{Backfill, Refusal};
use kubefan_common::{proto::v1alpha1::ResourceStatus, sync::watch};
use kubefan_model::{
    GroupVersionResource, Media, ObjectKey, ResourceVersion, Scope, fields::FieldTable, object::ObjectParser,
    protobuf::kinds, selection::Selection,
};
use tokio::time::Instant;

use crate::hub::{Fresh, Hub};

/// A resource that is served in one scope.
#[derive(Clone)]
pub struct Served {
    /// Full name of the resource.
    pub gvr: GroupVersionResource,
    /// Whether its objects are namespaced.
    pub namespaced: bool,
    /// The scope that is cached.
    pub scope: Scope,
    /// The fields that field selectors may name.
    pub fields: Arc<FieldTable>,
    /// The kind of its lists, which a CRD may choose.
    pub list_kind: Arc<str>,
    /// Reads its objects, in their encoding.
    pub parser: Arc<ObjectParser>,
    /// State, history and views.
    pub hub: Arc<Hub>,
    /// Counts the reader's tenant among those that read the cache, until it is dropped. `None` if
    /// nothing depends on that.
    pub reading: Option<Arc<dyn Any + Send + Sync>>,
}

impl Served {
    /// Whether it is a built-in type that kubefan knows. All else is defined while the apiserver
    /// runs, and may be served by another apiserver.
    pub fn is_built_in(&self) -> bool {
        kinds::is_known(&self.gvr)
    }
}

/// A reader's patience with the proof that a cache is current. Greater means longer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Patience {
    /// At most 40 ms, for a proof that is due: upstream answers the read soon enough.
    #[default]
    AtOnce,
    /// A second or two, for upstream's next bookmark: the read itself would cost upstream or the
    /// reader more.
    Bookmark,
    /// A second or two, also if a recent wait failed: upstream cannot answer the read instead.
    NoFallback,
}

/// The cache that a reader needs.
#[derive(Debug, Clone, Copy)]
pub struct CacheRequest<'a> {
    /// The API group. If it and `version` are empty, `resource` is any name that kubectl takes.
    pub group: &'a str,
    /// The version.
    pub version: &'a str,
    /// The plural name.
    pub resource: &'a str,
    /// The requested namespace; empty for all.
    pub namespace: &'a str,
    /// The encoding.
    pub media: Media,
    /// The tenant that the reader's limits are shared with, if callers are distinguished: its user,
    /// or all service accounts of its namespace.
    pub tenant: Option<&'a str>,
}

/// The caches that servers read from. A trait object, so that servers are compiled once, in their
/// own package. A request asks it once or twice, so the boxed futures cost nothing that can be
/// measured.
#[async_trait]
pub trait Catalog: Send + Sync + 'static {
    /// Finds the cache of a resource in an encoding, and may start it.
    ///
    /// # Errors
    /// For protobuf, [`Refusal::NotEncoded`] if the resource has no protobuf type that kubefan
    /// knows, [`Refusal::NoRoom`] for a limit, and [`Refusal::NotCached`] for any other reason: the
    /// objects can be read upstream, or as JSON.
    async fn find(&self, request: CacheRequest<'_>) -> Result<Served, Refusal>;

    /// The full name of a resource. If `group` and `version` are empty, `resource` is any name that
    /// kubectl takes; if only `version` is, it is the preferred one. Starts nothing. `None` if
    /// there is no such resource, or if that is not known now.
    async fn full_name(&self, group: &str, version: &str, resource: &str) -> Option<GroupVersionResource>;

    /// Reads the events after `version` from upstream again, for a client that returns with a
    /// version from before this cache started. `needs_state` is true for a view that needs the
    /// state before each event: it selects by labels or fields, or sends only changes. One read
    /// serves all calls at about the same time.
    ///
    /// # Errors
    /// [`Refusal::Expired`] if upstream no longer has the events either; [`Refusal::Unavailable`]
    /// if it could not be asked.
    async fn backfill(
        &self,
        served: &Served,
        version: ResourceVersion,
        needs_state: bool,
    ) -> Result<Arc<Backfill>, Refusal>;

    /// Waits for upstream's proof that a state is not older than this call. One proof serves all
    /// that wait. If the cache is small and quiet, upstream may list the metadata of the `listed`
    /// objects for it: those that the reader would otherwise read there. The state is then proved
    /// for these objects only.
    ///
    /// # Errors
    /// [`Refusal::Unavailable`] if none arrived in time: upstream has to answer the read.
    async fn prove(&self, served: &Served, listed: Option<&Selection>, patience: Patience) -> Result<Fresh, Refusal>;

    /// Waits until the cache itself has reached the version that the cluster had at this call, for
    /// a reader that names a version. Unlike [`Self::prove`], it lists no metadata.
    ///
    /// # Errors
    /// [`Refusal::Unavailable`] if it was not proved in time.
    async fn advance(&self, served: &Served, patience: Patience) -> Result<(), Refusal>;

    /// The version that the cluster has reached, from an upstream request made after `asked`. One
    /// request serves all calls that began to wait before it.
    ///
    /// # Errors
    /// [`Refusal::Unavailable`] if upstream could not be asked, or if another cluster answered.
    async fn cluster_version(&self, served: &Served, asked: Instant) -> Result<ResourceVersion, Refusal>;

    /// Whether the object with this uid exists, as far as a cache of all objects of the resource
    /// knows; `None` if there is no such cache. Starts nothing.
    fn exists(&self, gvr: &GroupVersionResource, key: &ObjectKey, uid: &str) -> Option<bool>;

    /// Whether a resource is cached in any scope. Starts nothing.
    fn holds(&self, gvr: &GroupVersionResource, media: Media) -> bool;

    /// Whether a limit has refused a cache of a resource since the start, or the resource cannot be
    /// cached. Such a resource is named in metrics without being cached.
    fn is_known_uncached(&self, gvr: &GroupVersionResource) -> bool;

    /// Changes whenever a cache is added, removed or enters another phase.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Every cache with its encoding, ordered by name. A resource that is cached in several
    /// encodings is listed with each.
    fn list(&self) -> Vec<(Media, ResourceStatus)>;
}
